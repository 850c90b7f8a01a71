"""JSON texts of clients, read in steps that are short whatever a client sends.

A step here is one call that keeps the interpreter lock: nobody else runs meanwhile, streams and health checks included.
Parsing itself is one step. It takes some 4 ms a MiB, and 60 ms where MAX_MARKS are used up; the size of a body is
limited elsewhere. Everything else looks at WINDOW bytes at a time.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import Any

import orjson

from .errors import RequestError

WINDOW = 1 << 15  # well below a millisecond: the event loop takes the lock several times for each of its turns
MAX_MARKS = 300_000
"""Commas, colons and opening brackets of one text: they bound the number of values in it. Source code that fills the
context has fewer."""

_HIGH = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE = re.compile(_HIGH + rb"(?!" + _LOW + rb")|(?<!" + _HIGH + rb")" + _LOW)
_PAIR_BYTES = 12  # a surrogate pair, escaped
_HIDDEN = b"\0\0"  # stands for an escaped backslash; NUL cannot occur in JSON


def count_marks(data: bytes) -> Iterator[int]:
    """How many marks each window of `data` has; the caller may do something else in between."""
    for at in range(0, len(data), WINDOW):
        part = data[at : at + WINDOW]
        yield sum(part.count(mark) for mark in (b",", b":", b"[", b"{"))


def too_complex(marks: int) -> str:
    """What a client is told of a text with more than MAX_MARKS."""
    return f"it has {marks:,} commas, colons and opening brackets; at most {MAX_MARKS:,} are accepted"


def load(data: bytes) -> Any:
    """The value in `data`, which has at most MAX_MARKS; halves of surrogate pairs become U+FFFD.

    Raises RequestError for bytes that are not UTF-8 and for anything JSON forbids (NaN, trailing commas).
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as e:
        error = e
    _check_utf8(data)
    mended = mend_surrogates(data)
    if mended is not None:
        try:
            return orjson.loads(mended)
        except orjson.JSONDecodeError as e:
            error = e
    place = f"line {error.lineno}, column {error.colno}"
    raise RequestError(f"We could not parse the JSON body of your request: {error.msg} ({place}).", code="invalid_json")


def check_inner(data: bytes, param: str) -> None:
    """Raise RequestError naming `param` if a JSON text within a string of the body has more than MAX_MARKS: they were
    not counted with those of the body, for there they may be escaped."""
    marks = sum(count_marks(data)) if len(data) > MAX_MARKS else 0
    if marks > MAX_MARKS:
        raise RequestError(f"Invalid '{param}': {too_complex(marks)}.", param=param, code="request_too_complex")


def _check_utf8(data: bytes) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(data), WINDOW):
        held = len(decoder.getstate()[0])
        try:
            decoder.decode(data[at : at + WINDOW], at + WINDOW >= len(data))
        except UnicodeDecodeError as e:
            message = f"The request body is not valid UTF-8 (byte {at - held + e.start}); JSON must be sent as UTF-8."
            raise RequestError(message, code="invalid_json") from None


def mend_surrogates(data: bytes) -> bytes | None:
    """`data` with every escaped half of a surrogate pair replaced by U+FFFD; None if there is no such half."""
    if b"\0" in data:
        return None
    out: list[bytes] = []
    found = 0
    held = b""
    for part in _windows(data):
        text = held + part.replace(rb"\\", _HIDDEN)
        cut = _safe_cut(text)
        mended, count = _LONE.subn(rb"\\ufffd", text[:cut])
        out.append(mended.replace(_HIDDEN, rb"\\"))
        found += count
        held = text[cut:]
    mended, count = _LONE.subn(rb"\\ufffd", held)
    out.append(mended.replace(_HIDDEN, rb"\\"))
    return b"".join(out) if found + count else None


def _windows(data: bytes) -> Iterator[bytes]:
    """`data` in parts that begin outside `\\\\`."""
    at = 0
    while at < len(data):
        part = data[at : at + WINDOW]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:
            part = data[at : at + WINDOW + 1]
        yield part
        at += len(part)


def _safe_cut(text: bytes) -> int:
    """Where `text` may be cut: neither within an escape nor behind a half whose other half may follow."""
    first = text.find(b"\\", max(0, len(text) - _PAIR_BYTES))
    if first < 0:
        return len(text)
    half = _PAIR_BYTES // 2
    return first - half if re.fullmatch(_HIGH, text[max(0, first - half) : first]) else first
