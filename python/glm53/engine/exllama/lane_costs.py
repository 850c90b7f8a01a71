"""The constants of the CPU/GPU split, measured on this host at start: A, B, B_row, T and g of `core/cache/split.h`.

  A, B     the line through the times of jobs with 0, 1, 2, 4 ... experts of one row, published from this host; a GPU
           adds a few microseconds of PCIe latency to A. Of each kind of job the lower quartile counts: what else runs
           at start shall not
  B_row    what each further row of an expert costs; no more than B
  T        one expert copied to the GPU from its place in host memory, many in a row
           B, B_row and T are measured again while both lanes are at work, for they read the same memory, and the dearer
           value counts
  g        what the experts in VRAM keep the GPU busy for: their launches (`LAUNCH_NS`) and a token's picks read at the
           speed of a copy within VRAM; an upper bound, since some picks miss
Before that, the AVX-512 kernels take turns at large jobs (`race`): which are the fastest depends on the processor, and
on what all workers at once leave of its clock, its ports and its memory; the results are the same.
Times are nanoseconds. Costs: twice BUDGET_S, the copies and the race, about two seconds, longer on a host that is slow
or busy (each kind of job runs LEAST_ROUNDS times whatever it takes); every job reads other experts, so that none is in
a cache.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import linear_regression
from typing import Any, Protocol

import numpy as np
import torch

from ... import _core
from ...config import Settings
from ...errors import EngineError

LAUNCH_NS = 15_000
ROUNDS, LEAST_ROUNDS, BUDGET_S = 12, 3, 0.6
ROWS = 4
"""Rows of the jobs that tell B_row: what decodes together by default."""
RACE_JOBS, RACE_TURNS, CLEARLY = 8, 2, 0.97
"""Of kernels that could serve: large jobs a turn, turns, and how much less time decides against the one before."""
COPIES, MOST_COPIES = 16, 256
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


class Beside(Protocol):
    """Work for the other lane while a job is timed."""

    def begin(self, ns: int) -> None:
        """Start what takes about that long."""
        ...

    def end(self) -> None:
        """Wait for it."""
        ...


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

    def large_job_ns(self) -> float:
        """What a job of a token's experts takes, once the processor's clock has settled."""
        most = min(self._top_k, self._experts)
        self._lane.wake()
        times = [self.job_ns(most, 1) for _ in range(2 * RACE_JOBS)]
        return lower_quartile(times[RACE_JOBS:])

    def measure(self, budget_s: float = BUDGET_S, beside: Beside | None = None) -> tuple[int, int, int]:
        """A, B and B_row; `beside` keeps the other lane busy during each job."""
        most = min(self._top_k, self._experts)
        shapes = [(n, 1) for n in (0, 1, 2, 4, 8) if n < most] + [(most, 1), (most, ROWS)]
        self._lane.wake()
        first = {shape: self.job_ns(*shape) for shape in shapes}
        times: dict[tuple[int, int], list[int]] = {shape: [] for shape in shapes}
        start = time.monotonic()
        for done in range(ROUNDS):
            if done >= LEAST_ROUNDS and time.monotonic() - start > budget_s:
                break
            for shape in shapes:
                if beside is not None:
                    beside.begin(2 * max(times[shape] or [first[shape]]))
                times[shape].append(self.job_ns(*shape))
                if beside is not None:
                    beside.end()
        return fit({shape: lower_quartile(found) for shape, found in times.items()})


def race(names: Sequence[str], large_job_ns: Callable[[str], float]) -> tuple[str, dict[str, int]]:
    """The first of `names`, or one behind it that is clearly faster, and the best time of each, ns. They take turns."""
    best = dict.fromkeys(names, MOST_NS)
    for _ in range(RACE_TURNS):
        for name in names:
            best[name] = min(best[name], round(large_job_ns(name)))
    chosen = names[0]
    for name in names[1:]:
        if best[name] < CLEARLY * best[chosen]:
            chosen = name
    return chosen, best


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


class ExpertCopies:
    """Copies of experts to the current GPU, from where they lie in the first layer's arena; timed by the device."""

    def __init__(self, store: Any) -> None:
        arena = store.arena(store.layers[0])
        self._experts, self._stride = store.whole_copies, store.layout.stride
        self._source = torch.frombuffer((ctypes.c_uint8 * arena.bytes).from_address(arena.address), dtype=torch.uint8)
        self._target, self._other = (torch.empty(self._stride, dtype=torch.uint8, device="cuda") for _ in range(2))
        events = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._start, self._stop = events
        self._count = 0
        self.times_ns: list[int] = []
        self.expert_ns = 0

    def alone(self) -> int:
        """T: ns of one copy, with nothing else going on; the first run does not count."""
        for _ in range(2):
            self._queue(COPIES)
            self.end()
        self.expert_ns = self.times_ns.pop()
        self.times_ns.clear()
        return self.expert_ns

    def within_vram(self) -> int:
        """ns of copying as many bytes from VRAM to VRAM."""
        for _ in range(2):
            self._start.record()
            for _ in range(COPIES):
                self._other.copy_(self._target, non_blocking=True)
            self._stop.record()
            self._stop.synchronize()
        return round(float(self._start.elapsed_time(self._stop)) / COPIES * _NS_PER_MS)

    def _queue(self, count: int) -> None:
        self._count = count
        self._start.record()
        for i in range(count):
            at = i * 7 % self._experts * self._stride
            self._target.copy_(self._source[at : at + self._stride], non_blocking=True)
        self._stop.record()

    def begin(self, ns: int) -> None:
        """Queue copies for about that long."""
        self._queue(min(MOST_COPIES, ns // max(self.expert_ns, 1) + 2))

    def end(self) -> None:
        """Wait for them and note what one took."""
        self._stop.synchronize()
        self.times_ns.append(round(self._start.elapsed_time(self._stop) / self._count * _NS_PER_MS))


def measure(timer: LaneTimer, copies: ExpertCopies, top_k: int) -> Costs:
    """All constants: each lane alone, then both at once."""
    t, g = copies.alone(), LAUNCH_NS + top_k * copies.within_vram() // 2
    a, b, row = timer.measure()
    _, b_both, row_both = timer.measure(beside=copies)
    t_both = round(lower_quartile(copies.times_ns or [t]))
    b = max(b, b_both)
    return Costs(a, b, min(max(row, row_both), b), min(max(t, t_both), MOST_NS), min(g, MOST_NS))


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
