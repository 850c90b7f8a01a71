"""Hand-over of tokens from an engine thread to the event loop.

States of a QueuedStream: open -> finished (the engine pushed a Finish) or cancelled (the reader left; the engine sees
`cancelled` at its next step and pushes a final Finish("cancelled")).
Threads: `push` and `finish` are the engine thread's, `cancel` is anyone's, iteration is the event loop's.
Cost: one `call_soon_threadsafe` per wake-up, not per token: while the loop is busy, tokens gather into one Delta.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

from .protocol import Delta, Finish, StreamUsage, Token


class QueuedStream:
    """The TokenStream every engine returns. Create it on the event loop that will read it."""

    def __init__(self, prompt_tokens: int) -> None:
        self.usage = StreamUsage(prompt_tokens=prompt_tokens)
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._lock = threading.Lock()
        self._tokens: list[Token] = []
        self._finish: Finish | None = None
        self._cancelled = False
        self._woken = False

    @property
    def cancelled(self) -> bool:
        """True once the reader has left; the engine drops the stream at its next step."""
        return self._cancelled

    def push(self, tokens: Sequence[Token]) -> None:
        """Deliver tokens (engine thread)."""
        self._put(tokens, None)

    def finish(self, finish: Finish, tokens: Sequence[Token] = ()) -> None:
        """Deliver the last tokens and the end (engine thread). Later calls are ignored."""
        self._put(tokens, finish)

    def cancel(self) -> None:
        """Ask the engine to stop (any thread, idempotent)."""
        self._cancelled = True

    def _put(self, tokens: Sequence[Token], finish: Finish | None) -> None:
        with self._lock:
            if self._finish is not None:
                return
            self._tokens.extend(tokens)
            self._finish = finish
            wake, self._woken = not self._woken, True
        if wake:
            try:
                self._loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:  # the loop has closed: nobody is left to read
                self._cancelled = True

    def _take(self) -> Delta:
        with self._lock:
            tokens, self._tokens, self._woken = self._tokens, [], False
            self._wake.clear()
            return Delta(tokens, self._finish)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            await self._wake.wait()
            delta = self._take()
            if delta.tokens or delta.finish:
                yield delta
            if delta.finish:
                return
