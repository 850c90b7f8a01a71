"""What clients send is parsed in short pieces, in turn, and nothing of it is lost or mixed up."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from typing import Any

import pytest
from aiohttp import web
from conftest import CHAT, LiveServer, Start, run_beside, user

from glm53.server import connection, read_turns
from glm53.server.read_turns import ReadTurns

HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()


def chunked(body: bytes) -> bytes:
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"1\r\n%c\r\n" % c for c in body) + b"0\r\n\r\n"


def plain(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chat(words: int = 1, **more: Any) -> bytes:
    return json.dumps({"messages": user("word " * words), **more}).encode()


def test_a_turn_ends_after_its_time_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_turns, "TURN_S", 0)
    order: list[str] = []

    class Sender:
        def __init__(self, name: str, pieces: int) -> None:
            self.name, self.left = name, pieces

        def parse_piece(self) -> bool:
            order.append(self.name)
            self.left -= 1
            return self.left > 0

    async def all_at_once() -> None:
        turns = ReadTurns(asyncio.get_running_loop())
        for name in "abc":
            turns.add(Sender(name, 3))
        for _ in range(30):
            await asyncio.sleep(0)

    run_beside(order, all_at_once())
    assert [o for o in order if o != "other"] == [*"abcabcabc"]
    assert not any(a != "other" != b for a, b in itertools.pairwise(order))


def test_a_connection_that_fails_does_not_stop_the_others() -> None:
    parsed: list[str] = []

    class Sender:
        def __init__(self, fails: bool) -> None:
            self.fails = fails

        def parse_piece(self) -> bool:
            if self.fails:
                raise ValueError
            parsed.append("parsed")
            return False

    async def both() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        turns = ReadTurns(loop)
        turns.add(Sender(True))
        turns.add(Sender(False))
        await asyncio.sleep(0.01)

    asyncio.run(both())
    assert parsed == ["parsed"]


def test_bodies_in_one_byte_chunks_are_parsed_piece_by_piece(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_turns, "TURN_S", 0)
    live, turn, parsed = start(max_queue=64), [0], list[tuple[int, int]]()
    data_received = web.RequestHandler.data_received

    def counted(self: Any, data: bytes) -> None:
        parsed.append((turn[0], len(data)))
        data_received(self, data)

    async def count_turns() -> None:
        while True:
            turn[0] += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(web.RequestHandler, "data_received", counted)
    counting = asyncio.run_coroutine_threadsafe(count_turns(), live.loop)
    body = chunked(chat(4000))
    at_once([lambda: answer(live, body)] * 4)
    counting.cancel()
    assert sum(size for _, size in parsed) == 4 * len(body)
    assert max(size for _, size in parsed) <= read_turns.PIECE
    assert len({at for at, _ in parsed}) == len(parsed)


def answer(live: LiveServer, request: bytes) -> None:
    with live.raw(request) as s:
        assert s.recv(12) == b"HTTP/1.1 200"


def at_once(calls: list[Any]) -> None:
    failed: list[BaseException] = []

    def one(call: Any) -> None:
        try:
            call()
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=one, args=(c,)) for c in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed


@pytest.mark.parametrize("piece", [1, 7, 8192])
def test_requests_sent_in_one_go_are_answered_in_order(
    start: Start, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """More of them than aiohttp queues, their bodies larger than its buffer and in both of HTTP's forms."""
    monkeypatch.setattr(connection, "PIECE", piece)
    monkeypatch.setattr(connection, "BUFFER", 1 << 10)
    live = start()
    wanted = [(kind, words) for words in (1, 800, 3, 1, 500, *[2] * 40) for kind in (plain, chunked)]
    sent = b"".join(kind(chat(words, max_tokens=1)) for kind, words in wanted)
    counts = {w: live.chat(messages=user("word " * w)).json["usage"]["prompt_tokens"] for _, w in wanted}
    with live.raw(sent, timeout=60) as s, s.makefile("rb") as replies:
        assert [_read_reply(replies)["usage"]["prompt_tokens"] for _ in wanted] == [counts[w] for _, w in wanted]


def _read_reply(replies: Any) -> Any:
    assert replies.readline() == b"HTTP/1.1 200 OK\r\n"
    length = 0
    while (line := replies.readline()) != b"\r\n":
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return json.loads(replies.read(length))
