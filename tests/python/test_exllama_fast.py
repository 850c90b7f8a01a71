"""Fast mode end to end on the host device: the real native split, lane and runtime under the stand-in exllamav3."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exllama_helpers import collect, make_settings, use_fakes
from tiny_checkpoint import TINY

from glm53 import _core
from glm53.engine.exllama import ExllamaEngine, lane
from glm53.engine.exllama.loader import LoadOptions, load
from glm53.engine.protocol import GenerationRequest, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
CHEAP_CPU = {"ct_a": 0.001, "ct_b": 0.001, "ct_t": 10.0, "ct_g": 0.0}
"""Constants with which every miss that may go to the CPU does."""
SLOTS = LoadOptions(max_slots=6)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    return use_fakes(monkeypatch)


@pytest.fixture
def engines(cuda: Any, tmp_path: Path) -> Iterator[Any]:
    made: list[ExllamaEngine] = []

    def make(options: LoadOptions = SLOTS, **changes: Any) -> ExllamaEngine:
        settings = make_settings(tmp_path, **{"mode": "fast", "ct_threads": 2, **CHEAP_CPU, **changes})
        made.append(ExllamaEngine.load(settings, options=options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def ask(engine: ExllamaEngine, prompts: list[list[int]], steps: int) -> list[tuple[list[int], Any]]:
    """Answers of requests that the engine takes all at once: their steps are the same steps."""
    admit, all_there = engine._admit, threading.Event()

    async def run() -> list[tuple[list[int], Any]]:
        requests = [GenerationRequest(str(i), p, steps, sampling=GREEDY) for i, p in enumerate(prompts)]
        streams = [engine.submit(r) for r in requests]
        all_there.set()
        engine._wake.set()
        return list(await asyncio.wait_for(asyncio.gather(*map(collect, streams)), 60))

    engine._admit = lambda: admit() if all_there.is_set() else None  # type: ignore[method-assign]
    try:
        return asyncio.run(run())
    finally:
        engine._admit = admit  # type: ignore[method-assign]


def stock_model() -> Any:
    import exllamav3

    model = exllamav3.Model.from_config(exllamav3.Config.from_directory(str(TINY)))
    model.load()
    return model


def sums(model: Any, ids: list[int]) -> list[torch.Tensor]:
    """Each MoE layer's sum for a row an id, all given the same rows."""
    rows = torch.sin(torch.tensor(ids).view(-1, 1, 1) * 0.1 + torch.arange(256)).half()
    return [module.forward(rows, {}).clone() for module in model.moe]


def split_sums(loaded: Any, ids: list[int]) -> list[torch.Tensor]:
    """The same as a decode step of that many streams."""
    with loaded.passes.bracket(len(ids), True):
        return sums(loaded.model, ids)


def assert_close(ours: list[torch.Tensor], reference: list[torch.Tensor]) -> None:
    """Nothing but the order of additions in float32 may differ."""
    for a, b in zip(ours, reference, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-5 * float(b.abs().max()))


@pytest.fixture
def loaded(cuda: Any, tmp_path: Path) -> Iterator[Any]:
    settings = make_settings(tmp_path, mode="fast", ct_threads=2, **CHEAP_CPU)
    made = load(settings, lambda stage, fraction: None, LoadOptions(max_slots=6, stage_from=64))
    yield made
    made.close()


@pytest.mark.parametrize("streams", [1, 2, 4, 8])
def test_a_split_step_gives_the_exact_steps_sums(loaded: Any, streams: int) -> None:
    stock = stock_model()
    for step in range(30):
        ids = [7 * step + 11 * s for s in range(streams)]
        assert_close(split_sums(loaded, ids), sums(stock, ids))
        assert loaded.passes.fault() is None
    stats = loaded.runtime.stats(0)
    assert stats["cpu_picks"] > 0
    assert stats["cpu_picks"] + stats["admissions"] == stats["misses"]
    assert stats["cpu_bytes"] == stats["cpu_picks"] * sum(loaded.store.layout.part_bytes)
    assert 0 < stats["cpu_steps"] <= stats["steps"]
    assert loaded.runtime.verify(0) == []


def test_without_what_the_lane_adds_the_sums_are_others(loaded: Any) -> None:
    for module in loaded.model.moe:
        del module.forward
    with pytest.raises(AssertionError):
        assert_close(split_sums(loaded, [3]), sums(stock_model(), [3]))


def test_prompts_of_any_length_are_bit_for_bit_exact_and_use_no_lane(loaded: Any) -> None:
    stock = stock_model()
    for n in (1, 5, 8, 9, 40, 100):
        ids = torch.arange(30, 30 + n).view(1, n)
        assert torch.equal(loaded.model.forward(ids), stock.forward(ids)), n
    loaded.model.prefill(torch.tensor([[1, 2, 3]]), {"cache": loaded.cache})
    stats = loaded.runtime.stats(0)
    assert stats["misses"] > 0
    assert stats["cpu_steps"] == 0


def test_the_engine_answers_and_says_what_each_lane_did(engines: Any) -> None:
    engine = engines()
    assert engine.info.mode == "fast"
    answers = ask(engine, [[5], [7, 8, 9], list(range(30, 60)), [4, 4]], 12)
    assert [(len(ids), finish.reason) for ids, finish in answers] == [(12, "length")] * 4
    deadline = time.monotonic() + 20
    while not engine.stats()["lanes"]["cpu"] and time.monotonic() < deadline:
        engine._snapshot_s = 0.0
        engine._wake.set()
        time.sleep(0.02)
    stats = engine.stats()
    cache, lanes, split = stats["expert_cache"], stats["lanes"], stats["split"]
    assert lanes["cpu"] == cache["cpu_picks"] > 0
    assert all(n >= 0 for n in lanes.values())
    assert sum(lanes.values()) == cache["hits"] + cache["misses"] + cache["prompt_distinct"]
    assert (split["on"], split["rebuilds"], split["workers"]) == (True, 0, 2)
    assert (split["a_ms"], split["b_ms"], split["t_ms"], split["g_ms"]) == (0.001, 0.001, 10.0, 0.0)
    assert split["jobs"] > 0
    assert stats["memory"]["scale_bytes"] == 4 * 16 * 2 * (3 * 256 + 3 * 128)
    assert engine.verify() == []


def test_where_the_cpu_is_dear_nothing_goes_there(engines: Any) -> None:
    engine = engines(ct_a=100.0, ct_b=100.0, ct_t=0.001)
    ask(engine, [[5], [6]], 8)
    assert engine._loaded.runtime.stats(0)["cpu_picks"] == 0
    assert engine._loaded.runtime.stats(0)["misses"] > 0


def unserve(engine: ExllamaEngine, cuda: Any, limit_ms: int = 150) -> None:
    """From now on jobs go where nobody computes them."""
    runtime, tier = engine._loaded.runtime, engine._loaded.tier
    arena = _core.HostArena(_core.lane_block_bytes(256), "nobody", cuda.device)
    runtime.detach_lane(16)
    runtime.attach_lane(arena, 256, tier.costs.split(), limit_ms)


def recovered(engine: ExllamaEngine, rebuilds: int) -> None:
    """Wait until the engine has its next lane, or has given up."""
    deadline = time.monotonic() + 20
    runtime, tier = engine._loaded.runtime, engine._loaded.tier
    while engine.info.mode == "fast" and not (tier.stats()["rebuilds"] == rebuilds and runtime.has_lane):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stalled_lane_ends_the_steps_streams_by_name_and_the_next_ones_are_right(engines: Any, cuda: Any) -> None:
    engine = engines()
    ask(engine, [[9, 10]], 6)
    unserve(engine, cuda)
    start = time.monotonic()
    for ids, finish in ask(engine, [[5], [6, 7]], 200):
        assert finish.reason == "error"
        assert finish.error.startswith("the CPU lane stalled: ")
        assert ids == []
    assert time.monotonic() - start < 20
    recovered(engine, 1)
    assert_close(split_sums(engine._loaded, [9, 10]), sums(stock_model(), [9, 10]))
    [(ids, finish)] = ask(engine, [[9, 10]], 6)
    assert (len(ids), finish.reason) == (6, "length")
    stats = engine.stats()
    assert (stats["failed"], stats["running"], stats["dead"]) == (2, 0, False)
    assert (stats["split"]["on"], stats["split"]["rebuilds"]) == (True, 1)
    assert engine.info.mode == "fast"


def test_a_lane_that_keeps_failing_leaves_exact_mode(engines: Any, cuda: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = engines()
    for failure in range(lane.REBUILDS + 1):
        unserve(engine, cuda, 50)
        assert ask(engine, [[5]], 50)[0][1].reason == "error"
        recovered(engine, failure + 1)
    assert engine.info.mode == "exact"
    assert engine.stats()["split"]["on"] is False
    assert "decoding goes on without the CPU lane, as in exact mode" in caplog.text
    before = engine._loaded.runtime.stats(0)["cpu_picks"]
    [(ids, finish)] = ask(engine, [[9, 10]], 6)
    assert (len(ids), finish.reason) == (6, "length")
    assert engine._loaded.runtime.stats(0)["cpu_picks"] == before


def test_failures_that_lie_far_apart_do_not_add_up(engines: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines()
    now = [1000.0]
    monkeypatch.setattr(lane, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for failure in range(lane.REBUILDS + 2):
        now[0] += lane.WINDOW_S / (lane.REBUILDS - 0.5)
        unserve(engine, cuda, 50)
        assert ask(engine, [[5]], 50)[0][1].reason == "error"
        recovered(engine, failure + 1)
    assert engine.info.mode == "fast"
    assert engine.stats()["split"]["rebuilds"] == lane.REBUILDS + 2


def test_exact_mode_has_no_lane_and_no_hook_for_it(engines: Any) -> None:
    engine = engines(mode="exact")
    assert engine.info.mode == "exact"
    assert "split" not in engine.stats()
    assert not any("forward" in vars(m) for m in engine._loaded.model.moe)
    assert engine._loaded.model.moe[0].routing_fn.__wrapped__ is not None
    ask(engine, [[5]], 4)
    assert engine._loaded.runtime.stats(0)["cpu_picks"] == 0


def test_closing_takes_the_hooks_and_the_workers_away(engines: Any, cuda: Any) -> None:
    engine = engines()
    model, tier = engine._loaded.model, engine._loaded.tier
    engine.close()
    assert not any("forward" in vars(m) for m in model.moe)
    assert not {"forward", "prefill"} & set(vars(model))
    assert tier.stats()["jobs"] == 0
    tier.close(0)  # again
