"""Errors as HTTP: which status each exception gets, and the JSON bodies that OpenAI and Anthropic clients parse."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

from glm53.errors import EngineError, Glm53Error, QueueFull, RequestError

log = logging.getLogger("glm53.server")

MAX_MESSAGE = 600  # characters of an error text; a client's own text may be quoted in it

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error", 504: "timeout_error"}


class HttpError(Glm53Error):
    """An answer other than 200 that no engine error stands for."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


class Unavailable(HttpError):
    """503 with Retry-After: the server is loading, draining, short of room for bodies, or its engine has died."""

    def __init__(self, message: str, *, code: str, retry_after_s: int = 5) -> None:
        super().__init__(503, message, code=code, headers={"Retry-After": str(retry_after_s)})


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """One error, ready for either wire format."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)

    def openai(self) -> dict[str, object]:
        """`{"error": {...}}` as the OpenAI SDK, LiteLLM and most others read it."""
        kind = OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.extra}
        return {"error": error}

    def anthropic(self) -> dict[str, object]:
        """`{"type": "error", "error": {...}}` of the Messages API."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self._anthropic_message()}}

    def _anthropic_message(self) -> str:
        """Claude Code makes its history shorter where an error says this in Anthropic's words."""
        if self.code != "context_length_exceeded":
            return self.message
        prompt, context = self.extra["n_prompt_tokens"], self.extra["n_ctx"]
        return f"prompt is too long: {prompt} tokens > {context} maximum. {self.message}"

    def body(self, path: str) -> dict[str, object]:
        """The wire format that clients of `path` expect."""
        return self.anthropic() if path.startswith("/v1/messages") else self.openai()


def clip(text: str) -> str:
    """One line of at most MAX_MESSAGE characters, safe to log and to send."""
    line = " ".join(text.encode("utf-8", "replace").decode().split())
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 3] + "..."


def reply_for(error: BaseException) -> ErrorReply | None:
    """How `error` is told to the client; None for one that nobody foresaw (a 500 that is logged with its traceback)."""
    if isinstance(error, RequestError):
        return ErrorReply(400, clip(str(error)), error.param, error.code, extra=error.extra)
    if isinstance(error, QueueFull):
        headers = {"Retry-After": str(error.retry_after_s)}
        return ErrorReply(503, clip(str(error)), code="queue_full", headers=headers)
    if isinstance(error, HttpError):
        return ErrorReply(error.status, clip(str(error)), code=error.code, headers=error.headers)
    if isinstance(error, EngineError):
        return ErrorReply(500, clip(str(error)), code="engine_error")
    if isinstance(error, web.HTTPException):
        return _of_aiohttp(error)
    return None


def unforeseen(request_id: str) -> ErrorReply:
    """Log the exception being handled with its traceback; what the client is told of it."""
    log.exception("%s: unforeseen error", request_id)
    return ErrorReply(500, f"internal error; the log has it under {request_id}", code="internal_error")


def _of_aiohttp(error: web.HTTPException) -> ErrorReply:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{error.method} is not allowed here; allowed: {allowed}"
        return ErrorReply(405, clip(message), code="method_not_allowed", headers={"Allow": allowed})
    if isinstance(error, web.HTTPNotFound):
        return ErrorReply(404, "no such route; /openapi.json lists all", code="not_found")
    return ErrorReply(error.status, clip(error.reason), code="http_error")
