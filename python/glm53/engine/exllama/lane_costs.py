"""The constants of the CPU/GPU split, measured on this host at start: A, B, B_row, T and g of `core/cache/split.h`.

  A, B     the line through the times of jobs with 0, 1, 2, 4 ... experts of one row, published from this host; a GPU
           adds a few microseconds of PCIe latency to A. Of each kind of job the lower quartile counts: what else runs
           at start shall not
  B_row    what each further row of an expert costs; no more than B
  T        one expert copied to the GPU from its place in host memory, many in a row
  g        what the experts in VRAM keep the GPU busy for: their launches (`LAUNCH_NS`) and a token's picks read at the
           speed of a copy within VRAM; an upper bound, since some picks miss
Times are nanoseconds. Costs: about a second at most; every job reads other experts, so that none is in a cache.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import linear_regression
from typing import Any

import numpy as np
import torch

from ... import _core
from ...config import Settings
from ...errors import EngineError

LAUNCH_NS = 15_000
ROUNDS, LEAST_ROUNDS, BUDGET_S = 12, 3, 0.8
ROWS = 4
"""Rows of the jobs that tell B_row: what decodes together by default."""
COPIES = 16
MOST_NS = 1_000_000_000
"""The split's largest constant."""
_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Costs:
    """Nanoseconds; the letters are those of the cost model."""

    handoff_ns: int
    cpu_expert_ns: int
    cpu_row_ns: int
    pcie_expert_ns: int
    cached_ns: int

    def split(self) -> Any:
        """As the native `SplitConfig`, which checks their ranges when a lane is attached."""
        config = _core.SplitConfig()
        for field in fields(self):
            setattr(config, field.name, getattr(self, field.name))
        return config

    def as_ms(self) -> dict[str, float]:
        """For people and /stats."""
        letters = ("a_ms", "b_ms", "b_row_ms", "t_ms", "g_ms")
        return {
            name: round(getattr(self, f.name) / _NS_PER_MS, 4) for name, f in zip(letters, fields(self), strict=True)
        }


class LaneTimer:
    """Publishes jobs to a lane of its own and times them."""

    def __init__(self, lane: Any, arena: Any, tables: Sequence[Any], top_k: int) -> None:
        self._lane, self._tables, self._top_k = lane, tables, top_k
        self._hidden, self._experts = int(tables[0].hidden), int(tables[0].experts)
        self._publisher = _core.LanePublisher(arena, self._hidden)
        random = np.random.default_rng(0)
        self._x = random.standard_normal((ROWS, self._hidden)).astype(np.float32)
        self._next = 0

    def job_ns(self, experts: int, rows: int) -> int:
        """One job in which each of `rows` rows picks the same `experts` experts. Raises EngineError if it fails."""
        picks = np.full((rows, self._top_k), -1, np.int32)
        picks[:, :experts] = (self._next + np.arange(experts)) % self._experts
        layer = self._next // self._experts % len(self._tables)
        self._next += experts
        weights = np.full(picks.shape, 1 / self._top_k, np.float32)
        start = time.perf_counter_ns()
        self._publisher.publish(layer, self._x[:rows], picks, weights)
        verdict = self._publisher.wait()
        spent = time.perf_counter_ns() - start
        if verdict != "ok":
            why = self._lane.health()["reason"] or verdict
            raise EngineError(f"the CPU lane failed while it was measured: {why}")
        return spent

    def measure(self, budget_s: float = BUDGET_S) -> tuple[int, int, int]:
        """A, B and B_row."""
        most = min(self._top_k, self._experts)
        shapes = [(n, 1) for n in (0, 1, 2, 4, 8) if n < most] + [(most, 1), (most, ROWS)]
        self._lane.wake()
        for shape in shapes:
            self.job_ns(*shape)
        times: dict[tuple[int, int], list[int]] = {shape: [] for shape in shapes}
        start = time.monotonic()
        for done in range(ROUNDS):
            if done >= LEAST_ROUNDS and time.monotonic() - start > budget_s:
                break
            for shape in shapes:
                times[shape].append(self.job_ns(*shape))
        return fit({shape: lower_quartile(found) for shape, found in times.items()})


def lower_quartile(times: list[int]) -> float:
    """A quarter of the times are below it."""
    return float(sorted(times)[len(times) // 4])


def fit(times: dict[tuple[int, int], float]) -> tuple[int, int, int]:
    """A, B, B_row from the times of jobs by (experts, rows); jobs without experts are among them.

    Times so disturbed that the line is flat or falls give B as the largest job's share, and A as the empty job's time.
    """
    single = {experts: t for (experts, rows), t in times.items() if rows == 1}
    most = max(single)
    line = linear_regression(list(single), list(single.values()))
    each, handoff = line.slope, max(line.intercept, 0.0)
    share = single[most] / most
    if each < share / 4:
        each, handoff = share, single[0]
    more = [(t - single[most]) / (most * (rows - 1)) for (n, rows), t in times.items() if n == most and rows > 1]
    row = min(max(0.0, *more), each) if more else 0.0
    return tuple(min(round(ns), MOST_NS) for ns in (handoff, max(each, 1.0), row))  # type: ignore[return-value]


def _elapsed_ms(work: Any) -> float:
    """Device time of the second of two runs of `work`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(2):
        begin.record()
        work()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end))


def gpu_costs(store: Any, top_k: int) -> tuple[int, int]:
    """T and g on the current GPU; the experts are read where they lie."""
    arena, stride = store.arena(store.layers[0]), store.layout.stride
    source = torch.frombuffer((ctypes.c_uint8 * arena.bytes).from_address(arena.address), dtype=torch.uint8)
    target, other = (torch.empty(stride, dtype=torch.uint8, device="cuda") for _ in range(2))

    def read() -> None:
        for i in range(COPIES):
            at = i * 7 % store.experts * stride
            target.copy_(source[at : at + stride], non_blocking=True)

    def copy() -> None:
        for _ in range(COPIES):
            other.copy_(target, non_blocking=True)

    expert_ms, copy_ms = _elapsed_ms(read) / COPIES, _elapsed_ms(copy) / COPIES
    times = expert_ms * _NS_PER_MS, LAUNCH_NS + top_k * copy_ms / 2 * _NS_PER_MS
    return min(round(times[0]), MOST_NS), min(round(times[1]), MOST_NS)


def overridden(costs: Costs, settings: Settings) -> tuple[Costs, list[str]]:
    """The constants with those that the settings give in their place, and which these are. B_row follows B."""
    chosen = {"handoff_ns": settings.ct_a, "pcie_expert_ns": settings.ct_t, "cached_ns": settings.ct_g}
    values = {f.name: getattr(costs, f.name) for f in fields(costs)}
    values |= {name: round(ms * _NS_PER_MS) for name, ms in chosen.items() if ms is not None}
    if settings.ct_b is not None:
        each = round(settings.ct_b * _NS_PER_MS)
        values |= {"cpu_expert_ns": each, "cpu_row_ns": round(costs.cpu_row_ns * each / max(costs.cpu_expert_ns, 1))}
    names = [name for name in ("ct_a", "ct_b", "ct_t", "ct_g") if getattr(settings, name) is not None]
    return Costs(**values), names
