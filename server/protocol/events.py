"""What an answer consists of, as it arrives, and the same answer as one message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from glm53.engine.protocol import Token

DoneReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]


@dataclass(slots=True)
class ReasoningText:
    """More reasoning; never empty."""

    text: str


@dataclass(slots=True)
class ContentText:
    """More of the answer; never empty. `tokens`: those whose first visible character is in it, if kept."""

    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(slots=True)
class ToolCallStart:
    """A call's name is known. `index` counts the calls of this answer from 0."""

    index: int
    id: str
    name: str


@dataclass(slots=True)
class ToolCallArgs:
    """More of the JSON text of a call's arguments."""

    index: int
    fragment: str


@dataclass(slots=True)
class ToolCallEnd:
    """The call is complete; a call without this must not be executed."""

    index: int


@dataclass(slots=True)
class Done:
    """The end. `stop_sequence`: the stop string that was met. `reasoning_is_answer`: the model stopped by itself
    without ever closing its reasoning, so that text is all the answer there is."""

    reason: DoneReason
    stop_sequence: str | None = None
    stop_id: int | None = None
    error: str | None = None
    reasoning_is_answer: bool = False


Event = ReasoningText | ContentText | ToolCallStart | ToolCallArgs | ToolCallEnd | Done


@dataclass(slots=True)
class Call:
    """One complete tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


Part = ReasoningText | ContentText | Call


@dataclass(slots=True)
class Answer:
    """A whole answer. `parts`: reasoning, content and calls in the order they came; neighbours of a kind are one.
    `cut_call`: it ended inside a call, which is left out."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    done: Done | None = None
    parts: list[Part] = field(default_factory=list)
    cut_call: bool = False

    def message(self) -> dict[str, Any]:
        """The assistant message of the Chat Completions API; keys without a value are left out."""
        out: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        if self.calls:
            out["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.calls
            ]
        return out


def collect(events: Iterable[Event]) -> Answer:
    """Put an answer together. Calls that never ended are left out."""
    open_calls: dict[int, tuple[str, str, list[str]]] = {}
    answer = Answer()
    for event in merge(list(events)):
        if isinstance(event, ContentText):
            answer.parts.append(event)
            answer.tokens += event.tokens
        elif isinstance(event, ReasoningText):
            answer.parts.append(event)
        elif isinstance(event, ToolCallStart):
            open_calls[event.index] = (event.id, event.name, [])
        elif isinstance(event, ToolCallArgs):
            open_calls[event.index][2].append(event.fragment)
        elif isinstance(event, ToolCallEnd):
            call_id, name, fragments = open_calls.pop(event.index)
            answer.parts.append(Call(call_id, name, "".join(fragments)))
        else:
            answer.done = event
    answer.cut_call = bool(open_calls)
    _summarise(answer)
    return answer


def _summarise(answer: Answer) -> None:
    if answer.done and answer.done.reasoning_is_answer and not any(isinstance(p, ContentText) for p in answer.parts):
        answer.parts = [ContentText(p.text) if isinstance(p, ReasoningText) else p for p in answer.parts]
    answer.content = "".join(p.text for p in answer.parts if isinstance(p, ContentText))
    answer.reasoning = "".join(p.text for p in answer.parts if isinstance(p, ReasoningText))
    answer.calls = [p for p in answer.parts if isinstance(p, Call)]


def merge(events: list[Event]) -> list[Event]:
    """Neighbours of one kind as one event, in linear time."""
    out: list[Event] = []
    i = 0
    while i < len(events):
        first = events[i]
        j = i + 1
        if isinstance(first, ReasoningText | ContentText | ToolCallArgs):
            while j < len(events) and type(events[j]) is type(first) and _same_call(first, events[j]):
                j += 1
        out.append(_joined(events[i:j]) if j - i > 1 else first)
        i = j
    return out


def _same_call(a: Event, b: Event) -> bool:
    return not isinstance(a, ToolCallArgs) or (isinstance(b, ToolCallArgs) and a.index == b.index)


def _joined(events: list[Event]) -> Event:
    first = events[0]
    if isinstance(first, ToolCallArgs):
        return ToolCallArgs(first.index, "".join(e.fragment for e in events if isinstance(e, ToolCallArgs)))
    text = "".join(e.text for e in events if isinstance(e, ReasoningText | ContentText))
    if isinstance(first, ReasoningText):
        return ReasoningText(text)
    return ContentText(text, tuple(t for e in events if isinstance(e, ContentText) for t in e.tokens))
