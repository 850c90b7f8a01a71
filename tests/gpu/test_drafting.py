"""Drafting on the GPU: token for token what stock exllamav3 drafts and verifies; the answers are those without drafts.

The checkpoint is synthetic (random weights, K = 4 MTP layer), so nearly every draft is refused: every step steps back.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_helpers import forward_logits, greedy, load_ours, prompt_ids

from glm53.engine.exllama import mtp, pins
from glm53.engine.exllama.draft_policy import DraftPolicy, PolicySettings
from glm53.engine.exllama.loader import LoadOptions, architecture

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from cpu_engine_helpers import checkpoint_dir

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
STEPS = 96
NEAR = 0.25
"""Of the logits' standard deviation, which the best is three above their mean."""


class Always(DraftPolicy):
    def want(self, streams: int) -> bool:
        return True


@pytest.fixture(scope="module")
def folder() -> Path:
    return checkpoint_dir(esb=1.0, mtp=1)


def questions(vocab: int) -> list[list[torch.Tensor]]:
    """One stream, two, four, and a prompt that begins as an earlier one (its pages are reused)."""
    four = [prompt_ids(20 + 13 * i, 2 + i, vocab) for i in range(4)]
    long = prompt_ids(700, 5, vocab)
    return [[prompt_ids(40, 1, vocab)], four[:2], four, [long], [torch.cat([long, four[0]], dim=1)]]


def generator_of(exllamav3: Any, model: Any, cache: Any, tokenizer: Any, more: dict[str, Any]) -> Any:
    return exllamav3.Generator(
        model, cache, tokenizer, max_batch_size=4, max_chunk_size=512, recurrent_cache_size=1 << 28, **more
    )


def stock_with_drafts(folder: Path, tokens: int) -> list[list[list[int]]]:
    """Stock exllamav3 with its own drafting, every expert in VRAM."""
    import exllamav3

    shipped = pins.pin_path(architecture(0), None)
    if shipped is not None:
        pins.apply_pins(shipped, architecture(0))
    config = exllamav3.Config.from_directory(str(folder))
    model, draft = (exllamav3.Model.from_config(config, component=c) for c in ("text", "mtp"))
    cache = exllamav3.Cache(model, max_num_tokens=8192, max_batch_size=4, max_history=tokens)
    draft_cache = exllamav3.Cache(draft, max_num_tokens=8192)
    for part in (model, draft):
        part.load(device="cuda:0", progressbar=False)
    more = {"draft_model": draft, "draft_cache": draft_cache, "num_draft_tokens": tokens}
    try:
        generator = generator_of(exllamav3, model, cache, exllamav3.Tokenizer.from_config(config), more)
        return [greedy(exllamav3, generator, q, STEPS) for q in questions(config.vocab_size)]
    finally:
        for part in (model, draft):
            part.unload()
        gc.collect()
        torch.cuda.empty_cache()


class Ours:
    def __init__(self, folder: Path, state: Path, tokens: int, policy: DraftPolicy | None = None) -> None:
        import exllamav3

        self.exllamav3 = exllamav3
        self.loaded = loaded = load_ours(folder, state, LoadOptions(max_slots=24), mtp=tokens)
        more = mtp.generator_arguments(loaded.draft)
        self.generator = generator_of(exllamav3, loaded.model, loaded.cache, loaded.tokenizer, more)
        self.drafting = None
        if loaded.draft is not None:
            self.drafting = mtp.Drafting(loaded.draft, policy or Always())
            self.drafting.attach(self.generator)

    def answers(self) -> list[list[list[int]]]:
        asked = questions(self.loaded.vocab_size)
        return [greedy(self.exllamav3, self.generator, q, STEPS) for q in asked]

    def close(self) -> None:
        self.loaded.close()
        self.generator = self.drafting = None
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(params=[1, 3])
def tokens(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def ours(folder: Path, tokens: int, tmp_path: Path) -> Iterator[Ours]:
    made = Ours(folder, tmp_path, tokens)
    yield made
    made.close()


def test_tokens_are_those_of_stock_with_the_same_drafts(folder: Path, tokens: int, ours: Ours) -> None:
    """Where stock may draft as much as asked for: one stream, and two with one or three tokens (8 rows at most)."""
    expected, got = stock_with_drafts(folder, tokens), ours.answers()
    for number in (0, 1, 3, 4):
        assert got[number] == expected[number], f"question {number}"
    stats = ours.drafting.stats() if ours.drafting else {}
    assert stats["drafted_tokens"] > 4 * STEPS
    assert stats["accepted_tokens"] < stats["drafted_tokens"]


def test_answers_part_from_those_without_drafts_at_near_ties(folder: Path, ours: Ours, tmp_path: Path) -> None:
    """Rows verified together are rounded otherwise than a row alone: a near tie falls the other way, or a pick of the
    router, which moves a row of random weights by far. Of most streams the first is all; a state or page that was left
    wrong by a refused draft would make any token come."""
    drafted = ours.answers()
    plain_engine = Ours(folder, tmp_path / "plain", 0)
    try:
        plain, gaps = plain_engine.answers(), []
        for prompts, a, b in zip(questions(plain_engine.loaded.vocab_size), plain, drafted, strict=True):
            for ids, x, y in zip(prompts, a, b, strict=True):
                at = next((k for k, (i, j) in enumerate(zip(x, y, strict=True)) if i != j), None)
                if at is None:
                    gaps.append(0.0)
                    continue
                whole = torch.cat([ids, torch.tensor([x[:at]], dtype=torch.long)], dim=1)
                best = forward_logits(plain_engine.loaded.model, whole)[-1].float()
                gaps.append(abs(float(best[x[at]] - best[y[at]])) / float(best.std()))
        assert statistics.median(gaps) < NEAR, gaps
    finally:
        plain_engine.close()


def test_drafts_that_are_never_right_are_given_up(folder: Path, tmp_path: Path) -> None:
    ours = Ours(folder, tmp_path, 1, DraftPolicy(PolicySettings(window=32, pairs=2)))
    try:
        assert ours.drafting is not None
        prompt = prompt_ids(40, 1, ours.loaded.vocab_size)
        for _ in range(2):
            greedy(ours.exllamav3, ours.generator, [prompt], 400)
        stats = ours.drafting.stats()
        assert stats["streams"]["1"]["state"] == "off"
        assert stats["streams"]["1"]["speedup"] < 1.0
        greedy(ours.exllamav3, ours.generator, [prompt], 8)
        assert not ours.drafting.stats()["attached"]
    finally:
        ours.close()


def test_the_mtp_layers_experts_take_no_vram(ours: Ours) -> None:
    draft = ours.loaded.draft
    assert draft is not None
    arena = draft.store.arena(draft.store.layers[0])
    module = next(m for m in draft.model if type(m).__name__ == "BlockSparseMLP")
    for part in ("gate", "up", "down"):
        table = getattr(module, f"multi_{part}").ptrs_trellis.tolist()
        assert all(arena.address <= address < arena.address + arena.bytes for address in table)
