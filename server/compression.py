"""Compressed request bodies, decompressed in steps of a bounded size.

A body of 16 KiB may stand for one of 16 MiB, so nothing here makes all of it at once: the caller runs each step on a
thread, where it lets go of the interpreter lock, and decides in between whether it wants the next one.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

STEP = 1 << 18  # bytes that a step makes at most: about a millisecond's work
INPUT = 1 << 16  # compressed bytes given to a decoder at a time: it copies what it does not use
MAX_MEMBERS = 1000  # compressed files in one body, one behind the other; clients send one


class BrokenBody(ValueError):
    """The bytes are not what Content-Encoding says, or end too early."""


class _Zlib:
    """zlib's decompressor, which leaves it to its caller to keep what it has not used."""

    def __init__(self, wbits: int) -> None:
        self._zlib = zlib.decompressobj(wbits)

    def decompress(self, data: bytes, most: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, most)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data


def _gzip(_data: bytes) -> _Zlib:
    return _Zlib(16 + zlib.MAX_WBITS)


def _deflate(data: bytes) -> _Zlib:
    """With zlib's header, as RFC 9110 wants it, or without, as some clients send it."""
    has_header = len(data) > 1 and data[0] & 15 == 8 and int.from_bytes(data[:2]) % 31 == 0
    return _Zlib(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)


def _zstd(_data: bytes) -> Any:
    return zstd.ZstdDecompressor()


DECODERS: dict[str, Callable[[bytes], Any]] = {"gzip": _gzip, "x-gzip": _gzip, "deflate": _deflate, "zstd": _zstd}
"""By the name in Content-Encoding, lower case."""


def decompressed(data: bytes, encoding: str) -> Iterator[bytes]:
    """What `data` stands for, in parts of at most STEP bytes, none empty. `encoding` is a key of DECODERS.

    Raises BrokenBody.
    """
    if not data:
        return
    decoder, members, at, given = DECODERS[encoding](data), 1, 0, b""
    while True:
        try:
            part = decoder.decompress(given, STEP)
        except (zlib.error, zstd.ZstdError) as e:
            raise BrokenBody(str(e)) from None
        if part:
            yield part
        given = decoder.unused_data if decoder.eof else b""
        if decoder.eof and (given or at < len(data)):
            members += 1
            if members > MAX_MEMBERS or encoding == "deflate":
                raise BrokenBody("something follows the compressed data")
            decoder = DECODERS[encoding](data)
        elif decoder.eof:
            return
        elif len(part) == STEP:
            continue  # there may be more without more input
        if not given:
            if at >= len(data):
                raise BrokenBody("the compressed data ends too early")
            given, at = data[at : at + INPUT], at + INPUT
