"""Every case with scripted model text, over HTTP: whole and streamed, in the case's own pieces, in one, in characters.

All six answers must be one message, and each stream must keep what every stream keeps.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from conftest import LiveServer, Start, Streamed, check_chat_stream, read_stream, user
from protocol_helpers import TOOLS1_RAW, splits

OFF = {"chat_template_kwargs": {"enable_thinking": False}}
TOOLS = {"tools": TOOLS1_RAW}
PREFILL = {
    "messages": [{"role": "user", "content": "json"}, {"role": "assistant", "content": '{"a":'}],
    "continue_final_message": True,
    "add_generation_prompt": False,
}
NAMED = {"tool_choice": {"type": "function", "function": {"name": "write_file"}}}
ENDS = {"obs": "observation"}
LS = ("list_mailboxes", {})
VALUES = ["123_456", "001", "true", "null", "1e5", '{"a":1}', "[1]", '"quoted"', "NaN", ""]


@dataclass(frozen=True)
class Case:
    """MODEL and END of a case, the request's own fields, and the message to hold."""

    model: str
    end: str = "user"
    body: dict[str, Any] = field(default_factory=dict)
    content: str | None = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    finish: str = "stop"


def call(*arguments: tuple[str, str], name: str = "write_file") -> str:
    values = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments)
    return f"<tool_call>{name}{values}</tool_call>"


def called(model: str, *calls: tuple[str, dict[str, Any]], body: dict[str, Any] = TOOLS, **more: Any) -> Case:
    """A case whose answer is calls alone."""
    return Case(model, **{"end": "obs", "body": body, "content": None, "calls": calls, "finish": "tool_calls", **more})


def one_value(key: str, text: str, value: Any) -> Case:
    return called("</think>" + call((key, text)), ("write_file", {key: value}))


B13 = {"path": "p", "mode": 40, "exec": True, "tags": ["a", "b"], "opts": {"k": {"n": [1, 2]}}, "ratio": 0.001}
B13_TEXT = [(k, v if isinstance(v, str) else "1e-3" if k == "ratio" else json.dumps(v)) for k, v in B13.items()]
B18 = sorted(B13_TEXT, key=lambda kv: kv[0] == "opts")
NEWLINES = (
    "</think>\n<tool_call>write_file\n<arg_key>path</arg_key>\n<arg_value>a.txt</arg_value>\n</tool_call>\n"
    "<tool_call>list_mailboxes\n</tool_call>"
)
FORGOTTEN = "</think><tool_call>write_file<arg_key>path</arg_key><arg_value>a</arg_value>"
HTML = '<div class="a">&amp;</div>\n<!-- x -->'

CASES = {
    "b01-stray-end": Case("</think>|4", body=OFF, content="4"),
    "b01-plain": Case("4", body=OFF, content="4"),
    "b01-thinks-anyway": Case("<think>hm</think>4", body=OFF, content="4", reasoning="hm"),
    "b02": called("need list|<tool_call>|list_mailboxes|</tool_call>", LS, reasoning="need list"),
    "b04": Case("a |b |c |d |e", "length", reasoning="a b c d e", finish="length"),
    "b05": Case("1}", body=PREFILL, content="1}"),
    "b07": Case("think</th|ink>ans", reasoning="think", content="ans"),
    "b10": Case("4", body={"reasoning_effort": "none"}, content="4"),
    "b12": called(
        "</think>" + call(("path", "a.txt")) + call(name="list_mailboxes"), ("write_file", {"path": "a.txt"}), LS
    ),
    "b12-newlines": called(NEWLINES, ("write_file", {"path": "a.txt"}), LS),
    "b13": called("</think>" + call(*B13_TEXT), ("write_file", B13)),
    **{f"b14-{v or 'empty'}": one_value("content", v, v) for v in VALUES},
    "b15": one_value("content", "    if x:\n        y\n", "    if x:\n        y\n"),
    "b15-trimmed": one_value("mode", " \n40 ", 40),
    "b17-null": one_value("note", "null", None),
    "b17-string": one_value("note", "5", "5"),
    "b17-unknown": one_value("absent", "5", "5"),
    "b18": called("</think>" + call(*B18), ("write_file", B13)),
    "b20": called("</think>" + call(name="list_mailboxes"), LS),
    "b22": Case(FORGOTTEN.removesuffix("a</arg_value>") + "NY", "length", TOOLS, finish="length"),
    **{f"b23-{end}": called(FORGOTTEN, ("write_file", {"path": "a"}), end=end) for end in ("obs", "user", "eos")},
    "b27": Case(
        "</think>Sure.<tool_call>list_mailboxes</tool_call>\n\ntrailing",
        body=TOOLS,
        content="Sure.\n\ntrailing",
        calls=(LS,),
        finish="tool_calls",
    ),
    "b27-blank": Case(
        "</think>Sure.<tool_call>list_mailboxes</tool_call>\n \n",
        body=TOOLS,
        content="Sure.",
        calls=(LS,),
        finish="tool_calls",
    ),
    "b29": Case("</think>Write <tool_call>f</tool_call>", content="Write <tool_call>f</tool_call>"),
    "b30-none": Case(
        "</think>" + call(name="list_mailboxes"),
        body={**TOOLS, "tool_choice": "none"},
        content="<tool_call>list_mailboxes</tool_call>",
    ),
    "b30-named": called(
        "</think>" + call(("path", "a")), ("write_file", {"path": "a"}), body={**TOOLS, **NAMED}, end="user"
    ),
    "b34": one_value("content", 'C:\\new\\table "x" Größe 温度 😀', 'C:\\new\\table "x" Größe 温度 😀'),
    "b35": one_value("content", HTML, HTML),
    "b44": Case("</think>a\u2028b\u0085c\u2029d", content="a\u2028b\u0085c\u2029d"),
}


def stream_and_reuse(live: LiveServer, body: dict[str, Any]) -> Streamed:
    """A stream, and a second request on its connection."""
    connection = live.connect()
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}))
        out = read_stream(connection.getresponse())
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        return out
    finally:
        connection.close()


def as_case(message: dict[str, Any], finish: str | None) -> dict[str, Any]:
    """A message as the case's words tell it; every call must have an id of its own."""
    calls = message.get("tool_calls") or []
    assert len({c["id"] for c in calls}) == len(calls)
    assert all(c["type"] == "function" for c in calls)
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": tuple((c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls),
        "finish": finish,
    }


def check_deltas(out: Streamed, case: Case) -> None:
    """The shape of tool deltas, and no piece of a tag in any text."""
    named: set[int] = set()
    for event in out.events:
        for delta in (c["delta"] for c in event["choices"]):
            assert "\ufffd" not in json.dumps(delta, ensure_ascii=False)
            if case.content is None or "<" not in case.content:
                assert not re.search(r"<|think>|tool_call|arg_", delta.get("content", ""))
            assert not re.search(r"<|think>", delta.get("reasoning_content", ""))
            for part in delta.get("tool_calls", ()):
                first = part["index"] not in named
                assert set(part) == ({"index", "id", "type", "function"} if first else {"index", "function"})
                assert set(part["function"]) == ({"name", "arguments"} if first else {"arguments"})
                assert part["index"] == (len(named) if first else max(named))
                named.add(part["index"])


@pytest.mark.parametrize("name", CASES)
def test_model_case(start: Start, name: str) -> None:
    case = CASES[name]
    cuts = splits(case.model)
    end = ENDS.get(case.end, case.end)
    live = start([{"pieces": pieces, "end": end} for pieces in cuts for _ in (0, 1)])
    body = {"messages": user("x"), **case.body}
    expected = {
        "content": case.content or "",
        "reasoning": case.reasoning,
        "calls": case.calls,
        "finish": case.finish,
    }
    for _ in cuts:
        [choice] = live.post("/v1/chat/completions", body).json["choices"]
        message = choice["message"]
        assert as_case(message, choice["finish_reason"]) == expected
        assert ("tool_calls" in message) == bool(case.calls)
        assert ("reasoning_content" in message) == bool(case.reasoning)
        assert case.content is not None or message["content"] is None
        out = stream_and_reuse(live, body)
        check_chat_stream(out)
        check_deltas(out, case)
        assert out.raw.endswith(b"data: [DONE]\n\n")
        streamed = out.choice()
        assert as_case(streamed, streamed["finish_reason"]) == expected


def test_b04_reasoning_that_uses_up_max_tokens(start: Start) -> None:
    live = start({"pieces": ["a ", "b ", "c ", "d ", "e", " f"], "end": "user"})
    reply = live.chat(max_tokens=5).json
    assert reply["choices"][0]["finish_reason"] == "length"
    assert not reply["choices"][0]["message"]["content"]
    assert reply["choices"][0]["message"]["reasoning_content"] == "a b c d e"
    assert reply["usage"]["completion_tokens"] == 5
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5


def test_b22_a_long_call_cut_by_length_cannot_be_parsed(start: Start) -> None:
    model = "</think><tool_call>write_file<arg_key>content</arg_key><arg_value>" + "x" * 1000
    cuts = splits(model)
    live = start([{"pieces": pieces, "end": "length"} for pieces in cuts for _ in (0, 1)])
    for _ in cuts:
        out = live.chat_stream(TOOLS)
        check_chat_stream(out)
        streamed = out.choice()
        assert streamed["finish_reason"] == "length"
        for part in streamed["tool_calls"]:
            with pytest.raises(ValueError, match="Unterminated"):
                json.loads(part["function"]["arguments"])
        [choice] = live.chat(TOOLS).json["choices"]
        assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("length", False)


def test_b26_the_only_call_has_index_0_whichever_tool_it_names(start: Start) -> None:
    live = start({"pieces": ["</think>", "<tool_call>", "list_mailboxes", "</tool_call>"], "end": "observation"})
    parts = [c for e in live.chat_stream(TOOLS).events for c in e["choices"][0]["delta"].get("tool_calls", ())]
    assert {p["index"] for p in parts} == {0}
