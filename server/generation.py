"""Running the streams of one request: from prepared prompts to events, all at once or as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError

from glm53.engine.protocol import Constraint, Finish, GenerationRequest, SamplingParams, TokenStream

from .errors import ErrorReply, reply_for, unforeseen
from .jobs import Job, deltas
from .protocol.events import Answer, Event, collect
from .protocol.output import OutputParser
from .protocol.requests import Decoding
from .protocol.sse import DONE
from .sse import PING, SseResponse
from .state import ServerState

STOP_NAMES = ("<|endoftext|>", "<|user|>", "<|observation|>", "<|system|>", "<|assistant|>", "[gMASK]", "<sop>")
"""Every token that starts a turn ends the answer: the model must not speak for others."""
FEW_EVENTS = 1000  # are put together in a millisecond


Frames = bytes | Sequence[bytes]
"""Complete SSE events, in one part or in several."""


@dataclass(slots=True)
class Work:
    """One stream to run. `max_tokens` 0 reads the prompt (one token is generated and thrown away)."""

    prompt_ids: Sequence[int]
    max_tokens: int
    parser: OutputParser
    seed_offset: int = 0
    constraint: Constraint | None = None


@dataclass(slots=True)
class Choice:
    """A running stream and what reads it."""

    index: int
    stream: TokenStream
    parser: OutputParser
    read_only: bool
    constraint: Constraint | None = None

    async def events(self) -> AsyncIterator[list[Event]]:
        """Events as they come, never an empty list; the last one ends with Done.

        Raises EngineError, or RequestError if the request's own grammar gave up.
        """
        parser = self.parser
        async for delta in deltas(self.stream):
            if self.constraint is not None and self.constraint.failure is not None:
                raise self.constraint.failure
            if self.read_only:
                if delta.finish:
                    yield parser.finish(Finish("length"))
                continue
            events = parser.feed(delta.tokens)
            if parser.stopped:
                self.stream.cancel()
                yield events + parser.finish(Finish("stop"))
                return
            if delta.finish:
                events += parser.finish(delta.finish)
            if events:
                yield events


def stop_ids(decoding: Decoding, state: ServerState) -> frozenset[int]:
    """Token ids that end an answer."""
    own = frozenset(decoding.stop_ids)
    if decoding.ignore_eos:
        return own
    return own | state.tokenizer.special_ids(STOP_NAMES) | state.generation_config.eos_ids


def give_each(works: Sequence[Work], constraint: Constraint | None) -> None:
    """Give each stream a constraint of its own; compiled once, for that may take a second."""
    for index, work in enumerate(works):
        work.constraint = constraint.copy() if constraint is not None and index else constraint


async def submit(job: Job, works: Sequence[Work], decoding: Decoding) -> list[Choice]:
    """Start all streams of a request. Raises PromptTooLong, RequestError or EngineError."""
    stops = stop_ids(decoding, job.state)
    requests = [
        GenerationRequest(
            request_id=f"{job.id}-{index}",
            prompt_ids=work.prompt_ids,
            max_tokens=max(1, work.max_tokens),
            sampling=_seeded(decoding.sampling, work.seed_offset),
            stop_ids=stops,
            top_logprobs=decoding.top_logprobs,
            constraint=work.constraint,
        )
        for index, work in enumerate(works)
    ]
    streams = await job.submit(requests)
    return [
        Choice(index, stream, work.parser, work.max_tokens == 0, work.constraint)
        for index, (stream, work) in enumerate(zip(streams, works, strict=True))
    ]


def _seeded(sampling: SamplingParams, offset: int) -> SamplingParams:
    """With a seed, the second choice must differ from the first and still be repeatable."""
    if sampling.seed is None or offset == 0:
        return sampling
    return replace(sampling, seed=sampling.seed + offset)


async def gather(job: Job, choices: Sequence[Choice]) -> list[Answer]:
    """Whole answers. Raises EngineError, or the HTTP error of a time limit or shutdown."""

    async def one(choice: Choice) -> Answer:
        events: list[Event] = []
        async for batch in choice.events():
            events += batch
        answer = collect(events) if len(events) <= FEW_EVENTS else await job.on_thread(lambda: collect(events))
        if tokens := answer.tokens:
            job.owns(tokens, len(tokens) * (1 + len(tokens[0].top)))
        return answer

    try:
        async with job.deadline():
            return [await one(choices[0])] if len(choices) == 1 else list(await asyncio.gather(*map(one, choices)))
    except TimeoutError as e:
        raise job.explain(e) from None


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How one API writes a stream; every function returns complete SSE frames.

    `begin` is sent before the first token, `events` for each batch of a choice, `end` after all choices, `error` in
    place of the rest. `done` closes either way. `ping` is sent while nothing else is. `begin` and `end` run on a
    thread: they may repeat all of the request.
    """

    begin: Callable[[], Frames]
    events: Callable[[Choice, list[Event]], Frames]
    end: Callable[[], Frames]
    error: Callable[[ErrorReply], bytes]
    done: bytes = DONE
    ping: bytes = PING


async def stream(job: Job, choices: Sequence[Choice], form: StreamFormat) -> web.StreamResponse:
    """Answer with a stream. Everything that can be refused must have been refused: this sends the headers."""
    job.streamed = True
    async with SseResponse(job.request, job.state.options, form.ping) as sse:
        try:
            async with job.deadline():
                await sse.write(await job.on_thread(form.begin))
                await _write_all(sse, choices, form)
                last = await job.on_thread(form.end)
        except ClientConnectionResetError:
            raise
        except Exception as error:
            reply = reply_for(job.explain(error)) or unforeseen(job.id)
            job.failed_in_stream(reply.code or str(reply.status))
            last = form.error(reply)
        await sse.write(last)
        await sse.write(form.done)
    return sse.response


async def _write_all(sse: SseResponse, choices: Sequence[Choice], form: StreamFormat) -> None:
    async def one(choice: Choice) -> None:
        async for batch in choice.events():
            if frames := form.events(choice, batch):
                await sse.write(frames)

    if len(choices) == 1:
        await one(choices[0])
        return
    try:
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(one(choice))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
