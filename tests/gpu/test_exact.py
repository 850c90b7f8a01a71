"""Exact mode on the GPU is stock exllamav3 bit for bit, with far fewer slots than experts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_helpers import (
    PROMPTS,
    Parts,
    answer,
    differences,
    forward_logits,
    greedy,
    prompt_ids,
    settle,
)
from tiny_checkpoint import TINY

from glm53.engine.exllama import ExllamaEngine
from glm53.engine.exllama.loader import LoadOptions
from glm53.engine.exllama.sampling import make_sampler
from glm53.engine.exllama.tools import turn_heat_over
from glm53.engine.protocol import GenerationRequest, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


class Ours(Parts):
    """The parts in exact mode, held against what stock answered."""

    def differences(self, stock: Any, lengths: tuple[int, ...] = PROMPTS) -> list[str]:
        return differences(answer(self.exllamav3, self.model, self.generator, lengths), stock)


@pytest.fixture(scope="module")
def ours(checkpoint: Path, stock: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ours]:
    made = Ours(checkpoint, tmp_path_factory.mktemp("state"))
    yield made
    made.close()


def test_logits_and_greedy_tokens_equal_stock(ours: Ours, stock: Any) -> None:
    assert ours.differences(stock) == []
    stats = ours.runtime.stats(0)
    assert stats["misses"] > 0
    assert stats["admissions"] > 0
    assert stats["long_prompts"] > 0


@pytest.mark.parametrize("threshold", [9, 10**9], ids=["always staged", "read in place"])
def test_prompts_equal_stock_whichever_way_they_are_read(ours: Ours, stock: Any, threshold: int) -> None:
    usual, ours.passes.threshold = ours.passes.threshold, threshold
    before = dict(ours.passes.counts)
    try:
        for n in (300, 4103):
            logits = forward_logits(ours.model, prompt_ids(n, 0, ours.loaded.vocab_size))
            assert torch.equal(logits, stock.logits[n]), n
    finally:
        ours.passes.threshold = usual
    now = ours.passes.counts  # without these two where --without leaves that part out
    alone, in_vram = (now.get(k, 0) - before.get(k, 0) for k in ("single_experts", "single_experts_in_vram"))
    if alone:  # an expert had more rows than exllamav3 runs together: more than 512 of the real shape
        assert (in_vram > 0) == (threshold == 9)


def test_still_equal_after_all_slots_were_lent_and_taken_back(ours: Ours, stock: Any) -> None:
    slots = ours.loaded.slots
    assert ours.runtime.lend(10**12, ours.passes.stream) == slots * ours.runtime.slot_bytes
    ours.passes._lent = slots * ours.runtime.slot_bytes
    assert ours.differences(stock, PROMPTS[:3]) == []
    settle(ours.passes)
    stats = ours.runtime.stats(0)
    assert stats["lent_slots"] == 0
    assert stats["refills"] > 0
    assert ours.runtime.verify(0) == []
    assert ours.differences(stock, PROMPTS[:3]) == []


def test_churn_leaves_every_slot_equal_to_its_home(ours: Ours, stock: Any, checkpoint: Path) -> None:
    """Decode steps evict and refill every slot over and over. Heat is turned over each round: the policy keeps what it
    rightly has cached, and of a model of few experts that is soon the same ones for good."""
    rounds, steps = (80 if checkpoint.name == "tiny" else 12), 25
    runtime, slots, layers = ours.runtime, ours.loaded.slots, len(ours.loaded.store.layers)
    owners: list[set[int]] = [set() for _ in range(slots)]
    vocab = ours.loaded.vocab_size
    greedy(ours.exllamav3, ours.generator, [prompt_ids(12 + i, 40 + i, vocab) for i in range(4)], steps)
    assert runtime.stats(0)["resident_slots"] == slots  # none is empty from here on
    before, lendings = runtime.stats(0), ours.passes.counts["lendings"]
    for round_ in range(rounds):
        turn_heat_over(runtime, ours.passes.stream)
        prompts = [prompt_ids(12 + i, 50 + 4 * round_ + i, vocab) for i in range(4)]
        greedy(ours.exllamav3, ours.generator, prompts, steps)
        assert runtime.verify(0) == [], f"round {round_}"
        for entry, slot in enumerate(runtime.residency(0).tolist()):
            if slot >= 0:
                owners[slot].add(entry)
    grown = {name: runtime.stats(0)[name] - before[name] for name in ("steps", "evictions", "admissions", "refills")}
    assert grown["steps"] >= rounds * steps * layers
    assert grown["evictions"] >= rounds * slots, grown
    assert grown["admissions"] == grown["evictions"], "decode steps filled all that they emptied"
    assert grown["refills"] == ours.passes.counts["lendings"] - lendings == 0
    assert min(len(seen) for seen in owners) >= 3, owners
    assert ours.differences(stock, PROMPTS[:3]) == []


def test_decode_waits_for_nothing_in_the_moe_layers(ours: Ours) -> None:
    greedy(ours.exllamav3, ours.generator, [prompt_ids(9, 3, ours.loaded.vocab_size)], 4)
    before = ours.runtime.stats(0)
    greedy(ours.exllamav3, ours.generator, [prompt_ids(9, 3, ours.loaded.vocab_size)], 32)
    after = ours.runtime.stats(0)
    assert after["host_waits"] - before["host_waits"] == 1  # the second stats() itself
    assert after["steps"] > before["steps"]


def test_the_host_waits_for_nothing_inside_a_decode_steps_moe_layers(
    ours: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a profiler trace: the CUDA calls between a MoE layer's beginning and its end."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    from exact_trace import moe_trace

    from glm53.hooks import moe_modules

    greedy(ours.exllamav3, ours.generator, [prompt_ids(9, 4, ours.loaded.vocab_size)], 4)
    ids = prompt_ids(9, 4, ours.loaded.vocab_size)
    sampler = ours.exllamav3.GreedySampler()
    ours.generator.enqueue(ours.exllamav3.Job(input_ids=ids, max_new_tokens=12, sampler=sampler))
    ours.generator.iterate()  # reads the prompt

    def decode() -> None:
        while ours.generator.num_remaining_jobs():
            ours.generator.iterate()

    for layer in moe_trace(decode, moe_modules(ours.exllamav3, ours.model))["layers"]:
        assert layer["runs"] >= 10
        assert layer["calls"], "the trace has no CUDA calls"
        assert layer["waits"] == 0, layer


@pytest.mark.parametrize("streams", [1, 4])
def test_steps_queued_ahead_draw_what_steps_that_wait_draw(ours: Ours, streams: int) -> None:
    """Over the end of a page of the KV cache; with a stop token too, behind which nothing is ahead in exact mode."""
    if ours.ahead is None:
        pytest.skip("left out by --without")
    vocab, steps = ours.loaded.vocab_size, 100
    prompts = [prompt_ids(180 + 7 * i, 30 + i, vocab) for i in range(streams)]
    drawn, ahead = [], []
    try:
        for on in (True, False):
            ours.ahead.on = on
            before = ours.ahead.steps
            sampler = make_sampler(ours.exllamav3, SamplingParams(temperature=0.9, top_p=0.9), 0)
            drawn.append(greedy(ours.exllamav3, ours.generator, prompts, steps, sampler=sampler, seed=5))
            ahead.append(ours.ahead.steps - before)
        assert drawn[0] == drawn[1]
        assert all(len(ids) == steps for ids in drawn[0])
        assert ahead[0] >= steps - 3 - streams  # each reaches the end of a page once
        assert ahead[1] == 0
        stop = drawn[0][0][60]
        more = {"sampler": sampler, "seed": 5, "stop_conditions": [stop]}
        found = []
        for on in (False, True):
            ours.ahead.on = on
            found.append(greedy(ours.exllamav3, ours.generator, prompts, steps, **more))
        assert found[0] == found[1]
        if streams == 1:  # of several another may stop first, which leaves other rows beside it
            assert found[0][0] == drawn[0][0][: drawn[0][0].index(stop) + 1]
    finally:
        ours.ahead.on = True
    assert ours.runtime.verify(0) == []


def test_policy_on_the_device_equals_the_policy_on_the_host(ours: Ours) -> None:
    """The same picks through a CUDA runtime and a host one end in the same slots."""
    from glm53 import _core

    layers, experts, stride = 2, 32, 3 * 256
    device = _core.cuda_device(0)
    generator = torch.Generator().manual_seed(5)
    picks = torch.randint(0, experts, (400, 16), generator=generator)
    residency = []
    for on in (device, _core.HostDevice()):
        arenas = [_core.HostArena(experts * stride, f"layer {i}", on) for i in range(layers)]
        place = "cuda" if on is device else "cpu"
        tables = [[torch.zeros(experts, dtype=torch.long, device=place) for _ in range(3)] for _ in range(layers)]
        addresses = [[t.data_ptr() for t in row] for row in tables]
        runtime = _core.ExpertRuntime(on, experts, 10, 4, [256] * 3, addresses, [a.address for a in arenas])
        here = picks.to(place)
        for step in range(picks.shape[0]):
            runtime.decode(step % layers, here[step].data_ptr(), 16, 2, 0)
        residency.append((runtime.residency(0).tolist(), [t.cpu().tolist() for row in tables for t in row]))
        del runtime
    assert residency[0][0] == residency[1][0]


def test_the_engine_streams_and_reports(tmp_path: Path) -> None:
    """Submit, batch, cancel and score through the engine the server uses."""
    from glm53.config import Settings

    settings = Settings(model_dir=TINY, mode="exact", state_dir=tmp_path, cache_tokens=4096)
    engine = ExllamaEngine.load(settings, options=LoadOptions(max_slots=12))
    greedy_ = SamplingParams(temperature=0.0)

    async def one(name: str, length: int, steps: int) -> list[int]:
        ids = prompt_ids(length, 9, engine.info.vocab_size)[0].tolist()
        stream, got = engine.submit(GenerationRequest(name, ids, steps, sampling=greedy_)), []
        async for delta in stream:
            got += [t.id for t in delta.tokens]
            if delta.finish:
                assert delta.finish.reason == "length", delta.finish
        return got

    async def run() -> None:
        together = await asyncio.gather(*(one(str(n), n, 24) for n in (5, 90, 300)))
        assert [len(t) for t in together] == [24, 24, 24]
        drawn = GenerationRequest(
            "s",
            [5, 6],
            16,
            sampling=SamplingParams(temperature=0.8, top_k=20, presence_penalty=0.5, seed=7),
            top_logprobs=2,
        )
        runs = []
        for _ in range(2):
            tokens = [t async for d in engine.submit(drawn) for t in d.tokens]
            assert len(tokens) == 16
            assert all(t.logprob is not None and len(t.top) == 2 for t in tokens)
            runs.append([t.id for t in tokens])
        assert runs[0] == runs[1]
        stream = engine.submit(GenerationRequest("c", [1, 2, 3], 3000, sampling=greedy_))
        async for delta in stream:
            stream.cancel()
            if delta.finish:
                assert delta.finish.reason == "cancelled"
        scores = await engine.score(list(range(5, 60)), 3)
        assert len(scores) == 55
        assert all(s.logprob is not None and s.logprob < 0 for s in scores[1:])

    try:
        asyncio.run(run())
        assert engine.stats()["cancelled"] == 1
        assert engine.stats()["steps_ahead"] > 15
    finally:
        engine.close()
    assert (tmp_path / "expert-heat.npz").exists()
