"""The Messages and Responses APIs over HTTP, raw and through their own libraries. Case B68, and kin of others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import LiveServer, Start, Streamed, user

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
CALL = ["<tool_call>", "ls", "<arg_key>", "path", "</arg_key>", "<arg_value>", "/tmp", "</arg_value>", "</tool_call>"]
TALK = {"pieces": ["hm", "</think>", "Hello", " you"], "end": "user"}
PLAIN = {"pieces": ["Hello", " you"], "end": "user"}
ASKS = {"pieces": ["Looking.", *CALL], "end": "observation"}
LS = {"name": "ls", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}
THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def message(live: LiveServer, **more: Any) -> Any:
    return live.post(MESSAGES, {"model": "m", "max_tokens": 50, "messages": user("hi"), **more})


def blocks(stream: Streamed) -> list[dict[str, Any]]:
    """Content blocks put together the way the anthropic library does it."""
    out: list[dict[str, Any]] = []
    for event in stream.events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(out)
            out.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], out[event["index"]]
            for kind, key in (("text_delta", "text"), ("thinking_delta", "thinking"), ("signature_delta", "signature")):
                if delta["type"] == kind:
                    block[key] += delta[key]
            block["json"] += delta.get("partial_json", "")
    for block in out:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
    return out


def test_messages_whole_and_streamed_agree(start: Start) -> None:
    for answer, more in ((PLAIN, {}), (TALK, THINK), (ASKS, {"tools": [LS]})):
        live = start(answer)
        whole = message(live, **more).json
        assert whole["type"] == "message"
        assert whole["role"] == "assistant"
        stream = live.stream(MESSAGES, {"model": "m", "max_tokens": 50, "messages": user("hi"), **more})
        kinds = [e["type"] for e in stream.events]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        assert b"event: message_start\ndata: " in stream.raw
        assert b"[DONE]" not in stream.raw
        streamed = blocks(stream)
        for block in [*whole["content"], *streamed]:
            block.pop("id", None)
        assert streamed == whole["content"]
        assert stream.events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
        assert stream.events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_messages_tool_use(start: Start) -> None:
    reply = message(start(ASKS), tools=[LS]).json
    assert reply["stop_reason"] == "tool_use"
    text, call = reply["content"]
    assert text == {"type": "text", "text": "Looking."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "ls", {"path": "/tmp"})
    assert call["id"].startswith("toolu_")


def test_messages_errors_have_the_anthropic_shape(start: Start) -> None:
    live = start(PLAIN, context=64, api_keys=("k",), max_body_bytes=20000)
    key = {"x-api-key": "k", "Content-Type": "application/json"}
    cases: list[tuple[Any, dict[str, str], int, str]] = [
        ({"messages": user("x")}, {}, 401, "authentication_error"),
        ({"messages": []}, key, 400, "invalid_request_error"),
        (b"{", key, 400, "invalid_request_error"),
        ({"messages": user("word " * 500)}, key, 400, "invalid_request_error"),
        ({"messages": user("x" * 30000)}, key, 413, "request_too_large"),
    ]
    for body, headers, status, kind in cases:
        reply = live.post(MESSAGES, body, headers)
        assert (reply.status, reply.json["type"], reply.json["error"]["type"]) == (status, "error", kind)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    for content in ([image], [{"type": "tool_result", "tool_use_id": "t", "content": [image]}]):
        reply = live.post(MESSAGES, {"messages": [{"role": "user", "content": content}]}, key)
        assert reply.status == 400
        assert "reads text only" in reply.json["error"]["message"]


def test_messages_error_inside_a_stream(start: Start) -> None:
    live = start({"pieces": ["half"], "end": "error"})
    stream = live.stream(MESSAGES, {"max_tokens": 9, "messages": user("x")})
    assert stream.events[-1]["type"] == "error"
    assert b"event: error\n" in stream.raw


def test_b60_messages_with_no_token_is_a_cache_warm_up(start: Start) -> None:
    live = start(PLAIN)
    reply = message(live, max_tokens=0).json
    assert reply["content"] == []
    assert reply["stop_reason"] == "max_tokens"
    assert reply["usage"]["output_tokens"] == 0
    assert message(live).json["usage"]["cache_read_input_tokens"] > 0


def test_b65_a_made_up_turn_is_cut_in_messages_too(start: Start) -> None:
    reply = message(start({"pieces": ["answer", "<|user|>", "fake"], "end": "user"})).json
    assert reply["content"] == [{"type": "text", "text": "answer"}]
    assert reply["stop_reason"] == "end_turn"


def test_b68_the_billing_header_does_not_break_the_prefix(start: Start) -> None:
    live = start(PLAIN)
    system = "You are a careful assistant. " * 20
    cached = []
    for cch in ("abc", "def"):
        head = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=1; cch={cch}"}
        reply = message(live, system=[head, {"type": "text", "text": system}])
        cached.append(reply.json["usage"]["cache_read_input_tokens"])
    assert cached[0] == 0
    assert cached[1] > 50


def test_count_tokens_is_what_the_message_then_reads(start: Start) -> None:
    live = start(PLAIN)
    body = {"model": "m", "messages": user("How many?"), "system": "s", "tools": [LS]}
    counted = live.post(MESSAGES + "/count_tokens", body).json
    usage = live.post(MESSAGES, {**body, "max_tokens": 5}).json["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert live.post(MESSAGES + "/count_tokens", {"messages": []}).json["type"] == "error"


def test_responses_whole_and_streamed_agree(start: Start) -> None:
    tool = {"type": "function", "name": "ls", "parameters": LS["input_schema"]}
    for answer, more in ((TALK, {}), ({**ASKS, "pieces": ["</think>", *ASKS["pieces"]]}, {"tools": [tool]})):
        live = start(answer)
        whole = live.post(RESPONSES, {"input": "hi", **more}).json
        assert (whole["object"], whole["status"]) == ("response", "completed")
        stream = live.stream(RESPONSES, {"input": "hi", **more})
        assert [e["sequence_number"] for e in stream.events] == list(range(len(stream.events)))
        last = stream.events[-1]
        assert last["type"] == "response.completed"
        for item in [*whole["output"], *last["response"]["output"]]:
            item.pop("id")
            item.pop("call_id", None)
        assert last["response"]["output"] == whole["output"]
        assert last["response"]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_responses_errors(start: Start) -> None:
    live = start({"pieces": ["</think>", "half"], "end": "error"})
    assert live.post(RESPONSES, {}).error["param"] == "input"
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}
    assert live.post(RESPONSES, {"input": [image]}).error["code"] == "unsupported_content"
    assert live.post(RESPONSES, {"input": "x", "previous_response_id": "r"}).status == 400
    assert live.stream(RESPONSES, {"input": "x"}).events[-1]["type"] == "response.failed"


@pytest.mark.effect("store")
@pytest.mark.parametrize("streamed", [False, True])
def test_responses_may_refer_to_items_of_earlier_ones(start: Start, streamed: bool) -> None:
    """The Vercel AI SDK does, in tool loops and conversations, unless it is told not to."""
    live = start(TALK)

    def ask(body: dict[str, Any]) -> Any:
        if streamed:
            return live.stream(RESPONSES, body).events[-1]["response"]
        return live.post(RESPONSES, body).json

    def again(first: Any) -> Any:
        refs = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        return live.post(RESPONSES, {"input": [*user("hi"), *refs, *user("and?")]})

    first = ask({"input": "hi"})
    sent = [*user("hi"), *first["output"], *user("and?")]
    whole = live.post(RESPONSES, {"input": sent}).json
    assert again(first).json["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert "store: false" in again(ask({"input": "hi", "store": False})).error["message"]


@pytest.mark.parametrize("huge", [2**64 - 1, 2**64, 1e300])
def test_b60_numbers_beyond_64_bits_are_echoed_as_such_that_json_has(start: Start, huge: float) -> None:
    live = start(TALK)
    body = {"input": "x", "max_output_tokens": huge, "seed": huge, "metadata": {"a": huge}}
    reply = live.post(RESPONSES, body)
    assert reply.status == 200
    assert reply.json["max_output_tokens"] >= 2**63 - 1
    assert live.stream(RESPONSES, body).events[-1]["type"] == "response.completed"


def test_openai_library_speaks_responses(start: Start) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=start(TALK).url + "/v1", api_key="none", max_retries=0)
    assert client.responses.create(model="m", input="hi").output_text == "Hello you"
    with client.responses.stream(model="m", input="hi") as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == "Hello you"


class TestAnthropicLibrary:
    def client(self, live: LiveServer) -> Any:
        anthropic = pytest.importorskip("anthropic")
        return anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0)

    def test_message(self, start: Start) -> None:
        reply = self.client(start(PLAIN)).messages.create(model="m", max_tokens=50, messages=user("hi"))
        assert reply.content[0].text == "Hello you"
        assert reply.stop_reason == "end_turn"

    def test_stream_with_thinking(self, start: Start) -> None:
        c = self.client(start(TALK))
        with c.messages.stream(model="m", max_tokens=2000, messages=user("hi"), **THINK) as stream:
            assert "".join(stream.text_stream) == "Hello you"
            final = stream.get_final_message()
        assert [b.type for b in final.content] == ["thinking", "text"]
        assert final.usage.output_tokens == 4

    def test_tool_loop(self, start: Start) -> None:
        c = self.client(start([ASKS, PLAIN]))
        messages: list[Any] = user("list")
        with c.messages.stream(model="m", max_tokens=50, messages=messages, tools=[LS]) as stream:
            first = stream.get_final_message()
        call = first.content[-1]
        assert (first.stop_reason, call.input) == ("tool_use", {"path": "/tmp"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "a.txt"}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = c.messages.create(model="m", max_tokens=50, messages=messages, tools=[LS])
        assert second.content[0].text == "Hello you"

    def test_request_id(self, start: Start) -> None:
        anthropic = pytest.importorskip("anthropic")
        c = self.client(start(PLAIN))
        assert c.messages.create(model="m", max_tokens=50, messages=user("hi"))._request_id.startswith("req-")
        with c.messages.stream(model="m", max_tokens=50, messages=user("hi")) as stream:
            assert stream.request_id.startswith("req-")
        with pytest.raises(anthropic.BadRequestError) as e:
            c.messages.create(model="m", max_tokens=50, messages=[])
        assert e.value.request_id.startswith("req-")

    def test_errors_and_count(self, start: Start) -> None:
        anthropic = pytest.importorskip("anthropic")
        c = self.client(start(PLAIN, context=64))
        assert c.messages.count_tokens(model="m", messages=user("hi")).input_tokens > 5
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* maximum context length is 64 "):
            c.messages.create(model="m", max_tokens=50, messages=user("word " * 500))
