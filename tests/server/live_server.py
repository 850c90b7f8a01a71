"""The real application on a real port, in a thread of the test process, and what tests ask of it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tiny_checkpoint import TINY

from glm53.engine.protocol import Engine
from glm53.engine.scripted import ScriptedEngine
from glm53.server.app import Server, ServerOptions, create_app
from glm53.server.notify import Notifier
from glm53.tokenizer import Tokenizer

MODEL_DIR = TINY
HELLO = {"pieces": ["I ", "think", "</think>", "Hello", " world", "!"], "end": "user"}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@dataclass
class Reply:
    """A whole HTTP reply."""

    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert isinstance(error["message"], str)
        assert error["message"]
        return error

    @property
    def message(self) -> dict[str, Any]:
        return self.json["choices"][0]["message"]


@dataclass
class Streamed:
    """The events of a stream with their arrival times (monotonic seconds)."""

    status: int
    headers: dict[str, str]
    events: list[Any]
    times: list[float]
    comments: list[str]
    done: bool
    raw: bytes

    def choice(self, index: int = 0) -> dict[str, Any]:
        """The message of choice `index`, put together from its deltas; plus its finish_reason."""
        out: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
        for event in self.events:
            for choice in event.get("choices", ()):
                if choice["index"] == index:
                    _add_delta(out, choice)
        return out


def _add_delta(out: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice["delta"]
    for name in ("content", "reasoning_content"):
        out[name] += delta.get(name) or ""
    for call in delta.get("tool_calls", ()):
        if call["index"] == len(out["tool_calls"]):
            out["tool_calls"].append({**call, "function": dict(call["function"])})
        else:
            out["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if choice.get("finish_reason") is not None:
        assert out["finish_reason"] is None, "two finish reasons"
        out["finish_reason"] = choice["finish_reason"]


def check_chat_stream(stream: Streamed, choices: int = 1) -> None:
    """What every chat stream must keep."""
    assert stream.status == 200
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.done
    chunks = [e for e in stream.events if "error" not in e]
    for key in ("id", "object", "created", "model"):
        assert len({c[key] for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    finished: set[int] = set()
    for index in range(choices):
        first = next(c for e in chunks for c in e["choices"] if c["index"] == index)
        assert first["delta"] == {"role": "assistant", "content": ""}
    for choice in (c for e in chunks[choices:] for c in e["choices"]):
        delta = choice["delta"]
        assert choice["index"] not in finished, "something after the finish reason"
        assert all(v not in (None, "", []) for v in delta.values())
        assert delta or choice["finish_reason"]
        if choice["finish_reason"]:
            finished.add(choice["index"])
    assert finished == set(range(choices))


@dataclass
class LiveServer:
    """A running server; `stop` ends it the way SIGTERM does."""

    server: Server
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    engine: Engine | None = None
    key: dict[str, str] = field(default_factory=dict)
    failure: list[BaseException] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def connect(self, timeout: float = 20) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def raw(self, request: bytes, timeout: float = 20) -> socket.socket:
        """A connection on which `request` has been sent."""
        s = socket.create_connection(("127.0.0.1", self.port), timeout=timeout)
        s.sendall(request)
        return s

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 20
    ) -> Reply:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {"Content-Type": "application/json"} if headers is None and data is not None else headers or {}
        connection = self.connect(timeout)
        try:
            connection.request(method, path, data, given)
            reply = connection.getresponse()
            return Reply(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())
        finally:
            connection.close()

    def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        return self.request("POST", path, body, headers)

    def chat(self, body: dict[str, Any] | None = None, **more: Any) -> Reply:
        return self.post("/v1/chat/completions", {"messages": user("hi"), **(body or {}), **more})

    def stream(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Streamed:
        connection = self.connect()
        try:
            given = {"Content-Type": "application/json", **(headers or {})}
            connection.request("POST", path, json.dumps({**body, "stream": True}).encode(), given)
            return read_stream(connection.getresponse())
        finally:
            connection.close()

    def chat_stream(self, body: dict[str, Any] | None = None, **more: Any) -> Streamed:
        return self.stream("/v1/chat/completions", {"messages": user("hi"), **(body or {}), **more})

    def stats(self) -> dict[str, Any]:
        if self.failure:
            raise RuntimeError("the server ended") from self.failure[0]
        return self.get("/stats", self.key).json

    def until(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 30) -> dict[str, Any]:
        """Poll /stats until `condition` holds; the statistics then. What must not end by itself has to last longer."""
        end = time.monotonic() + seconds
        while True:
            stats = self.stats()
            if condition(stats):
                return stats
            assert time.monotonic() < end, f"did not happen within {seconds} s: {stats}"
            time.sleep(0.01)

    def call(self, function: Callable[[], Any]) -> None:
        self.loop.call_soon_threadsafe(function)

    def hold(self, after: int = 0) -> threading.Event:
        """Make streams of the scripted engine wait before token number `after` (of those with a rate) until the event
        that is returned is set: what a test does meanwhile cannot come too late on a busy machine."""
        assert isinstance(self.engine, ScriptedEngine)
        advance, go = self.engine._advance, threading.Event()

        def gated(entry: Any, now: float) -> None:
            if entry.sent < after or go.is_set():
                advance(entry, now)
            else:
                entry.first_due_s += 0.005  # and the pace goes on from there

        self.engine._advance = gated  # type: ignore[method-assign]
        return go

    def stop(self, seconds: float = 60) -> None:
        if self.thread.is_alive():
            self.call(self.server.request_stop)
            self.thread.join(seconds)
            assert not self.thread.is_alive(), "the server did not stop"


def read_stream(reply: http.client.HTTPResponse) -> Streamed:
    headers = {k.lower(): v for k, v in reply.getheaders()}
    out = Streamed(reply.status, headers, [], [], [], False, b"")
    while line := reply.readline():
        out.raw += line
        text = line.decode().rstrip("\n")
        assert len(text.splitlines()) <= 1, "an event must stay one line for every way of splitting"
        if text.startswith(":"):
            out.comments.append(text)
        elif text == "data: [DONE]":
            out.done = True
        elif text.startswith("data: "):
            assert not out.done, "an event after [DONE]"
            out.events.append(json.loads(text[6:]))
            out.times.append(time.monotonic())
    return out


async def _life(server: Server, bound: threading.Event, failure: list[BaseException]) -> None:
    try:
        await server.bind()
        bound.set()
        await server.load()
        await server.wait_stop()
        await server.drain()
    except Exception as e:
        failure.append(e)
    finally:
        bound.set()
        await server.close()


def start_server(
    options: ServerOptions, load: Callable[..., Engine], tokenizer: Tokenizer, notifier: Notifier | None = None
) -> LiveServer:
    loop = asyncio.new_event_loop()
    bound = threading.Event()
    failure: list[BaseException] = []

    async def make() -> Server:
        return Server(create_app(options, tokenizer), load, notifier or Notifier({}))

    server = loop.run_until_complete(make())

    def work() -> None:
        loop.run_until_complete(_life(server, bound, failure))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=work, name="test-server", daemon=True)
    thread.start()
    assert bound.wait(60)
    return LiveServer(server, loop, thread, failure=failure)
