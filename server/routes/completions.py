"""POST /v1/completions."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from aiohttp import web

from glm53.engine.protocol import Token, TokenScore
from glm53.tokenizer import Tokenizer

from ..errors import ErrorReply
from ..generation import Choice, Frames, StreamFormat, gather, stream, submit
from ..jobs import Job, admit
from ..protocol.body import parse_body
from ..protocol.events import Answer, ContentText, Done, Event
from ..protocol.json_parts import JsonList
from ..protocol.requests import CompletionCall, parse_completion
from ..protocol.sse import frame, frame_parts
from ..text_work import TextWork, constrain, scores, text_work
from ..whole import whole_reply
from ..wire import finite, timings, usage


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue each prompt, streamed or whole."""
    async with admit(request) as job:
        state = job.state

        def prepare(raw: bytes) -> tuple[CompletionCall, TextWork]:
            call = parse_completion(parse_body(raw), state.defaults())
            return call, text_work(state, job.engine, call.prompts, call.decoding)

        call, work = await job.prepare(prepare)
        await constrain(job, work, call.decoding)
        top = call.decoding.top_logprobs
        echoed = await scores(job, work.prompts, top) if call.echo and top is not None else None
        choices = await submit(job, work.works, call.decoding)
        reply = _Reply(job, call, work, choices, echoed)
        if call.decoding.stream:
            return await stream(job, choices, StreamFormat(reply.begin, reply.events, reply.end, reply.error))
        answers = await gather(job, choices)
        return await whole_reply(job, lambda: reply.whole(answers))


@dataclass(slots=True)
class _Logprobs:
    """The four lists of the Completions API; `offset` is where the next token starts in the whole text."""

    tokenizer: Tokenizer
    offset: int = 0

    def lists(self, scored: Iterable[_Scored]) -> dict[str, JsonList]:
        """The lists of these tokens; the scores of a long prompt are written slice by slice."""
        lists = {name: JsonList() for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        iterator = iter(scored)
        while some := list(itertools.islice(iterator, 128)):
            for name, column in zip(lists, zip(*map(self._row, some), strict=True), strict=True):
                lists[name].extend(column)
        return lists

    def _row(self, scored: _Scored) -> tuple[str, float | None, dict[str, float] | None, int]:
        text = scored.data.decode("utf-8", "replace")
        best = {self.tokenizer.token_bytes(i).decode("utf-8", "replace"): finite(v) for i, v in scored.top}
        offset, self.offset = self.offset, self.offset + len(text)
        return text, None if scored.first else finite(scored.logprob), None if scored.first else best, offset


class _Scored(NamedTuple):
    """A token of prompt or answer; `first`: nothing precedes it, so it has no score."""

    data: bytes
    logprob: float | None
    top: Sequence[tuple[int, float]]
    first: bool = False


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

    def _lists(self, index: int, tokens: Sequence[Token], *, with_echo: bool) -> dict[str, JsonList] | None:
        if self._call.decoding.top_logprobs is None:
            return None
        echoed = self._echoed[index // self._call.decoding.n] if with_echo and self._echoed is not None else ()
        prompt = (_Scored(self._tokenizer.token_bytes(s.id), s.logprob, s.top, i == 0) for i, s in enumerate(echoed))
        answer = (_Scored(t.data, t.logprob, t.top) for t in tokens)
        return self._logprobs[index].lists(itertools.chain(prompt, answer))

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = JsonList((self._choice(i, answer) for i, answer in enumerate(answers)), at_once=1)
        return {**self._head, "choices": choices, "usage": self._usage(), "timings": self._timings()}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        lists = self._lists(index, answer.tokens, with_echo=True)
        reason = answer.done.reason if answer.done else "stop"
        text = self._echo(index) + answer.content
        return {"index": index, "text": text, "logprobs": lists, "finish_reason": reason}

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

    def begin(self) -> Frames:
        out: list[bytes] = []
        for c in self._choices if self._call.echo else ():
            out += self._frame(c.index, self._echo(c.index), self._lists(c.index, (), with_echo=True))
        return out

    def events(self, choice: Choice, events: list[Event]) -> bytes:
        out: list[bytes] = []
        for event in events:
            if isinstance(event, ContentText):
                lists = self._lists(choice.index, event.tokens, with_echo=False)
                out += self._frame(choice.index, event.text, lists)
            elif isinstance(event, Done):
                out += self._frame(choice.index, "", None, event.reason)
        return b"".join(out)

    def end(self) -> bytes:
        if not self._call.decoding.include_usage:
            return b""
        return frame({**self._head, "choices": [], "usage": self._usage(), "timings": self._timings()})

    def error(self, reply: ErrorReply) -> bytes:
        return frame(reply.openai())

    def _frame(
        self, index: int, text: str, logprobs: dict[str, JsonList] | None, reason: str | None = None
    ) -> list[bytes]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return frame_parts({**self._head, "choices": [choice]})
