"""VRAM of the GPU engine, on the host device: how many slots there are, who borrows them, and when they are back."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exllama_helpers import PROMPTS, answers, make_settings, stock_answer, use_fakes

from glm53.engine.exllama import ExllamaEngine, passes
from glm53.engine.exllama.loader import LoadOptions, load, slot_count
from glm53.engine.exllama.passes import Upkeep
from glm53.errors import DeviceError


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    return use_fakes(monkeypatch)


@pytest.fixture
def engines(cuda: Any, tmp_path: Path) -> Iterator[Any]:
    made: list[ExllamaEngine] = []

    def make(options: LoadOptions | None = None, **changes: Any) -> ExllamaEngine:
        made.append(ExllamaEngine.load(make_settings(tmp_path, **changes), options=options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


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


@pytest.fixture
def loaded(cuda: Any, tmp_path: Path) -> Iterator[Any]:
    """A loaded model without an engine: nothing happens between the passes but what a test does."""
    made = load(make_settings(tmp_path, ec_reserve_gb=0.0), lambda stage, fraction: None, LoadOptions(max_slots=40))
    cuda.free = 0  # nothing is left beside the slots
    made.model.forward(torch.tensor([[5]]), {})
    yield made
    made.close()


def lend(loaded: Any) -> int:
    """A long prompt's borrowing; the slots that are lent then."""
    loaded.passes._make_room(10**6, 0)
    return int(loaded.runtime.stats(0)["lent_slots"])


def test_every_lending_is_taken_back_at_the_first_chance(loaded: Any) -> None:
    for _ in range(3):  # within a second of each other
        assert lend(loaded) > 0
        rounds = 0
        while loaded.passes.between(prompts_left=False):
            rounds += 1
            assert rounds < 50
        assert loaded.passes.settled
        assert loaded.runtime.stats(0)["lent_slots"] == 0
    assert loaded.runtime.verify(0) == []


def test_no_more_is_lent_in_all_than_the_elastic_limit(loaded: Any) -> None:
    few = 8 * loaded.runtime.slot_bytes  # the last segment
    loaded.passes._settings = dataclasses.replace(loaded.passes._settings, elastic_bytes=few)
    assert lend(loaded) == 8
    assert lend(loaded) == 8
    assert loaded.passes.counts["lendings"] == 1


def test_what_a_pass_needs_is_what_one_took_and_a_tenth_once_one_was_large_enough(loaded: Any) -> None:
    loaded.passes._per_token = 1000.0
    fixed = 256 << 20
    assert loaded.passes._need(600) == 600 * 1100 + fixed
    hidden, top_k = loaded.passes._hidden, loaded.passes._top_k
    assert loaded.passes._need(500) == passes.activation_bytes(500, hidden, top_k)
    loaded.passes._per_token = 0.0
    assert loaded.passes._need(600) == passes.activation_bytes(600, hidden, top_k)


def test_slots_whose_memory_is_not_to_be_had_stay_lent_and_are_tried_again(
    loaded: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = lend(loaded)
    assert loaded.passes.between(prompts_left=True) is Upkeep.LATER
    cuda.device.fail_next_alloc()
    assert loaded.passes.between(prompts_left=False) is Upkeep.LATER
    assert loaded.passes.between(prompts_left=False) is Upkeep.LATER  # too early to ask again
    assert loaded.runtime.stats(0)["lent_slots"] == slots
    now = passes.time.monotonic()
    monkeypatch.setattr(passes, "time", SimpleNamespace(monotonic=lambda: now + 5))
    while loaded.passes.between(prompts_left=False) is Upkeep.NOW:
        pass
    assert loaded.passes.between(prompts_left=False) is Upkeep.NONE
    assert loaded.runtime.stats(0)["lent_slots"] == 0


def test_an_idle_engine_goes_on_until_everything_lent_is_back_without_spinning(
    engines: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "_RETRY_S", 0.4)
    engine = engines(LoadOptions(max_slots=40, stage_from=64), ec_reserve_gb=0.0, ec_elastic_gb=0.001)
    cuda.free = 0
    device, calls = cuda.device, []
    taken, between = engine._loaded.runtime.take_back, engine._loaded.passes.between

    class Refusing:
        """The runtime, whose first attempts find the memory taken."""

        def __getattr__(self, name: str) -> Any:
            return getattr(engine._loaded.runtime, name)

        def take_back(self, stream: int) -> int:
            if len(calls) < 3:
                device.fail_next_alloc()
            calls.append("attempt")
            return int(taken(stream))

    def counted(prompts_left: bool) -> Upkeep:
        rounds.append(prompts_left)
        return between(prompts_left)

    rounds: list[bool] = []
    monkeypatch.setattr(engine._loaded.passes, "_rt", Refusing())
    asyncio.run(answers(engine, PROMPTS[2:], 2))
    monkeypatch.setattr(engine._loaded.passes, "between", counted)
    deadline = time.monotonic() + 20
    while not engine._loaded.passes.settled and time.monotonic() < deadline:
        time.sleep(0.02)
    assert engine._loaded.passes.settled
    assert len(calls) == 4
    assert len(rounds) < 40


def test_streams_that_wait_their_turn_do_not_keep_slots_lent(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines(LoadOptions(max_slots=8), autosplit_max_batch_size=1)
    between, seen = engine._loaded.passes.between, []

    def recorded(prompts_left: bool) -> Upkeep:
        seen.append((prompts_left, engine._generator.num_pending_jobs()))
        return between(prompts_left)

    admit = engine._admit

    def together() -> None:  # not before both are there: the first could have ended by then
        if engine._counts["requests"] or len(engine._submitted) == 2:
            admit()

    monkeypatch.setattr(engine, "_admit", together)
    monkeypatch.setattr(engine._loaded.passes, "between", recorded)
    asyncio.run(answers(engine, PROMPTS[:2], 8))
    assert [left for left, pending in seen if pending] == [False] * len([1 for _, pending in seen if pending])
    assert any(pending for _, pending in seen)


def test_a_smaller_kv_cache_leaves_more_slots_and_less_vram_fails_clearly(engines: Any, cuda: Any) -> None:
    cuda.free = 2 * 10**5
    with pytest.raises(DeviceError, match="too little VRAM for the expert cache"):
        engines(ec_reserve_gb=0.0002)
    assert slot_count(1000, reserve=100, slot_bytes=100, entries=50, top_k=4, limit=None) == 9
    assert slot_count(1000, reserve=100, slot_bytes=100, entries=50, top_k=4, limit=5) == 5
    assert slot_count(500, reserve=100, slot_bytes=100, entries=50, top_k=4, limit=None) == 4
    with pytest.raises(DeviceError, match="one layer's 4 picks"):
        slot_count(499, reserve=100, slot_bytes=100, entries=50, top_k=4, limit=None)
    assert slot_count(10**6, reserve=100, slot_bytes=100, entries=50, top_k=4, limit=None) == 50
