"""The whole stack on the GPU engine: HTTP, the server, exllamav3. The tests are the CPU engine's, in `engine_cases`
and `engine_chat_cases`.

Mode exact, the bundled kind of checkpoint, far fewer slots than experts; under a minute with compiled kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_cases import *  # noqa: F403
from engine_cases import golden_dir
from engine_chat_cases import *  # noqa: F403
from generator_fixtures import forget, reuse_rounding  # noqa: F401
from live_server import LiveServer, start_server

from glm53.config import Settings
from glm53.server.app import ServerOptions
from glm53.tokenizer import Tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
SLOTS = 12


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    from glm53.engine.exllama import ExllamaEngine
    from glm53.engine.exllama.loader import LoadOptions

    state = tmp_path_factory.mktemp("state")
    settings = Settings(model_dir=golden_dir(), mode="exact", state_dir=state, cache_tokens=8192)

    made: list[Any] = []

    def load(progress: Any) -> Any:
        made.append(ExllamaEngine.load(settings, progress, LoadOptions(max_slots=SLOTS)))
        return made[0]

    server = start_server(ServerOptions(port=0), load, Tokenizer(golden_dir()))
    server.until(lambda s: s["status"] == "ready", 110)
    server.engine = made.pop()
    yield server
    server.engine = None
    server.stop(30)


@pytest.fixture(scope="module")
def rounding() -> float:
    """exllamav3 decodes one or two streams with int8 activations and reads prompts with float16: about 1 % of logits
    whose standard deviation is 4, more where a near tie sends a token to other experts."""
    return 0.2


def test_the_expert_cache_was_at_work_behind_the_server(live: LiveServer, greedy: list[int]) -> None:
    def seen(stats: dict[str, Any]) -> bool:
        cache = stats["engine"]["expert_cache"]
        return cache.get("hits", 0) > 0 and cache.get("misses", 0) > 0

    engine = live.until(seen, 10)["engine"]
    assert sum(engine["lanes"].values()) > 0
    assert engine["memory"]["pinned_expert_bytes"] > engine["memory"]["slot_bytes"] > 0
    assert live.get("/server_info").json["mode"] == "exact"
