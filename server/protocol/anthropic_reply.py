"""Answers in the Anthropic Messages API: one message, or its stream of content blocks.

A reply's blocks follow each other: at most one is open, and opening the next closes it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import orjson

from .events import Answer, ContentText, Done, Event, Part, ReasoningText, ToolCallArgs, ToolCallEnd, ToolCallStart
from .sse import frame
from .usage import TokenCounts

SIGNATURE = "Z2xtNTM="
"""Of every thinking block. It signs nothing, but clients send a block without one back as plain text or not at all."""
STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


def new_tool_use_id() -> str:
    """An id for a `tool_use` block (OutputParser's `new_id`)."""
    return f"toolu_{uuid.uuid4().hex[:24]}"


def stop_of(done: Done | None) -> dict[str, Any]:
    """`stop_reason` and `stop_sequence`."""
    if done is not None and done.reason == "stop" and done.stop_sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": done.stop_sequence}
    return {"stop_reason": STOP_REASONS.get(done.reason if done else "stop", "end_turn"), "stop_sequence": None}


class MessagesReply:
    """One reply. Call `whole`, or `begin`, `events` for each batch, and `end`."""

    def __init__(self, model: str) -> None:
        self._head = {"id": f"msg_{uuid.uuid4().hex[:24]}", "type": "message", "role": "assistant", "model": model}
        self._index = -1
        self._open = ""
        self._done: Done | None = None

    def whole(self, answer: Answer, counts: TokenCounts) -> dict[str, Any]:
        """The message object, for orjson."""
        content = [_block(part) for part in answer.parts]
        return {**self._head, "content": content, **stop_of(answer.done), "usage": counts.anthropic()}

    def begin(self, counts: TokenCounts) -> bytes:
        """`message_start`; of the counts only those of the prompt are known."""
        message = {**self._head, "content": [], **stop_of(None), "stop_reason": None, "usage": counts.anthropic()}
        return _event({"type": "message_start", "message": message})

    def events(self, events: Iterable[Event]) -> bytes:
        """Frames of one batch; the end is remembered for `end`."""
        return b"".join(self._frames(e) for e in events)

    def end(self, counts: TokenCounts) -> bytes:
        """Closes the open block, then `message_delta` and `message_stop`."""
        delta = {"type": "message_delta", "delta": stop_of(self._done), "usage": counts.anthropic()}
        return self._close() + _event(delta) + _event({"type": "message_stop"})

    def _frames(self, event: Event) -> bytes:
        if isinstance(event, ContentText):
            start = self._enter("text", {"type": "text", "text": ""})
            return start + self._delta({"type": "text_delta", "text": event.text})
        if isinstance(event, ReasoningText):
            start = self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return start + self._delta({"type": "thinking_delta", "thinking": event.text})
        if isinstance(event, ToolCallStart):
            block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
            return self._enter(f"call {event.index}", block)
        if isinstance(event, ToolCallArgs):
            return self._delta({"type": "input_json_delta", "partial_json": event.fragment})
        if isinstance(event, ToolCallEnd):
            return self._close()
        self._done = event
        return b""

    def _enter(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        self._index += 1
        return closed + _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": SIGNATURE}) if self._open == "thinking" else b""
        self._open = ""
        return signed + _event({"type": "content_block_stop", "index": self._index})


def _block(part: Part) -> dict[str, Any]:
    if isinstance(part, ReasoningText):
        return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}
    if isinstance(part, ContentText):
        return {"type": "text", "text": part.text}
    arguments = orjson.Fragment(
        part.arguments
    )  # as written: what the model made need not fit orjson's numbers or depth
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": arguments}


def _event(payload: dict[str, Any]) -> bytes:
    return frame(payload, payload["type"])
