"""Cases about what clients send: thinking, tools, messages, JSON; each test is named after its case."""

from __future__ import annotations

from typing import Any

import pytest
from protocol_helpers import TOOLS1_RAW
from request_helpers import DEFAULTS, U, chat, refused

from glm53.chat import render, to_text
from glm53.errors import RequestError
from glm53.server.protocol.body import parse_body
from glm53.server.protocol.requests import (
    ChatCall,
    RequestDefaults,
    parse_chat,
)
from glm53.server.protocol.thinking import Thinking


def prompt_of(call: ChatCall) -> str:
    return to_text(render(call.messages, call.tools, call.chat))


@pytest.mark.parametrize(
    "switch",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}},
        {"enable_thinking": False},
        {"thinking": {"type": "disabled"}},
        {"thinking": False},
        {"reasoning": {"enabled": False}},
        {"reasoning": {"effort": "none"}},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "NONE", "enable_thinking": True},
    ],
)
def test_b01_b10_thinking_off(switch: Any) -> None:
    assert not chat(**switch).chat.thinking
    assert prompt_of(chat(**switch)).endswith("<|assistant|><think></think>")


@pytest.mark.parametrize(
    ("effort", "shown"),
    [
        ("minimal", "Low"),
        ("low", "Low"),
        ("medium", "High"),
        ("high", "High"),
        ("xhigh", "Max"),
        ("max", "Max"),
        (None, "Max"),
        ("LOW", "Low"),
    ],
)
def test_b10_effort(effort: Any, shown: str) -> None:
    for body in ({"reasoning_effort": effort}, {"reasoning": {"effort": effort}}):
        call = chat(**body)
        assert call.chat.thinking
        assert f"Reasoning Effort: {shown}<" in prompt_of(call)


def test_b10_bad_effort() -> None:
    refused("reasoning_effort", reasoning_effort=7)
    refused("reasoning_effort", reasoning_effort="hard")
    assert not parse_chat({"messages": U}, RequestDefaults(thinking=Thinking(enabled=False))).chat.thinking
    assert parse_chat(
        {"messages": U, "enable_thinking": True}, RequestDefaults(thinking=Thinking(enabled=False))
    ).chat.thinking


@pytest.mark.parametrize(
    "body",
    [
        {"thinking_budget": 9},
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
        {"reasoning": {"max_tokens": 9}},
        {"chat_template_kwargs": {"thinking_budget": 9}},
    ],
)
def test_thinking_budget(body: Any) -> None:
    assert chat(**body).thinking_budget == 9


def test_b05_prefill() -> None:
    messages = [{"role": "user", "content": "json"}, {"role": "assistant", "content": '{"a":'}]
    call = parse_chat({"messages": messages, "continue_final_message": True, "add_generation_prompt": False}, DEFAULTS)
    assert prompt_of(call).endswith('<|assistant|><think></think>{"a":')
    both = {"continue_final_message": True, "add_generation_prompt": True}
    refused("continue_final_message", messages=messages, **both)
    refused("continue_final_message", continue_final_message=True)


def test_b09_response_format() -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    fmt = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    got = chat(response_format=fmt).decoding.response_format
    assert (got.kind, got.schema) == ("json_schema", schema)
    assert chat(response_format={"type": "json_object"}).decoding.response_format.kind == "json_object"
    assert chat(response_format={"type": "text"}).decoding.response_format is None
    refused("response_format.type", response_format={"type": "xml"})
    refused("response_format.type", response_format={"json_schema": {}})
    refused("response_format.json_schema.schema", response_format={"type": "json_schema", "json_schema": {"name": "a"}})
    refused("response_format.json_schema.schema", response_format={"type": "json_schema"})
    refused("response_format", response_format="json")


NAMED = {"type": "function", "function": {"name": "write_file"}}


def test_b30_tool_choice() -> None:
    none = chat(tools=TOOLS1_RAW, tool_choice="none")
    assert none.tools == ()
    assert "# Tools" not in prompt_of(none)
    named = chat(tools=TOOLS1_RAW, tool_choice=NAMED)
    assert (named.tool_choice.mode, named.tool_choice.name, len(named.tools)) == ("named", "write_file", 2)
    refused("tool_choice", tools=TOOLS1_RAW, tool_choice={"type": "function", "function": {"name": "nope"}})
    for word in ("required", "any"):
        refused("tool_choice", tool_choice=word)
        assert chat(tools=TOOLS1_RAW, tool_choice=word).tool_choice.mode == "required"
    refused("tool_choice", tool_choice=NAMED)
    assert chat(tool_choice="none").tool_choice.mode == "none"
    assert chat(tool_choice="auto").tools == ()
    refused("tool_choice", tools=TOOLS1_RAW, tool_choice="sometimes")
    refused("tool_choice", tools=TOOLS1_RAW, tool_choice=3)
    refused("tool_choice", tools=TOOLS1_RAW, tool_choice={"type": "custom", "custom": {"name": "x"}})
    refused("tool_choice.type", tools=TOOLS1_RAW, tool_choice={"type": "mcp", "server_label": "x"})


@pytest.mark.parametrize("mode", ["auto", "required", None])
def test_b30_allowed_tools(mode: Any) -> None:
    inner = {"mode": mode, "tools": [NAMED]}
    for raw in ({"type": "allowed_tools", "allowed_tools": inner}, {"type": "allowed_tools", **inner}):
        call = chat(tools=TOOLS1_RAW, tool_choice=raw)
        assert [t.name for t in call.tools] == ["write_file"]
        assert call.tool_choice.mode == (mode or "auto")
    for bad in (
        None,
        [],
        {"tools": "x"},
        {"tools": [{"name": "nope"}]},
        {"tools": [], "mode": "any"},
        {"tools": [], "mode": ""},
        {"tools": [], "mode": []},
    ):
        refused(tools=TOOLS1_RAW, tool_choice={"type": "allowed_tools", "allowed_tools": bad})


def history(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*U, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize("arguments", ['{"path":"a"}', {"path": "a"}])
def test_b32_history_arguments(arguments: Any) -> None:
    assert "<tool_call>f<arg_key>path</arg_key><arg_value>a</arg_value></tool_call>" in prompt_of(
        chat(messages=history(arguments))
    )


def test_b32_half_a_surrogate_pair() -> None:
    text = prompt_of(chat(messages=history('{"path":"a\\ud83d", "mode":"\\ud83d\\ude00 \\\\ud83d"}')))
    for value in ("a\ufffd", "\U0001f600 \\ud83d"):
        assert f"<arg_value>{value}</arg_value>" in text


@pytest.mark.parametrize("arguments", ["", " ", None, "null", {}])
def test_b32_empty_arguments(arguments: Any) -> None:
    assert "<think></think><tool_call>f</tool_call>" in prompt_of(chat(messages=history(arguments)))


@pytest.mark.parametrize("arguments", ["not json", "[1]", "3", 3, [1]])
def test_b32_broken_arguments(arguments: Any) -> None:
    refused("messages[1].tool_calls[0].function.arguments", messages=history(arguments))


def test_b37_tools_edges() -> None:
    for tools in ([], None):
        assert chat(tools=tools).tools == ()
    assert chat(tools=[{"type": "function", "function": {"name": "f"}}]).tools[0].parameters is None
    assert chat(tools=[{"type": "function", "function": {"name": "f", "parameters": None}}]).tools[0].parameters is None
    refused("tools[0].function", tools=[{"name": "f", "input_schema": {}}])
    for kind in ("custom", "web_search"):
        refused("tools[0].type", "unsupported_tool", tools=[{"type": kind, "custom": {"name": "f"}}])
    refused("tools", tools=[TOOLS1_RAW[0], TOOLS1_RAW[0]])
    for name in ("two words", "", None, 3, "a<b", "x" * 257):
        refused("tools[0].function.name", tools=[{"type": "function", "function": {"name": name}}])
    for bad in ("x", {}, [1], [None], [{"type": "function", "function": "f"}]):
        refused(tools=bad)
    refused("tools[0].function.parameters", tools=[{"type": "function", "function": {"name": "f", "parameters": "x"}}])
    for calls in (None, []):
        call = chat(messages=[*U, {"role": "assistant", "content": "a", "tool_calls": calls}])
        assert call.messages[1].tool_calls == ()
    refused("functions", functions=[{"name": "f"}])


def test_b48_stream_options() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).decoding.include_usage
    assert not chat(stream=True, stream_options=None).decoding.include_usage
    assert not chat(stream=True).decoding.include_usage
    assert not chat(stream=False, stream_options={"include_usage": True}).decoding.include_usage


@pytest.mark.parametrize("kind", ["image_url", "image", "input_audio", "file", "video_url", "odd", None, 3])
@pytest.mark.parametrize("role", ["user", "assistant", "tool", "system"])
def test_b50_parts_that_are_not_text(kind: Any, role: str) -> None:
    part = {"type": kind, "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    content = [{"type": "text", "text": "see"}, part]
    error = refused("messages[0].content[1]", "unsupported_content", messages=[{"role": role, "content": content}])
    assert "AAAA" not in str(error)


@pytest.mark.parametrize("messages", [[], None, "hi", [None], [{}], [{"role": "user"}], [{"role": "assistant"}], {}, 3])
def test_b51_messages(messages: Any) -> None:
    refused(messages=messages)


def test_b51_more() -> None:
    with pytest.raises(RequestError, match="Missing required parameter: 'messages'"):
        parse_chat({}, DEFAULTS)
    refused("messages[0].role", messages=[{"role": "robot", "content": "x"}])
    refused("messages[0].role", messages=[{"role": ["user"], "content": "x"}])
    refused("messages[0].content", messages=[{"role": "user", "content": 3}])
    system = chat(messages=[{"role": "system", "content": "s"}])
    assert prompt_of(system).endswith("<|system|>s<|assistant|><think>")
    assert chat(messages=[{"role": "user", "content": None}]).messages[0].content == ""
    refusal = chat(messages=[*U, {"role": "assistant", "content": None, "refusal": "no"}])
    assert refusal.messages[1].content == "no"
    legacy = [*U, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}]
    assert chat(messages=[*legacy, {"role": "function", "name": "f", "content": "r"}]).messages[2].role == "tool"


@pytest.mark.parametrize(
    "raw",
    [
        b"", b" \n", b"{", b"[]", b'"x"', b"null", b"3", b'{"messages":[],}', b'{"a":"\xff"}', b'{"temperature":NaN}',
        b'{"a":1e400}', b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}", '{"a":"é"}'.encode("latin-1"), b'{"a":"\n"}',
        b'{"a":"\\ud83d"', b"\xef\xbb\xbf", b"{} {}", b'{"a":Infinity}', b"\x00",
    ],
)  # fmt: skip
def test_b54_bad_json(raw: bytes) -> None:
    with pytest.raises(RequestError) as e:
        parse_body(raw)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b'\xef\xbb\xbf{"a":1}', 1),
        (b'{"a":"a\\ud83d b"}', "a\ufffd b"),
        (b'{"a":"\\uDE00\\ud83d"}', "\ufffd\ufffd"),
        (b'{"a":"\\ud83d\\ude00"}', "😀"),
        (b'{"a":"\\ud83d\\ud83d\\ude00"}', "\ufffd😀"),
        (b'{"a":"\\ud83d\\ude00 \\\\ud83d \\ud83d"}', "😀 \\ud83d \ufffd"),
        (b'{"a":1,"a":2}', 2),
        (b'{"a":99999999999999999999}', 1e20),
    ],
)
def test_b54_accepted_json(raw: bytes, value: Any) -> None:
    assert parse_body(raw) == {"a": value}


@pytest.mark.parametrize("depth", [150, 500, 1000])
def test_b54_nesting(depth: int) -> None:
    text = "[" * depth + "1" + "]" * depth
    places = [
        f'{{"messages": [{{"role": "tool", "content": {text}}}]}}',
        f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{{"type": "function", "function":'
        f' {{"name": "f", "parameters": {{"x": {text}}}}}}}]}}',
        f'{{"messages": [{{"role": "assistant", "tool_calls": [{{"function": {{"name": "f", '
        f'"arguments": "{{\\"x\\": {text}}}"}}}}]}}]}}',
    ]
    for place in places:
        raw = place.encode()
        if depth < 200:
            assert prompt_of(parse_chat(parse_body(raw), DEFAULTS))
            continue
        with pytest.raises(RequestError, match="levels deep"):
            parse_chat(parse_body(raw), DEFAULTS)
