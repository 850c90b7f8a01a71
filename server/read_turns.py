"""Bytes that clients have sent, parsed a few at a time: for how long the event loop is held does not depend on how many
connections send at once, nor on what they send.

HTTP's parser takes a millisecond for a few kilobytes of one-byte chunks, and a read of the loop brings up to 256 KiB of
each connection. So a connection hands in only that it has something to parse, and is parsed piece by piece, in turn
with the others. All on the event loop. Cost: a callback a read, and two calls into the kernel.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

TURN_S = 0.002  # for the connections together, in one turn of the event loop
PIECE = 8192  # bytes: at worst about a millisecond


class Parsing(Protocol):
    """What has something to parse."""

    def parse_piece(self) -> bool:
        """Parse up to PIECE bytes; whether more can be parsed now."""


class ReadTurns:
    """The connections that have something to parse, each once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Parsing] = deque()
        self._scheduled = False

    def add(self, connection: Parsing) -> None:
        """`connection`, which is not waiting yet, has something to parse."""
        self._waiting.append(connection)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        end = self._loop.time() + TURN_S
        try:
            while self._waiting:
                connection = self._waiting.popleft()
                if connection.parse_piece():
                    self._waiting.append(connection)
                if self._loop.time() >= end:
                    break
        finally:
            self._schedule()
