"""Requests of the OpenAI Responses API as chat calls: stateless, text and function calls only (`responses_tools`).

Neighbouring reasoning, assistant text and calls make up one assistant turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from glm53.chat import ChatOptions, Message, ToolCall
from glm53.chat.messages import (
    ROLES,
    TOOL_NAME,
    assistant_turn,
    parse_arguments,
    parse_content,
    parse_tool_result,
)

from .fields import Fields, missing, refuse, wrong_type
from .requests import ChatCall, Decoding, RequestDefaults
from .responses_tools import ResponsesTools, parse_responses_tools
from .sampling import MAX_LOGPROBS, parse_max_tokens, parse_response_format, parse_sampling, parse_stop_ids
from .thinking import parse_thinking
from .tools import choose_tools

REASONING_ID = "rs_"
SUMMARIES = ("auto", "concise", "detailed", "none")
IGNORED_ITEMS = ("web_search_call", "file_search_call", "tool_search_call", "tool_search_output")

Kept = Callable[[object], Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    """`echo`: request fields that the response object repeats. `declared`: the tools as the client knows them.
    `summary`: the client looks for the reasoning where other models have only a summary of it. `keep`: it may refer to
    the answer's items later. `sealed`: it will send reasoning back, but maybe only what looks encrypted."""

    chat: ChatCall
    echo: Mapping[str, Any]
    declared: ResponsesTools
    summary: bool = False
    keep: bool = True
    sealed: bool = False


def parse_responses(body: Mapping[str, Any], defaults: RequestDefaults, kept: Kept = lambda _: None) -> ResponsesCall:
    """/v1/responses. `kept` finds an item that the request only refers to. Raises RequestError."""
    f = Fields(body)
    for key in ("previous_response_id", "conversation", "prompt"):
        if f.get(key) is not None:
            refuse(
                key,
                f"'{key}' is not supported: no conversation is stored here; send the whole input.",
                "unsupported_parameter",
            )
    if f.boolean("background"):
        refuse("background", "'background' is not supported.", "unsupported_parameter")
    declared = parse_responses_tools(f)
    messages = _messages(f, declared, kept)
    tools, choice = choose_tools(declared.tools, f)
    thinking = parse_thinking(f, defaults.thinking)
    decoding = Decoding(
        sampling=parse_sampling(f, defaults.sampling, defaults.vocab_size),
        max_tokens=parse_max_tokens(f, "max_output_tokens"),
        stop_ids=parse_stop_ids(f),
        ignore_eos=f.boolean("ignore_eos"),
        stream=f.boolean("stream"),
        include_usage=True,
        top_logprobs=_logprobs(f),
        response_format=parse_response_format(f.fields("text"), "format"),
    )
    chat = ChatCall(
        messages=messages,
        decoding=decoding,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=f.boolean("parallel_tool_calls", True),
        chat=ChatOptions(thinking=thinking.enabled, effort=thinking.effort, clear_thinking=thinking.clear),
        thinking_budget=thinking.budget,
        template_kwargs=f.fields("chat_template_kwargs").raw,
    )
    return ResponsesCall(
        chat,
        _echo(f, chat),
        declared,
        summary=_summary(f) is not None,
        keep=f.boolean("store", True),
        sealed=_included(f, "reasoning.encrypted_content"),
    )


def _logprobs(f: Fields) -> int | None:
    """`include` asks for those of the drawn tokens, `top_logprobs` above 0 for alternatives too."""
    asked = _included(f, "message.output_text.logprobs")
    top = f.integer("top_logprobs", 0, MAX_LOGPROBS) or 0
    return top if asked or top else None


def _included(f: Fields, what: str) -> bool:
    include = f.get("include")
    return isinstance(include, list) and what in include


def _summary(f: Fields) -> str | None:
    wanted = f.fields("reasoning").choice("summary", SUMMARIES)
    return None if wanted == "none" else wanted


def _echo(f: Fields, chat: ChatCall) -> dict[str, Any]:
    sampling = chat.decoding.sampling
    return {
        "instructions": f.get("instructions"),
        "max_output_tokens": chat.decoding.max_tokens,
        "metadata": f.fields("metadata").raw,
        "parallel_tool_calls": chat.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": f.fields("reasoning").get("effort"), "summary": _summary(f)},
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": f.fields("text").get("format") or {"type": "text"}},
        "tool_choice": f.get("tool_choice") or "auto",
        "tools": f.get("tools") or [],
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }


def _messages(f: Fields, declared: ResponsesTools, kept: Kept) -> tuple[Message, ...]:
    out: list[Message] = []
    if instructions := f.text("instructions"):
        out.append(Message("system", instructions))
    raw = f.get("input")
    if raw is None:
        missing("input")
    if isinstance(raw, str):
        return (*out, Message("user", raw))
    if not isinstance(raw, list):
        wrong_type("input", "a string or an array of items", raw)
    if not raw:
        refuse("input", "Invalid 'input': empty array. Expected at least one item.", "empty_array")
    for i, item in enumerate(raw):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            wrong_type(where, "an object", item)
        is_reference = item.get("type") == "item_reference"
        meant = _referenced(item.get("id"), f"{where}.id", kept) if is_reference else item
        if meant is not None:
            _append(out, _item(meant, where, declared))
    if not out:
        refuse("input", "Invalid 'input': no item holds a message.")
    return tuple(out)


def _referenced(item_id: object, param: str, kept: Kept) -> Mapping[str, Any] | None:
    """The item; None for reasoning that is not kept, which an answer can do without."""
    item = kept(item_id)
    if item is None and not (isinstance(item_id, str) and item_id.startswith(REASONING_ID)):
        advice = "Send the item itself; the Vercel AI SDK does with 'store: false'."
        refuse(param, f"Invalid '{param}': no such item is kept. {advice}")
    return item


def _append(out: list[Message], message: Message | None) -> None:
    """Add a turn; parts of one assistant turn are joined."""
    if message is None:
        return
    last = out[-1] if out else None
    if last is None or last.role != "assistant" or message.role != "assistant":
        out.append(message)
        return
    thoughts = [r for r in (last.reasoning, message.reasoning) if r is not None]
    out[-1] = replace(
        last,
        content=last.content + message.content,
        reasoning="".join(thoughts) if thoughts else None,
        tool_calls=last.tool_calls + message.tool_calls,
    )


def _item(item: Mapping[str, Any], param: str, declared: ResponsesTools) -> Message | None:
    kind = item.get("type", "message")
    if kind == "message":
        return _message(item, param)
    if kind == "reasoning":
        return Message("assistant", reasoning=_reasoning(item, param))
    if kind in ("function_call", "custom_tool_call"):
        return Message("assistant", tool_calls=(_call(item, param, declared),))
    if kind in ("function_call_output", "custom_tool_call_output"):
        call_id = item.get("call_id")
        text = parse_tool_result(item.get("output"), f"{param}.output")
        return Message("tool", text, tool_call_id=call_id if isinstance(call_id, str) else None)
    if kind in IGNORED_ITEMS:
        return None
    shown = repr(kind[:40]) if isinstance(kind, str) else "not a string"
    refuse(f"{param}.type", f"'{param}.type' is {shown}, which is not supported.", "unsupported_content")


def _message(item: Mapping[str, Any], param: str) -> Message:
    role = item.get("role")
    known = ROLES.get(role) if isinstance(role, str) else None
    if known is None or known == "tool":
        supported = "Supported values are: 'user', 'assistant', 'system', 'developer'."
        refuse(f"{param}.role", f"Invalid value for '{param}.role'. {supported}")
    if "content" not in item:
        missing(f"{param}.content")
    content, thought = parse_content(item["content"], f"{param}.content")
    return assistant_turn(content, thought) if known == "assistant" else Message(known, content)


def _reasoning(item: Mapping[str, Any], param: str) -> str | None:
    """The text of a reasoning item: its content, or its summary if it has no content."""
    for key in ("content", "summary"):
        parts = item.get(key)
        if isinstance(parts, list) and parts:
            texts = [p.get("text") if isinstance(p, dict) else p for p in parts]
            if not all(isinstance(t, str) for t in texts):
                refuse(f"{param}.{key}", f"Invalid '{param}.{key}': expected parts with a text.")
            return "".join(str(t) for t in texts)
    return None


def _call(item: Mapping[str, Any], param: str, declared: ResponsesTools) -> ToolCall:
    name, call_id = item.get("name"), item.get("call_id")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        refuse(f"{param}.name", f"Invalid '{param}.name': expected a function name.")
    if item["type"] == "custom_tool_call":
        text = item.get("input")
        arguments: Mapping[str, Any] = {"input": text if isinstance(text, str) else ""}
    else:
        arguments = parse_arguments(item.get("arguments"), f"{param}.arguments")
    shown = declared.shown(name, item.get("namespace"))
    return ToolCall(shown, arguments, call_id if isinstance(call_id, str) else None)
