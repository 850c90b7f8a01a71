"""The GPU engine's own logic, end to end on the host device: equal to the unpatched model whatever the cache does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exllama_helpers import TINY, make_settings, use_fakes

from glm53.engine.exllama import ExllamaEngine
from glm53.engine.exllama.loader import LoadOptions, slot_count
from glm53.engine.protocol import GenerationRequest, SamplingParams
from glm53.errors import DeviceError, EngineError, PromptTooLong, RequestError

PROMPTS = ([5], [7, 8, 9, 10, 11, 12, 13], list(range(30, 230)))
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    return use_fakes(monkeypatch)


def stock_answer(prompt: list[int], steps: int) -> list[int]:
    """Tokens of the unpatched stand-in."""
    import exllamav3

    config = exllamav3.Config.from_directory(str(TINY))
    model = exllamav3.Model.from_config(config)
    model.load()
    ids = list(prompt)
    for _ in range(steps):
        ids.append(int(model.forward(torch.tensor([ids[-1:]]))[0, -1].float().argmax()))
    return ids[len(prompt) :]


async def collect(stream: Any) -> tuple[list[int], Any]:
    ids, finish = [], None
    async for delta in stream:
        ids += [t.id for t in delta.tokens]
        finish = delta.finish
    return ids, finish


async def answers(engine: ExllamaEngine, prompts: Any, steps: int, **extra: Any) -> list[tuple[list[int], Any]]:
    requests = [GenerationRequest(str(i), p, steps, sampling=GREEDY, **extra) for i, p in enumerate(prompts)]
    return list(await asyncio.gather(*(collect(engine.submit(r)) for r in requests)))


@pytest.fixture
def engines(cuda: Any, tmp_path: Path) -> Iterator[Any]:
    made: list[ExllamaEngine] = []

    def make(options: LoadOptions | None = None, **changes: Any) -> ExllamaEngine:
        made.append(ExllamaEngine.load(make_settings(tmp_path, **changes), options=options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("stage_from", [None, 9, 100_000], ids=["default", "always staged", "never staged"])
def test_answers_equal_the_unpatched_model_with_few_slots(engines: Any, stage_from: int | None) -> None:
    engine = engines(LoadOptions(max_slots=5, stage_from=stage_from))
    for prompt, (ids, finish) in zip(PROMPTS, asyncio.run(answers(engine, PROMPTS, 12)), strict=True):
        assert ids == stock_answer(prompt, 12)
        assert finish.reason == "length"
    assert engine.verify() == []


def test_slots_are_lent_to_a_long_prompt_and_refilled(engines: Any, cuda: Any) -> None:
    engine = engines(LoadOptions(max_slots=40, stage_from=64), ec_reserve_gb=0.0, ec_elastic_gb=0.001)
    asyncio.run(answers(engine, PROMPTS[:2], 30))
    cuda.free = 0  # nothing is left beside the slots
    ((ids, _),) = asyncio.run(answers(engine, PROMPTS[2:], 30))
    assert ids == stock_answer(PROMPTS[2], 30)
    assert engine._loaded.passes.counts["lendings"] >= 1
    assert engine.verify() == []
    stats = engine._loaded.runtime.stats(0)
    assert stats["lent_slots"] == 0
    assert stats["refills"] > 0


def test_a_smaller_kv_cache_leaves_more_slots_and_less_vram_fails_clearly(engines: Any, cuda: Any) -> None:
    cuda.free = 2 * 10**5
    with pytest.raises(DeviceError, match="too little VRAM for the expert cache"):
        engines(ec_reserve_gb=0.0002)
    assert slot_count(1000, reserve=100, slot_bytes=100, entries=50, top_k=4, limit=None) == 9
    assert slot_count(1000, reserve=100, slot_bytes=100, entries=50, top_k=4, limit=5) == 5
    assert slot_count(10**6, reserve=100, slot_bytes=100, entries=50, top_k=4, limit=None) == 50


def test_stop_ids_logprobs_and_cancel(engines: Any) -> None:
    engine = engines(LoadOptions(max_slots=8))
    expected = stock_answer([3], 6)

    async def run() -> None:
        stop = frozenset({expected[3]})
        ids, finish = (await answers(engine, [[3]], 6, stop_ids=stop, top_logprobs=2))[0]
        assert ids == expected[: expected.index(expected[3])]
        assert (finish.reason, finish.stop_id) == ("stop", expected[3])
        request = GenerationRequest("l", [3], 1, sampling=GREEDY, top_logprobs=3)
        async for delta in engine.submit(request):
            for token in delta.tokens:
                assert token.top[0][1] == token.logprob
                assert len(token.top) == 3
        stream = engine.submit(GenerationRequest("c", [3], 4000, sampling=GREEDY))
        async for delta in stream:
            stream.cancel()
            if delta.finish:
                assert delta.finish.reason == "cancelled"

    asyncio.run(run())
    assert engine.stats()["running"] == 0


def test_score_is_the_log_softmax_of_the_model(engines: Any) -> None:
    engine = engines(LoadOptions(max_slots=8))
    ids = list(range(10, 30))
    scores = asyncio.run(engine.score(ids, 2))
    assert [s.id for s in scores] == ids
    assert scores[0].logprob is None
    import exllamav3

    model = exllamav3.Model.from_config(exllamav3.Config.from_directory(str(TINY)))
    model.load()
    wanted = model.forward(torch.tensor([ids]))[0].float().log_softmax(-1)
    for at in range(1, len(ids)):
        assert scores[at].logprob == pytest.approx(float(wanted[at - 1, ids[at]]), abs=1e-4)


def test_what_was_learned_survives_a_restart(engines: Any, tmp_path: Path) -> None:
    first = engines(LoadOptions(max_slots=10))
    asyncio.run(answers(first, [[3]], 40))
    first.close()
    second = engines(LoadOptions(max_slots=10))
    assert second._loaded.runtime.stats(0)["refills"] == 10
    assert second.verify() == []


def test_bad_requests_are_refused_and_a_closed_engine_says_so(engines: Any) -> None:
    engine = engines(LoadOptions(max_slots=8), cache_tokens=256)

    async def run() -> None:
        with pytest.raises(PromptTooLong):
            engine.submit(GenerationRequest("a", [1] * 256, 1))
        with pytest.raises(RequestError, match="empty"):
            engine.submit(GenerationRequest("b", [], 1))
        with pytest.raises(RequestError, match="outside the vocabulary"):
            engine.submit(GenerationRequest("c", [10**6], 1))
        engine.close()
        with pytest.raises(EngineError, match="shutting down"):
            engine.submit(GenerationRequest("d", [1], 1))

    asyncio.run(run())


def test_an_error_of_the_worker_ends_all_streams_with_one_line(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines(LoadOptions(max_slots=8))

    def broken(*_: Any) -> Any:
        raise RuntimeError("CUDA error:\n an illegal access")

    async def run() -> None:
        monkeypatch.setattr(engine._generator, "iterate", broken)
        _, finish = (await answers(engine, [[3]], 4))[0]
        assert finish.reason == "error"
        assert finish.error == "RuntimeError: CUDA error: an illegal access"
        with pytest.raises(EngineError, match="illegal access"):
            engine.submit(GenerationRequest("d", [1], 1))

    asyncio.run(run())


def test_a_failed_load_leaves_nothing_patched(engines: Any) -> None:
    import exllamav3

    exllamav3.Model.fail_load = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    try:
        with pytest.raises(DeviceError, match="too little VRAM for the model"):
            engines()
    finally:
        exllamav3.Model.fail_load = None
    engine = engines(LoadOptions(max_slots=8))
    assert asyncio.run(answers(engine, [[3]], 3))[0][0] == stock_answer([3], 3)
