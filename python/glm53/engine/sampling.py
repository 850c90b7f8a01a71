"""From one row of logits to the next token: biases, penalties, cuts and a seeded draw.

Order: mask (padding rows, constraint), logit_bias, repetition / presence / frequency penalties, temperature, top_k,
top_p, min_p. Repetition looks at prompt and answer, presence and frequency at the answer (as in vLLM).
The draw inverts the cumulative distribution with one uniform number per token from the stream's own generator, so a
seed gives the same tokens whatever streams run beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .protocol import SamplingParams

Row = npt.NDArray[Any]
_FIRST_CUT = 512
"""Candidates sorted before the whole vocabulary is: enough for nearly every top_p."""


def log_normaliser(logits: Row) -> float:
    """log(sum(exp(logits))) in float64."""
    high = float(logits.max())
    return high + float(np.log(np.exp(logits - high, dtype=np.float64).sum()))


def best_logprobs(logits: Row, size: int, n: int) -> tuple[tuple[int, float], ...]:
    """The `n` best of the first `size` ids with their log-probabilities over the whole row, best first."""
    if n <= 0:
        return ()
    row, norm = logits[:size], log_normaliser(logits)
    ids = _largest(row, min(n, size))
    return tuple((int(i), float(row[i]) - norm) for i in ids)


def _largest(values: Row, n: int) -> npt.NDArray[np.int64]:
    """Indices of the n largest, descending; equal values in index order."""
    candidates = np.sort(np.argpartition(-values, n - 1)[:n]) if n < values.size else np.arange(values.size)
    order: npt.NDArray[np.int64] = candidates[np.argsort(-values[candidates], kind="stable")]
    return order


class Sampler:
    """Draws one stream's tokens. `size`: ids from here on are padding rows of the head and are never drawn."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], size: int) -> None:
        self._p = params
        self._size = size
        seed = None if params.seed is None else params.seed & (2**64 - 1)
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._counts: dict[int, int] = {}
        biases = {i: bias for i, bias in params.logit_bias.items() if 0 <= i < size}  # maybe of the whole vocabulary
        self._biased = np.fromiter(biases, np.intp, len(biases))
        self._biases = np.fromiter(biases.values(), np.float32, len(biases))
        self._seen = np.unique(np.asarray(prompt_ids, np.int64)) if params.repetition_penalty != 1.0 else None

    def sample(self, logits: Row, allowed: Row | None = None) -> int:
        """The next token id from logits (vocabulary,) float32; `allowed` is a bool mask over the same ids.

        Raises ValueError if nothing may be drawn. The row is not changed.
        """
        row = self._adjusted(logits, allowed)
        if self._p.temperature <= 0.0:
            token = int(row.argmax())
            if not np.isfinite(row[token]):
                raise ValueError("no token may be drawn: the constraint allows none, or the logits are not finite")
        else:
            ids, probabilities = cut(row, self._p)
            cumulative = np.cumsum(probabilities)
            at = int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))
            token = int(ids[min(at, ids.size - 1)])
        self._counts[token] = self._counts.get(token, 0) + 1
        return token

    def _adjusted(self, logits: Row, allowed: Row | None) -> Row:
        p = self._p
        row = np.array(logits[: self._size], np.float32)
        row[self._biased] += self._biases
        if self._seen is not None:
            seen = np.union1d(self._seen, np.fromiter(self._counts, np.int64, len(self._counts)))
            seen = seen[seen < self._size]
            row[seen] = np.where(row[seen] > 0, row[seen] / p.repetition_penalty, row[seen] * p.repetition_penalty)
        if self._counts and (p.presence_penalty or p.frequency_penalty):
            ids = np.fromiter(self._counts, np.int64, len(self._counts))
            times = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            row[ids] -= p.presence_penalty + p.frequency_penalty * times
        if allowed is not None:
            row[~np.asarray(allowed, bool)[: self._size]] = -np.inf
        return row


def cut(row: Row, p: SamplingParams) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Ids and (unnormalised) probabilities left after temperature, top_k, top_p and min_p; `p.temperature` > 0.

    Sorted by descending probability when a cut needed it, else in id order.
    """
    high = float(row.max())
    if not np.isfinite(high):
        raise ValueError("no token may be drawn: the constraint allows none, or the logits are not finite")
    weights = np.exp((row.astype(np.float64) - high) / p.temperature)
    keep = min(p.top_k, row.size) if p.top_k > 0 else row.size
    if keep == row.size and p.top_p >= 1.0:
        ids = np.flatnonzero(weights >= p.min_p) if p.min_p > 0 else np.arange(row.size)
        return ids, weights[ids]
    if keep == row.size and row.size > _FIRST_CUT:
        first = np.argpartition(-weights, _FIRST_CUT - 1)[:_FIRST_CUT]
        if weights[first].sum() >= p.top_p * weights.sum():
            keep = _FIRST_CUT
    total = weights.sum() if p.top_k <= 0 else None
    ids = _largest(weights, keep)
    sorted_weights = weights[ids]
    before = np.cumsum(sorted_weights) - sorted_weights
    limit = p.top_p * (sorted_weights.sum() if total is None else total)
    left = max(1, int(np.searchsorted(before, limit, side="left"))) if p.top_p < 1.0 else ids.size
    ids, sorted_weights = ids[:left], sorted_weights[:left]
    kept = sorted_weights >= p.min_p * sorted_weights[0]
    return ids[kept], sorted_weights[kept]
