"""Start, loading, failing, draining and stopping; what systemd is told."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import LiveServer, Start, start_server, user

from glm53.engine.protocol import Engine, Progress
from glm53.engine.scripted import ScriptedEngine
from glm53.errors import CheckpointError, ConfigError, EngineError, Glm53Error, ResourceError
from glm53.server import lifecycle
from glm53.server.app import ServerOptions, create_app
from glm53.server.lifecycle import Server
from glm53.server.notify import Notifier
from glm53.tokenizer import Tokenizer

SLOW = {"pieces": ["</think>", *["x"] * 6000], "end": "user", "rate": 50}  # longer than anything here waits


class Loader:
    """A loader that waits until the test lets it go on."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        path.write_text('{"pieces": ["</think>", "ok"], "end": "user"}\n')
        self._make = lambda: ScriptedEngine(path, tokenizer)
        self.release = threading.Event()
        self.progress: Progress | None = None
        self.error: Exception | None = None
        self.interrupted = False

    def __call__(self, progress: Progress) -> Engine:
        self.progress = progress
        try:
            while not self.release.wait(0.01):
                progress("reading experts", 0.25)
        except Glm53Error:
            self.interrupted = True
            raise
        if self.error:
            raise self.error
        return self._make()


@pytest.fixture
def loading(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[tuple[LiveServer, Loader]]:
    loader = Loader(tmp_path / "s.jsonl", tokenizer)
    live = start_server(ServerOptions(port=0), loader, tokenizer)
    yield live, loader
    loader.release.set()
    live.stop()


def test_b75_answers_503_while_loading(loading: tuple[LiveServer, Loader]) -> None:
    live, loader = loading
    live.until(lambda s: s["loading"]["progress"] == 0.25)
    health = live.get("/health")
    assert (health.status, health.json["status"]) == (503, "loading")
    assert health.json["stage"] == "reading experts"
    for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/v1/responses"):
        reply = live.post(path, {"messages": user("x"), "prompt": "x", "text": "x", "input": "x"})
        assert (reply.status, reply.error["code"]) == (503, "loading"), path
        assert int(reply.headers["retry-after"]) > 0
    assert live.get("/v1/models").status == 503
    loader.release.set()
    live.until(lambda s: s["status"] == "ready")
    assert live.get("/health").json == {"status": "ready"}
    assert live.chat().message["content"] == "ok"


def test_a_loader_that_fails_ends_the_server(tmp_path: Path, tokenizer: Tokenizer) -> None:
    loader = Loader(tmp_path / "s.jsonl", tokenizer)
    loader.error = CheckpointError("model.safetensors: truncated")
    loader.release.set()
    live = start_server(ServerOptions(port=0), loader, tokenizer)
    live.thread.join(60)
    assert not live.thread.is_alive()
    assert live.failure == [loader.error]


def test_stop_while_loading_interrupts_the_loader(loading: tuple[LiveServer, Loader]) -> None:
    live, loader = loading
    live.until(lambda s: s["loading"]["progress"] == 0.25)
    live.stop()
    assert isinstance(live.failure[0], EngineError)
    end = time.monotonic() + 30
    while not loader.interrupted and time.monotonic() < end:
        time.sleep(0.01)
    assert loader.interrupted


def test_port_in_use_is_one_clear_line(start: Start, tokenizer: Tokenizer) -> None:
    taken = start().port
    second = start_server(ServerOptions(port=taken), lambda p: pytest.fail("must not load"), tokenizer)
    second.thread.join(60)
    error = second.failure[0]
    assert isinstance(error, ResourceError)
    assert f"port {taken}" in str(error)
    assert "in use" in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_a_config_error(
    tokenizer: Tokenizer, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo

    def offline(name: Any, *rest: Any, **more: Any) -> Any:  # a name server that does not answer takes half a minute
        if name == "no.such.host.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(name, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", offline)
    live = start_server(ServerOptions(host=host, port=0), lambda p: pytest.fail("must not load"), tokenizer)
    live.thread.join(60)
    assert isinstance(live.failure[0], ConfigError)
    assert host in str(live.failure[0])


def test_missing_chat_template_is_a_config_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jinja"):
        create_app(ServerOptions(chat_template="/nowhere.jinja"), tokenizer)


def _stream_in_background(live: LiveServer) -> tuple[threading.Thread, list[Any]]:
    out: list[Any] = []
    thread = threading.Thread(target=lambda: out.append(live.chat_stream()))
    thread.start()
    live.until(lambda s: any(r["completion_tokens"] > 3 for r in s["requests"]))
    return thread, out


def test_b75_drain_lets_a_stream_finish_and_refuses_new_ones(start: Start) -> None:
    live = start({"pieces": ["</think>", *["x"] * 200], "end": "user", "rate": 200}, drain_s=60)
    go = live.hold(after=10)
    thread, out = _stream_in_background(live)
    live.call(live.server.request_stop)
    live.until(lambda s: s["status"] == "draining")
    refused = live.chat()
    assert (refused.status, refused.error["code"]) == (503, "shutting_down")
    assert "retry-after" in refused.headers
    assert live.get("/health").status == 503
    go.set()
    thread.join(60)
    live.thread.join(60)
    assert not live.thread.is_alive()
    assert not live.failure
    assert out[0].choice()["content"] == "x" * 200
    assert out[0].choice()["finish_reason"] == "stop"


def test_b75_after_the_drain_time_the_stream_ends_with_an_error_event(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glm53.server.lifecycle.GOODBYE_S", 100.0)  # the most it waits, not what it waits
    live = start(SLOW, drain_s=0.3)
    thread, out = _stream_in_background(live)
    started = time.monotonic()
    live.call(live.server.request_stop)
    thread.join(60)
    live.thread.join(60)
    assert not live.thread.is_alive()
    assert time.monotonic() - started < 60
    assert not live.failure
    assert out[0].done
    assert out[0].events[-1]["error"]["code"] == "shutting_down"


def test_b75_a_second_signal_ends_at_once(start: Start) -> None:
    live = start(SLOW, drain_s=100)
    thread, out = _stream_in_background(live)
    live.call(live.server.request_stop)
    live.until(lambda s: s["status"] == "draining")
    live.call(live.server.request_stop)
    thread.join(60)
    live.thread.join(60)
    assert not live.thread.is_alive()
    assert out[0].events[-1]["error"]["code"] == "shutting_down"


def test_drain_without_requests_is_immediate(start: Start) -> None:
    live = start(drain_s=100)
    live.stop(60)


def test_notify_speaks_the_protocol_of_systemd(short_path: Path) -> None:
    path = str(short_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(path)
        s.settimeout(30)
        notifier = Notifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "30000000"})
        assert notifier.watchdog_s == 30
        notifier.loading("experts", 0.5)
        assert s.recv(999) == b"STATUS=loading: experts 50%\nEXTEND_TIMEOUT_USEC=120000000"
        notifier.ready("serving")
        assert s.recv(999) == b"READY=1\nSTATUS=serving"
        notifier.alive()
        assert s.recv(999) == b"WATCHDOG=1"
        notifier.stopping("draining", 40)
        assert s.recv(999) == b"STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=40000000"


def test_notify_is_silent_without_a_socket_and_for_another_process() -> None:
    Notifier({}).ready("x")
    Notifier({"NOTIFY_SOCKET": "/nowhere/socket"}).ready("x")
    assert Notifier({"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}).watchdog_s == 0


def test_the_watchdog_is_fed_by_the_engines_heartbeat(tmp_path: Path, short_path: Path, tokenizer: Tokenizer) -> None:
    """A live engine: beats arrive. A stuck one: they stop although the event loop runs."""
    path = str(short_path / "notify")
    script = tmp_path / "s.jsonl"
    script.write_text('{"pieces": ["ok"], "end": "user"}\n')
    engine = ScriptedEngine(script, tokenizer)
    age, told = [0.0], []

    def stats() -> dict[str, float]:
        told.append(age[0])
        return {"running": 0, "waiting": 0, "heartbeat_age_s": told[-1]}

    engine.stats = stats  # type: ignore[method-assign]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(path)
        s.settimeout(30)
        notifier = Notifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "400000"})
        live = start_server(ServerOptions(port=0), lambda p: engine, tokenizer, notifier)
        try:
            while s.recv(999) != b"WATCHDOG=1":
                pass
            age[0] = 9.0
            end = time.monotonic() + 30
            while told.count(9.0) < 2 and time.monotonic() < end:  # the first may be the second look of an old beat
                time.sleep(0.01)
            assert told.count(9.0) >= 2
            s.setblocking(False)
            with pytest.raises(BlockingIOError):
                while s.recv(999):  # beats from before it stuck
                    pass
            s.settimeout(0.5)
            with pytest.raises(TimeoutError):
                s.recv(999)
        finally:
            live.stop()


def test_the_server_class_needs_no_running_loop_to_be_made(tokenizer: Tokenizer) -> None:
    assert Server(create_app(ServerOptions(), tokenizer), lambda p: pytest.fail("not called")).url == ""


@pytest.mark.parametrize(
    ("live", "longest", "collects"), [(False, 600.0, True), (True, 600.0, False), (True, 0.0, True)]
)
def test_old_objects_are_collected_between_requests(
    monkeypatch: pytest.MonkeyPatch, live: bool, longest: float, collects: bool
) -> None:
    """Python's own time for it would be while a long prompt's scores are made: 600 ms in which nobody else runs."""
    before, collected = gc.get_threshold(), []
    monkeypatch.setattr(lifecycle, "LOOK_S", 0.0)
    monkeypatch.setattr(lifecycle, "COLLECT_S", longest)
    monkeypatch.setattr(gc, "collect", lambda: collected.append(gc.get_threshold()[2]))

    class State:
        pass

    async def some_rounds() -> None:
        state: Any = State()
        state.live = {"a": None} if live else {}
        task = asyncio.create_task(lifecycle.collect_when_idle(state))
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(some_rounds())
    assert gc.get_threshold() == before
    assert bool(collected) == collects
    assert set(collected) <= {lifecycle.NEVER}
