"""tool_choice: which tools the model sees and whether it must call one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from glm53.chat import Tool

from .fields import Fields, refuse, wrong_type

WORDS: dict[str, Literal["auto", "none", "required"]] = {
    "auto": "auto",
    "none": "none",
    "required": "required",
    "any": "required",  # Anthropic's word
}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """ "named" forces the tool `name`, "required" any one of the tools."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None

    @property
    def forced(self) -> bool:
        """The answer must be a call."""
        return self.mode in ("required", "named")


def choose_tools(tools: Sequence[Tool], f: Fields, key: str = "tool_choice") -> tuple[tuple[Tool, ...], ToolChoice]:
    """(tools the model is shown, choice). "none" shows none; "allowed_tools" filters."""
    raw, param = f.get(key), f.name(key)
    if raw is None:
        choice = ToolChoice()
    elif isinstance(raw, str):
        if raw.lower() not in WORDS:
            supported = ", ".join(f"'{w}'" for w in WORDS)
            refuse(param, f"Invalid value for '{param}'. Supported values are: {supported}, or an object.")
        choice = ToolChoice(WORDS[raw.lower()])
    elif not isinstance(raw, dict):
        wrong_type(param, "a string or an object", raw)
    elif raw.get("type") == "allowed_tools":
        tools, choice = _allowed(tools, raw, param)
    else:
        choice = _object(tools, raw, param)
    if choice.mode == "none":
        return (), choice
    if choice.forced and not tools:
        refuse(param, f"Invalid '{param}': it asks for a tool call, but 'tools' is empty.")
    return tuple(tools), choice


def _object(tools: Sequence[Tool], raw: dict[str, Any], param: str) -> ToolChoice:
    kind = raw.get("type")
    if isinstance(kind, str) and kind in WORDS:
        return ToolChoice(WORDS[kind])
    if kind not in ("function", "tool", "custom"):
        message = f"Invalid value for '{param}.type': only 'function', 'custom' and 'allowed_tools' are supported."
        refuse(f"{param}.type", message, "unsupported_tool" if isinstance(kind, str) else "invalid_value")
    name = _name(raw)
    if name not in {t.name for t in tools}:
        refuse(param, f"Invalid '{param}': there is no tool of that name in 'tools'.")
    return ToolChoice("named", name)


def _name(raw: dict[str, Any]) -> str | None:
    function = raw.get("function")
    name = function.get("name") if isinstance(function, dict) else raw.get("name")
    return name if isinstance(name, str) else None


def _allowed(tools: Sequence[Tool], raw: dict[str, Any], param: str) -> tuple[tuple[Tool, ...], ToolChoice]:
    inner = raw.get("allowed_tools", raw)
    names = inner.get("tools") if isinstance(inner, dict) else None
    if not isinstance(names, list) or not all(isinstance(n, dict) for n in names):
        refuse(param, f"Invalid '{param}': expected an array of tools in allowed_tools.")
    mode = inner.get("mode")
    mode = "auto" if mode is None else mode
    if mode not in ("auto", "required"):
        refuse(f"{param}.mode", f"Invalid value for '{param}.mode'. Supported values are: 'auto', 'required'.")
    allowed = {_name(n) for n in names}
    unknown = allowed - {t.name for t in tools}
    if unknown:
        refuse(param, f"Invalid '{param}': allowed_tools names a tool that is not in 'tools'.")
    return tuple(t for t in tools if t.name in allowed), ToolChoice(WORDS[mode])
