"""Requests of the Anthropic Messages API as chat calls.

Differences that matter: reasoning is off unless `thinking` asks for it, a final assistant message is continued, tool
results arrive inside user messages, and the system text may open with a billing header that changes every time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from glm53.chat import ChatOptions, Message, Tool, ToolCall
from glm53.chat.messages import TOOL_NAME, assistant_turn, make_tool, parse_content, parse_part, unique_tools

from .fields import Fields, missing, refuse, wrong_type
from .requests import ChatCall, Decoding, RequestDefaults
from .sampling import (
    ResponseFormat,
    json_schema_format,
    parse_max_tokens,
    parse_sampling,
    parse_stop,
    parse_stop_ids,
)
from .thinking import EFFORTS, parse_thinking
from .tools import choose_tools

BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
"""Claude Code's first system block: it says nothing to the model and would end every shared prefix."""


def parse_messages(body: Mapping[str, Any], defaults: RequestDefaults) -> ChatCall:
    """/v1/messages and /v1/messages/count_tokens. Raises RequestError."""
    f = Fields(body)
    messages = (*_system(f), *_conversation(f))
    tools, choice = choose_tools(_tools(f), f)
    continued = messages[-1].role == "assistant" and not messages[-1].tool_calls
    chat, budget = _thinking(f, defaults)
    decoding = Decoding(
        sampling=parse_sampling(f, defaults.sampling, defaults.vocab_size),
        max_tokens=parse_max_tokens(f, "max_tokens"),
        stop=parse_stop(f, "stop_sequences"),
        stop_ids=parse_stop_ids(f),
        ignore_eos=f.boolean("ignore_eos"),
        stream=f.boolean("stream"),
        include_usage=True,
        response_format=_format(f),
    )
    return ChatCall(
        messages=messages,
        decoding=decoding,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=_parallel(f),
        chat=replace(chat, continue_final=continued, add_generation_prompt=not continued),
        thinking_budget=budget,
    )


def _thinking(f: Fields, defaults: RequestDefaults) -> tuple[ChatOptions, int | None]:
    asked = f.given("thinking", "enable_thinking", "chat_template_kwargs", "reasoning_effort") is not None
    thinking = parse_thinking(f, replace(defaults.thinking, enabled=asked and defaults.thinking.enabled))
    effort = f.fields("output_config").choice("effort", tuple(EFFORTS))
    options = ChatOptions(
        thinking=thinking.enabled,
        effort=(EFFORTS[effort] if effort else None) or thinking.effort,
        clear_thinking=thinking.clear,
    )
    return options, thinking.budget


def _format(f: Fields) -> ResponseFormat | None:
    config = f.fields("output_config")
    fmt = config.fields("format") if config.get("format") is not None else f.fields("output_format")
    if not fmt.raw:
        return None
    if fmt.choice("type", ("json_schema",)) is None:
        missing(fmt.name("type"))
    return json_schema_format(fmt.get("schema"), fmt.name("schema"))


def _parallel(f: Fields) -> bool:
    raw = f.get("tool_choice")
    return not (isinstance(raw, dict) and Fields(raw, "tool_choice.").boolean("disable_parallel_tool_use"))


def _system(f: Fields) -> tuple[Message, ...]:
    raw = f.get("system")
    blocks = raw if isinstance(raw, list) else [raw]
    texts = [parse_part(b, f"system[{i}]")[1] for i, b in enumerate(blocks) if b]
    text = "\n\n".join(t for t in (BILLING_HEADER.sub("", t) for t in texts) if t)
    return (Message("system", text),) if text else ()


def _conversation(f: Fields) -> tuple[Message, ...]:
    raw = f.get("messages")
    if raw is None:
        missing("messages")
    if not isinstance(raw, list):
        wrong_type("messages", "an array of objects", raw)
    out: list[Message] = []
    for i, message in enumerate(raw):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            wrong_type(where, "an object", message)
        role, content = message.get("role"), message.get("content")
        if content is None:
            missing(f"{where}.content")
        if role == "assistant":
            out.append(_assistant(content, f"{where}.content"))
        elif role == "user":
            out += _user(content, f"{where}.content")
        elif role in ("system", "developer"):
            out.append(Message("system", parse_content(content, f"{where}.content")[0]))
        else:
            supported = "Supported values are: 'user', 'assistant', 'system'."
            refuse(f"{where}.role", f"Invalid value for '{where}.role'. {supported}")
    if not out:
        refuse(
            "messages", "Invalid 'messages': empty array. Expected an array with at least one message.", "empty_array"
        )
    return tuple(out)


def _blocks(content: object, param: str) -> list[tuple[str, Mapping[str, Any], str]]:
    """(type, block, param) of each block; a string is one text block."""
    if isinstance(content, str):
        return [("text", {"type": "text", "text": content}, param)]
    if not isinstance(content, list):
        wrong_type(param, "a string or an array of blocks", content)
    out: list[tuple[str, Mapping[str, Any], str]] = []
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            wrong_type(f"{param}[{i}]", "an object", block)
        kind = block.get("type")
        out.append((kind if isinstance(kind, str) else "", block, f"{param}[{i}]"))
    return out


def _text(block: Mapping[str, Any], param: str) -> str:
    """Text of a text block or of a plain-text document; every other kind is refused by name."""
    source = block.get("source")
    if block.get("type") == "document" and isinstance(source, dict) and source.get("type") == "text":
        return parse_part({"type": "text", "text": source.get("data")}, f"{param}.source")[1]
    return parse_part(block, param)[1]


def _user(content: object, param: str) -> list[Message]:
    """Tool results become tool messages; the text around them user messages."""
    out: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            out.append(Message("user", "".join(texts)))
            texts.clear()

    for kind, block, where in _blocks(content, param):
        if kind == "tool_result":
            flush()
            out.append(_tool_result(block, where))
        else:
            texts.append(_text(block, where))
    flush()
    return out or [Message("user", "")]


def _tool_result(block: Mapping[str, Any], param: str) -> Message:
    call_id = block.get("tool_use_id")
    content = block.get("content")
    if content is None:
        text = ""
    elif isinstance(content, str | list):
        text = "".join(_text(b, where) for _, b, where in _blocks(content, f"{param}.content"))
    else:
        text = json.dumps(content, ensure_ascii=False)
    return Message("tool", text, tool_call_id=call_id if isinstance(call_id, str) else None)


def _assistant(content: object, param: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for kind, block, where in _blocks(content, param):
        if kind == "thinking":
            thoughts.append(parse_part(block, where)[1])
        elif kind == "redacted_thinking":
            continue
        elif kind == "tool_use":
            calls.append(_tool_use(block, where))
        else:
            texts.append(_text(block, where))
    return assistant_turn("".join(texts), "".join(thoughts) if thoughts else None, tuple(calls))


def _tool_use(block: Mapping[str, Any], param: str) -> ToolCall:
    name, arguments, call_id = block.get("name"), block.get("input"), block.get("id")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        refuse(f"{param}.name", f"Invalid '{param}.name': expected a tool name.")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        wrong_type(f"{param}.input", "an object", arguments)
    return ToolCall(name, arguments, call_id if isinstance(call_id, str) else None)


def _tools(f: Fields) -> tuple[Tool, ...]:
    raw = f.get("tools")
    if raw is None:
        return ()
    if not isinstance(raw, list):
        wrong_type("tools", "an array", raw)
    tools: list[Tool] = []
    for i, tool in enumerate(raw):
        where = f"tools[{i}]"
        if not isinstance(tool, dict):
            wrong_type(where, "an object", tool)
        kind = tool.get("type")
        if kind not in (None, "custom", "function"):
            refuse(
                f"{where}.type", f"'{where}.type': only tools with 'input_schema' are supported.", "unsupported_tool"
            )
        if tool.get("input_schema") is None:
            missing(f"{where}.input_schema")
        definition = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool["input_schema"],
        }
        shown = {k: v for k, v in definition.items() if v is not None}
        tools.append(make_tool(shown, tool["input_schema"], where))
    return unique_tools(tools, "tools")
