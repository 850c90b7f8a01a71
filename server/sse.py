"""One server-sent-event response: writing, keep-alive comments, and dropping readers that stopped reading.

States: new -> open (headers and the first event are out) -> closed. All on the event loop. A ticker task per response
writes a ping (a comment, as a rule) after `ping_s` without an event and closes the connection when a write has waited
for the client longer than `write_timeout_s`.
Costs: one await per write, none per token beyond it; aiohttp buffers up to 64 KiB before a write waits for its client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from aiohttp import web

from .options import ServerOptions
from .protocol.json_parts import PART, cut
from .state import REQUEST_ID

log = logging.getLogger("glm53.server")

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
PING = b": ping\n\n"


class SseResponse:
    """`async with SseResponse(request, options) as sse: await sse.write(frame)`; leaving it ends the response."""

    def __init__(self, request: web.Request, options: ServerOptions, ping: bytes = PING) -> None:
        self._ping = ping
        self.response = web.StreamResponse(headers=HEADERS)
        self._request = request
        self._options = options
        self._last_s = time.monotonic()
        self._blocked_since = 0.0
        self._ticker: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # nothing may come between the parts of an event

    async def __aenter__(self) -> SseResponse:
        await self.response.prepare(self._request)
        self._ticker = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._ticker:
            self._ticker.cancel()
        if error is None:
            await self.response.write_eof()

    async def write(self, frames: bytes | Sequence[bytes]) -> None:
        """Send whole events, in one part or in several. Raises ClientConnectionResetError, or is cancelled, when the
        client has gone."""
        async with self._turn:
            if isinstance(frames, bytes) and len(frames) <= PART:
                await self._write(frames)
                return
            for part in cut(frames):
                await self._write(part)
                await asyncio.sleep(0)  # a client that takes all at once would never make a write wait

    async def _write(self, part: bytes) -> None:
        self._blocked_since = time.monotonic()
        await self.response.write(part)
        self._blocked_since = 0.0
        self._last_s = time.monotonic()

    async def _tick(self) -> None:
        pause = max(0.01, min(1.0, self._options.ping_s / 4, (self._options.write_timeout_s or 4.0) / 4))
        while True:
            await asyncio.sleep(pause)
            now = time.monotonic()
            if self._blocked_since:
                if self._options.write_timeout_s and now - self._blocked_since > self._options.write_timeout_s:
                    self._drop(now - self._blocked_since)
                    return
            elif now - self._last_s >= self._options.ping_s - pause:
                with suppress(ConnectionResetError):  # the handler is about to learn of it
                    await self.write(self._ping)

    def _drop(self, seconds: float) -> None:
        log.warning("%s: the client took nothing for %.0f s; dropped", self._request[REQUEST_ID], seconds)
        if self._request.transport is not None:
            self._request.transport.abort()
