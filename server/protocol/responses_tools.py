"""Tools of the OpenAI Responses API as functions the model may call.

Hosted tools (web search and the like) are left out, since nothing runs them here; "custom" tools are shown to the model
as functions of one string. A namespace's tools are shown one by one, by their own names where these are unique and as
`namespace.name` where not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from glm53.chat import Tool
from glm53.chat.messages import TOOL_NAME, make_tool, unique_tools

from .fields import Fields, refuse, wrong_type

HOSTED_TOOLS = (
    "web_search", "file_search", "code_interpreter", "image_generation", "mcp", "computer", "local_shell",
    "tool_search", "programmatic_tool_calling",
)  # fmt: skip
CUSTOM_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class ResponsesTools:
    """`custom`: names of tools that take free text. `spaces`: (namespace, name in it) of the tools that have one. Both
    by the name the model is shown."""

    tools: tuple[Tool, ...] = ()
    custom: frozenset[str] = frozenset()
    spaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def shown(self, name: str, namespace: object) -> str:
        """The model's name for a client's tool; that of an unknown namespace is called as if it had none."""
        return next((shown for shown, own in self.spaces.items() if own == (namespace, name)), name)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tool of the request, still under the client's name."""

    tool: Tool
    param: str
    custom: bool
    namespace: str | None = None


def parse_responses_tools(f: Fields) -> ResponsesTools:
    """The request's `tools`. Raises RequestError."""
    entries = _entries(f.get("tools"), "tools", None)
    names = Counter(e.tool.name for e in entries)
    tools: list[Tool] = []
    custom: set[str] = set()
    spaces: dict[str, tuple[str, str]] = {}
    for entry in entries:
        tool = entry.tool
        if entry.namespace is not None and names[tool.name] > 1:
            shown = f"{entry.namespace}.{tool.name}"
            tool = make_tool({**tool.definition, "name": shown}, tool.parameters, entry.param)
        tools.append(tool)
        if entry.namespace is not None:
            spaces[tool.name] = (entry.namespace, entry.tool.name)
        if entry.custom:
            custom.add(tool.name)
    return ResponsesTools(unique_tools(tools, "tools"), frozenset(custom), spaces)


def _entries(raw: object, param: str, namespace: str | None) -> list[_Entry]:
    if raw is None:
        return []
    if not isinstance(raw, list):
        wrong_type(param, "an array", raw)
    out: list[_Entry] = []
    for i, tool in enumerate(raw):
        where = f"{param}[{i}]"
        if not isinstance(tool, dict):
            wrong_type(where, "an object", tool)
        kind = tool.get("type")
        if kind == "namespace" and namespace is None:
            out += _entries(tool.get("tools"), f"{where}.tools", _namespace(tool, where))
        elif isinstance(kind, str) and kind.startswith(HOSTED_TOOLS):
            continue
        elif kind in ("function", "custom"):
            out.append(replace(_entry(tool, where), namespace=namespace))
        else:
            message = f"'{where}.type': only 'function', 'custom' and 'namespace' are supported."
            refuse(f"{where}.type", message, "unsupported_tool")
    return out


def _namespace(tool: Mapping[str, Any], param: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        refuse(f"{param}.name", f"Invalid '{param}.name': expected one word of at most 256 characters.")
    return name


def _entry(tool: Mapping[str, Any], param: str) -> _Entry:
    custom = tool["type"] == "custom"
    parameters = CUSTOM_INPUT if custom else tool.get("parameters")
    definition = {"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters}
    shown = {k: v for k, v in definition.items() if v is not None}
    return _Entry(make_tool(shown, parameters, param), param, custom)
