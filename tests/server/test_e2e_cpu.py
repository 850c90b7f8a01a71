"""The whole stack: HTTP in front of the CPU engine. What each parameter of a request changes is in `engine_cases`
and `engine_chat_cases`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_cases import *  # noqa: F403
from engine_cases import golden_dir
from engine_chat_cases import *  # noqa: F403
from live_server import LiveServer, start_server

from glm53.server.app import ServerOptions
from glm53.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    pytest.importorskip("transformers")
    from glm53.engine.cpu import CpuEngine

    made: list[Any] = []

    def load(progress: Any) -> Any:
        made.append(CpuEngine.load(golden_dir(), progress=progress))
        return made[0]

    server = start_server(ServerOptions(port=0), load, Tokenizer(golden_dir()))
    server.until(lambda s: s["status"] == "ready", 180)
    server.engine = made.pop()
    yield server
    server.engine = None
    server.stop(30)


@pytest.fixture(scope="module")
def forget(live: LiveServer) -> Callable[[], None]:
    engine: Any = live.engine

    def clear() -> None:
        engine._scheduler._prefix.clear()

    return clear


@pytest.fixture(scope="module")
def reuse_rounding() -> float:
    """A prompt is cut elsewhere where its beginning is found."""
    return 1e-3


@pytest.fixture(scope="module")
def rounding() -> float:
    """float32, but for the native experts' int16 activations."""
    return 1e-3


def test_every_pick_was_served_by_the_native_experts(live: LiveServer, greedy: list[int]) -> None:
    """Once no step is under way: a stream that an earlier test left may still be computing its last one."""
    live.until(lambda s: s["engine"]["routed_picks_served"] == s["engine"]["routed_picks_expected"] > 0)
