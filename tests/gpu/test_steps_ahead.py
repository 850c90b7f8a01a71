"""Steps queued ahead on a GPU: what is only to be seen there. That they draw what steps that wait draw is also in
test_exact.py; what the host does about them is tested without a GPU (tests/server/test_ahead_generator.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from ahead_cases import Asked, Told, apart, eventful, far_ahead, waits
from exact_helpers import Parts, greedy, make_generator, prompt_ids
from tiny_checkpoint import TINY

from glm53.config import Settings
from glm53.engine.exllama import ExllamaEngine
from glm53.engine.exllama.ahead import RunAhead, run_ahead
from glm53.engine.exllama.loader import LoadOptions
from glm53.engine.protocol import GenerationRequest, SamplingParams, TokenScore

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
How = Callable[[RunAhead], AbstractContextManager[None]]
ASLEEP = 500_000_000
"""Cycles, some 0.3 s."""


class Ahead(Parts):
    """The parts with a generator that runs ahead."""

    def __init__(self, checkpoint: Path, state: Path, **changes: Any) -> None:
        super().__init__(checkpoint, state, **changes)
        if self.ahead is None:
            self.close()
            pytest.skip("left out by --without")

    def prompt(self, tokens: int, seed: int) -> torch.Tensor:
        return prompt_ids(tokens, seed, self.loaded.vocab_size)

    def warm(self, streams: int) -> None:
        """All kernels are chosen, all graphs captured: neither happens in a test any more."""
        for _ in range(2):
            greedy(self.exllamav3, self.generator, [self.prompt(9 + i, i) for i in range(streams)], 12)

    def fresh(self, together: bool) -> RunAhead:
        """Of a new generator, which finds no pages of earlier prompts. together: several streams may be ahead."""
        self.generator = make_generator(self.exllamav3, self.model, self.loaded.cache, self.loaded.tokenizer)
        self.ahead = run_ahead(self.generator, self.loaded)
        assert self.ahead is not None
        self.ahead._together = lambda: together
        return self.ahead

    def play(self, streams: int, stop: list[int], how: How) -> tuple[dict[int, Told], int]:
        """What everybody was told, and steps that were queued ahead."""
        with how(self.fresh(True)):
            asked = Asked(self.exllamav3, self.generator)
            told = asked.play(eventful(asked, self.prompt, streams, stop))
        assert self.ahead is not None
        return told, self.ahead.steps


@pytest.fixture(scope="module")
def exact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    made = Ahead(checkpoint, tmp_path_factory.mktemp("state"))
    yield made
    made.close()


@pytest.mark.parametrize(("streams", "together"), [(1, False), (4, False), (4, True)])
def test_the_same_streams_draw_what_steps_that_wait_draw(exact: Ahead, streams: int, together: bool) -> None:
    """With stop tokens but where a row too many may change the others' last bits."""
    exact.warm(streams)

    def draw(on: bool, stop: list[int]) -> tuple[dict[int, Told], int]:
        ahead = exact.fresh(together)
        ahead.on, asked = on, Asked(exact.exllamav3, exact.generator)
        told = asked.play({0: [asked.comes(i, exact.prompt(180 + 7 * i, 30 + i), 100, stop) for i in range(streams)]})
        return told, ahead.steps

    waiting, none = draw(False, [])
    assert none == 0
    assert all(len(t.ids) == 100 for t in waiting.values())
    told, steps = draw(True, [])
    assert told == waiting
    assert steps > 60
    if not together:
        stop = [told[i].ids[40 + 15 * i] for i in range(streams)]
        assert draw(True, stop)[0] == draw(False, stop)[0]


def stops(told: dict[int, Told]) -> list[int]:
    """Tokens at which the streams with stop tokens end somewhere in the middle."""
    return [told[name].ids[at] for name, at in ((1, 50), (12, 10), (22, 7), (25, 12)) if name in told]


@pytest.mark.parametrize("streams", [1, 4])
def test_streams_that_come_stop_and_go_with_the_host_far_ahead_draw_the_same(exact: Ahead, streams: int) -> None:
    exact.warm(streams)
    stop = stops(exact.play(streams, [], apart)[0])
    alone, steps = exact.play(streams, stop, apart)
    assert exact.play(streams, stop, far_ahead) == (alone, steps)
    assert steps > 100
    assert {t.reason for t in alone.values()} == {"stop_token", "max_new_tokens", None}
    assert exact.runtime.verify(0) == []


def test_the_same_in_fast_mode_with_jobs_of_two_steps_for_the_cpu(tmp_path: Path) -> None:
    """Two engines from the same beginning: what is in a slot decides what the CPU computes, and that the last bits.
    Kernels are chosen while there is a third one."""
    cheap = {"mode": "fast", "ct_a": 0.001, "ct_b": 0.001, "ct_t": 10.0, "ct_g": 0.0}
    told, picks = [], []
    for i, how in enumerate((apart, apart, far_ahead)):
        made = Ahead(TINY, tmp_path / str(i), **cheap)
        try:
            made.warm(4)
            stop = stops(made.play(4, [], apart)[0])
            told.append(made.play(4, stop, how))
            assert made.passes.fault() is None
            assert made.runtime.verify(0) == []
            picks.append(made.runtime.stats(0)["cpu_picks"])
        finally:
            made.close()
    assert told[1] == told[2]
    assert picks[1] == picks[2] > 0


@pytest.mark.parametrize("streams", [1, 3])
def test_the_host_waits_for_nothing_while_it_queues_a_step_ahead(exact: Ahead, streams: int) -> None:
    """Over more tokens than a pool of keys has, which exllamav3 completes in one way with one stream and in another
    with several; and over a context whose attention is sparse."""
    ahead = exact.fresh(True)
    for length in (9, 2100):
        prompts = [exact.prompt(length + i, i) for i in range(streams)]
        for _ in range(2):
            greedy(exact.exllamav3, exact.generator, prompts, 12)
        with waits(ahead, ASLEEP) as found:
            greedy(exact.exllamav3, exact.generator, prompts, 10)
        assert len(found) >= 6
        assert not any(found), (length, found)


def test_the_embeddings_rows_are_bit_for_bit_the_same_where_the_gpu_reads_them(exact: Ahead) -> None:
    module, table = exact.model.modules[0], exact.loaded.tokens
    weight = module.embedding.weight.detach()
    last = weight.shape[0] - 1
    some = torch.randint(0, last, (3000,), generator=torch.Generator().manual_seed(3))
    for ids in (torch.tensor([[0], [last], [1], [last - 1]]), some.view(1, -1)):
        found = table(ids.cuda())
        assert (found.dtype, tuple(found.shape)) == (module.out_dtype, (*ids.shape, weight.shape[1]))
        assert torch.equal(found.cpu(), weight[ids].to(module.out_dtype))


def test_the_embedding_is_page_locked_until_the_engine_is_closed(tmp_path: Path) -> None:
    for _ in range(2):  # the second time in memory that was let go
        made = Ahead(TINY, tmp_path)
        weight = made.model.modules[0].embedding.weight.detach()
        assert weight.is_pinned()
        made.close()
        assert not weight.is_pinned()
        assert not torch.ones(1, device="cuda").isnan().any()  # no error of CUDA's is left behind


def test_prompts_that_are_scored_between_steps_and_the_steps_do_not_disturb_each_other(tmp_path: Path) -> None:
    """The pass of a scoring is queued behind a step that was queued ahead and is not read."""
    settings = Settings(model_dir=TINY, mode="exact", state_dir=tmp_path, cache_tokens=4096)
    engine = ExllamaEngine.load(settings, options=LoadOptions(max_slots=12))
    prompts = [prompt_ids(n, 3, engine.info.vocab_size)[0].tolist() for n in (5, 40, 300, 1200)]

    async def stream() -> list[int]:
        request = GenerationRequest("s", prompts[1], 300, sampling=SamplingParams(temperature=0.0))
        return [t.id async for delta in engine.submit(request) for t in delta.tokens]

    async def scores() -> list[list[TokenScore]]:
        return [await engine.score(ids, 2) for ids in prompts]

    async def both() -> tuple[list[int], list[list[TokenScore]]]:
        drawing = asyncio.ensure_future(stream())
        found = []
        while not drawing.done():
            found = await scores()
            await asyncio.sleep(0.02)  # for steps without a scoring that waits
        return await drawing, found

    try:
        alone, idle = asyncio.run(stream()), asyncio.run(scores())
        ahead = engine.stats()["steps_ahead"]
        drawn, between = asyncio.run(both())
        assert drawn == alone
        assert between == idle
        assert engine.stats()["steps_ahead"] > ahead
    finally:
        engine.close()
