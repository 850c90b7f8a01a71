"""The OpenAI Responses API: requests as chat calls, answers as response objects and as event streams."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from protocol_helpers import TOOLS1_RAW, events_of, splits
from pydantic import TypeAdapter

from glm53.chat import render, to_text
from glm53.errors import RequestError
from glm53.server.item_store import ItemStore
from glm53.server.protocol.events import Event, collect
from glm53.server.protocol.requests import RequestDefaults
from glm53.server.protocol.responses import ResponsesCall, parse_responses
from glm53.server.protocol.responses_reply import ResponsesReply
from glm53.server.protocol.usage import TokenCounts

TOOL = {"type": "function", **TOOLS1_RAW[0]["function"], "strict": False}
PATCH = {"type": "custom", "name": "apply_patch", "description": "p", "format": {"type": "text"}}
COUNTS = TokenCounts(prompt=10, cached=4, completion=3, reasoning=1)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def call(**body: Any) -> ResponsesCall:
    return parse_responses({"model": "m", "input": "x", **body}, RequestDefaults())


def prompt(**body: Any) -> str:
    chat = call(**body).chat
    return to_text(render(chat.messages, chat.tools, chat.chat)).removeprefix("[gMASK]<sop><|system|>")


def refused(param: str | None = None, code: str | None = None, **body: Any) -> None:
    with pytest.raises(RequestError) as e:
        call(**body)
    if param is not None:
        assert e.value.param == param
    if code is not None:
        assert e.value.code == code
    assert "AAAA" not in str(e.value)


def test_input_and_instructions() -> None:
    assert prompt(instructions="Be brief") == "Reasoning Effort: Max<|system|>Be brief<|user|>x<|assistant|><think>"
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}]
    assert prompt(input=parts) == "Reasoning Effort: Max<|user|>ab<|assistant|><think>"
    assert prompt(reasoning={"effort": "low", "summary": "auto"}).startswith("Reasoning Effort: Low<")
    assert prompt(reasoning={"effort": "none"}).endswith("<think></think>")


@pytest.mark.parametrize(
    ("output", "text"),
    [("a", "a"), (None, ""), ([{"type": "input_text", "text": "a"}], "a"), ({"k": [1]}, '{"k": [1]}'), (3, "3")],
)
def test_outputs_of_any_type(output: Any, text: str) -> None:
    item = {"type": "function_call_output", "call_id": "c", "output": output}
    assert f"<tool_response>{text}</tool_response>" in prompt(input=[item])


def test_what_codex_sends() -> None:
    body = {
        "instructions": "You code.", "stream": True, "store": False, "parallel_tool_calls": False,
        "tool_choice": "auto",
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "client_metadata": {"a": "b"},
        "reasoning": {"effort": "medium", "summary": "auto"}, "tools": [TOOL, PATCH, {"type": "web_search"}],
        "text": {"verbosity": "low"},
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
            {"type": "function_call", "call_id": "1", "name": "write_file", "arguments": '{"path":"p"}'},
            {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "*** p"},
            {"type": "function_call_output", "call_id": "1", "output": "done"},
            {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "patched"}]},
        ],
    }  # fmt: skip
    got = call(**body)
    assert got.declared.custom == {"apply_patch"}
    assert [t.name for t in got.chat.tools] == ["write_file", "apply_patch"]
    assert not got.chat.parallel_tool_calls
    assert prompt(**body).endswith(
        "<|system|>You code.<|system|>rules<|user|>fix it<|assistant|><think>hm</think>ok<tool_call>write_file"
        "<arg_key>path</arg_key><arg_value>p</arg_value></tool_call><tool_call>apply_patch<arg_key>input</arg_key>"
        "<arg_value>*** p</arg_value></tool_call><|observation|><tool_response>done</tool_response>"
        "<tool_response>patched</tool_response><|assistant|><think>"
    )


AGENTS = {"type": "namespace", "name": "agents", "description": "d", "tools": [
    {"type": "function", "name": "close", "parameters": {"type": "object"}},
    {"type": "function", "name": "write_file", "parameters": None},
    {"type": "custom", "name": "tell"},
]}  # fmt: skip


def test_namespaces() -> None:
    """Codex has tools in one in every request."""
    tools = {"tools": [TOOL, AGENTS, {"type": "tool_search"}]}
    got = call(**tools, tool_choice={"type": "function", "name": "close"})
    assert [t.name for t in got.chat.tools] == ["write_file", "close", "agents.write_file", "tell"]
    assert got.chat.tools[2].definition["name"] == "agents.write_file"
    assert got.declared.custom == {"tell"}
    assert got.chat.tool_choice.name == "close"
    text = prompt(**tools, input=[
        {"role": "user", "content": "x"},
        {"type": "function_call", "name": "write_file", "namespace": "agents", "call_id": "1", "arguments": "{}"},
        {"type": "function_call", "name": "write_file", "call_id": "2", "arguments": "{}"},
        {"type": "function_call", "name": "gone", "namespace": "agents", "call_id": "3", "arguments": "{}"},
    ])  # fmt: skip
    for name in ("agents.write_file", "write_file", "gone"):
        assert f"<tool_call>{name}</tool_call>" in text
    refused("tools[0].name", tools=[{**AGENTS, "name": None}])
    refused("tools[0].tools[0].type", "unsupported_tool", tools=[{**AGENTS, "tools": [AGENTS]}])
    refused("tools[0].tools", tools=[{**AGENTS, "tools": "x"}])
    refused("tools", tools=[AGENTS, AGENTS])


def test_calls_in_namespaces() -> None:
    request = call(tools=[TOOL, AGENTS])
    names = ["close", "agents.write_file", "write_file", "tell"]
    model = "</think>" + "".join(f"<tool_call>{name}</tool_call>" for name in names)
    got = list(events_of([model], "obs", tools=request.chat.tools))
    reply = ResponsesReply("m", 1, request)
    whole = reply.whole(collect(got), COUNTS)
    Response.model_validate(whole)
    calls = [(o["type"], o.get("namespace"), o["name"]) for o in whole["output"]]
    assert calls == [
        ("function_call", "agents", "close"),
        ("function_call", "agents", "write_file"),
        ("function_call", None, "write_file"),
        ("custom_tool_call", "agents", "tell"),
    ]
    payloads = frames(reply.begin() + reply.events(got) + reply.end(COUNTS))
    assert without_ids(payloads[-1]["response"]["output"]) == without_ids(whole["output"])
    added = [p["item"] for p in payloads if p["type"] == "response.output_item.added"]
    assert [(i.get("namespace"), i["name"]) for i in added] == [c[1:] for c in calls]


def test_references_to_items() -> None:
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "said"}]}
    kept = {"msg_1": text, "rs_1": {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}}

    def items(*ids: object) -> ResponsesCall:
        refs = [{"type": "item_reference", "id": i} for i in ids]
        body = {"input": [{"role": "user", "content": "x"}, *refs, {"role": "user", "content": "y"}]}
        return parse_responses(body, RequestDefaults(), lambda i: kept.get(str(i)))

    chat = items("rs_1", "msg_1").chat
    assert "<|user|>x<|assistant|><think>hm</think>said<|user|>y" in to_text(render(chat.messages, (), chat.chat))
    assert len(items("rs_gone").chat.messages) == 2
    for gone in ("msg_gone", 3, None):
        with pytest.raises(RequestError, match="store: false"):
            items(gone)


def test_item_store() -> None:
    store = ItemStore(most_bytes=200)
    store.put({"id": f"a{n}", "text": "x" * 50} for n in range(9))
    assert store.get("a8") == {"id": "a8", "text": "x" * 50}
    assert [n for n in range(9) if store.get(f"a{n}")] == [7, 8]
    for text in ("x" * 50, "y" * 50, "z" * 50):  # what comes again takes the place that it had
        store.put([{"id": "a8", "text": text}])
    assert store.get("a7")
    assert store.get("a8") == {"id": "a8", "text": "z" * 50}
    store.put([{"id": "b", "text": "x" * 500}])
    assert store.get("b") is store.get("none") is store.get(3) is None
    assert store.get("a8")


def test_fields() -> None:
    schema = {"type": "object"}
    got = call(
        max_output_tokens=9, temperature=0, text={"format": {"type": "json_schema", "name": "a", "schema": schema}}
    ).chat.decoding
    assert (got.max_tokens, got.sampling.temperature, got.response_format.schema) == (9, 0, schema)
    assert call(text={"format": {"type": "text"}}).chat.decoding.response_format is None
    named = call(tools=[TOOL], tool_choice={"type": "function", "name": "write_file"}).chat.tool_choice
    assert named.name == "write_file"
    assert call(tools=[PATCH], tool_choice={"type": "custom", "name": "apply_patch"}).chat.tool_choice.forced


def test_refusals() -> None:
    for bad in (
        None,
        [],
        3,
        [3],
        [{"role": "user"}],
        [{"role": "robot", "content": "x"}],
        [{"role": "tool", "content": "x"}],
    ):
        refused(input=bad)
    refused("input[0].type", "unsupported_content", input=[{"type": "computer_call"}])
    image = {"type": "input_image", "image_url": "data:image/png;base64," + "A" * 1000}
    refused("input[0].content[0]", "unsupported_content", input=[{"role": "user", "content": [image]}])
    refused("input[0].output[0]", "unsupported_content",
            input=[{"type": "function_call_output", "call_id": "1", "output": [image]}])  # fmt: skip
    refused("input[0].arguments", input=[{"type": "function_call", "name": "f", "arguments": "{"}])
    refused("previous_response_id", "unsupported_parameter", previous_response_id="resp_1")
    refused("background", background=True)
    refused("tools[0].type", "unsupported_tool", tools=[{"type": "odd"}])
    refused("tools[0].name", tools=[{"type": "function"}])
    refused("reasoning.effort", reasoning={"effort": "huge"})


def frames(data: bytes) -> list[dict[str, Any]]:
    out = []
    for part in data.decode().split("\n\n")[:-1]:
        event, line = part.split("\n")
        payload = json.loads(line.removeprefix("data: "))
        assert event == f"event: {payload['type']}"
        out.append(payload)
    return out


HELLO = "hm</think>Hello"
CALLS = (
    "hm</think>Sure.<tool_call>write_file<arg_key>mode</arg_key><arg_value>4</arg_value></tool_call>"
    "<tool_call>apply_patch<arg_key>input</arg_key><arg_value>*** {p}\n</arg_value></tool_call>"
)


def request(**more: Any) -> ResponsesCall:
    return call(tools=[TOOL, PATCH], instructions="i", **more)


def events(model: list[str], end: str) -> list[Event]:
    return list(events_of(model, end, tools=request().chat.tools))


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k != "id"} for item in output]


@pytest.mark.parametrize("summary", [None, "auto", "none"])
@pytest.mark.parametrize(("model", "end"), [(HELLO, "user"), (CALLS, "obs"), (HELLO, "length"), ("</think>", "user")])
def test_stream_is_the_response(model: str, end: str, summary: str | None) -> None:
    for pieces in splits(model):
        got = events(pieces, end)
        reply = ResponsesReply("m", 1, request(reasoning={"summary": summary}))
        whole = reply.whole(collect(got), COUNTS)
        Response.model_validate(whole)
        data = reply.begin() + b"".join(reply.events([e]) for e in got) + reply.end(COUNTS)
        payloads = frames(data)
        for n, payload in enumerate(payloads):
            EVENT.validate_python(payload)
            assert payload["sequence_number"] == n
        final = payloads[-1]["response"]
        assert payloads[-1]["type"] == f"response.{final['status']}"
        assert final["status"] == ("incomplete" if end == "length" else "completed")
        assert without_ids(final["output"]) == without_ids(whole["output"])
        assert {**final, "output": 0} == {**whole, "output": 0}
        check_deltas(payloads, final["output"])


def check_deltas(payloads: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    """Deltas of every item add up to it, between its `added` and its `done`."""
    for index, item in enumerate(output):
        own = [p for p in payloads if p.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added"
        assert own[-1]["type"] == "response.output_item.done"
        assert own[-1]["item"] == item
        assert all(p.get("item_id", item["id"]) == item["id"] for p in own)
        text = "".join(p["delta"] for p in own if p["type"].endswith(".delta"))
        keys = {"function_call": "arguments", "custom_tool_call": "input"}
        if item["type"] in keys:
            assert text == item[keys[item["type"]]]
            continue
        [part] = [*item["content"], *item.get("summary", [])]
        assert part["text"] == text
        kind = "reasoning_summary" if part["type"] == "summary_text" else "content"
        # libraries add deltas to a part, which they must have been told of
        assert (own[1]["type"], own[1]["part"]) == (f"response.{kind}_part.added", {**part, "text": ""})
        assert (own[-2]["type"], own[-2]["part"]) == (f"response.{kind}_part.done", part)


def test_items() -> None:
    whole = ResponsesReply("m", 1, request()).whole(collect(events([CALLS], "obs")), COUNTS)
    assert [i["type"] for i in whole["output"]] == ["reasoning", "message", "function_call", "custom_tool_call"]
    assert whole["output"][2]["arguments"] == '{"mode":4}'
    assert whole["output"][3]["input"] == "*** {p}\n"
    assert whole["usage"]["input_tokens_details"] == {"cached_tokens": 4, "cache_write_tokens": 0}
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}


@pytest.mark.effect("reasoning.summary")
def test_reasoning_goes_where_the_client_looks_for_it() -> None:
    """Codex and the Vercel library show what is in the summary, if they asked for one."""
    for wanted, place in ((None, "content"), ("none", "content"), ("auto", "summary"), ("Detailed", "summary")):
        reply = ResponsesReply("m", 1, request(reasoning={"summary": wanted, "effort": "low"}))
        whole = reply.whole(collect(events([HELLO], "user")), COUNTS)
        first = whole["output"][0]
        assert [p["text"] for p in first[place]] == ["hm"]
        assert len(first["content"]) + len(first["summary"]) == 1
        assert whole["reasoning"]["summary"] == (wanted.lower() if place == "summary" else None)
        assert "<think>hm</think>Hello" in prompt(input=[{"role": "user", "content": "x"}, *whole["output"]])
    refused("reasoning.summary", reasoning={"summary": 3})


def test_reasoning_that_is_to_come_back() -> None:
    for include, sealed in ((["reasoning.encrypted_content"], True), ([], False), (None, False)):
        own = request(include=include, reasoning={"summary": "auto"})
        got = events([HELLO], "user")
        reply = ResponsesReply("m", 1, own)
        first = reply.whole(collect(got), COUNTS)["output"][0]
        assert bool(first.get("encrypted_content")) == sealed
        payloads = frames(reply.begin() + reply.events(got) + reply.end(COUNTS))
        assert without_ids(payloads[-1]["response"]["output"])[0] == without_ids([first])[0]
        returned = {k: v for k, v in first.items() if k != "content"}
        assert "<think>hm</think>" in prompt(input=[{"role": "user", "content": "x"}, returned])


def test_failure() -> None:
    reply = ResponsesReply("m", 1, request())
    payloads = frames(reply.begin() + reply.events(events(["hm"], "user")[:1]) + reply.failed("server_error", "broke"))
    for payload in payloads:
        EVENT.validate_python(payload)
    assert payloads[-1]["type"] == "response.failed"
    assert payloads[-1]["response"]["error"] == {"code": "server_error", "message": "broke"}
