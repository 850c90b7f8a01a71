"""The Anthropic Messages API: requests as chat calls, answers as messages and as block streams."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from protocol_helpers import TOOLS1, TOOLS1_RAW, events_of, splits

from glm53.chat import parse_tools, render, to_text
from glm53.errors import RequestError
from glm53.server.protocol.anthropic import parse_messages
from glm53.server.protocol.anthropic_reply import MessagesReply
from glm53.server.protocol.events import collect
from glm53.server.protocol.requests import ChatCall, RequestDefaults
from glm53.server.protocol.usage import TokenCounts

U = [{"role": "user", "content": "x"}]
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
COUNTS = TokenCounts(prompt=10, cached=4, completion=3, reasoning=1)


def call(**body: Any) -> ChatCall:
    return parse_messages({"model": "m", "max_tokens": 50, "messages": U, **body}, RequestDefaults())


def prompt(**body: Any) -> str:
    parsed = call(**body)
    return to_text(render(parsed.messages, parsed.tools, parsed.chat)).removeprefix("[gMASK]<sop><|system|>")


def refused(param: str | None = None, code: str | None = None, **body: Any) -> None:
    with pytest.raises(RequestError) as e:
        call(**body)
    if param is not None:
        assert e.value.param == param
    if code is not None:
        assert e.value.code == code
    assert "AAAA" not in str(e.value)


def test_thinking_is_off_unless_asked_for() -> None:
    assert prompt().endswith("<|user|>x<|assistant|><think></think>")
    on = call(thinking={"type": "enabled", "budget_tokens": 2000})
    assert (on.chat.thinking, on.thinking_budget) == (True, 2000)
    assert call(thinking={"type": "adaptive"}).chat.thinking
    assert not call(thinking={"type": "disabled"}).chat.thinking
    assert call(output_config={"effort": "low"}).chat.effort == "low"


def test_fields() -> None:
    parsed = call(temperature=0.5, top_k=3, top_p=0.9, stop_sequences=["a", ""], stream=True, max_tokens=0)
    assert (parsed.decoding.sampling.temperature, parsed.decoding.sampling.top_k) == (0.5, 3)
    assert (parsed.decoding.stop, parsed.decoding.stream, parsed.decoding.max_tokens) == (("a",), True, 0)
    schema = {"type": "object"}
    for where in ({"output_format": {"type": "json_schema", "schema": schema}},
                  {"output_config": {"format": {"type": "json_schema", "schema": schema}}}):  # fmt: skip
        assert call(**where).decoding.response_format.schema == schema
    refused("stop_sequences[0]", stop_sequences=[1])


def test_b68_billing_header_is_dropped() -> None:
    def with_header(cch: str) -> str:
        header = f"x-anthropic-billing-header: cc_version=1; cch={cch}"
        return prompt(system=[{"type": "text", "text": header}, {"type": "text", "text": "You code."}])

    assert with_header("abc") == with_header("def")
    assert "<|system|>You code.<|user|>" in with_header("abc")
    assert prompt(system="x-anthropic-billing-header: a\nYou code.") == prompt(system="You code.")
    assert prompt(system="x-anthropic-billing-header: a") == prompt()
    both = prompt(system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}])
    assert "<|system|>a\n\nb<|user|>" in both


def test_tool_round_trip() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "go"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "ok"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "2", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "second"}]},
                {"type": "tool_result", "tool_use_id": "1", "content": "first", "is_error": True},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    assert prompt(messages=messages, tools=[TOOL]).endswith(
        "<|user|>go<|assistant|><think>hm</think>ok<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
        "<tool_call>f</tool_call><|observation|><tool_response>first</tool_response>"
        "<tool_response>second</tool_response><|user|>and now?<|assistant|><think></think>"
    )
    assert '{"name": "f", "description": "d", "parameters": {"type": "object"' in prompt(tools=[TOOL])


def test_prefill() -> None:
    assert prompt(messages=[*U, {"role": "assistant", "content": "{"}]).endswith("<|assistant|><think></think>{")
    inline = prompt(messages=[*U, {"role": "assistant", "content": "<think>plan</think>{"}])
    assert inline.endswith("<|assistant|><think>plan</think>{")


def test_documents_of_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "the text"}
    assert "the text" in prompt(messages=[{"role": "user", "content": [{"type": "document", "source": source}]}])


@pytest.mark.parametrize("kind", ["image", "document", "search_result", "odd"])
def test_b50_blocks_that_are_not_text(kind: str) -> None:
    block = {"type": kind, "source": {"type": "base64", "data": "A" * 100_000}}
    code = "unsupported_content"
    refused("messages[0].content[0]", code, messages=[{"role": "user", "content": [block]}])
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a"}, block]}
    refused("messages[0].content[0].content[1]", code, messages=[{"role": "user", "content": [result]}])
    refused("system[0]", code, system=[block])


def test_refusals() -> None:
    for messages in (None, [], "hi", [None], [{}], [{"role": "user"}], [{"role": "tool", "content": "x"}]):
        refused(messages=messages)
    refused("tools[0].input_schema", tools=[{"name": "f"}])
    refused("tools[0].type", "unsupported_tool", tools=[{"type": "web_search_20250305", "name": "web_search"}])
    refused("tool_choice", tool_choice={"type": "any"})
    refused("tool_choice", tools=[TOOL], tool_choice={"type": "tool", "name": "g"})
    bad = {"type": "tool_use", "id": "1", "name": "f", "input": "x"}
    refused("messages[0].content[0].input", messages=[{"role": "assistant", "content": [bad]}])


def test_tool_choice() -> None:
    assert call(tools=[TOOL], tool_choice={"type": "any"}).tool_choice.mode == "required"
    assert call(tools=[TOOL], tool_choice={"type": "tool", "name": "f"}).tool_choice.name == "f"
    assert call(tools=[TOOL], tool_choice={"type": "none"}).tools == ()
    assert not call(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).parallel_tool_calls


def frames(data: bytes) -> list[dict[str, Any]]:
    out = []
    for part in data.decode().split("\n\n")[:-1]:
        event, line = part.split("\n")
        payload = json.loads(line.removeprefix("data: "))
        assert event == f"event: {payload['type']}"
        out.append(payload)
    return out


def sent(message: dict[str, Any]) -> dict[str, Any]:
    """The message as a client reads it."""
    return json.loads(orjson.dumps(message))


DELTAS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


def rebuild(payloads: list[dict[str, Any]]) -> dict[str, Any]:
    """The message a client puts together from a stream."""
    message = dict(payloads[0]["message"])
    blocks: list[dict[str, Any]] = []
    is_open = False
    for p in payloads[1:]:
        if p["type"] == "content_block_start":
            assert not is_open
            assert p["index"] == len(blocks)
            blocks.append({**p["content_block"], "json": ""})
            is_open = True
        elif p["type"] == "content_block_delta":
            assert is_open
            assert p["index"] == len(blocks) - 1
            delta = p["delta"]
            key = DELTAS[delta["type"]]
            assert delta[key]
            blocks[-1]["json" if key == "partial_json" else key] += delta[key]
        elif p["type"] == "content_block_stop":
            is_open = False
        elif p["type"] == "message_delta":
            assert not is_open
            message.update(p["delta"])
            message["usage"] = p["usage"]
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    return message | {"content": blocks}


MODELS = [
    ("hm</think>Hello", "user", {}),
    ("hm</think>Sure.<tool_call>write_file<arg_key>mode</arg_key><arg_value>4</arg_value></tool_call>"
     "<tool_call>list_mailboxes</tool_call>", "obs", {"tools": TOOLS1}),
    ("hm</think>cut", "length", {}),
    ("</think>", "user", {}),
    ("</think>aSTOPb", "stopstr", {"stop": ["STOP"]}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "end", "options"), MODELS)
def test_stream_is_the_message(model: str, end: str, options: Any) -> None:
    for pieces in splits(model):
        events = events_of(pieces, end, **options)
        reply = MessagesReply("m")
        whole = sent(reply.whole(collect(events), COUNTS))
        data = reply.begin(TokenCounts(prompt=10)) + b"".join(reply.events([e]) for e in events) + reply.end(COUNTS)
        payloads = frames(data)
        assert [payloads[0]["type"], payloads[-1]["type"]] == ["message_start", "message_stop"]
        assert rebuild(payloads) == whole


def test_message_fields() -> None:
    answers = [collect(events_of([m], end, **options)) for m, end, options in MODELS]
    messages = [sent(MessagesReply("m").whole(a, COUNTS)) for a in answers]
    assert [m["stop_reason"] for m in messages] == ["end_turn", "tool_use", "max_tokens", "end_turn", "stop_sequence"]
    assert messages[4]["stop_sequence"] == "STOP"
    assert [b["type"] for b in messages[1]["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert messages[1]["content"][2]["input"] == {"mode": 4}
    assert all(b["signature"] for m in messages for b in m["content"] if b["type"] == "thinking")
    usage = messages[0]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (6, 4, 3)


@pytest.mark.parametrize("value", ["123456789012345678901234567890", "[" * 300 + "]" * 300, "-9223372036854775809"])
def test_arguments_that_orjson_cannot_write(value: str) -> None:
    """JSON has numbers and depths of any size, and a model writes them."""
    tool = {"type": "function", "function": {"name": "f"}}
    model = f"</think><tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
    events = events_of([model], "obs", tools=parse_tools([tool]))
    reply = MessagesReply("m")
    whole = sent(reply.whole(collect(events), COUNTS))
    assert whole["content"][0]["input"] == {"a": json.loads(value)}
    assert rebuild(frames(reply.begin(COUNTS) + reply.events(events)))["content"] == whole["content"]


def test_cut_call_is_not_a_complete_block() -> None:
    model = "</think><tool_call>write_file<arg_key>content</arg_key><arg_value>" + "x" * 400
    events = events_of(list(model), "length", tools=TOOLS1)
    assert MessagesReply("m").whole(collect(events), COUNTS)["content"] == []
    reply = MessagesReply("m")
    payloads = frames(reply.begin(COUNTS) + reply.events(events) + reply.end(COUNTS))
    assert payloads[-2]["delta"]["stop_reason"] == "max_tokens"
    with pytest.raises(ValueError, match="Unterminated"):
        rebuild(payloads)


def test_openai_tools_are_refused() -> None:
    refused("tools[0].input_schema", tools=TOOLS1_RAW)


@pytest.mark.parametrize(("model", "end", "options"), MODELS)
def test_anthropic_sdk_types(model: str, end: str, options: Any) -> None:
    types = pytest.importorskip("anthropic.types")
    pydantic = pytest.importorskip("pydantic")
    events = events_of([model], end, **options)
    reply = MessagesReply("m")
    types.Message.model_validate(sent(reply.whole(collect(events), COUNTS)))
    adapter = pydantic.TypeAdapter(types.RawMessageStreamEvent)
    for payload in frames(reply.begin(COUNTS) + reply.events(events) + reply.end(COUNTS)):
        adapter.validate_python(payload)
