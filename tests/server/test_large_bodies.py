"""Large bodies and what they make long do not keep other clients waiting, and do not fill the memory."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from typing import Any

import pytest
from conftest import Start, run_beside, user

from glm53 import json_text
from glm53.engine import scripted
from glm53.grammar import Grammars
from glm53.server import body as body_module
from glm53.server import generation, text_work, whole
from glm53.server.admission import BodyLease, BodyRoom
from glm53.server.errors import Unavailable
from glm53.server.options import MIB
from glm53.server.protocol import schema
from glm53.server.state import BREATH_S, COMPILERS, LARGE_BYTES, WORKERS

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

    run_beside(order, body_module._check_structure(b"a" * 10_000))
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


def test_large_work_leaves_time_between_its_pieces(start: Start) -> None:
    """An engine's thread takes the interpreter lock many times a token: it must not wait for all of them in a row."""
    live, spans = start(), list[tuple[float, float]]()

    def work() -> None:
        started = time.monotonic()
        time.sleep(BREATH_S / 2)
        spans.append((started, time.monotonic()))

    async def all_of() -> None:
        await asyncio.gather(*(live.server.state.run_sized(LARGE_BYTES + 1, work) for _ in range(3)))

    asyncio.run_coroutine_threadsafe(all_of(), live.loop).result(60)
    for (started, ended), (following, _) in itertools.pairwise(spans):
        assert following - ended > 0.9 * min(BREATH_S, ended - started)


def test_grammars_that_take_long_to_compile_keep_only_grammars_waiting(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream's beginning and end are made on the threads that prepare requests."""
    live, compiling, go_on = start(SLOW), threading.Semaphore(0), threading.Event()
    compile_grammar = Grammars.json_schema

    def slowly(self: Grammars, *args: Any, **kwargs: Any) -> Any:
        compiling.release()
        assert go_on.wait(60)
        return compile_grammar(self, *args, **kwargs)

    monkeypatch.setattr(Grammars, "json_schema", slowly)
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    waiting = [threading.Thread(target=live.chat, kwargs={"response_format": wanted}) for _ in range(WORKERS + 1)]
    for thread in waiting:
        thread.start()
    try:
        assert all(compiling.acquire(timeout=30) for _ in range(COMPILERS))
        assert live.chat(stream=True, messages=user("x" * 10_000)).status == 200
    finally:
        go_on.set()
        for thread in waiting:
            thread.join(60)


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


def test_the_work_for_heavy_requests_is_done_one_after_another(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only their parsing: their scores, grammars and replies too, though a small body asked for much."""
    live, threads = start(), {}
    dumped = whole.dump

    def dump_on(value: Any) -> Any:
        threads[len(threads)] = threading.current_thread().name
        return dumped(value)

    monkeypatch.setattr(whole, "dump", dump_on)
    scored = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
    assert live.post("/generate", {"input_ids": IDS, "top_logprobs_num": 5, **scored}).status == 200
    assert live.post("/generate", {"input_ids": IDS[:9], "top_logprobs_num": 5, **scored}).status == 200
    assert live.post("/v1/responses", {"input": "x", "unknown": "x" * LARGE_BYTES}).status == 200
    assert [name.partition("_")[0] for name in threads.values()] == ["large", "prepare", "large"]


def test_the_event_loop_runs_between_the_parts_of_a_body() -> None:
    """Also if the next part is there at once."""
    order: list[str] = []
    parts = [b"a", b"b", b"c", b""]

    class Content:
        async def readany(self) -> bytes:
            order.append("part")
            return parts.pop(0)

    class App:
        _client_max_size = 100

        def __getitem__(self, key: object) -> App:
            return self

        async def run_sized(self, size: int, work: Any) -> Any:
            return work()

    class Request:
        app = App()
        content = Content()

    request: Any = Request()
    assert run_beside(order, body_module._receive(request, BodyLease(BodyRoom(100)))) == b"abc"
    assert "part part" not in " ".join(order)
