"""Large bodies and large replies do not keep other clients waiting, and do not fill the memory."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from typing import Any

import orjson
import pytest
from conftest import Start, user

from glm53 import json_text
from glm53.engine import scripted
from glm53.grammar import Grammars
from glm53.server import body as body_module
from glm53.server import generation, text_work
from glm53.server.admission import BodyLease, BodyRoom
from glm53.server.errors import Unavailable
from glm53.server.options import MIB, ServerOptions
from glm53.server.protocol import schema
from glm53.server.protocol.json_parts import PART, Finished, JsonList, dump
from glm53.server.protocol.sse import frame, frame_parts
from glm53.server.sse import SseResponse
from glm53.server.state import LARGE_BYTES
from glm53.server.whole import SMALL_BYTES, LargeReply

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
SLOW = {"pieces": ["</think>", *["tick "] * 100], "end": "user", "rate": 50}


def test_the_event_loop_runs_between_the_windows_of_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "WINDOW", 1000)
    monkeypatch.setattr(body_module, "MAX_MARKS", 5000)
    order: list[str] = []
    count = json_text.count_marks

    def counted(data: bytes) -> Any:
        for found in count(data):
            order.append("window")
            yield found

    monkeypatch.setattr(body_module, "count_marks", counted)

    async def other() -> None:
        while True:
            order.append("other")
            await asyncio.sleep(0)

    async def both() -> None:
        task = asyncio.create_task(other())
        await body_module._check_structure(b"a" * 10_000)
        task.cancel()

    asyncio.run(both())
    assert order.count("window") == 10
    assert "window window" not in " ".join(order)


def test_large_requests_are_prepared_one_after_another(start: Start) -> None:
    """Each may keep the interpreter lock for tens of milliseconds: the event loop must not wait for all of them."""
    live = start()
    state = live.server.state
    running, most = 0, {"large": 0, "small": 0}
    lock, together = threading.Lock(), threading.Barrier(2)

    def work(kind: str) -> None:
        nonlocal running
        with lock:
            running += 1
            most[kind] = max(most[kind], running)
        if kind == "small":
            together.wait(30)  # both of them have to be here at once
        with lock:
            running -= 1

    async def all_of(kind: str, size: int, count: int) -> None:
        await asyncio.gather(*(state.run_sized(size, lambda: work(kind)) for _ in range(count)))

    for kind, size, count in (("large", LARGE_BYTES + 1, 20), ("small", LARGE_BYTES, 2)):
        asyncio.run_coroutine_threadsafe(all_of(kind, size, count), live.loop).result(60)
    assert most == {"large": 1, "small": 2}


def test_bodies_that_arrive_have_a_limit_together(start: Start) -> None:
    live = start(max_body_bytes=MIB, context=10**6)
    state = live.server.state
    state.bodies.limit = 3 * MIB // 2
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {MIB}\r\n\r\n"
    with live.raw(head.encode() + b" " * (MIB - 1)):
        live.until(lambda s: state.bodies.held == MIB - 1)
        reply = live.chat(messages=user("x" * (MIB // 2 + 1)))
        assert (reply.status, reply.error["code"]) == (503, "bodies_full")
        assert int(reply.headers["retry-after"]) > 0
        assert live.chat().status == 200
    live.until(lambda s: state.bodies.held == 0)
    assert live.chat(messages=user("x" * (MIB // 2 + 1))).status == 200


def test_a_lease_is_given_back_once() -> None:
    room = BodyRoom(10)
    with BodyLease(room) as one, BodyLease(room) as two:
        one.grow(6)
        with pytest.raises(Unavailable):
            two.grow(5)
        two.grow(4)
        assert room.held == 10
        one.close()
        one.close()
        assert room.held == 4
    assert room.held == 0


def test_a_body_is_not_kept_while_the_answer_is_generated(start: Start) -> None:
    live = start(SLOW)
    go = live.hold()
    data = json.dumps({"messages": user("hi"), "unknown": "x" * MIB}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with live.raw(head.encode() + data):
        live.until(lambda s: s["engine"]["running"] == 1)
        [job] = live.server.state.live.values()
        assert job._body == b""
        assert live.server.state.bodies.held == 0
        go.set()


def test_the_event_loop_runs_between_the_streams_of_a_request(start: Start) -> None:
    """An engine copies the prompt of each: milliseconds of a long one, and there may be hundreds."""
    live = start()
    engine, order = live.engine, []
    assert engine is not None
    submit = engine.submit

    def slow_submit(request: Any) -> Any:
        order.append("submit")
        asyncio.get_running_loop().call_soon(order.append, "other")
        return submit(request)

    engine.submit = slow_submit  # type: ignore[method-assign]
    assert live.post("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 1}).status == 200
    assert order == ["submit", "other"] * 6


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


def test_the_event_loop_runs_between_the_parts_of_an_event() -> None:
    """Also if the client takes each part at once."""
    order: list[str] = []

    class Response:
        async def write(self, part: bytes) -> None:
            order.append(part.decode())

    async def other() -> None:
        while True:
            order.append("other")
            await asyncio.sleep(0)

    async def both() -> None:
        task = asyncio.create_task(other())
        sse = SseResponse(None, ServerOptions())  # type: ignore[arg-type]
        sse.response = Response()  # type: ignore[assignment]
        await sse.write([b"1", b"2", b"3"])
        reply = LargeReply([b"4", b"5", b"6"], 0)
        reply.write = sse.response.write  # type: ignore[method-assign]
        with pytest.raises(AssertionError):  # aiohttp's part: there is no request to end
            await reply.write_eof()
        task.cancel()

    asyncio.run(both())
    assert "".join(o for o in order if o != "other") == "123456"
    assert not any(a != "other" != b for a, b in itertools.pairwise(order))


IDS = list(range(40, 60)) * 400  # 8,000 tokens


def test_the_scores_of_a_request_have_a_limit(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    live = start()
    monkeypatch.setattr(text_work, "MOST_SCORES", 6 * len(IDS))
    scored = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
    echo = {"echo": True, "max_tokens": 1}
    assert live.post("/generate", {"input_ids": IDS, "top_logprobs_num": 5, **scored}).status == 200
    assert live.post("/v1/completions", {"prompt": IDS, "logprobs": 5, **echo}).status == 200
    for reply in (
        live.post("/generate", {"input_ids": IDS, "top_logprobs_num": 6, **scored}),
        live.post("/generate", {"input_ids": [IDS, IDS], "top_logprobs_num": 5, **scored}),
        live.post("/v1/completions", {"prompt": IDS, "logprobs": 6, **echo}),
    ):
        assert (reply.status, reply.error["code"]) == (400, "too_many_scores")


def test_long_work_is_not_done_on_the_event_loop(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted engine's scores, and putting a long answer together."""
    live = start({"pieces": ["</think>", *["tick "] * 3000], "end": "user"})
    where: dict[str, set[threading.Thread]] = {"score": set(), "collect": set()}
    score, collect = scripted.TokenScore, generation.collect

    def scored(*args: Any) -> Any:
        where["score"].add(threading.current_thread())
        return score(*args)

    def collected(events: Any) -> Any:
        where["collect"].add(threading.current_thread())
        return collect(events)

    monkeypatch.setattr(scripted, "TokenScore", scored)
    monkeypatch.setattr(generation, "collect", collected)
    monkeypatch.setattr(generation, "FEW_EVENTS", 1)
    assert live.chat().message["content"] == "tick " * 3000
    body = {"text": "a", "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
    assert live.post("/generate", body).status == 200
    assert where["score"]
    assert where["collect"]
    assert live.thread not in where["score"] | where["collect"]


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


def test_the_answers_of_a_request_share_one_compiled_grammar(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take a second, and one request may ask for hundreds of answers."""
    live, compiled, given = start(), [], []
    compile_one, submit = Grammars._compile, live.engine.submit  # type: ignore[union-attr]

    def counted(self: Grammars, *args: Any) -> Any:
        compiled.append(args)
        return compile_one(self, *args)

    monkeypatch.setattr(Grammars, "_compile", counted)
    live.engine.submit = lambda r: (given.append(r.constraint), submit(r))[1]  # type: ignore[union-attr,method-assign]
    form = {"type": "json_object"}
    assert live.chat(response_format=form, n=3, thinking_budget=5).status == 200
    assert live.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "response_format": form}).status == 200
    assert len(compiled) == 2
    assert len({id(c) for c in given}) == 7


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"anyOf": [{"type": "integer"}] * 50_000}}},
        {"properties": {"a": {"enum": [1] * 50_000}}},
        {"allOf": [{"properties": {"a": {"type": "integer"}}}] * 50_000},
        {"properties": {}, "patternProperties": {f"a{i}": {"type": "integer"} for i in range(50_000)}},
        {"properties": {"a": {"$ref": "#/$defs/0"}},
         "$defs": {str(i): {"anyOf": [{"type": "integer"}, {"$ref": f"#/$defs/{i + 1}"}] * 9} for i in range(9000)}},
    ],
)  # fmt: skip
def test_little_of_a_huge_schema_is_looked_at_for_one_argument(parameters: dict[str, Any]) -> None:
    """It happens on the event loop, each time the model names an argument."""
    looked: list[None] = []

    class Counted(dict[str, Any]):
        def get(self, *args: Any) -> Any:
            looked.append(None)
            return super().get(*args)

    def counted(value: Any) -> Any:
        if isinstance(value, dict):
            return Counted({k: counted(v) for k, v in value.items()})
        return [counted(v) for v in value] if isinstance(value, list) else value

    assert schema.argument_types(counted(parameters), "a") == {"integer"}
    assert len(looked) < 10 * schema.MOST_LOOKED_AT
