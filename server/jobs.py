"""One admitted request, from its body to the end of its answer: place in the queue, time limit, streams, accounting.

States of a Job: admitted -> generating (inside `deadline`) -> ended. All on the event loop. `end` may be called at any
time (time limit, shutdown): the handler's current await then raises TimeoutError, which `explain` puts into words.
Whatever way the handler is left (finished, failed, cancelled because the client went away), `admit` cancels the job's
engine streams and gives its place back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from glm53.engine.protocol import Delta, Engine, GenerationRequest, TokenStream
from glm53.errors import EngineError

from .admission import BodyLease, Ticket
from .body import read_body
from .errors import HttpError, Unavailable
from .state import NOTE, REQUEST_ID, STATE, STOPPING, ServerState

T = TypeVar("T")
SCORE_BYTES = 32  # of a log-probability in a reply, about
SLICE = 16  # tokens handled at a time: a burst on many streams must leave the event loop free every few ms


class Job:
    """See the module docstring. `body` is the request's raw body, `lease` its room."""

    def __init__(
        self,
        request: web.Request,
        state: ServerState,
        engine: Engine,
        ticket: Ticket,
        *,
        body: bytes,
        lease: BodyLease,
    ) -> None:
        self.request = request
        self.state = state
        self.engine = engine
        self.weight = len(body)  # bytes of the largest thing that is made of this request or for it, about
        self._body = body
        self._lease = lease
        self.id: str = request[REQUEST_ID]
        self.route = request.path
        self.streamed = False
        self.started_s = time.monotonic()
        self.streams: list[TokenStream] = []
        self._ticket = ticket
        self._timer: asyncio.Timeout | None = None
        self._ended_by = ""
        self._owned: list[list[Any]] = []

    async def prepare(self, work: Callable[[bytes], T]) -> T:
        """`work(body)`, on a thread unless the body is small. The body is given away: it is not kept while the answer
        is generated."""
        body, self._body = self._body, b""
        try:
            return await self.state.run_sized(len(body), partial(work, body))
        finally:
            self._lease.close()

    async def on_thread(self, work: Callable[[], T]) -> T:
        """`work()` on a thread; that of heavy requests one after another."""
        return await self.state.run_on_thread(work, self.weight)

    def owns(self, items: list[Any], scores: int) -> None:
        """`items` hold `scores` log-probabilities, maybe millions. To make a reply of them is heavy work, and so is to
        free them: they are kept until the request has ended, and freed on a thread."""
        self.weight = max(self.weight, SCORE_BYTES * scores)
        self._owned.append(items)

    async def submit(self, requests: list[GenerationRequest]) -> list[TokenStream]:
        """Hand all of a request's streams to the engine. Raises what `Engine.submit` raises."""
        self._ticket.grow(max(1, len(requests)))
        for generation in requests:
            if self.streams:
                await asyncio.sleep(0)  # engines copy a long prompt: ms for each of maybe hundreds
            self.streams.append(self.engine.submit(generation))
        return self.streams

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Time limit around generation; also what `end` interrupts."""
        limit = self.state.options.request_timeout_s
        left = max(0.0, limit - (time.monotonic() - self.started_s)) if limit else None
        async with asyncio.timeout(0 if self._ended_by else left) as self._timer:
            yield

    def end(self, why: str) -> None:
        """Stop this job from outside. Idempotent."""
        self._ended_by = self._ended_by or why
        if self._timer is not None:
            self._timer.reschedule(asyncio.get_running_loop().time())

    def explain(self, error: Exception) -> Exception:
        """A TimeoutError from `deadline` in words; other errors as they are."""
        if not isinstance(error, TimeoutError):
            return error
        if self._ended_by == STOPPING:
            return Unavailable(STOPPING, code="shutting_down", retry_after_s=10)
        limit = self.state.options.request_timeout_s
        message = f"the request took longer than the limit of {limit:g} s (setting request_timeout_s)"
        return HttpError(504, message, code="request_timeout", headers={"x-should-retry": "false"})

    def failed_in_stream(self, code: str) -> None:
        """For the log and the metrics: the status was 200, and still it went wrong."""
        self.request[NOTE] = f" (in the stream: {code})"
        self.state.metrics.stream_failed(code)

    def close(self) -> None:
        """Cancel what still runs and count what was generated."""
        for stream in self.streams:
            stream.cancel()
            self.state.metrics.stream_ended(stream.usage)
        if self.streams:
            usages = [s.usage for s in self.streams]
            prompt, answer = usages[0].prompt_tokens, sum(u.completion_tokens for u in usages)
            seconds = max(u.last_token_s - u.first_token_s for u in usages)
            rate = f", {(answer - len(usages)) / seconds:.1f} tokens/s" if seconds > 0 else ""
            self.request[NOTE] = f", {prompt} + {answer} tokens{rate}" + self.request.get(NOTE, "")
        self.state.free_later(self._owned)


@asynccontextmanager
async def admit(request: web.Request) -> AsyncIterator[Job]:
    """Check the queue, read the body, take a place. Raises Unavailable, QueueFull or HttpError before any parsing."""
    state = request.app[STATE]
    state.engine_or_503()
    state.admission.check()
    with BodyLease(state.bodies) as lease:
        body = await read_body(request, lease, timeout_s=state.options.body_timeout_s)
        engine = state.engine_or_503()
        with state.admission.acquire() as ticket:
            job = Job(request, state, engine, ticket, body=body, lease=lease)
            del body
            with _known(job):
                yield job


@contextmanager
def _known(job: Job) -> Iterator[Job]:
    """The server waits for `job` when it stops."""
    state = job.state
    state.live[job.id] = job
    state.idle.clear()
    try:
        yield job
    finally:
        del state.live[job.id]
        if not state.live:
            state.idle.set()
        job.close()


async def deltas(stream: TokenStream) -> AsyncIterator[Delta]:
    """The stream's deltas in slices of at most SLICE tokens. Raises EngineError if the engine failed or gave it up."""
    async for delta in stream:
        tokens = delta.tokens
        for start in range(0, len(tokens) - SLICE, SLICE):
            yield Delta(tokens[start : start + SLICE])
            await asyncio.sleep(0)
        if delta.finish and delta.finish.reason in {"error", "cancelled"}:
            raise EngineError(delta.finish.error or "the engine stopped this request")
        rest = (len(tokens) - 1) // SLICE * SLICE if tokens else 0
        yield Delta(tokens[rest:], delta.finish)
