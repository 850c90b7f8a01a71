"""Around every request, outermost first: id, log line and metrics; errors as JSON; CORS pre-flight; authentication."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
import uuid

from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError
from aiohttp.typedefs import Handler

from glm53 import __version__

from .connection import Connection
from .cors import allowed_origin, note_refused
from .errors import ErrorReply, HttpError, reply_for, unforeseen
from .protocol.json_parts import dump
from .state import NOTE, REQUEST_ID, STATE, ServerState

log = logging.getLogger("glm53.server")

OPEN_PATHS = ("/", "/health", "/openapi.json")  # served without a key: no prompt, no answer, no work in them
OPEN_PREFIXES = ("/web/",)
REQUEST_ID_HEADERS = ("x-request-id", "request-id")  # OpenAI's name and Anthropic's, as their libraries look for it
CLIENT_GONE = 499  # nginx's number for "client closed request"; only ever logged


def json_response(body: object, *, status: int = 200) -> web.Response:
    """A JSON reply; lone surrogates and other oddities must have been replaced before."""
    return web.Response(body=b"".join(dump(body)), status=status, content_type="application/json")


def error_response(reply: ErrorReply, path: str) -> web.Response:
    """The error in the wire format of `path`."""
    response = json_response(reply.body(path), status=reply.status)
    response.headers.update(reply.headers)
    return response


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request an id; when it has ended, one log line and its metrics."""
    state = request.app[STATE]
    request[REQUEST_ID] = f"req-{uuid.uuid4().hex[:16]}"
    started, status = time.monotonic(), CLIENT_GONE
    connection = request.protocol
    if isinstance(connection, Connection):
        connection.begun()
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        if isinstance(connection, Connection):
            connection.ended()
        route = _route_name(request)
        state.metrics.request_ended(route, status, time.monotonic() - started)
        if state.options.log_requests and request.method == "POST":
            seconds = time.monotonic() - started
            log.info("%s %s %d %.3f s%s", request[REQUEST_ID], route, status, seconds, request.get(NOTE, ""))


def _route_name(request: web.Request) -> str:
    """The route's pattern, so that a scanner's paths make neither log lines nor metric labels."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "(none)"


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure becomes a JSON reply of the right shape; only the unforeseen ones are logged with a traceback."""
    try:
        return await handler(request)
    except (asyncio.CancelledError, ClientConnectionResetError):
        raise
    except Exception as error:
        reply = reply_for(error) or unforeseen(request[REQUEST_ID])
        request[NOTE] = f" ({reply.code or reply.param or 'error'})"
        return error_response(reply, request.path)


@web.middleware
async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer CORS pre-flights for every path, before authentication: browsers send them without the key."""
    if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
        return await handler(request)
    response = web.Response(status=204)
    if allowed_origin(request):
        asked = request.headers.get("Access-Control-Request-Headers")
        response.headers["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
        response.headers["Access-Control-Allow-Headers"] = asked or "authorization, content-type, x-api-key"
        response.headers["Access-Control-Max-Age"] = "86400"
    else:
        note_refused(request)
    return response


async def decorate(request: web.Request, response: web.StreamResponse) -> None:
    """Headers every reply carries, streams and errors included (an `on_response_prepare` signal)."""
    response.headers["Server"] = f"glm53/{__version__}"
    if REQUEST_ID in request:
        for name in REQUEST_ID_HEADERS:
            response.headers[name] = request[REQUEST_ID]
    if origin := allowed_origin(request):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = ", ".join((*REQUEST_ID_HEADERS, "retry-after"))
        if origin != "*":
            response.headers["Vary"] = "Origin"


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """With keys configured, want one as `Authorization: Bearer` or `x-api-key`."""
    state = request.app[STATE]
    if not state.options.api_keys or _is_open(request) or _has_key(request, state):
        return await handler(request)
    raise HttpError(
        401,
        "missing or wrong API key; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _is_open(request: web.Request) -> bool:
    deep = request.path == "/health" and "deep" in request.query
    return not deep and (request.path in OPEN_PATHS or request.path.startswith(OPEN_PREFIXES))


def _has_key(request: web.Request, state: ServerState) -> bool:
    """Compare digests of every key with every credential sent: the time taken tells nothing about a key."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    sent = [request.headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
    found = False
    for credential in sent:
        digest = hashlib.sha256(credential.encode("utf-8", "surrogateescape")).digest()
        for key in state.options.api_keys:
            found |= hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest())
    return found
