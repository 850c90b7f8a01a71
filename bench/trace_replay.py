#!/usr/bin/env python3
"""Misses of the expert cache's policy on a routing trace, beside those of the policies it could have been.

    python bench/trace_replay.py --trace routing.npz --slots 1302
    python bench/trace_replay.py --synthetic zipf --slots 248
    python bench/trace_replay.py --synthetic drift --rows 4 --policy ours --knob margin=0

A trace is an .npz with `picks` (steps, layers, rows * k) of expert ids and, optionally, `experts` and `rows`. All slots
are one pool for all layers. "ours" is the native object that decode steps run; the others are written here, in the
textbook way. One JSON line per policy; `raw` of "ours" has the hit rate over time, from a cold cache on; `bars` holds
misses per layer and step, the hit rate, the misses as multiples of those of the hottest experts of each layer held
fixed (in hindsight), and of Belady's optimum.
"""

from __future__ import annotations

import argparse
import heapq
import importlib.metadata
import itertools
import json
import math
import platform
import shlex
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from common import machine

from glm53 import _core

Picks = npt.NDArray[np.int64]
K = 8  # picks per row of the synthetic traces
CURVE = 60  # points of the hit rate over time
KNOBS = (
    "window", "max_admissions", "margin", "ref_max", "gain", "age_rows", "slow_shift", "recent_shift", "recent_weight",
)  # fmt: skip


class Policy(Protocol):
    """A cache of entries (layer * experts + expert); `request` says (hit, admitted) for one distinct pick."""

    def request(self, entry: int) -> tuple[bool, bool]: ...

    def end_step(self) -> None: ...


class Lru:
    """Least recently used goes; every miss is admitted."""

    def __init__(self, slots: int) -> None:
        self._slots, self._order = slots, OrderedDict[int, None]()

    def request(self, entry: int) -> tuple[bool, bool]:
        hit = entry in self._order
        if not hit and len(self._order) == self._slots:
            self._order.popitem(last=False)
        self._order[entry] = None
        self._order.move_to_end(entry)
        return hit, not hit

    def end_step(self) -> None:
        pass


class PlainClock:
    """One reference bit a slot, a hand, every miss admitted (Corbato 1968)."""

    def __init__(self, slots: int) -> None:
        self._owner, self._ref = [-1] * slots, bytearray(slots)
        self._slot_of: dict[int, int] = {}
        self._hand = 0

    def request(self, entry: int) -> tuple[bool, bool]:
        slot = self._slot_of.get(entry)
        if slot is not None:
            self._ref[slot] = 1
            return True, False
        while self._ref[self._hand]:
            self._ref[self._hand] = 0
            self._hand = (self._hand + 1) % len(self._owner)
        self._slot_of.pop(self._owner[self._hand], None)
        self._owner[self._hand], self._slot_of[entry], self._ref[self._hand] = entry, self._hand, 1
        self._hand = (self._hand + 1) % len(self._owner)
        return False, True

    def end_step(self) -> None:
        pass


class Lrfu:
    """LRFU (Lee et al. 2001): each pick weighs 2^-(age / half_life); half_life inf is LFU, small ones approach LRU.

    With `filtered`, a miss is admitted only if its weight beats the lightest resident's. Weights are kept as
    log2(weight) + time / half_life, which does not change while an entry is not picked.
    """

    def __init__(self, slots: int, half_life: float, filtered: bool) -> None:
        self._slots, self._rate, self._filtered = slots, 1.0 / half_life, filtered
        self._weight: dict[int, float] = {}
        self._resident: set[int] = set()
        self._heap: list[tuple[float, int]] = []
        self._step = 0

    def request(self, entry: int) -> tuple[bool, bool]:
        now = self._step * self._rate
        before = self._weight.get(entry, -math.inf)
        weight = now + math.log2(1.0 + 2.0 ** (before - now))
        self._weight[entry] = weight
        hit = entry in self._resident
        if not hit and len(self._resident) == self._slots:
            lightest, victim = self._lightest()
            if self._filtered and weight <= lightest:
                return False, False
            heapq.heappop(self._heap)
            self._resident.remove(victim)
        self._resident.add(entry)
        heapq.heappush(self._heap, (weight, entry))
        return hit, not hit

    def _lightest(self) -> tuple[float, int]:
        while True:
            weight, entry = self._heap[0]
            if entry in self._resident and self._weight[entry] == weight:
                return weight, entry
            heapq.heappop(self._heap)

    def end_step(self) -> None:
        self._step += 1


def requests(picks: Picks, experts: int) -> Iterator[tuple[int, list[list[int]]]]:
    """(step, per layer the distinct entries)."""
    for step, layers in enumerate(picks):
        yield step, [(layer * experts + np.unique(row)).tolist() for layer, row in enumerate(layers)]


def replay(policy: Policy, picks: Picks, experts: int, warmup: int) -> dict[str, int]:
    """Misses and admissions of the steps from `warmup` on."""
    misses = admissions = distinct = 0
    for step, layers in requests(picks, experts):
        for entries in layers:
            for entry in entries:
                hit, admitted = policy.request(entry)
                if step >= warmup:
                    distinct += 1
                    misses += not hit
                    admissions += admitted
        policy.end_step()
    return {"distinct": distinct, "misses": misses, "admissions": admissions}


def replay_ours(
    picks: Picks, experts: int, slots: int, *, rows: int, warmup: int, knobs: dict[str, int]
) -> dict[str, Any]:
    config = _core.ClockConfig(picks.shape[1], experts, slots)
    for name, value in knobs.items():
        setattr(config, name, value)
    results = _core.ClockPolicy(config).replay(picks, rows)
    distinct, hits, admissions = results[warmup:].sum((0, 1), dtype=np.int64).tolist()
    raw = {"distinct": distinct, "misses": distinct - hits, "admissions": admissions}
    return raw | {"hit_rate": curve(results.sum(1, dtype=np.int64), rows)}


def curve(per_step: npt.NDArray[np.int64], rows: int) -> list[list[float]]:
    """[[tokens so far, hit rate since the last point], ...] from (distinct, hits, ...) per step, about CURVE points."""
    width = max(1, len(per_step) // CURVE)
    parts = [per_step[at : at + width] for at in range(0, len(per_step), width)]
    ends = itertools.accumulate(len(part) * rows for part in parts)
    return [[end, round(float(p[:, 1].sum() / max(1, p[:, 0].sum())), 4)] for end, p in zip(ends, parts, strict=True)]


def replay_fixed(picks: Picks, experts: int, slots: int, warmup: int) -> dict[str, int]:
    """The hottest slots / layers experts of each layer over the very steps that are counted."""
    counts = np.zeros((picks.shape[1], experts), np.int64)
    for _, layers in requests(picks[warmup:], experts):
        for entries in layers:
            counts.reshape(-1)[entries] += 1
    hot = np.sort(counts, axis=1)[:, ::-1][:, : slots // picks.shape[1]]
    return {"distinct": int(counts.sum()), "misses": int(counts.sum() - hot.sum()), "admissions": 0}


def replay_belady(picks: Picks, experts: int, slots: int, warmup: int) -> dict[str, int]:
    """Belady's optimum with bypass: a miss is admitted if it is needed again before the resident needed last."""
    flat = [entries for _, layers in requests(picks, experts) for entries in layers]
    upcoming: list[list[int]] = [[] for _ in flat]  # when each distinct pick comes again
    seen: dict[int, int] = {}
    for i in range(len(flat) - 1, -1, -1):
        upcoming[i] = [seen.get(entry, sys.maxsize) for entry in flat[i]]
        seen.update((entry, i) for entry in flat[i])
    next_use: dict[int, int] = {}  # of residents
    heap: list[tuple[int, int]] = []  # (-next use, entry)
    raw = {"distinct": 0, "misses": 0, "admissions": 0}
    for i, (entries, again) in enumerate(zip(flat, upcoming, strict=True)):
        counted = i >= warmup * picks.shape[1]
        raw["distinct"] += len(entries) * counted
        for entry, when in zip(entries, again, strict=True):
            hit = entry in next_use
            raw["misses"] += (not hit) and counted
            if not hit and len(next_use) == slots:
                while next_use.get(heap[0][1]) != -heap[0][0]:
                    heapq.heappop(heap)
                if -heap[0][0] <= when:
                    continue
                del next_use[heapq.heappop(heap)[1]]
            raw["admissions"] += (not hit) and counted
            next_use[entry] = when
            heapq.heappush(heap, (-when, entry))
    return raw


def synthetic(kind: str, steps: int, layers: int, experts: int, *, rows: int, seed: int) -> Picks:
    """Top-8 of Zipf-like log weights plus Gumbel noise. `drift` adds a new topic every 400 steps and, for each row, an
    expert bias that decays over 30 steps, which gives the locality from token to token that trained models show."""
    rng = np.random.default_rng(seed)
    exponent = 0.62 if kind == "zipf" else 0.45
    base = rng.permuted(np.broadcast_to(-exponent * np.log1p(np.arange(experts)), (layers, experts)), axis=1)
    topic, bias = np.zeros_like(base), rng.normal(size=(rows, layers, experts))
    picks = np.empty((steps, layers, rows * K), np.int64)
    for step in range(steps):
        scores = base + rng.gumbel(size=(rows, layers, experts))
        if kind == "drift":
            if step % 400 == 0:
                topic = rng.normal(scale=0.7, size=base.shape)
            keep = math.exp(-1 / 30)
            bias = keep * bias + math.sqrt(1 - keep * keep) * rng.normal(size=bias.shape)
            scores += topic + bias
        top = np.argpartition(scores, experts - K, axis=2)[:, :, experts - K :]
        picks[step] = top.transpose(1, 0, 2).reshape(layers, rows * K)
    return picks


def load_trace(path: Path, rows: int) -> tuple[Picks, int, int]:
    """(picks, experts, rows) of a recorded trace."""
    with np.load(path) as data:
        picks = np.ascontiguousarray(data["picks"], np.int64)
        experts = int(data["experts"]) if "experts" in data else int(picks.max()) + 1
        rows = int(data["rows"]) if "rows" in data else rows
    if picks.ndim != 3 or picks.size == 0 or picks.min() < 0 or picks.max() >= experts:
        raise SystemExit(f"{path}: picks must be (steps, layers, rows * k) of ids below {experts}, got {picks.shape}")
    return picks, experts, rows


def together(found: Picks, rows: int) -> Picks:
    """(steps, layers, n) of one stream -> (steps / rows, layers, rows * n): its `rows` parts decode together."""
    count, layers, n = len(found) // rows, *found.shape[1:]
    parts = found[: count * rows].reshape(rows, count, layers, n)
    return np.ascontiguousarray(parts.transpose(1, 2, 0, 3).reshape(count, layers, rows * n))


def policies(
    picks: Picks, experts: int, rows: int, args: argparse.Namespace
) -> dict[str, Callable[[], dict[str, int]]]:
    slots, warmup = args.slots, args.warmup

    def textbook(make: Callable[[], Policy]) -> Callable[[], dict[str, int]]:
        return lambda: replay(make(), picks, experts, warmup)

    return {
        "fixed": lambda: replay_fixed(picks, experts, slots, warmup),
        "belady": lambda: replay_belady(picks, experts, slots, warmup),
        "ours": lambda: replay_ours(picks, experts, slots, rows=rows, warmup=warmup, knobs=args.knob),
        "clock": textbook(lambda: PlainClock(slots)),
        "lru": textbook(lambda: Lru(slots)),
        "lfu": textbook(lambda: Lrfu(slots, math.inf, False)),
        "lfu_filtered": textbook(lambda: Lrfu(slots, math.inf, True)),
        "lrfu64_filtered": textbook(lambda: Lrfu(slots, 64.0, True)),
        "lrfu256_filtered": textbook(lambda: Lrfu(slots, 256.0, True)),
    }


def bars(raw: dict[str, int], of: dict[str, dict[str, int]], layer_steps: int) -> dict[str, float]:
    found = {"misses_per_layer": raw["misses"] / layer_steps, "admissions_per_layer": raw["admissions"] / layer_steps}
    found["hit_rate"] = 1.0 - raw["misses"] / raw["distinct"]
    for name, other in of.items():
        if other["misses"]:
            found[f"misses_of_{name}"] = raw["misses"] / other["misses"]
    return {name: round(value, 4) for name, value in found.items()}


def knob(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if name not in KNOBS:
        raise argparse.ArgumentTypeError(f"no knob is called {name}; there are {', '.join(KNOBS)}")
    return name, int(value)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="recorded routing, .npz")
    source.add_argument("--synthetic", choices=("zipf", "drift"))
    parser.add_argument("--slots", type=int, required=True, help="experts that fit in the cache, all layers together")
    parser.add_argument("--warmup", type=int, help="steps that are replayed but not counted (a third)")
    parser.add_argument("--policy", action="append", help="only these (repeatable); all by default")
    parser.add_argument("--knob", action="append", type=knob, default=[], help="NAME=VALUE for ours (repeatable)")
    parser.add_argument("--rows", type=int, default=1, help="rows that decode together")
    parser.add_argument("--streams", type=int, default=1, help="cut a recorded stream into parts that decode together")
    parser.add_argument("--beside", action="append", default=[], help="policy whose misses ours are compared with, too")
    parser.add_argument("--steps", type=int, default=1500, help="of a synthetic trace, as are --layers ... --seed")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=288)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    args.knob = dict(args.knob)
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.trace:
        picks, experts, rows = load_trace(args.trace, args.rows)
        picks, rows = together(picks, args.streams), rows * args.streams
    else:
        experts, rows = args.experts, args.rows
        picks = synthetic(args.synthetic, args.steps, args.layers, experts, rows=rows, seed=args.seed)
    steps, layers, width = picks.shape
    args.warmup = steps // 3 if args.warmup is None else args.warmup
    if not 0 <= args.warmup < steps:
        raise SystemExit(f"--warmup {args.warmup} leaves nothing of {steps} steps")
    available = policies(picks, experts, rows, args)
    if unknown := {*(args.policy or ()), *args.beside} - set(available):
        raise SystemExit(f"no policy is called {', '.join(sorted(unknown))}; there are {', '.join(available)}")
    references = {name: available[name]() for name in ("fixed", "belady", *args.beside)}
    settings: dict[str, Any] = {
        "trace": args.trace.name if args.trace else f"{args.synthetic}, seed {args.seed}", "steps": steps,
        "layers": layers, "experts": experts, "picks": width, "rows": rows, "slots": args.slots, "warmup": args.warmup,
    }  # fmt: skip
    versions = {name: importlib.metadata.version(name) for name in ("glm53", "numpy")}
    versions["python"] = platform.python_version()
    for name in args.policy or available:
        raw = references.get(name) or available[name]()
        line = {
            "what": f"expert cache on replayed routing, policy {name}",
            "machine": machine(),
            "versions": versions,
            "command": shlex.join(["python", "bench/trace_replay.py", *argv]),
            "settings": settings | ({"knobs": args.knob} if name == "ours" else {}),
            "raw": raw | {"references": references},
            "bars": bars(raw, references, layers * (steps - args.warmup)),
        }
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
