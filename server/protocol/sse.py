"""Server-sent events: framing of JSON payloads."""

from __future__ import annotations

from .json_parts import dump

DONE = b"data: [DONE]\n\n"


def frame_parts(payload: object, event: str | None = None) -> list[bytes]:
    """One event with `payload` as JSON; `event` names it, as the Messages and Responses APIs want."""
    parts = dump(payload)
    parts[0] = (b"" if event is None else b"event: " + event.encode() + b"\n") + b"data: " + parts[0]
    parts[-1] += b"\n\n"
    return parts


def frame(payload: object, event: str | None = None) -> bytes:
    """`frame_parts` as one piece."""
    parts = frame_parts(payload, event)
    return parts[0] if len(parts) == 1 else b"".join(parts)
