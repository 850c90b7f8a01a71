"""Reading a request body within its limits, with an error a person can act on."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from glm53.json_text import MAX_MARKS, count_marks, too_complex

from .admission import BodyLease
from .compression import DECODERS, BrokenBody, decompressed
from .cors import is_foreign
from .errors import HttpError
from .options import MIB
from .state import STATE

FORM = "application/x-www-form-urlencoded"  # what `curl -d` sends unless it is told otherwise


def _check_content_type(request: web.Request) -> None:
    """JSON, or nothing or curl's default, which a web page may send anywhere without a pre-flight: not from strangers'
    pages. text/plain, which it may send too, has no other use."""
    raw = request.headers.get("Content-Type")
    kind = request.content_type.lower()
    if raw and kind.endswith(("/json", "+json")):
        return
    if not raw or kind == FORM:
        if is_foreign(request):
            message = "a web page of another origin must send Content-Type: application/json (see --cors-origins)"
            raise HttpError(403, message, code="foreign_origin")
        return
    raise HttpError(
        415,
        f"Content-Type {raw[:80]!r} is not supported; send JSON, with curl: -H 'Content-Type: application/json'",
        code="unsupported_media_type",
    )


async def ask_later(request: web.Request) -> None:
    """For an Expect header aiohttp calls this: `read_body` asks for the body, once it is known to be wanted."""


def _check_length(request: web.Request) -> None:
    if (request.content_length or 0) > request.app._client_max_size:
        raise _too_large(request)


def _too_large(request: web.Request) -> HttpError:
    limit = request.app._client_max_size
    message = f"the request body is larger than {limit / MIB:g} MiB (setting max_body_mib)"
    return HttpError(413, message, code="request_too_large")


async def _ask_for_body(request: web.Request) -> None:
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= (1, 1):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the reply has not begun


async def _check_structure(data: bytes) -> None:
    """Parsing JSON holds the interpreter lock: a body of millions of tiny values would stop every stream meanwhile."""
    if len(data) <= MAX_MARKS:
        return
    marks = 0
    for found in count_marks(data):
        marks += found
        await asyncio.sleep(0)
    if marks > MAX_MARKS:
        raise HttpError(413, f"the request body is too complex: {too_complex(marks)}", code="request_too_complex")


class _Parts:
    """A body as it grows, within the limit for one and the room for all."""

    def __init__(self, request: web.Request, lease: BodyLease) -> None:
        self._request = request
        self._lease = lease
        self._parts: list[bytes] = []
        self.size = 0

    def add(self, part: bytes) -> None:
        """Raises HttpError 413 or 503."""
        self.size += len(part)
        if 0 < self._request.app._client_max_size < self.size:
            raise _too_large(self._request)
        self._lease.grow(len(part))
        self._parts.append(part)

    async def joined(self) -> bytes:
        """All of it. Joining takes 10 ms for 16 MiB of fresh memory, without the interpreter lock."""
        return await self._request.app[STATE].run_sized(self.size, lambda: b"".join(self._parts))


async def _receive(request: web.Request, lease: BodyLease) -> bytes:
    """The body as it is sent."""
    body = _Parts(request, lease)
    while part := await request.content.readany():
        body.add(part)
        await asyncio.sleep(0)  # a part that is there already comes without a wait
    return await body.joined()


def _content_encoding(request: web.Request) -> str:
    """The body's compression, "" for none."""
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return ""
    if encoding not in DECODERS:
        known = ", ".join(DECODERS)
        message = f"Content-Encoding {encoding[:40]!r} is not supported; send the body as it is, or with one of {known}"
        raise HttpError(415, message, code="unsupported_encoding", headers={"Accept-Encoding": known})
    return encoding


async def _decompress(request: web.Request, data: bytes, encoding: str, lease: BodyLease) -> bytes:
    """What `data` stands for."""
    body, parts = _Parts(request, lease), decompressed(data, encoding)
    while part := await request.app[STATE].run_on_thread(lambda: next(parts, b""), body.size):
        body.add(part)
    return await body.joined()


async def read_body(request: web.Request, lease: BodyLease, *, timeout_s: float) -> bytes:
    """The whole body, decompressed; `lease` grows by its size. Raises HttpError 400, 403, 408, 413, 415 or 503."""
    _check_content_type(request)
    encoding = _content_encoding(request)
    _check_length(request)
    await _ask_for_body(request)
    try:
        async with asyncio.timeout(timeout_s or None):
            data = await _receive(request, lease)
        if encoding:
            data = await _decompress(request, data, encoding, lease)
    except (web.RequestPayloadError, HttpProcessingError, BrokenBody):
        raise HttpError(
            400, "the request body cannot be read: broken encoding or compression", code="bad_body"
        ) from None
    except TimeoutError:
        raise HttpError(408, f"the request body did not arrive within {timeout_s:g} s", code="body_timeout") from None
    await _check_structure(data)
    return data
