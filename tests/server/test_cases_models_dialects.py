"""Every case with scripted model text over /v1/messages and /v1/responses: whole and streamed, in the case's own
pieces, in one and in characters. The cases are those of the chat route; all six answers must be one message."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from conftest import LiveServer, Start, Streamed, read_stream, user
from protocol_helpers import TOOLS1_RAW, splits
from test_cases_dialects import blocks
from test_cases_models import CASES, ENDS, NAMED, OFF, PREFILL, Case

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
FUNCTIONS = [t["function"] for t in TOOLS1_RAW]
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def messages_body(case: Case) -> dict[str, Any]:
    """The case's request in the Messages API, where reasoning is off unless asked for and a prefill needs no word."""
    body: dict[str, Any] = {"messages": user("x"), "max_tokens": 5000}
    if case.body == PREFILL:
        return {**body, "messages": PREFILL["messages"]}
    if case.body not in (OFF, {"reasoning_effort": "none"}):
        body["thinking"] = {"type": "enabled", "budget_tokens": 4000}
    if "tools" in case.body:
        body["tools"] = [
            {"name": f["name"], "description": f.get("description", ""), "input_schema": f["parameters"]}
            for f in FUNCTIONS
        ]
    if "tool_choice" in case.body:
        named = case.body["tool_choice"] == NAMED["tool_choice"]
        body["tool_choice"] = {"type": "tool", "name": "write_file"} if named else {"type": "none"}
    return body


def responses_body(case: Case) -> dict[str, Any]:
    body: dict[str, Any] = {"input": "x"}
    if case.body in (OFF, {"reasoning_effort": "none"}):
        body["reasoning"] = {"effort": "none"}
    if "tools" in case.body:
        body["tools"] = [{"type": "function", **f} for f in FUNCTIONS]
    if "tool_choice" in case.body:
        named = case.body["tool_choice"] == NAMED["tool_choice"]
        body["tool_choice"] = {"type": "function", "name": "write_file"} if named else "none"
    return body


def scripted(start: Start, case: Case) -> LiveServer:
    """Each cut of the model text twice: for the whole answer and for the stream."""
    end = ENDS.get(case.end, case.end)
    return start([{"pieces": pieces, "end": end} for pieces in splits(case.model) for _ in (0, 1)])


def stream_and_reuse(live: LiveServer, path: str, body: dict[str, Any]) -> Streamed:
    """A stream, and a second request on its connection."""
    connection = live.connect()
    try:
        connection.request("POST", path, json.dumps({**body, "stream": True}))
        out = read_stream(connection.getresponse())
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        return out
    finally:
        connection.close()


def check_frames(out: Streamed) -> None:
    """What every typed stream keeps: headers, an event line for each payload, no empty delta, no broken character."""
    assert out.status == 200
    assert out.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = out.raw.decode().split("\n\n")
    assert frames.pop() == ""
    for frame in (f for f in frames if not f.startswith(":")):
        event, data = frame.split("\n")
        assert event == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert "\ufffd" not in json.dumps(out.events, ensure_ascii=False)


def check_tags(case: Case, text: str) -> None:
    if case.content is None or "<" not in case.content:
        assert not re.search(r"<|think>|tool_call|arg_", text)


def as_case(parts: list[tuple[str, Any]], finish: str) -> dict[str, Any]:
    def joined(kind: str) -> str:
        return "".join(value for k, value in parts if k == kind)

    calls = tuple(value for kind, value in parts if kind == "call")
    return {"content": joined("text"), "reasoning": joined("thinking"), "calls": calls, "finish": finish}


def expected(case: Case) -> dict[str, Any]:
    return {
        "content": case.content or "",
        "reasoning": case.reasoning,
        "calls": case.calls,
        "finish": case.finish,
    }


def message_parts(content: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    parts: list[tuple[str, Any]] = []
    for block in content:
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("toolu_")
            parts.append(("call", (block["name"], block["input"])))
        else:
            assert block[block["type"]], "an empty block"
            parts.append((block["type"], block[block["type"]]))
    return parts


def check_message_stream(out: Streamed, case: Case) -> None:
    """Blocks open and close one after the other, between the message's beginning and its end."""
    check_frames(out)
    kinds = [e["type"] for e in out.events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    is_open = False
    for event in out.events[1:-2]:
        kind = event["type"]
        assert is_open == (kind != "content_block_start")
        is_open = kind != "content_block_stop"
        if kind == "content_block_delta":
            [text] = [v for k, v in event["delta"].items() if k != "type"]
            assert text
            if event["delta"]["type"] == "text_delta":
                check_tags(case, text)
    assert not is_open


@pytest.mark.parametrize("name", CASES)
def test_model_case_in_messages(start: Start, name: str) -> None:
    case = CASES[name]
    live, body = scripted(start, case), messages_body(case)
    for _ in splits(case.model):
        whole = live.post(MESSAGES, body).json
        finish = {v: k for k, v in STOP_REASONS.items()}
        parts = message_parts(whole["content"])
        assert as_case(parts, finish[whole["stop_reason"]]) == expected(case)
        out = stream_and_reuse(live, MESSAGES, body)
        check_message_stream(out, case)
        assert message_parts(blocks(out)) == parts
        end = out.events[-2]
        assert end["delta"]["stop_reason"] == whole["stop_reason"]
        assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def output_parts(output: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    parts: list[tuple[str, Any]] = []
    for item in output:
        if item["type"] == "function_call":
            parts.append(("call", (item["name"], json.loads(item["arguments"]))))
        else:
            [part] = item["content"]
            assert part["text"], "an empty part"
            parts.append(("thinking" if item["type"] == "reasoning" else "text", part["text"]))
    return parts


def check_response_stream(out: Streamed, case: Case) -> list[dict[str, Any]]:
    """Sequence numbers, and deltas that add up to the items; the items of the last event, without their ids."""
    check_frames(out)
    assert [e["sequence_number"] for e in out.events] == list(range(len(out.events)))
    assert [e["type"] for e in out.events[:2]] == ["response.created", "response.in_progress"]
    output: list[dict[str, Any]] = out.events[-1]["response"]["output"]
    for index, item in enumerate(output):
        own = [e for e in out.events if e.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added"
        assert own[-1] == {**own[-1], "type": "response.output_item.done", "item": item}
        deltas = [e["delta"] for e in own if e["type"].endswith(".delta")]
        assert all(deltas)
        assert "".join(deltas) == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
        if item["type"] == "message":
            for text in deltas:
                check_tags(case, text)
    return without_ids(output)


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output]


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].body != PREFILL])  # the API has no prefill
def test_model_case_in_responses(start: Start, name: str) -> None:
    case = CASES[name]
    live, body = scripted(start, case), responses_body(case)
    for _ in splits(case.model):
        whole = live.post(RESPONSES, body).json
        finish = "length" if whole["status"] == "incomplete" else "tool_calls" if case.calls else "stop"
        assert as_case(output_parts(whole["output"]), finish) == expected(case)
        out = stream_and_reuse(live, RESPONSES, body)
        assert check_response_stream(out, case) == without_ids(whole["output"])
        last = out.events[-1]
        assert last["type"] == f"response.{whole['status']}"
        assert last["response"]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


CUT = "</think><tool_call>write_file<arg_key>content</arg_key><arg_value>" + "x" * 1000


def test_b22_a_call_cut_by_length_is_in_no_whole_answer_and_cannot_be_parsed_in_a_stream(start: Start) -> None:
    case = Case(CUT, "length", {"tools": TOOLS1_RAW})
    live = scripted(start, case)
    assert live.post(MESSAGES, messages_body(case)).json["content"] == []
    with pytest.raises(ValueError, match="Unterminated"):
        blocks(stream_and_reuse(live, MESSAGES, messages_body(case)))
    whole = live.post(RESPONSES, responses_body(case)).json
    assert (whole["output"], whole["status"]) == ([], "incomplete")
    [item] = stream_and_reuse(live, RESPONSES, responses_body(case)).events[-1]["response"]["output"]
    assert item["status"] == "incomplete"
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(item["arguments"])


def test_b04_reasoning_that_uses_up_the_tokens(start: Start) -> None:
    live = start({"pieces": ["a ", "b ", "c ", "d ", "e", " f"], "end": "user"})
    thinking = {"thinking": {"type": "enabled"}}
    reply = live.post(MESSAGES, {"messages": user("x"), "max_tokens": 5, **thinking}).json
    assert [b["thinking"] for b in reply["content"]] == ["a b c d e"]
    assert (reply["stop_reason"], reply["usage"]["output_tokens"]) == ("max_tokens", 5)
    body = {"input": "x", "max_output_tokens": 5}
    whole = live.post(RESPONSES, body).json
    assert output_parts(whole["output"]) == [("thinking", "a b c d e")]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 5
    last = live.stream(RESPONSES, body).events[-1]["response"]
    assert without_ids(last["output"]) == without_ids(whole["output"])
