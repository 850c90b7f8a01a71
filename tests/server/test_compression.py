"""Compressed bodies, decompressed in short steps away from the event loop."""

from __future__ import annotations

import gzip
import random
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import CHAT, JSON, Start, refused

from glm53.server import body as body_module
from glm53.server import compression
from glm53.server.compression import MAX_MEMBERS, STEP, BrokenBody, decompressed
from glm53.server.options import MIB

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


PACKERS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("zstd", zstd.compress),
]
every_encoding = pytest.mark.parametrize(("encoding", "pack"), PACKERS)
TEXTS = (b"{}", b" " * (3 * STEP), b"x" * STEP, random.Random(1).randbytes(STEP + 1), bytes(range(256)) * 5000)


@every_encoding
@pytest.mark.parametrize("text", TEXTS, ids=["tiny", "blank", "one step", "random", "long"])
def test_all_comes_back_in_short_parts(encoding: str, pack: Callable[[bytes], bytes], text: bytes) -> None:
    parts = [*decompressed(pack(text), encoding)]
    assert b"".join(parts) == text
    assert all(0 < len(p) <= STEP for p in parts)


@every_encoding
def test_what_is_cut_short_or_goes_on_is_told(encoding: str, pack: Callable[[bytes], bytes]) -> None:
    data = pack(bytes(range(200)))
    for end in range(1, len(data)):
        with pytest.raises(BrokenBody):
            b"".join(decompressed(data[:end], encoding))
    for wrong in (data + b"junk", b"not compressed"):
        with pytest.raises(BrokenBody):
            b"".join(decompressed(wrong, encoding))
    assert [*decompressed(b"", encoding)] == []


@pytest.mark.parametrize(("encoding", "pack"), [p for p in PACKERS if p[0] != "deflate"])
def test_several_files_one_behind_the_other(encoding: str, pack: Callable[[bytes], bytes]) -> None:
    assert b"".join(decompressed(pack(b"a" * STEP) + pack(b"") + pack(b"b"), encoding)) == b"a" * STEP + b"b"
    with pytest.raises(BrokenBody):
        b"".join(decompressed(pack(b"") * (MAX_MEMBERS + 1), encoding))


def test_a_body_is_decompressed_off_the_event_loop_and_no_further_than_the_limit(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, made = start(max_body_bytes=MIB), list[tuple[threading.Thread, int]]()

    def watched(data: bytes, encoding: str) -> Iterator[bytes]:
        for part in decompressed(data, encoding):
            made.append((threading.current_thread(), len(part)))
            yield part

    monkeypatch.setattr(body_module, "decompressed", watched)
    bomb = gzip.compress(b" " * (900 * MIB // 8))
    assert len(bomb) < MIB
    with live.raw(b"") as s:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
        s.sendall(f"{head}Content-Length: {len(bomb)}\r\n\r\n".encode() + bomb)
        assert s.recv(12) == b"HTTP/1.1 413"
    assert sum(size for _, size in made) <= MIB + STEP
    assert live.thread not in {thread for thread, _ in made}


def test_a_body_that_is_refused_unread_is_not_decompressed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp reads what is left of it for ten seconds, so that the client gets to see the reply."""
    used: list[Any] = []
    monkeypatch.setattr(zlib, "decompressobj", lambda *a: used.append(a))
    live = start(max_body_bytes=MIB)
    data = gzip.compress(random.Random(1).randbytes(2 * MIB))
    assert live.post(CHAT, data, {**JSON, "Content-Encoding": "gzip"}).status == 413
    assert live.post("/nothing", data, {**JSON, "Content-Encoding": "gzip"}).status == 404
    assert used == []


def test_an_encoding_that_is_not_known_is_told(start: Start) -> None:
    live = start()
    for encoding in ("br", "gzip, gzip", "x" * 5000):
        reply = live.post(CHAT, b"{}", {**JSON, "Content-Encoding": encoding})
        assert refused(reply, 415)["code"] == "unsupported_encoding"
        assert "gzip" in reply.headers["accept-encoding"]
    assert (
        live.post(
            CHAT, b'{"messages":[{"role":"user","content":"x"}]}', {**JSON, "Content-Encoding": "identity"}
        ).status
        == 200
    )
    assert compression.DECODERS.keys() == {e for e, _ in PACKERS}
