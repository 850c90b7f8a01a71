"""One TCP connection: aiohttp's HTTP protocol, with a limit on how long a request's head may take, and errors in JSON.

States: waiting (no byte of a request yet) -> head (some bytes came) -> request (a handler runs) -> waiting. The limit
holds in "waiting" on a new connection and in "head"; between requests a connection may stay open for an hour, so that a
reverse proxy never finds one closed that it is just about to use. One connection too many is closed at once. All on the
event loop. Cost: one timer a request.

What a client sends waits in `_unread` until `ReadTurns` has it parsed. Meanwhile nothing more is read: little is kept,
and the end of the connection is not met before its last bytes. `_again`: the parser was made to pause, and has to be
asked for what it kept before it is given more.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from aiohttp import web

from .descriptors import ConnectionLimit
from .errors import HttpError, reply_for
from .read_turns import PIECE, ReadTurns

BUFFER = 1 << 15  # bytes of a body, or a sixteenth as many chunks, that wait for its reader
HTTP_2 = "Pause on PRI/Upgrade"  # what the parser says of HTTP/2's preface


class Connection(web.RequestHandler):
    """Made by `lifecycle.Server` for each client; the outermost middleware tells it of its requests."""

    __slots__ = ("_again", "_head_s", "_head_timer", "_in_request", "_limit", "_turns", "_unread", "_waiting")

    def __init__(
        self, server: web.Server, *, head_s: float, limit: ConnectionLimit, turns: ReadTurns, **options: Any
    ) -> None:
        # aiohttp would decompress bodies on the event loop; `body` does it elsewhere
        super().__init__(server, auto_decompress=False, read_bufsize=BUFFER, **options)
        self._limit = limit
        self._head_s = head_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._in_request = False
        self._turns = turns
        self._unread = memoryview(b"")
        self._again = False
        self._waiting = False  # in `turns`

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._limit.entered():
            self._expect_head()
        elif isinstance(transport, asyncio.Transport):
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Called by the transport, and with nothing by aiohttp to have the parser go on after a pause."""
        self._unread = memoryview(bytes(self._unread) + data if self._unread else data)
        self._again |= not data
        self._pause_transport_reading()
        if not self._waiting:
            self._waiting = True
            self._turns.add(self)

    def parse_piece(self) -> bool:
        """See `Parsing`."""
        if self.transport is None:
            return False
        if self._again:
            self._again, piece = False, b""
        else:
            piece, self._unread = bytes(self._unread[:PIECE]), self._unread[PIECE:]
        super().data_received(piece)
        if not self._in_request and self._head_timer is None:
            self._expect_head()
        paused = self._reading_paused or self._buffer_paused
        self._waiting = self._again or (bool(self._unread) and not paused)
        if not self._waiting and not paused:
            self._resume_transport_reading()
        return self._waiting

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Called by aiohttp whenever a chunk of a body has been taken, also if nothing is paused."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def _resume_transport_reading(self) -> None:
        if not self._waiting and not self._unread:
            super()._resume_transport_reading()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        self._unread = memoryview(b"")
        self._limit.left()
        super().connection_lost(exc)

    def begun(self) -> None:
        """A request's head is complete."""
        self._in_request = True
        self._stop_timer()

    def ended(self) -> None:
        """The request has been answered."""
        self._in_request = False

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is not HTTP gets a JSON error too; aiohttp's own text would quote the client's bytes."""
        self._stop_timer()
        response = super().handle_error(request, status, exc, message)
        text = "internal error" if status == 500 else f"this is not a valid HTTP request: {_first_line(message)}"
        reply = web.json_response(_error(status, text, "bad_http"), status=response.status)
        reply.force_close()
        return reply

    def _expect_head(self) -> None:
        if self._head_s:
            self._head_timer = asyncio.get_running_loop().call_later(self._head_s, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self._in_request:
            self.force_close()  # without a word: nobody may take it for the answer to a request under way


def _first_line(message: str | None) -> str:
    """What aiohttp's parser says is wrong, without the bytes it goes on to quote."""
    line = re.split(r":?\s*(?:b['\"]|bytearray\()|\n", (message or "malformed").strip())[0].rstrip(": ")
    return "HTTP/2 is not spoken here, HTTP/1.1 is" if line == HTTP_2 else line


def _error(status: int, text: str, code: str) -> dict[str, object]:
    reply = reply_for(HttpError(status, text, code=code))
    assert reply is not None
    return reply.openai()
