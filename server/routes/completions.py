"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from glm53.engine.protocol import Token, TokenScore
from glm53.tokenizer import Tokenizer

from ..errors import ErrorReply
from ..generation import Choice, StreamFormat, gather, stream, submit
from ..jobs import Job, admit
from ..middleware import json_response
from ..protocol.body import parse_body
from ..protocol.events import Answer, ContentText, Done, Event
from ..protocol.requests import CompletionCall, parse_completion
from ..protocol.sse import frame
from ..text_work import TextWork, constrain, scores, text_work
from ..wire import finite, timings, usage


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue each prompt, streamed or whole."""
    async with admit(request) as job:
        state = job.state

        def prepare() -> tuple[CompletionCall, TextWork]:
            call = parse_completion(parse_body(job.body), state.defaults())
            return call, text_work(state, job.engine, call.prompts, call.decoding)

        call, work = await state.run_sized(len(job.body), prepare)
        await constrain(state, work, call.decoding)
        top = call.decoding.top_logprobs
        echoed = await scores(job, work.prompts, top) if call.echo and top is not None else None
        choices = submit(job, work.works, call.decoding)
        reply = _Reply(job, call, work, choices, echoed)
        if call.decoding.stream:
            return await stream(job, choices, StreamFormat(reply.begin, reply.events, reply.end, reply.error))
        answers = await gather(job, choices)
        return await state.run_on_thread(lambda: json_response(reply.whole(answers)))


@dataclass(slots=True)
class _Logprobs:
    """The four lists of the Completions API; `offset` is where the next token starts in the whole text."""

    tokenizer: Tokenizer
    offset: int = 0
    lists: dict[str, list[Any]] = field(default_factory=dict)

    def clear(self) -> None:
        self.lists = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(self, data: bytes, logprob: float | None, top: Sequence[tuple[int, float]], *, first: bool = False) -> None:
        """`first`: nothing precedes the token, so it has no score."""
        text = data.decode("utf-8", "replace")
        best = {self.tokenizer.token_bytes(i).decode("utf-8", "replace"): finite(v) for i, v in top}
        self.lists["tokens"].append(text)
        self.lists["token_logprobs"].append(None if first else finite(logprob))
        self.lists["top_logprobs"].append(None if first else best)
        self.lists["text_offset"].append(self.offset)
        self.offset += len(text)


class _Reply:
    """Builds the objects of one reply."""

    def __init__(
        self,
        job: Job,
        call: CompletionCall,
        work: TextWork,
        choices: Sequence[Choice],
        echoed: list[list[TokenScore]] | None,
    ) -> None:
        self._tokenizer = job.state.tokenizer
        self._call = call
        self._work = work
        self._choices = choices
        self._echoed = echoed
        self._logprobs = [_Logprobs(self._tokenizer) for _ in choices]
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": job.state.options.served_name,
        }

    def _echo(self, index: int) -> str:
        """The prompt's text, if it is to be repeated."""
        if not self._call.echo:
            return ""
        return self._tokenizer.decode(self._work.prompts[index // self._call.decoding.n]).decode("utf-8", "replace")

    def _lists(self, index: int, tokens: Sequence[Token], *, with_echo: bool) -> dict[str, Any] | None:
        if self._call.decoding.top_logprobs is None:
            return None
        logprobs = self._logprobs[index]
        logprobs.clear()
        if with_echo and self._echoed is not None:
            for i, score in enumerate(self._echoed[index // self._call.decoding.n]):
                logprobs.add(self._tokenizer.token_bytes(score.id), score.logprob, score.top, first=i == 0)
        for token in tokens:
            logprobs.add(token.data, token.logprob, token.top)
        return logprobs.lists

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        out = []
        for i, answer in enumerate(answers):
            lists = self._lists(i, answer.tokens, with_echo=True)
            reason = answer.done.reason if answer.done else "stop"
            out.append({"index": i, "text": self._echo(i) + answer.content, "logprobs": lists, "finish_reason": reason})
        return {**self._head, "choices": out, "usage": self._usage(), "timings": self._timings()}

    def _usage(self) -> dict[str, Any]:
        """Unlike in a chat, there may be several prompts."""
        out = usage(self._choices)
        prompts = sum(len(p) for p in self._work.prompts)
        cached = sum(c.stream.usage.cached_tokens for c in self._choices[:: self._call.decoding.n])
        out.update(prompt_tokens=prompts, total_tokens=prompts + out["completion_tokens"])
        out["prompt_tokens_details"] = {"cached_tokens": cached}
        return out

    def _timings(self) -> dict[str, Any]:
        return timings(self._choices[0].stream.usage)

    def begin(self) -> bytes:
        if not self._call.echo:
            return b""
        return b"".join(
            self._frame(c.index, self._echo(c.index), self._lists(c.index, (), with_echo=True)) for c in self._choices
        )

    def events(self, choice: Choice, events: list[Event]) -> bytes:
        out = b""
        for event in events:
            if isinstance(event, ContentText):
                lists = self._lists(choice.index, event.tokens, with_echo=False)
                out += self._frame(choice.index, event.text, lists)
            elif isinstance(event, Done):
                out += self._frame(choice.index, "", None, event.reason)
        return out

    def end(self) -> bytes:
        if not self._call.decoding.include_usage:
            return b""
        return frame({**self._head, "choices": [], "usage": self._usage(), "timings": self._timings()})

    def error(self, reply: ErrorReply) -> bytes:
        return frame(reply.openai())

    def _frame(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return frame({**self._head, "choices": [choice]})
