"""Every sampling parameter changes tokens or the distribution as it should."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53.engine.protocol import SamplingParams
from glm53.engine.sampling import Sampler, best_logprobs, cut, log_normaliser

SIZE = 50


def row(seed: int = 0, size: int = SIZE) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * 2).astype(np.float32)


def params(**kw: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "top_p": 1.0, **kw})


def draws(n: int, logits: np.ndarray, **kw: Any) -> Counter[int]:
    p = params(seed=1, **kw)
    plain = not (p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0)
    assert plain, "counts would feed back into the draws"
    sampler = Sampler(p, [], SIZE)
    return Counter(sampler.sample(logits) for _ in range(n))


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits.astype(np.float64) - logits.max())
    return e / e.sum()


def test_greedy_takes_the_best_and_the_lowest_id_of_a_tie() -> None:
    logits = row()
    logits[[7, 30]] = 99.0
    assert Sampler(params(temperature=0.0), [], SIZE).sample(logits) == 7


def test_draws_follow_the_model_distribution() -> None:
    logits, n = row(), 20_000
    counts = draws(n, logits)
    freq = np.array([counts[i] for i in range(SIZE)]) / n
    assert np.abs(freq - softmax(logits)).max() < 0.02


def test_temperature_sharpens_and_flattens() -> None:
    logits, best = row(), int(row().argmax())
    cold, warm, hot = (draws(2000, logits, temperature=t)[best] for t in (0.3, 1.0, 5.0))
    assert cold > warm > hot


def test_top_k_keeps_the_k_best() -> None:
    logits = row()
    assert set(draws(2000, logits, top_k=3)) == set(np.argsort(-logits)[:3].tolist())


@pytest.mark.parametrize("slope", [0.0, 1e-4, 0.01, 1.0])
def test_top_p_over_a_large_vocabulary_is_that_of_a_full_sort(slope: float) -> None:
    """Only some hundreds of candidates are sorted where these are enough: not where the row is flat."""
    logits = -slope * np.arange(3000, dtype=np.float32)
    mass = np.cumsum(softmax(logits))
    ids, _ = cut(logits, params(top_p=0.9))
    assert ids.tolist() == list(range(int(np.searchsorted(mass, 0.9 - 1e-9)) + 1))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    for top_p, kept in ((0.4, 1), (0.5, 1), (0.6, 2), (0.9, 3), (0.96, 4), (1.0, 4), (0.0, 1)):
        ids, _ = cut(logits - 3.0, params(top_p=top_p))
        assert sorted(ids.tolist()) == list(range(kept)), top_p


def test_top_p_counts_mass_after_top_k() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    ids, _ = cut(logits, params(top_k=2, top_p=0.6))
    assert sorted(ids.tolist()) == [0, 1]
    ids, _ = cut(logits, params(top_k=2, top_p=0.55))
    assert ids.tolist() == [0]


def test_min_p_is_relative_to_the_best() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    for top_p in (1.0, 0.999):
        ids, _ = cut(logits, params(min_p=0.31, top_p=top_p))
        assert sorted(ids.tolist()) == [0, 1], top_p


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 1.0), st.integers(0, 1500), st.floats(0.2, 3.0))
def test_cut_agrees_with_a_plain_sort(seed: int, top_p: float, top_k: int, temperature: float) -> None:
    logits = row(seed, 2000) * 3
    ids, weights = cut(logits, params(top_p=top_p, top_k=top_k, temperature=temperature))
    order = np.argsort(-logits, kind="stable")
    p = softmax(logits / temperature)[order][: top_k or None]
    p /= p.sum()
    before = np.cumsum(p) - p
    kept = order[: len(p)][before < top_p] if top_p < 1 else order[: len(p)]
    assert abs(len(kept) - len(ids)) <= 1  # rounding at the edge of the cut
    n = min(len(kept), len(ids))
    assert set(kept[: n - 1].tolist()) <= set(ids.tolist())
    assert np.isfinite(weights).all() and (weights >= 0).all()


def test_logit_bias_forces_and_forbids() -> None:
    logits, best = row(), int(row().argmax())
    assert set(draws(200, logits, logit_bias={5: 100.0})) == {5}
    assert best not in draws(2000, logits, logit_bias={best: -100.0})
    assert draws(50, logits, logit_bias={SIZE + 3: 100.0}, temperature=0.0) == {best: 50}
    assert draws(50, logits, logit_bias={-1: 100.0}, temperature=0.0) == {best: 50}


@pytest.mark.parametrize("kw", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 8.0}])
def test_penalties_push_away_what_was_said(kw: dict[str, float]) -> None:
    logits = np.zeros(SIZE, np.float32)
    logits[:3] = [3.0, 2.0, 1.5]
    sampler = Sampler(params(temperature=0.0, **kw), [], SIZE)
    first, second = sampler.sample(logits), sampler.sample(logits)
    assert (first, second) == (0, 1)
    assert [Sampler(params(temperature=0.0), [], SIZE).sample(logits) for _ in range(2)] == [0, 0]


def test_frequency_penalty_grows_with_the_count_and_presence_does_not() -> None:
    logits = np.zeros(SIZE, np.float32)
    logits[0], logits[1] = 2.5, 0.1

    def until_other(**kw: float) -> int:
        sampler = Sampler(params(temperature=0.0, **kw), [], SIZE)
        return next((i for i in range(20) if sampler.sample(logits) != 0), 20)

    assert until_other(frequency_penalty=1.0) == 3
    assert until_other(presence_penalty=1.0) == 20


def test_repetition_counts_the_prompt_and_the_other_penalties_do_not() -> None:
    logits = np.zeros(SIZE, np.float32)
    logits[:2] = [3.0, 2.0]
    assert Sampler(params(temperature=0.0, repetition_penalty=4.0), [0], SIZE).sample(logits) == 1
    assert Sampler(params(temperature=0.0, presence_penalty=2.0), [0], SIZE).sample(logits) == 0
    negative = logits - 9.0
    negative[[0, 1]] = [-1.0, -1.5]
    assert Sampler(params(temperature=0.0, repetition_penalty=4.0), [0], SIZE).sample(negative) == 1


def test_padding_rows_are_never_drawn() -> None:
    logits = row(0, SIZE + 20)
    logits[SIZE:] = 50.0
    sampler = Sampler(params(seed=3), [], SIZE)
    assert all(sampler.sample(logits) < SIZE for _ in range(200))
    assert all(i < SIZE for i, _ in best_logprobs(logits, SIZE, 30))


def test_constraint_wins_over_bias_and_nothing_allowed_is_an_error() -> None:
    logits, allowed = row(), np.zeros(SIZE, bool)
    for temperature in (0.0, 1.0):
        sampler = Sampler(params(temperature=temperature, logit_bias={5: 100.0}), [], SIZE)
        allowed[:] = False
        with pytest.raises(ValueError, match="no token may be drawn"):
            sampler.sample(logits, allowed)
        allowed[9] = True
        assert sampler.sample(logits, allowed) == 9


def test_not_a_number_is_an_error_not_a_token() -> None:
    logits = np.full(SIZE, np.nan, np.float32)
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="not finite"):
            Sampler(params(temperature=temperature), [], SIZE).sample(logits)


def test_seeds_reproduce_and_differ() -> None:
    def run(seed: int | None) -> list[int]:
        sampler = Sampler(params(seed=seed), [], SIZE)
        return [sampler.sample(row(i)) for i in range(30)]

    assert run(7) == run(7) and run(-7) == run(-7)
    assert run(7) != run(8)
    assert run(None) != run(None)


def test_tiny_temperature_is_greedy_without_overflow() -> None:
    logits = row()
    assert set(draws(50, logits, temperature=1e-6)) == {int(logits.argmax())}


def test_logprobs_are_the_models_before_any_cut() -> None:
    logits = row()
    best = best_logprobs(logits, SIZE, 5)
    expected = np.log(softmax(logits))
    assert [i for i, _ in best] == np.argsort(-logits)[:5].tolist()
    assert np.allclose([v for _, v in best], expected[[i for i, _ in best]], atol=1e-5)
    assert np.isclose(log_normaliser(logits), np.log(np.exp(logits.astype(np.float64)).sum()))
    assert best_logprobs(logits, SIZE, 0) == ()


def test_the_row_is_left_as_it_was() -> None:
    logits = row()
    before = logits.copy()
    Sampler(params(logit_bias={1: 5.0}, presence_penalty=1.0), [], SIZE).sample(logits)
    assert np.array_equal(logits, before)


def test_a_bias_for_the_whole_vocabulary_is_read_once() -> None:
    """Not at every token: that would hold up the streams of others."""

    class Counted(dict[int, float]):
        reads = 0

        def items(self) -> Any:
            self.reads += 1
            return super().items()

        def __iter__(self) -> Any:
            self.reads += 1
            return super().__iter__()

    biases = Counted({i: -50.0 if i != 7 else 50.0 for i in range(SIZE)})
    sampler = Sampler(params(logit_bias=biases), [], SIZE)
    reads = biases.reads
    assert [sampler.sample(row(i)) for i in range(5)] == [7] * 5
    assert biases.reads == reads
