"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from glm53.engine.protocol import Token

from ..chat_work import ChatWork, chat_work, constrain
from ..errors import ErrorReply
from ..generation import Choice, StreamFormat, gather, stream, submit
from ..jobs import Job, admit
from ..protocol.body import parse_body
from ..protocol.events import Answer, ContentText, Done, Event, ReasoningText, ToolCallArgs, ToolCallStart
from ..protocol.json_parts import JsonList
from ..protocol.requests import parse_chat
from ..protocol.sse import frame
from ..sse import PING
from ..whole import whole_reply
from ..wire import chat_logprobs, timings, usage


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, streamed or whole."""
    async with admit(request) as job:
        state = job.state

        def prepare(raw: bytes) -> tuple[ChatWork, bool]:
            body = parse_body(raw)
            work = chat_work(state, job.engine, parse_chat(body, state.defaults()))
            return work, body.get("prompt_progress") is True

        work, progress = await job.prepare(prepare)
        await constrain(job, work)
        choices = await submit(job, work.works, work.call.decoding)
        reply = _Reply(job, work, choices)
        if work.call.decoding.stream:
            ping = reply.empty_chunk() if progress and len(choices) == 1 else PING
            form = StreamFormat(reply.begin, reply.events, reply.end, reply.error, ping=ping)
            return await stream(job, choices, form)
        answers = await gather(job, choices)
        return await whole_reply(job, lambda: reply.whole(answers))


class _Reply:
    """Builds the objects of one reply; id, time and model are the same in all of them."""

    def __init__(self, job: Job, work: ChatWork, choices: Sequence[Choice]) -> None:
        self._tokenizer = job.state.tokenizer
        self._decoding = work.call.decoding
        self._choices = choices
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": job.state.options.served_name,
        }

    # ---- whole ----

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion",
            "choices": JsonList((self._choice(i, answer) for i, answer in enumerate(answers)), at_once=1),
            "usage": usage(self._choices),
            "timings": timings(self._choices[0].stream.usage),
        }

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        reason = answer.done.reason if answer.done else "stop"
        logprobs = self._logprobs(answer.tokens)
        return {"index": index, "message": answer.message(), "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._decoding.top_logprobs is None:
            return None
        return {"content": chat_logprobs(tokens, self._tokenizer)}

    # ---- streamed ----

    def begin(self) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(self._frame(c.index, first) for c in self._choices)

    def empty_chunk(self) -> bytes:
        """A chunk that says nothing: a ping for clients whose time limit does not see comments (`prompt_progress`)."""
        return self._frame(0, {})

    def events(self, choice: Choice, events: list[Event]) -> bytes:
        return b"".join(self._event(choice.index, e) for e in events)

    def end(self) -> bytes:
        if not self._decoding.include_usage:
            return b""
        return frame(
            self._chunk([]) | {"usage": usage(self._choices), "timings": timings(self._choices[0].stream.usage)}
        )

    def error(self, reply: ErrorReply) -> bytes:
        return frame(reply.openai())

    def _event(self, index: int, event: Event) -> bytes:
        if isinstance(event, ContentText):
            return self._frame(index, {"content": event.text}, self._logprobs(event.tokens))
        if isinstance(event, ReasoningText):
            return self._frame(index, {"reasoning_content": event.text})
        if isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": event.id, "type": "function", "function": function}
            return self._frame(index, {"tool_calls": [call]})
        if isinstance(event, ToolCallArgs):
            more = {"index": event.index, "function": {"arguments": event.fragment}}
            return self._frame(index, {"tool_calls": [more]})
        if isinstance(event, Done):
            return self._frame(index, {}, reason=event.reason)
        return b""

    def _frame(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> bytes:
        return frame(self._chunk([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]))

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}
