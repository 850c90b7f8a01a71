"""Replies that are not streamed: built on a thread, and written in parts where they are large."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from .jobs import Job
from .protocol.json_parts import cut, dump

SMALL_BYTES = 1 << 18


class LargeReply(web.StreamResponse):
    """JSON in parts. A client that takes none for `patience_s` is dropped (0 = never)."""

    def __init__(self, parts: Sequence[bytes], patience_s: float) -> None:
        super().__init__(headers={"Content-Type": "application/json; charset=utf-8"})
        self.content_length = sum(map(len, parts))
        self._parts = [*reversed(parts)]
        self._patience_s = patience_s
        self._transport: asyncio.Transport | None = None

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Called by aiohttp before the first part."""
        self._transport = request.transport
        return await super().prepare(request)

    async def write_eof(self, data: bytes = b"") -> None:
        """Called by aiohttp when the handler, and with it the request's place in the queue, has ended."""
        parts = self._parts
        for part in cut(parts.pop() for _ in range(len(parts))):  # what has been sent is not kept
            await asyncio.sleep(0)  # a client that takes all at once would never make a write wait
            try:
                async with asyncio.timeout(self._patience_s or None):
                    await self.write(part)
            except TimeoutError:
                if self._transport is not None:
                    self._transport.abort()
                raise ConnectionResetError("the client takes nothing") from None
        await super().write_eof(data)


async def whole_reply(job: Job, build: Callable[[], object]) -> web.StreamResponse:
    """The JSON of what `build()` returns."""
    parts = await job.on_thread(lambda: dump(build()))
    if sum(map(len, parts)) <= SMALL_BYTES:
        return web.Response(body=b"".join(parts), content_type="application/json")
    return LargeReply(parts, job.state.options.write_timeout_s)
