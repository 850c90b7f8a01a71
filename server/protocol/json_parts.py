"""JSON of replies in parts of a bounded size: a reply may have 100 MB, and writing, copying or sending that in one step
would hold everybody up. What is long in it goes in as a JsonList or a Finished; `dump` gives the parts."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Iterator, Sequence

import orjson

PART = 1 << 16  # bytes; shorter parts are joined, longer ones cut where that is cheap
_STAND_IN = uuid.uuid4().hex  # a text no client can know
_SEPARATOR = f'"{_STAND_IN}"'.encode()

# Characters that end a line for some clients (Python's str.splitlines) although not for SSE itself.
_LINE_ENDS = ((b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"), (b"\xc2\x85", rb"\u0085"))


class Finished:
    """A value that is written to JSON once, however often it is sent."""

    def __init__(self, value: object) -> None:
        self._parts = list(cut(dump(value)))

    def parts(self) -> Sequence[bytes]:
        """The value's JSON."""
        return self._parts


class JsonList:
    """A list that only grows, kept as finished JSON: sending it again costs nothing but the sending.

    It is written `at_once` items at a time; choose fewer for long ones.
    """

    def __init__(self, items: Iterable[object] = (), *, at_once: int = 128) -> None:
        self._parts: list[bytes] = []
        self._at_once = at_once
        self.extend(items)

    def extend(self, items: Iterable[object]) -> None:
        """Append the items, which must be JSON-ready."""
        iterator = iter(items)
        while some := list(itertools.islice(iterator, self._at_once)):
            parts = dump(some)
            parts[0] = (b"," if self._parts else b"") + parts[0][1:]
            parts[-1] = parts[-1][:-1]
            if self._parts and len(self._parts[-1]) + len(parts[0]) <= PART:
                self._parts[-1] += parts.pop(0)
            self._parts += parts

    def parts(self) -> Sequence[bytes]:
        """The list as it is now."""
        return [b"[", *self._parts, b"]"]


def cut(parts: bytes | Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in parts of at most PART."""
    for part in (parts,) if isinstance(parts, bytes) else parts:
        for at in range(0, len(part), PART):
            yield part[at : at + PART]


def dump(value: object) -> list[bytes]:
    """The JSON of `value`, never empty; characters that end a line for some clients are escaped."""
    long: list[Finished | JsonList] = []

    def stand_in(item: object) -> str:
        if not isinstance(item, Finished | JsonList):
            raise TypeError
        long.append(item)
        return _STAND_IN

    data = orjson.dumps(value, default=stand_in)
    for raw, escaped in _LINE_ENDS:
        if raw in data:
            data = data.replace(raw, escaped)
    if not long:
        return [data]
    out: list[bytes] = []
    for text, item in itertools.zip_longest(data.split(_SEPARATOR), long):
        _append(out, text)
        for part in item.parts() if item is not None else ():
            _append(out, part)
    return out


def _append(out: list[bytes], part: bytes) -> None:
    if out and len(out[-1]) + len(part) <= PART:
        out[-1] += part
    elif part:
        out.append(part)
