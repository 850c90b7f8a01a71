"""Large replies leave in parts, and do not keep other clients waiting."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from typing import Any

import orjson
import pytest
from conftest import Start, run_beside

from glm53.engine import scripted
from glm53.server import generation, state, whole
from glm53.server.options import MIB, ServerOptions
from glm53.server.protocol.json_parts import PART, Finished, JsonList, dump
from glm53.server.protocol.sse import frame, frame_parts
from glm53.server.sse import SseResponse
from glm53.server.whole import SMALL_BYTES, LargeReply


class TestParts:
    VALUE: dict[str, Any] = {"a": [1, {"b": "\u2028 é \x85"}], "c": None, "d": "x" * 200}  # noqa: RUF012

    def test_the_parts_are_the_json_of_the_whole(self) -> None:
        items = [{"i": i, "text": "ab" * i} for i in range(2000)]
        inner = JsonList(items, at_once=64)
        made = dump({"head": 1, "list": inner, "again": inner, "one": Finished(self.VALUE), "empty": JsonList()})
        assert orjson.loads(b"".join(made)) == {
            "head": 1, "list": items, "again": items, "one": self.VALUE, "empty": [],
        }  # fmt: skip
        assert len(made) > 10
        assert orjson.loads(b"".join(dump(self.VALUE))) == self.VALUE
        assert dump(JsonList([JsonList([1, 2]), JsonList(), 3])) == [b"[[1,2],[],3]"]

    def test_a_list_may_grow_in_any_steps(self) -> None:
        for steps in ([0, 5], [3, 0, 1], [2000, 1, 2000]):
            made, count = JsonList(at_once=7), 0
            for step in steps:
                made.extend(f"item {i}" for i in range(count, count + step))
                count += step
            assert orjson.loads(b"".join(made.parts())) == [f"item {i}" for i in range(count)]

    def test_parts_are_short_but_not_tiny(self) -> None:
        made = JsonList()
        for i in range(20_000):
            made.extend([f"token {i}"])
        parts = dump({"list": made})
        assert all(len(p) <= PART for p in parts)
        assert len(parts) < 20

    def test_nothing_but_json_is_written(self) -> None:
        with pytest.raises(TypeError):
            dump({"a": object()})

    def test_a_frame_is_one_line(self) -> None:
        payload = {"list": JsonList([self.VALUE] * 2000)}
        parts = frame_parts(payload, "name")
        assert b"".join(parts) == frame(payload, "name")
        text = b"".join(parts).decode()
        assert text.startswith("event: name\ndata: {")
        assert text.endswith("}\n\n")
        assert len(text.splitlines()) == 3


def test_nothing_comes_between_the_parts_of_an_event() -> None:
    written: list[bytes] = []

    class Response:
        async def write(self, part: bytes) -> None:
            await asyncio.sleep(0)
            written.append(part)

    async def both() -> None:
        sse = SseResponse(None, ServerOptions())  # type: ignore[arg-type]
        sse.response = Response()  # type: ignore[assignment]
        await asyncio.gather(sse.write([b"1", b"2", b"3"]), sse.write(b"x"), sse.write([b"4", b"5"]))

    asyncio.run(both())
    assert b"".join(written) == b"123x45"


def test_a_long_event_is_written_in_short_parts() -> None:
    written: list[bytes] = []

    class Response:
        async def write(self, part: bytes) -> None:
            written.append(part)

    data = bytes(range(256)) * (PART // 64)
    sse = SseResponse(None, ServerOptions())  # type: ignore[arg-type]
    sse.response = Response()  # type: ignore[assignment]
    asyncio.run(sse.write(data))
    assert [len(p) for p in written] == [PART] * 4
    assert b"".join(written) == data


def test_the_event_loop_runs_between_the_parts_of_an_event() -> None:
    """Also if the client takes each part at once."""
    order: list[str] = []

    class Response:
        async def write(self, part: bytes) -> None:
            order.append(part.decode())

    async def replies() -> None:
        sse = SseResponse(None, ServerOptions())  # type: ignore[arg-type]
        sse.response = Response()  # type: ignore[assignment]
        await sse.write([b"1", b"2", b"3"])
        reply = LargeReply([b"4", b"5", b"6"], 0)
        reply.write = sse.response.write  # type: ignore[method-assign]
        with pytest.raises(AssertionError):  # aiohttp's part: there is no request to end
            await reply.write_eof()

    run_beside(order, replies())
    assert "".join(o for o in order if o != "other") == "123456"
    assert not any(a != "other" != b for a, b in itertools.pairwise(order))


IDS = list(range(40, 60)) * 400  # 8,000 tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": IDS, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 5,
                       "sampling_params": {"max_new_tokens": 0}}),
        ("/v1/completions", {"prompt": IDS, "echo": True, "logprobs": 5, "max_tokens": 1}),
        ("/v1/responses", {"input": "x", "metadata": {"a": "y" * SMALL_BYTES}}),
    ],
)  # fmt: skip
def test_a_large_reply_is_written_in_parts(
    start: Start, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    live, sizes = start(), []
    write = LargeReply.write

    async def recorded(self: LargeReply, part: bytes) -> None:
        sizes.append(len(part))
        await write(self, part)

    monkeypatch.setattr(LargeReply, "write", recorded)
    reply = live.post(path, body)
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json; charset=utf-8"
    assert int(reply.headers["content-length"]) == len(reply.data) == sum(sizes)
    assert len(sizes) > 1
    assert isinstance(reply.json, dict)


def test_a_client_that_takes_nothing_of_a_large_reply_is_dropped(start: Start) -> None:
    live = start(write_timeout_s=0.3, max_body_bytes=32 * MIB)
    data = json.dumps({"input": "x", "metadata": {"a": "y" * (16 * MIB)}}).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    with live.raw(head.encode() + b"\r\n\r\n" + data, timeout=60) as s:
        assert s.recv(12) == b"HTTP/1.1 200"
        threading.Event().wait(1.5)
        received = 12
        while part := _received(s):
            received += len(part)
    assert received < 16 * MIB
    assert live.get("/health").status == 200


def _received(s: Any) -> bytes:
    try:
        return bytes(s.recv(1 << 20))
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a b c", "echo": True, "logprobs": 2, "max_tokens": 1}),
        ("/v1/responses", {"input": "x", "metadata": {"a": "b"}}),
    ],
)
def test_what_repeats_the_request_is_not_made_on_the_event_loop(
    start: Start, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    live, threads, stream = start(), [], generation.StreamFormat.__init__

    def recorded(self: Any, begin: Any, events: Any, end: Any, *rest: Any, **more: Any) -> None:
        def on(function: Any) -> Any:
            return lambda: (threads.append(threading.current_thread()), function())[1]

        stream(self, on(begin), events, on(end), *rest, **more)

    monkeypatch.setattr(generation.StreamFormat, "__init__", recorded)
    assert live.stream(path, body).status == 200
    assert len(threads) == 2
    assert live.thread not in threads


def test_the_scores_of_an_answer_make_its_reply_heavy_work(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    live, threads, dumped = start({"pieces": ["</think>", *["tick "] * 1000], "end": "user"}), [], whole.dump
    monkeypatch.setattr(
        whole, "dump", lambda value: (threads.append(threading.current_thread().name), dumped(value))[1]
    )
    for top in (20, 0):
        assert live.chat(logprobs=True, top_logprobs=top).status == 200
    assert [name.partition("_")[0] for name in threads] == ["large", "prepare"]


def test_scores_are_not_freed_on_the_event_loop(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be millions of them, and to free them takes as long as to make them."""
    live, made, freed = start({"pieces": ["</think>", *["tick "] * 600], "end": "user"}), [0], list[threading.Thread]()
    monkeypatch.setattr(state, "FREE_AFTER_S", 0.1)

    class Watched(list[Any]):
        """The alternatives of a token."""

        def __init__(self, *items: Any) -> None:
            super().__init__(*items)
            made[0] += 1

        def __del__(self) -> None:
            freed.append(threading.current_thread())

    for name in ("Token", "TokenScore"):
        kind = getattr(scripted, name)

        def watched(*args: Any, kind: Any = kind, **kwargs: Any) -> Any:
            token = kind(*args, **kwargs)
            object.__setattr__(token, "top", Watched(token.top))
            return token

        monkeypatch.setattr(scripted, name, watched)
    scored = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
    assert live.post("/generate", {"text": "word " * 500, "top_logprobs_num": 5, **scored}).status == 200
    assert live.post("/v1/completions", {"prompt": "word " * 500, "logprobs": 5, "echo": True}).status == 200
    assert live.chat(logprobs=True, top_logprobs=5).status == 200
    live.until(lambda _: made[0] > 1500 and len(freed) == made[0])
    elsewhere = [t for t in freed if not t.name.startswith("large")]
    assert len(elsewhere) < 100  # those of reasoning and of the end, which no reply has
