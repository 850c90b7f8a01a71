"""Fast mode on the GPU: prompts are stock's bit for bit, decode steps agree with exact ones, a stalled lane is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_helpers import (
    PROMPTS,
    Parts,
    forward_logits,
    greedy,
    prompt_ids,
)
from tiny_checkpoint import TINY

from glm53 import _core
from glm53.engine.exllama import ExllamaEngine
from glm53.engine.exllama.loader import LoadOptions
from glm53.engine.protocol import GenerationRequest, SamplingParams
from glm53.hooks import moe_modules

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
ALL_TO_CPU = {"ct_a": 0.001, "ct_b": 0.001, "ct_t": 10.0, "ct_g": 0.0}
"""Constants with which every miss that may go to the CPU does."""
CLOSE = 5e-3
"""Relative difference of a layer's sum that two kernels may have: float16 inputs, another order of additions."""


class Fast(Parts):
    """The parts in fast mode; every miss that may go to the CPU does, unless `changes` say otherwise."""

    def __init__(self, checkpoint: Path, state: Path, **changes: Any) -> None:
        super().__init__(checkpoint, state, mode="fast", **{**ALL_TO_CPU, **changes})


@pytest.fixture(scope="module")
def fast(checkpoint: Path, stock: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fast]:
    made = Fast(checkpoint, tmp_path_factory.mktemp("state"))
    yield made
    made.close()


@torch.inference_mode()
def layer_sums(fast: Fast, x: torch.Tensor, split: bool) -> list[torch.Tensor]:
    """Each MoE layer's output for x (1, rows, hidden) float16, as a decode step with or without the lane."""
    with fast.passes.bracket(x.shape[1], split):
        sums = [m.forward(x, {}).clone() for m in moe_modules(fast.exllamav3, fast.model)]
    torch.cuda.synchronize()
    return sums


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_a_layers_sum_is_the_same_on_both_lanes(fast: Fast, rows: int) -> None:
    hidden, before = fast.passes._hidden, fast.runtime.stats(0)
    for seed in range(6):
        random = torch.Generator().manual_seed(100 * rows + seed)
        x = torch.randn(1, rows, hidden, generator=random).half().cuda()
        for ours, exact in zip(layer_sums(fast, x, True), layer_sums(fast, x, False), strict=True):
            assert float((ours - exact).norm() / exact.norm()) < CLOSE
        assert fast.passes.fault() is None
    after = fast.runtime.stats(0)
    assert after["cpu_picks"] > before["cpu_picks"]
    assert after["cpu_steps"] > before["cpu_steps"]


def test_a_row_that_went_to_the_cpu_whole_is_right(fast: Fast) -> None:
    """No slot of the row is left for the GPU's kernels, which must still give its shared expert."""
    random = torch.Generator().manual_seed(7)
    found = 0
    for _ in range(20):
        x = torch.randn(1, 1, fast.passes._hidden, generator=random).half().cuda()
        before = fast.runtime.stats(0)["cpu_picks"]
        ours = layer_sums(fast, x, True)
        moved = fast.runtime.stats(0)["cpu_picks"] - before
        found = max(found, moved / len(ours))
        for a, b in zip(ours, layer_sums(fast, x, False), strict=True):
            assert float((a - b).norm() / b.norm()) < CLOSE
    assert found > 1  # several picks a layer went there at once


def test_prompts_of_any_length_are_bit_for_bit_those_of_stock(fast: Fast, stock: Any) -> None:
    before = fast.runtime.stats(0)["cpu_picks"]
    for n in PROMPTS:
        logits = forward_logits(fast.model, prompt_ids(n, 0, fast.loaded.vocab_size))
        assert torch.equal(logits, stock.logits[n]), n
    assert fast.runtime.stats(0)["cpu_picks"] == before


def test_greedy_answers_begin_as_stocks(fast: Fast, stock: Any) -> None:
    """Near-ties of random weights may fall the other way; most first tokens do not."""
    vocab = fast.loaded.vocab_size
    [one] = greedy(fast.exllamav3, fast.generator, [prompt_ids(40, 1, vocab)], 24)
    prompts = [prompt_ids(20 + 13 * i, 2 + i, vocab) for i in range(4)]
    four = greedy(fast.exllamav3, fast.generator, prompts, 24)
    assert [len(ids) for ids in (one, *four)] == [24] * 5
    same = [a[0] == b[0] for a, b in zip((one, *four), (stock.one[0], *stock.four), strict=True)]
    assert sum(same) >= 3, same
    assert fast.passes.fault() is None
    assert fast.runtime.verify(0) == []


def test_the_host_waits_for_nothing_inside_the_moe_layers(fast: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    from exact_trace import moe_trace

    ids = prompt_ids(9, 4, fast.loaded.vocab_size)
    sampler = fast.exllamav3.GreedySampler()
    fast.generator.enqueue(fast.exllamav3.Job(input_ids=ids, max_new_tokens=12, sampler=sampler))
    fast.generator.iterate()  # reads the prompt

    def decode() -> None:
        while fast.generator.num_remaining_jobs():
            fast.generator.iterate()

    modules = moe_modules(fast.exllamav3, fast.model)
    hooks = [vars(m)["forward"] for m in modules]
    for layer in moe_trace(decode, modules)["layers"]:
        assert layer["calls"], "the trace has no CUDA calls"
        assert layer["waits"] == 0, layer
    assert [vars(m)["forward"] for m in modules] == hooks
    assert fast.passes.fault() is None


def test_what_was_measured_at_start_is_plausible(checkpoint: Path, tmp_path: Path) -> None:
    made = Fast(checkpoint, tmp_path, **dict.fromkeys(ALL_TO_CPU))
    try:
        split = made.loaded.tier.stats()
        assert 0 < split["b_ms"] < 10
        assert 0 <= split["a_ms"] < 5
        assert 0 < split["t_ms"] < 5
        assert 0 < split["g_ms"] < 5
        assert made.loaded.times["cpu_lane"] < 5
    finally:
        made.close()


def test_closing_undoes_every_hook(checkpoint: Path, tmp_path: Path) -> None:
    made = Fast(checkpoint, tmp_path)
    model, modules = made.model, moe_modules(made.exllamav3, made.model)
    assert all("forward" in vars(m) for m in modules)
    made.close()
    assert not any("forward" in vars(m) for m in modules)
    assert not {"forward", "prefill"} & set(vars(model))


async def collect(engine: ExllamaEngine, name: str, tokens: int) -> tuple[int, Any]:
    request = GenerationRequest(name, [5, 6, 7], tokens, sampling=SamplingParams(temperature=0.0))
    drawn, finish = 0, None
    async for delta in engine.submit(request):
        drawn, finish = drawn + len(delta.tokens), delta.finish
    return drawn, finish


def test_a_stalled_lane_is_told_within_two_seconds_and_the_engine_goes_on(tmp_path: Path) -> None:
    from glm53.config import Settings

    values: dict[str, Any] = {"model_dir": TINY, "mode": "fast", "state_dir": tmp_path, "cache_tokens": 4096}
    engine = ExllamaEngine.load(Settings(**values, **ALL_TO_CPU), options=LoadOptions(max_slots=12))

    async def both(tokens: int) -> list[tuple[int, Any]]:
        return list(await asyncio.gather(*(collect(engine, str(i), tokens) for i in range(2))))

    try:
        assert [d for d, _ in asyncio.run(both(8))] == [8, 8]
        runtime, tier = engine._loaded.runtime, engine._loaded.tier
        nobody = _core.HostArena(_core.lane_block_bytes(engine._loaded.passes._hidden), "nobody", tier._device)
        torch.cuda.synchronize()
        runtime.detach_lane(engine._loaded.passes.stream)
        runtime.attach_lane(nobody, engine._loaded.passes._hidden, tier.costs.split(), 1900)
        start = time.monotonic()
        for drawn, finish in asyncio.run(both(2000)):
            assert finish.reason == "error"
            assert finish.error.startswith("the CPU lane stalled: ")
            assert drawn < 2000
        assert time.monotonic() - start < 5
        while tier.stats()["rebuilds"] < 1 or not runtime.has_lane:
            assert time.monotonic() - start < 20
            time.sleep(0.01)
        assert [(d, f.reason) for d, f in asyncio.run(both(8))] == [(8, "length")] * 2
        assert engine.info.mode == "fast"
        assert engine.stats()["failed"] == 2
    finally:
        engine.close()
