"""Reading a request body within its limits, with an error a person can act on."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from glm53.json_text import MAX_MARKS, count_marks, too_complex

from .admission import BodyLease
from .cors import is_foreign
from .errors import HttpError
from .options import MIB

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


async def _receive(request: web.Request, lease: BodyLease) -> bytes:
    """The body in the parts it comes in. `request.read()` would decompress all of it in one step."""
    parts: list[bytes] = []
    size, limit = 0, request.app._client_max_size
    while part := await request.content.readany():
        size += len(part)
        if limit and size > limit:
            raise _too_large(request)
        lease.grow(len(part))
        parts.append(part)
        await asyncio.sleep(0)  # the next part of a compressed body is made at once, without a wait for the network
    return b"".join(parts)


async def read_body(request: web.Request, lease: BodyLease, *, timeout_s: float) -> bytes:
    """The whole body, decompressed; `lease` grows by its size. Raises HttpError 400, 403, 408, 413, 415 or 503."""
    _check_content_type(request)
    _check_length(request)
    await _ask_for_body(request)
    try:
        async with asyncio.timeout(timeout_s or None):
            data = await _receive(request, lease)
    except (web.RequestPayloadError, HttpProcessingError):
        raise HttpError(
            400, "the request body cannot be read: broken encoding or compression", code="bad_body"
        ) from None
    except TimeoutError:
        raise HttpError(408, f"the request body did not arrive within {timeout_s:g} s", code="body_timeout") from None
    await _check_structure(data)
    return data
