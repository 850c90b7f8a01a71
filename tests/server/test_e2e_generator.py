"""The whole stack on exllamav3's own generator without a GPU: what its jobs, samplers, filters and page table do with
our requests. Skipped unless GLM53_EXLLAMAV3 names the unpacked wheel, see `real_generator`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from engine_cases import *  # noqa: F403
from engine_cases import GENERATE, PROMPT, golden_dir
from engine_chat_cases import *  # noqa: F403
from generator_fixtures import exllamav3_folder, forget, reuse_rounding  # noqa: F401
from live_server import LiveServer, start_server

from glm53.config import Settings
from glm53.engine.exllama import jobs
from glm53.server.app import ServerOptions
from glm53.tokenizer import Tokenizer

FOLDER = exllamav3_folder()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    pytest.importorskip("transformers")
    from cpu_engine_helpers import cpu_model
    from real_generator import import_generator, make_engine

    state = tmp_path_factory.mktemp("state")
    settings = Settings(model_dir=golden_dir(), mode="exact", state_dir=state, cache_tokens=8192)
    with pytest.MonkeyPatch.context() as patch:
        exllamav3 = import_generator(FOLDER, patch)
        model = cpu_model(golden_dir())

        made: list[Any] = []

        def load(progress: Any) -> Any:
            made.append(make_engine(exllamav3, model, settings, 2176))
            return made[0]

        server = start_server(ServerOptions(port=0), load, Tokenizer(golden_dir()))
        server.until(lambda s: s["status"] == "ready", 60)
        server.engine = made.pop()
        yield server
        server.engine = None
        server.stop(30)
        gc.unfreeze()  # the server froze what it had loaded, and native objects must go before their module


@pytest.fixture(scope="module")
def rounding() -> float:
    """Logits are rounded to float16."""
    return 0.02


def test_an_answer_that_takes_its_pages_in_rounds_is_the_one_that_takes_them_at_once(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is queued again keeps its random numbers, its penalties and what it told of its prompt."""
    params = {"temperature": 0.8, "seed": 3, "max_new_tokens": 1700, "ignore_eos": True, "presence_penalty": 0.5}
    body = {"text": PROMPT * 60, "sampling_params": params, "return_logprob": True}
    replies = []
    for tokens in (4096, 16):
        monkeypatch.setattr(jobs, "ROUND_TOKENS", tokens)
        replies.append(live.request("POST", GENERATE, body, timeout=250).json)
    at_once, in_rounds = replies
    assert at_once["output_ids"] == in_rounds["output_ids"]
    meta = in_rounds["meta_info"]
    assert (meta["completion_tokens"], len(meta["output_token_logprobs"])) == (1700, 1700)
    assert meta["cached_tokens"] == 256
    assert meta["prompt_tokens"] == at_once["meta_info"]["prompt_tokens"]


def test_answers_come_from_steps_that_were_queued_ahead(live: LiveServer) -> None:
    """So do those of the other tests here, but for grammars, penalties and log-probabilities."""
    engine: Any = live.engine
    before = engine.stats()["steps_ahead"]
    params = {"temperature": 0.7, "seed": 5, "max_new_tokens": 40, "ignore_eos": True}
    live.request("POST", GENERATE, {"text": PROMPT, "sampling_params": params})
    assert engine.stats()["steps_ahead"] - before == 38
    live.request("POST", GENERATE, {"text": PROMPT, "sampling_params": {**params, "presence_penalty": 0.5}})
    live.request("POST", GENERATE, {"text": PROMPT, "sampling_params": params, "return_logprob": True})
    assert engine.stats()["steps_ahead"] - before == 38
