"""However the model's text is cut into tokens, the answer is the same; and the work is linear in its length."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_helpers import TOOLS1, ends, parser, tokenizer

from glm53.engine.protocol import Token
from glm53.server.protocol.events import Answer, ContentText, Event, ReasoningText, ToolCallArgs, ToolCallStart, collect

BENCH = Path(__file__).resolve().parents[2] / "bench"
FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "list_mailboxes", "write_file", "path", "content", "mode", "40", "note", "null", "\n", " ", "<", "</", ">", "STOP",
    "ST", "text", "😀", "é", '"', "\\", "{", "x" * 300, "<|user|>", "\u2028", "</arg_value", "<tool_call",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=30).map("".join)
WELL_FORMED = st.tuples(
    TEXTS, st.sampled_from(["path", "content", "mode", "note", "opts"]), TEXTS, st.sampled_from(["", "</tool_call>"])
).map(lambda p: f"{p[0]}</think><tool_call>write_file<arg_key>{p[1]}</arg_key><arg_value>{p[2]}</arg_value>{p[3]}")


def cut(data: bytes, points: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(p % (len(data) + 1) for p in points)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def answer(pieces: list[bytes], end: str, batch: int, options: dict[str, Any]) -> tuple[Answer, list[Event]]:
    p = parser(**options)
    tokens = [Token(7, piece) for piece in pieces]
    events: list[Event] = []
    for i in range(0, len(tokens), batch):
        events += p.feed(tokens[i : i + batch])
    events += p.finish(ends()[end])
    return collect(events), events


@settings(max_examples=400, deadline=None)
@given(
    text=TEXTS | WELL_FORMED,
    points=st.lists(st.integers(0, 10**6), max_size=20),
    batch=st.integers(1, 4),
    end=st.sampled_from(["obs", "length"]),
    thinking=st.booleans(),
    tools=st.sampled_from([TOOLS1, None]),
    stop=st.sampled_from([(), ("STOP",), ("ST", "<tool", "\n\n", "path")]),
    single=st.booleans(),
)
def test_any_split_gives_the_same_answer(  # noqa: PLR0917
    text: str, points: list[int], batch: int, end: str, thinking: bool, tools: Any, stop: Any, single: bool
) -> None:
    data = text.encode("utf-8", "replace")
    options = {"thinking": thinking, "tools": tools, "stop": stop, "single_call": single}
    whole, _ = answer([data], end, 1, options)
    ways = [cut(data, points), [bytes([b]) for b in data]]
    for pieces in ways:
        got, events = answer(pieces, end, batch, options)
        assert got.message() == whole.message()
        assert got.done == whole.done
        for event in events:
            if isinstance(event, ReasoningText | ContentText):
                assert event.text
            if isinstance(event, ToolCallArgs):
                assert event.fragment
    for call in whole.calls:
        assert isinstance(json.loads(call.arguments), dict)
        assert call.name
    if end == "obs":
        assert whole.done.reason == ("tool_calls" if whole.calls else "stop")


@settings(max_examples=100, deadline=None)
@given(text=TEXTS, points=st.lists(st.integers(0, 10**6), max_size=20))
def test_every_token_is_attributed_once(text: str, points: list[int]) -> None:
    tokens = [Token(i, piece) for i, piece in enumerate(cut(text.encode("utf-8", "replace"), points))]
    hidden = tokenizer().special_ids(["<|user|>"])
    tokens = [t for t in tokens if t.id not in hidden]
    p = parser(tools=TOOLS1, keep_tokens=True)
    answered = collect([e for t in tokens for e in p.feed([t])] + p.finish(ends()["length"]))
    shown = [t.id for t in answered.tokens]
    assert shown == sorted(set(shown))
    assert p.tokens == len(tokens)
    assert len(shown) + p.reasoning_tokens <= len(tokens)
    if answered.content and not answered.done.reasoning_is_answer:
        assert shown


def seconds(text: str, size: int) -> float:
    p = parser(tools=TOOLS1)
    tokens = [Token(7, text[i : i + size].encode()) for i in range(0, len(text), size)]
    start = time.thread_time()
    for token in tokens:
        p.feed([token])
    p.finish(ends()["obs"])
    return time.thread_time() - start


CALL = "</think><tool_call>write_file<arg_key>content</arg_key><arg_value>"
SHAPES: dict[str, Callable[[int], str]] = {
    "content": lambda n: "</think>" + "word " * (n // 5),
    "string argument": lambda n: CALL + "abcd" * (n // 4) + "</arg_value></tool_call>",
    "open angle brackets": lambda n: CALL + "<" * n,
    "tags in a value": lambda n: CALL + "</arg_value>x" * (n // 13),
    "blank after a value": lambda n: CALL + "</arg_value>" + " " * n,
    "blank before content": lambda n: "</think>" + "\n" * n,
    "blank before reasoning": lambda n: " " * n,
    "object argument": lambda n: CALL.replace("content", "opts") + "{" + " " * n,
    "key without end": lambda n: CALL.replace("</arg_key><arg_value>", "x" * n),
    "calls": lambda n: "</think>" + "<tool_call>list_mailboxes</tool_call>" * (n // 37),
    "talk about calls": lambda n: "<tool_call> is " * (n // 15),
    "almost names": lambda n: ("<tool_call>" + "x" * 256 + " ") * (n // 268),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [4, 10**9])
def test_time_is_linear(shape: str, size: int) -> None:
    """Ten times the text takes far less than the hundred times of a quadratic parser."""
    small, large = SHAPES[shape](20_000), SHAPES[shape](200_000)
    base = min(seconds(small, size) for _ in range(3))
    assert min(seconds(large, size) for _ in range(2)) < max(40 * base, 0.05)


def test_an_argument_of_a_megabyte_flows() -> None:
    pieces = 250_000
    text = CALL + "abcd" * pieces + "</arg_value></tool_call>"
    p = parser(tools=TOOLS1)
    fragments = 0
    for i in range(0, len(text), 4):
        events = p.feed([Token(7, text[i : i + 4].encode())])
        fragments += sum(isinstance(e, ToolCallArgs) for e in events)
        if i > 400:
            assert fragments
    assert fragments > pieces - 100
    assert not any(isinstance(e, ToolCallStart) for e in p.finish(ends()["obs"]))


def test_the_bench_of_long_arguments_writes_its_bars(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    command = [sys.executable, str(BENCH / "tool_argument.py"), "--characters", "40000", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert {bar["ok"] for bar in result["bars"].values()} == {True}
    assert result["raw"]["string"]["fragments"] > 9000
    assert result["command"].startswith("python bench/tool_argument.py ")
