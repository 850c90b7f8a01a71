"""Client messages and tools, checked and brought to one shape before any template sees them.

Accepts what OpenAI-style clients send (see the tolerance notes at each function) and raises RequestError naming the
field for everything a template would drop, print as "None" or fail on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from glm53.errors import RequestError
from glm53.json_text import check_inner, load

Role = Literal["system", "user", "assistant", "tool"]
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
MAX_DEPTH = 200
TEXT_PARTS = ("text", "input_text", "output_text")
TOOL_NAME = re.compile(r"[^\s<>\x00-\x1f\x7f]{1,256}")
"""A function name the model's call format can carry: one word without angle brackets."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in the history. `arguments` keeps the client's key order."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `content` is "" where the client sent null; `reasoning` is None where it sent none; `thought`: its text
    itself closed the reasoning with `</think>`, maybe with nothing behind it."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    thought: bool = False


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. `definition` is the client's function object, shown to the model as it is."""

    name: str
    definition: Mapping[str, Any]
    parameters: Mapping[str, Any] | None = field(default=None)


def _bad(message: str, param: str, code: str = "invalid_value") -> NoReturn:
    raise RequestError(message, param=param, code=code)


def _bad_type(param: str, expected: str, got: object) -> NoReturn:
    message = f"Invalid type for '{param}': expected {expected}, but got {type_name(got)} instead."
    raise RequestError(message, param=param, code="invalid_type")


def type_name(value: object) -> str:
    """JSON's name for the type of a parsed value, as error texts use it."""
    for kind, name in ((bool, "a boolean"), (str, "a string"), (int, "an integer"), (float, "a number")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "an array" if isinstance(value, list) else "an object"


def check_depth(value: object, param: str | None = None) -> None:
    """Raise RequestError for values nested deeper than MAX_DEPTH, which later steps would fail on."""
    level = [value]
    for _ in range(MAX_DEPTH):
        containers = (c.values() if isinstance(c, dict) else c for c in level if isinstance(c, dict | list))
        level = [v for c in containers for v in c if isinstance(v, dict | list)]
        if not level:
            return
    message = f"The JSON is nested more than {MAX_DEPTH} levels deep."
    raise RequestError(message, param=param, code="invalid_json")


def parse_messages(raw: object, param: str = "messages") -> tuple[Message, ...]:
    """Messages of the Chat Completions API. Raises RequestError for an empty list, unknown roles and non-text parts."""
    if raw is None:
        _bad(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if not isinstance(raw, list):
        _bad_type(param, "an array of objects", raw)
    if not raw:
        _bad(f"Invalid '{param}': empty array. Expected an array with at least one message.", param, "empty_array")
    return tuple(_message(m, f"{param}[{i}]") for i, m in enumerate(raw))


def _message(raw: object, param: str) -> Message:
    if not isinstance(raw, dict):
        _bad_type(param, "an object", raw)
    role = ROLES.get(raw["role"]) if isinstance(raw.get("role"), str) else None
    if role is None:
        known = ", ".join(f"'{r}'" for r in ROLES)
        if "role" not in raw:
            _bad(f"Missing required parameter: '{param}.role'.", f"{param}.role", "missing_required_parameter")
        _bad(f"Invalid value for '{param}.role'. Supported values are: {known}.", f"{param}.role")
    calls = _tool_calls(raw, param) if role == "assistant" else ()
    reasoning = _reasoning(raw, param) if role == "assistant" else None
    if "content" not in raw and role != "tool" and not calls and reasoning is None:
        _bad(f"Missing required parameter: '{param}.content'.", f"{param}.content", "missing_required_parameter")
    if role == "tool":
        content = parse_tool_result(raw.get("content"), f"{param}.content")
        call_id = raw.get("tool_call_id")
        return Message("tool", content, tool_call_id=call_id if isinstance(call_id, str) and call_id else None)
    content, thoughts = parse_content(raw.get("content"), f"{param}.content")
    if role != "assistant":
        return Message(role, content)
    if not content and isinstance(raw.get("refusal"), str):
        content = raw["refusal"]
    return assistant_turn(content, reasoning if reasoning is not None else thoughts, calls)


def _reasoning(raw: Mapping[str, Any], param: str) -> str | None:
    for name in ("reasoning_content", "reasoning"):
        value = raw.get(name)
        if isinstance(value, str):
            return value
        if value is not None and name == "reasoning_content":
            _bad_type(f"{param}.{name}", "a string", value)
    return None


def parse_content(raw: object, param: str) -> tuple[str, str | None]:
    """(text, reasoning parts or None) of a string, null, or a list of parts joined without a separator."""
    if raw is None:
        return "", None
    if isinstance(raw, str):
        return raw, None
    if not isinstance(raw, list):
        _bad_type(param, "a string or an array of parts", raw)
    text: list[str] = []
    thoughts: list[str] = []
    for i, part in enumerate(raw):
        kind, value = parse_part(part, f"{param}[{i}]")
        (thoughts if kind == "thinking" else text).append(value)
    return "".join(text), "".join(thoughts) if thoughts else None


def parse_part(part: object, param: str) -> tuple[str, str]:
    """("text" or "thinking", its text) of one content part; parts that are not text are refused by name."""
    if isinstance(part, str):
        return "text", part
    if not isinstance(part, dict):
        _bad_type(param, "an object", part)
    kind = part.get("type", "text" if "text" in part else None)
    if kind in TEXT_PARTS:
        return "text", _part_text(part, "text", param)
    if kind == "refusal":
        return "text", _part_text(part, "refusal", param)
    if kind in ("thinking", "reasoning"):
        key = next((k for k in ("thinking", "reasoning", "text") if k in part), "thinking")
        return "thinking", _part_text(part, key, param)
    if kind == "redacted_thinking":
        return "thinking", ""
    shown = f"of type {kind[:40]!r}" if isinstance(kind, str) else "without a type"
    _bad(f"'{param}' is a content part {shown}; this model reads text only.", param, "unsupported_content")


def _part_text(part: Mapping[str, Any], key: str, param: str) -> str:
    value = part.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        _bad_type(f"{param}.{key}", "a string", value)
    return value


def parse_tool_result(raw: object, param: str) -> str:
    """Tool results may be any JSON: strings and parts as text, the rest as its JSON text."""
    if isinstance(raw, list) and all(isinstance(p, str) or (isinstance(p, dict) and "type" in p) for p in raw):
        return parse_content(raw, param)[0]
    return raw if isinstance(raw, str) else "" if raw is None else json.dumps(raw, ensure_ascii=False)


def split_inline_thinking(content: str, reasoning: str | None) -> tuple[str, str | None]:
    """Take `<think>..</think>` out of an assistant text, as GLM's template does.

    The first `</think>` ends the reasoning, which starts after the last `<think>` before it; the last one starts the
    content. A `reasoning` given apart wins over the inline one.
    """
    if "</think>" not in content:
        return content, reasoning
    thought = content.split("</think>", 1)[0].rsplit("<think>", 1)[-1]
    return content.rsplit("</think>", 1)[1], thought if reasoning is None else reasoning


def assistant_turn(content: str, reasoning: str | None, calls: tuple[ToolCall, ...] = ()) -> Message:
    """An assistant's message; reasoning inside its text is taken out of it."""
    text, reasoning = split_inline_thinking(content, reasoning)
    return Message("assistant", text, reasoning, calls, thought="</think>" in content)


def _tool_calls(raw: Mapping[str, Any], param: str) -> tuple[ToolCall, ...]:
    calls = raw.get("tool_calls")
    if calls is None and isinstance(raw.get("function_call"), dict):
        return (_tool_call({"function": raw["function_call"]}, f"{param}.function_call", wrapped=False),)
    if calls is None:
        return ()
    where = f"{param}.tool_calls"
    if not isinstance(calls, list):
        _bad_type(where, "an array", calls)
    return tuple(_tool_call(c, f"{where}[{i}]") for i, c in enumerate(calls))


def _tool_call(raw: object, param: str, *, wrapped: bool = True) -> ToolCall:
    function = raw.get("function") if isinstance(raw, dict) else None
    where = f"{param}.function" if wrapped else param
    if not isinstance(raw, dict) or not isinstance(function, dict):
        _bad(f"Invalid '{where}': expected an object with name and arguments.", where)
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        _bad(f"Invalid '{where}.name': expected a function name.", f"{where}.name")
    call_id = raw.get("id")
    arguments = parse_arguments(function.get("arguments"), f"{where}.arguments")
    return ToolCall(name, arguments, call_id if isinstance(call_id, str) and call_id else None)


def parse_arguments(raw: object, param: str) -> Mapping[str, Any]:
    """Call arguments as an object: given as one, as its JSON text, or as nothing ("" or null)."""
    if isinstance(raw, str) and raw.strip():
        data = raw.encode("utf-8", "replace")
        check_inner(data, param)
        try:
            raw = load(data)
        except RequestError:
            _bad(f"Invalid '{param}': expected a string that holds a JSON object.", param)
    if raw is None or (isinstance(raw, str) and not raw.strip()):
        return {}
    if not isinstance(raw, dict):
        _bad(f"Invalid '{param}': expected a JSON object, but got {type_name(raw)}.", param)
    check_depth(raw, param)
    return raw


def parse_tools(raw: object, param: str = "tools") -> tuple[Tool, ...]:
    """Function tools of the Chat Completions API; tools with `defer_loading` true are left out."""
    if raw is None:
        return ()
    if not isinstance(raw, list):
        _bad_type(param, "an array", raw)
    tools = [_tool(t, f"{param}[{i}]") for i, t in enumerate(raw)]
    return unique_tools([t for t in tools if t.definition.get("defer_loading") is not True], param)


def unique_tools(tools: Sequence[Tool], param: str) -> tuple[Tool, ...]:
    """The tools, or RequestError if two share a name."""
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            _bad(f"Invalid '{param}': two functions are named {tool.name!r}.", param)
        seen.add(tool.name)
    return tuple(tools)


def _tool(raw: object, param: str) -> Tool:
    if not isinstance(raw, dict):
        _bad_type(param, "an object", raw)
    kind = raw.get("type")
    if kind not in (None, "function"):
        shown = repr(kind[:40]) if isinstance(kind, str) else type_name(kind)
        message = f"'{param}.type' is {shown}; only tools of type 'function' are supported."
        _bad(message, f"{param}.type", "unsupported_tool")
    function = raw.get("function")
    if not isinstance(function, dict):
        hint = ' (a tool with "input_schema" belongs to /v1/messages)' if "input_schema" in raw else ""
        where = f"{param}.function"
        _bad(f"Missing required parameter: '{where}'{hint}.", where, "missing_required_parameter")
    if raw.get("defer_loading") is True:
        function = {**function, "defer_loading": True}
    return make_tool(function, function.get("parameters"), f"{param}.function")


def make_tool(definition: Mapping[str, Any], parameters: object, param: str) -> Tool:
    """A checked Tool from its function object and its JSON schema."""
    name = definition.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        _bad(f"Invalid '{param}.name': expected one word of at most 256 characters.", f"{param}.name")
    if parameters is not None and not isinstance(parameters, dict):
        _bad_type(f"{param}.parameters", "an object", parameters)
    return Tool(name, definition, parameters)
