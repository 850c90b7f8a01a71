"""Answers in the OpenAI Responses API: one response object, or its stream of typed events.

A response is a list of items (reasoning, message, calls). In a stream at most one item is open; the next one closes it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from glm53.engine.protocol import Token

from .events import (
    Answer,
    Call,
    ContentText,
    Done,
    Event,
    Part,
    ReasoningText,
    ToolCallArgs,
    ToolCallEnd,
    ToolCallStart,
)
from .responses import ResponsesCall
from .sse import frame
from .usage import TokenCounts


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


SEAL = "Z2xtNTM="
"""Reasoning is not encrypted, but the Vercel AI SDK sends none back that does not look so."""
Scores = list[dict[str, Any]]


def _text_part(text: str, scores: Scores) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}


def _message_item(item_id: str, text: str | None, status: str, scores: Scores) -> dict[str, Any]:
    content = [] if text is None else [_text_part(text, scores)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _reasoning_part(text: str, *, summary: bool) -> dict[str, Any]:
    return {"type": "summary_text" if summary else "reasoning_text", "text": text}


def _reasoning_item(item_id: str, text: str | None, status: str, call: ResponsesCall) -> dict[str, Any]:
    parts = [] if text is None else [_reasoning_part(text, summary=call.summary)]
    own: dict[str, Any] = {"summary": parts, "content": []} if call.summary else {"summary": [], "content": parts}
    sealed = {"encrypted_content": SEAL} if call.sealed else {}
    return {"id": item_id, "type": "reasoning", **own, **sealed, "status": status}


class ResponsesReply:
    """One reply. Call `whole`, or `begin`, `events` for each batch, and `end`. `logprobs` words those of tokens; it is
    asked only if the call wants them."""

    def __init__(
        self, model: str, created: int, call: ResponsesCall, logprobs: Callable[[Sequence[Token]], Scores] | None = None
    ) -> None:
        self._head = {"id": _new_id("resp"), "object": "response", "created_at": created, "model": model}
        self._call = call
        self._sequence = 0
        self.items: list[dict[str, Any]] = []
        """What the answer consists of, after `whole` or `end`."""
        self._output: list[dict[str, Any]] = []
        self._done: Done | None = None
        self._kind = ""
        self._item_id = ""
        self._pending: Call | None = None
        self._texts: list[str] = []
        self._logprobs = logprobs
        self._scores: Scores = []

    # -- whole ---------------------------------------------------------------------------------------------------

    def whole(self, answer: Answer, counts: TokenCounts) -> dict[str, Any]:
        """The response object."""
        output = self.items = [self._whole_item(part) for part in answer.parts]
        cut = answer.done is not None and answer.done.reason == "length"
        if cut and not answer.cut_call and output and not isinstance(answer.parts[-1], Call):
            output[-1]["status"] = "incomplete"
        return self._response(output, answer.done, counts)

    def _whole_item(self, part: Part) -> dict[str, Any]:
        if isinstance(part, ReasoningText):
            return _reasoning_item(_new_id("rs"), part.text, "completed", self._call)
        if isinstance(part, ContentText):
            return _message_item(_new_id("msg"), part.text, "completed", self._scores_of(part))
        return self._call_item(_new_id("fc"), part, "completed")

    def _response(self, output: list[dict[str, Any]], done: Done | None, counts: TokenCounts | None) -> dict[str, Any]:
        cut = done is not None and done.reason == "length"
        status = "in_progress" if counts is None else "incomplete" if cut else "completed"
        return {
            **self._head,
            **self._call.echo,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": counts.responses() if counts else None,
        }

    def _scores_of(self, text: ContentText) -> Scores:
        if self._logprobs is None or self._call.chat.decoding.top_logprobs is None:
            return []
        return self._logprobs(text.tokens)

    def _call_item(self, item_id: str, call: Call, status: str) -> dict[str, Any]:
        head = {"id": item_id, "call_id": call.id, "name": call.name, "status": status}
        if own := self._call.declared.spaces.get(call.name):
            head["namespace"], head["name"] = own
        if call.name not in self._call.declared.custom:
            return {**head, "type": "function_call", "arguments": call.arguments}
        return {**head, "type": "custom_tool_call", "input": _free_text(call.arguments)}

    # -- streamed ------------------------------------------------------------------------------------------------

    def begin(self) -> bytes:
        """`response.created` and `response.in_progress`."""
        response = self._response([], None, None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def events(self, events: Iterable[Event]) -> bytes:
        """Frames of one batch; the end is remembered for `end`."""
        return b"".join(self._frames(e) for e in events)

    def end(self, counts: TokenCounts) -> bytes:
        """Closes the open item, then `response.completed` or `response.incomplete`."""
        closed = self._close("incomplete")
        self.items = self._output
        response = self._response(self.items, self._done, counts)
        return closed + self._event(f"response.{response['status']}", response=response)

    def failed(self, code: str, message: str) -> bytes:
        """`response.failed`, in place of `end`."""
        closed = self._close("incomplete")
        response = self._response(self._output, self._done, None)
        response |= {"status": "failed", "error": {"code": code, "message": message}}
        return closed + self._event("response.failed", response=response)

    def _frames(self, event: Event) -> bytes:
        if isinstance(event, ContentText):
            start = self._enter("message", "msg")
            self._texts.append(event.text)
            scores = self._scores_of(event)
            self._scores += scores
            return start + self._part_event("response.output_text.delta", delta=event.text, logprobs=scores)
        if isinstance(event, ReasoningText):
            start = self._enter("reasoning", "rs")
            self._texts.append(event.text)
            return start + self._reasoning_event("text.delta", delta=event.text)
        if isinstance(event, ToolCallStart):
            closed = self._close()
            self._pending = Call(event.id, event.name, "")
            return closed + self._enter("call", "fc")
        if isinstance(event, ToolCallArgs):
            self._texts.append(event.fragment)
            if self._custom():
                return b""
            return self._item_event("response.function_call_arguments.delta", delta=event.fragment)
        if isinstance(event, ToolCallEnd):
            return self._close()
        self._done = event
        return b"" if event.reason == "length" else self._close()

    def _custom(self) -> bool:
        return self._pending is not None and self._pending.name in self._call.declared.custom

    def _enter(self, kind: str, prefix: str) -> bytes:
        if self._kind == kind:
            return b""
        closed = self._close()
        self._kind, self._item_id = kind, _new_id(prefix)
        added = self._event(
            "response.output_item.added", output_index=len(self._output), item=self._item("in_progress", None)
        )
        if kind == "message":
            added += self._part_event("response.content_part.added", part=_text_part("", []))
        elif kind == "reasoning":
            added += self._reasoning_event("part.added", part=_reasoning_part("", summary=self._call.summary))
        return closed + added

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        if self._kind == "message":
            return _message_item(self._item_id, text, status, self._scores)
        if self._kind == "reasoning":
            return _reasoning_item(self._item_id, text, status, self._call)
        assert self._pending is not None
        return self._call_item(self._item_id, Call(self._pending.id, self._pending.name, text or ""), status)

    def _close(self, status: str = "completed") -> bytes:
        if not self._kind:
            return b""
        text = "".join(self._texts)
        item = self._item(status, text)
        frames = self._ending(text, item) + self._event(
            "response.output_item.done", output_index=len(self._output), item=item
        )
        self._output.append(item)
        self._kind = ""
        self._texts.clear()
        self._scores = []
        self._pending = None
        return frames

    def _ending(self, text: str, item: dict[str, Any]) -> bytes:
        """Events that repeat the whole text of the open item."""
        if self._kind == "message":
            done = self._part_event("response.output_text.done", text=text, logprobs=self._scores)
            return done + self._part_event("response.content_part.done", part=_text_part(text, self._scores))
        if self._kind == "reasoning":
            part = _reasoning_part(text, summary=self._call.summary)
            return self._reasoning_event("text.done", text=text) + self._reasoning_event("part.done", part=part)
        if self._custom():
            delta = self._item_event("response.custom_tool_call_input.delta", delta=item["input"])
            return delta + self._item_event("response.custom_tool_call_input.done", input=item["input"])
        return self._item_event("response.function_call_arguments.done", name=item["name"], arguments=text)

    def _reasoning_event(self, kind: str, **fields: Any) -> bytes:
        """`kind` is part.added, text.delta, text.done or part.done."""
        if self._call.summary:
            return self._item_event(f"response.reasoning_summary_{kind}", summary_index=0, **fields)
        name = "content" if kind.startswith("part") else "reasoning"
        return self._part_event(f"response.{name}_{kind}", **fields)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return frame(payload, kind)


def _free_text(arguments: str) -> str:
    """The one string a custom tool takes, out of the JSON arguments of its stand-in; "" while they are incomplete."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return ""
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else ""
