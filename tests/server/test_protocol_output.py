"""Reasoning, content and where they end; what of a tool call is text. Calls themselves: test_protocol_calls.py."""

from __future__ import annotations

from typing import Any

import pytest
from protocol_helpers import TOOLS1, ends, events_of, parser, run, splits, token

from glm53.engine.protocol import Finish
from glm53.server.protocol.events import ContentText, ReasoningText, collect


@pytest.mark.parametrize(
    ("model", "reasoning", "content"), [("</think>|4", "", "4"), ("4", "", "4"), ("<think>hm</think>4", "hm", "4")]
)
def test_b01_thinking_off(model: str, reasoning: str, content: str) -> None:
    answer = run(model, thinking=False)
    assert (answer.reasoning, answer.content, answer.done.reason) == (reasoning, content, "stop")
    assert ("reasoning_content" in answer.message()) == bool(reasoning)


def test_b02_call_before_think_end() -> None:
    answer = run("need list|<tool_call>|list_mailboxes|</tool_call>", "obs", tools=TOOLS1)
    assert answer.message()["content"] is None
    assert answer.reasoning == "need list"
    assert [(c.name, c.arguments) for c in answer.calls] == [("list_mailboxes", "{}")]
    assert answer.done.reason == "tool_calls"


def test_b04_length_in_thinking() -> None:
    p = parser()
    events = p.feed([token(t) for t in ("a ", "b ", "c ", "d ", "e")]) + p.finish(ends()["length"])
    answer = collect(events)
    assert (answer.reasoning, answer.content, answer.done.reason) == ("a b c d e", "", "length")
    assert (p.tokens, p.reasoning_tokens) == (5, 5)


def test_b05_prefill_continues_in_content() -> None:
    assert run("1}", thinking=False).content == "1}"


def test_b07_think_end_split() -> None:
    answer = run("think</th|ink>ans")
    assert (answer.reasoning, answer.content) == ("think", "ans")
    for pieces in splits("think</th|ink>ans"):
        texts = [e.text for e in events_of(pieces) if isinstance(e, ReasoningText | ContentText)]
        assert not any("<" in t or "ink>" in t for t in texts)


def test_b27_text_around_calls() -> None:
    answer = run("</think>Sure.<tool_call>list_mailboxes</tool_call>\n\ntrailing", tools=TOOLS1)
    assert answer.content == "Sure.\n\ntrailing"
    assert len(answer.calls) == 1
    assert run("</think>Sure.<tool_call>list_mailboxes</tool_call>\n \n", tools=TOOLS1).content == "Sure."


def test_b29_tags_without_tools_are_text() -> None:
    answer = run("</think>Write <tool_call>f</tool_call>")
    assert answer.message() == {"role": "assistant", "content": "Write <tool_call>f</tool_call>"}
    assert answer.done.reason == "stop"


def test_b42_characters_split_over_tokens() -> None:
    data = "😀é漢".encode()
    events = events_of(["</think>", *(bytes([b]) for b in data)])
    assert [e.text for e in events if isinstance(e, ContentText)] == ["😀", "é", "漢"]


def test_b42_broken_bytes() -> None:
    assert collect(events_of(["</think>", "a", b"\xf0\x9f"])).content == "a\ufffd"
    events = events_of(["</think>", "a", b"\xff", "b", "c"])
    assert collect(events).content == "a\ufffdbc"
    assert collect(events_of([b"\xe6\xbc", "</think>", "x"])).message() == {
        "role": "assistant",
        "content": "x",
        "reasoning_content": "\ufffd",
    }


def test_b65_role_tokens_are_not_text() -> None:
    assert collect(events_of(["</think>", "answer", "<|user|>", "more"])).content == "answermore"
    shown = collect(events_of(["</think>", "answer", "<|user|>", "more"], show_special=True))
    assert shown.content == "answer<|user|>more"


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("list_mailboxes", ("list_mailboxes", "{}")),
        ("write_file<arg_key>path</arg_key><arg_value>a", ("write_file", '{"path":"a"}')),
        ("write_file<arg_key>pa", ("write_file", "{}")),
        ("write_file<arg_key>path</arg_key>", ("write_file", "{}")),
        ("write_file<arg_key>path</arg_key><arg_value>a</tool_call>", ("write_file", '{"path":"a"}')),
    ],
)
def test_b65_role_token_after_an_open_call(tail: str, expected: tuple[str, str]) -> None:
    answer = run("</think><tool_call>" + tail, tools=TOOLS1)
    assert [(c.name, c.arguments) for c in answer.calls] == [expected]


def test_unclosed_reasoning_is_the_answer() -> None:
    answer = run("just this")
    assert answer.message() == {"role": "assistant", "content": "just this"}
    assert answer.done.reasoning_is_answer
    assert run("just this", "length").reasoning == "just this"
    again = run("first</think> <think>and this")  # what was closed once is reasoning, and so is what is opened again
    assert again.message() == {"role": "assistant", "content": "", "reasoning_content": "firstand this"}


def test_tool_call_that_is_talk() -> None:
    model = "I may use <tool_call> tags, <tool_call>other</tool_call>.</think>The tag <tool_call> is a tag.<tool_call>"
    answer = run(model + "list_mailboxes</tool_call>", "obs", tools=TOOLS1)
    assert answer.reasoning == "I may use <tool_call> tags, <tool_call>other</tool_call>."
    assert answer.content == "The tag <tool_call> is a tag."
    assert [c.name for c in answer.calls] == ["list_mailboxes"]


def test_single_call_stops() -> None:
    p = parser(tools=TOOLS1, single_call=True)
    model = "</think><tool_call>list_mailboxes</tool_call>"
    events = p.feed([token(model + model)])
    assert p.stopped
    answer = collect(events + p.feed([token("more")]) + p.finish(ends()["stopstr"]))
    assert len(answer.calls) == 1
    assert answer.done.reason == "tool_calls"


@pytest.mark.parametrize(
    ("model", "stop", "content", "met"),
    [
        ("</think>one STOP two", ["STOP"], "one ", "STOP"),
        ("</think>one ST|OP two", ["STOP"], "one ", "STOP"),
        ("STOP in thought</think>one", ["STOP"], "one", None),
        ("</think>abc", ["abc", "b"], "a", "b"),
        ("</think>aab", ["aab", "ab"], "", "aab"),
        ("</think>ST", ["STOP"], "ST", None),
        ("</think>\n\nx", ["\n\n"], "", "\n\n"),
        ("</think>ababac", ["abac"], "ab", "abac"),
    ],
)
def test_stop_strings(model: str, stop: list[str], content: str, met: str | None) -> None:
    answer = run(model, "stopstr" if met else "user", stop=stop)
    assert (answer.content, answer.done.stop_sequence, answer.done.reason) == (content, met, "stop")


def test_raw_text_has_no_tags() -> None:
    text = "<think>a</think><tool_call>list_mailboxes</tool_call> </think>"
    assert run(text, thinking=False, tools=None, raw=True).message() == {"role": "assistant", "content": text}


def test_content_tokens() -> None:
    pieces: list[str | bytes] = ["r", "</think>", " ", "a", b"\xc3", b"\xa9", "b S", "TOP", "x"]
    tokens = [token(p) for p in pieces]
    p = parser(stop=["STOP"], keep_tokens=True)
    events = [e for t in tokens for e in p.feed([t])] + p.finish(ends()["stopstr"])
    answer = collect(events)
    assert answer.content == " aéb "
    assert answer.tokens == tokens[2:7]
    assert p.reasoning_tokens == 2


def test_content_tokens_leave_calls_out() -> None:
    pieces = ["</th", "ink>o", "k", "<tool_call>", "list_mailboxes", "</tool_call>", "\n", "end"]
    tokens = [token(p) for p in pieces]
    for batch in (1, 3, 8):
        p = parser(tools=TOOLS1, keep_tokens=True)
        events = [e for i in range(0, 8, batch) for e in p.feed(tokens[i : i + batch])] + p.finish(ends()["user"])
        assert [t.data for t in collect(events).tokens] == [b"ink>o", b"k", b"\n", b"end"]


def test_tokens_behind_a_stop_do_not_count() -> None:
    pieces = ["r", "</think>", "a", "ST", "OP", "b", b"\xf0\x9f"]  # the last one is half a character
    for batch in (1, 3, 7):
        p = parser(stop=["STOP"])
        for i in range(0, len(pieces), batch):
            p.feed([token(t) for t in pieces[i : i + batch]])
        assert p.stopped
        assert (p.tokens, p.reasoning_tokens) == (5, 2)
    p = parser(tools=TOOLS1, single_call=True)
    p.feed([token(t) for t in ("</think>", "<tool_call>", "list_mailboxes", "</tool_call>", "<tool_call>", "x")])
    assert p.tokens == 4


def test_talk_at_the_end_of_the_reasoning_is_kept() -> None:
    answer = run("I could <tool_call>other", tools=TOOLS1)
    assert answer.message() == {"role": "assistant", "content": "I could <tool_call>other"}


def test_blank_answers() -> None:
    assert run("</think> \n").content == " \n"
    assert run(" \n", "length").reasoning == " \n"
    assert run("\n<think>again</think>x").message()["reasoning_content"] == "again"


def test_finish_happens_once() -> None:
    p = parser()
    p.feed([token("a")])
    assert p.finish(ends()["user"])
    assert p.finish(ends()["user"]) == []
    assert p.feed([token("b")]) == []


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_other_ends_are_passed_on(reason: Any) -> None:
    p = parser(tools=TOOLS1)
    p.feed([token("</think><tool_call>list_mailboxes")])
    [done] = p.finish(Finish(reason, error="it broke"))
    assert (done.reason, done.error) == (reason, "it broke")
