"""Server-sent events: framing of JSON payloads."""

from __future__ import annotations

import orjson

DONE = b"data: [DONE]\n\n"

# Characters that end a line for some clients (Python's str.splitlines) although not for SSE itself.
_LINE_ENDS = ((b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"), (b"\xc2\x85", rb"\u0085"))


def frame(payload: object, event: str | None = None) -> bytes:
    """One event with `payload` as JSON; `event` names it, as the Messages and Responses APIs want."""
    data = orjson.dumps(payload)
    for raw, escaped in _LINE_ENDS:
        if raw in data:
            data = data.replace(raw, escaped)
    if event is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"
