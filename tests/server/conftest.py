"""The real application with answers from a script."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from live_server import (
    HELLO,
    MODEL_DIR,
    LiveServer,
    Reply,
    Streamed,
    check_chat_stream,
    read_stream,
    start_server,
    user,
)

from glm53.engine.scripted import ScriptedEngine
from glm53.server.app import ServerOptions
from glm53.tokenizer import Tokenizer

T = TypeVar("T")

pytest.register_assert_rewrite("engine_cases", "engine_chat_cases", "request_helpers")

__all__ = [
    "CHAT",
    "JSON",
    "ROUTES",
    "LiveServer",
    "Reply",
    "Start",
    "Streamed",
    "check_chat_stream",
    "read_stream",
    "refused",
    "run_beside",
    "start_server",
    "user",
]


CHAT = "/v1/chat/completions"
ROUTES = (CHAT, "/v1/completions", "/generate", "/tokenize", "/detokenize")
JSON = {"Content-Type": "application/json"}


def refused(reply: Reply, status: int = 400) -> dict[str, Any]:
    """The error of a reply that must be one."""
    assert reply.status == status, reply.data[:300]
    assert reply.headers["content-type"].startswith("application/json")
    return reply.error


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL_DIR)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder of this test for UNIX sockets, whose whole path may have 107 bytes: `tmp_path` may be longer."""
    with tempfile.TemporaryDirectory(prefix="glm53-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


Start = Callable[..., LiveServer]


@pytest.fixture
def start(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[Start]:
    """`start([answer, ...], max_streams=1, context=131072, max_queue=2, ...)` -> a ready server with that script."""
    servers: list[LiveServer] = []

    def make(answers: Any = None, *, max_streams: int = 4, context: int = 131072, **options: Any) -> LiveServer:
        given = [HELLO] if answers is None else answers if isinstance(answers, list) else [answers]
        script = tmp_path / f"script{len(servers)}.jsonl"
        script.write_text("".join(json.dumps(a) + "\n" for a in given), encoding="utf-8")
        engine = ScriptedEngine(script, tokenizer, max_streams=max_streams, context=context)
        live = start_server(ServerOptions(**{"port": 0, "drain_s": 5.0, **options}), lambda p: engine, tokenizer)
        live.engine = engine
        live.key = {"x-api-key": options["api_keys"][0]} if options.get("api_keys") else {}
        servers.append(live)
        live.until(lambda s: s["status"] == "ready")
        return live

    yield make
    for live in servers:
        live.stop()


def run_beside(order: list[str], work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on an event loop whose other turns add "other" to `order`: where `work` lets others run shows."""

    async def other() -> None:
        while True:
            order.append("other")
            await asyncio.sleep(0)

    async def both() -> T:
        task = asyncio.create_task(other())
        done = await work
        task.cancel()
        return done

    return asyncio.run(both())
