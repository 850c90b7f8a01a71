#!/usr/bin/env python3
"""What admitting experts costs and gains beside a CPU lane: in the step, or in the background.

    python3 bench/trace_lanes.py                                    # synthetic routing, 42 x 288 experts, 1,312 slots
    python3 bench/trace_lanes.py --trace nano.npz --slots 24 56 112 --out bench/results/DATE-admission.json

A trace is as bench/trace_replay.py reads it (`CpuEngine(..., trace=PATH)` writes one), of one stream also replayed as
four that decode together; its slots are given, for synthetic ones they are the reference card's. The hosts are those of
bench/lane_hosts.py. A token takes the fixed part and, per layer, max(CPU, GPU) as the split's
cost model has it; an expert admitted in the step crosses PCIe in that step. A background load starts behind a token,
takes the slot of the coldest resident that is colder than it, serves nobody for one token and is resident one later.
What it costs is bounded from both sides:
  gaps     it moves only while the step's own reads leave the link idle in the fixed part; what does not fit is added
  shared   it moves as it comes, and takes half the link from the reads it meets: reads / (reads + idle) of its time
Policy and split are the native objects that decode steps run; nothing here depends on this machine.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import save_or_print
from cpu_moe import commit, machine
from lane_hosts import LaneTimes, hosts
from trace_replay import load_trace, synthetic, together

from glm53 import _core
from glm53.sizing import SHAPE

IN_STEP = (8, 4, 2, 1, 0)
BACKGROUND = (0, 2, 4, 8, 16)
SLOTS = 1312


@dataclass(frozen=True, slots=True)
class Trace:
    """Routing to replay: picks (steps, layers, rows * k), and what is replayed on it."""

    picks: npt.NDArray[np.int64]
    experts: int
    rows: int
    slots: int
    warmup: int
    """Steps that are replayed but not counted."""


def cell(trace: Trace, config: Any, times: LaneTimes, background: int) -> dict[str, float]:
    """Averages per token over the counted steps; ms_gaps and ms_shared are a token's time."""
    policy = _core.ClockPolicy(config)
    replayed = policy.replay_lanes(trace.picks, trace.rows, times.split(), background)[trace.warmup :]
    distinct, hits, admitted, on_cpu, cpu_ns, gpu_ns, loads = (replayed[:, :, i] for i in range(7))
    layers_ms = np.maximum(cpu_ns, gpu_ns).sum(1) / 1e6
    fixed_ms = times.fixed * trace.picks.shape[1]
    reads_ms = np.maximum(gpu_ns / 1e6 - times.cached, 0.0).sum(1)
    loads_ms = loads.sum(1) * times.pcie_expert
    token_ms = layers_ms + fixed_ms
    found = {
        "hit_rate": hits.sum() / distinct.sum(),
        "admissions": admitted.sum(1).mean(),
        "on_cpu": on_cpu.sum(1).mean(),
        "loads": loads.sum(1).mean(),
        "ms_gaps": (token_ms + np.maximum(loads_ms - fixed_ms, 0.0)).mean(),
        "ms_shared": (token_ms + loads_ms * reads_ms / token_ms).mean(),
    }
    return {name: round(float(value), 4) for name, value in found.items()}


def compare(trace: Trace, times: LaneTimes) -> list[dict[str, float]]:
    """One row per pair of limits."""
    table: list[dict[str, float]] = []
    for in_step in IN_STEP:
        for background in BACKGROUND:
            config = _core.ClockConfig(trace.picks.shape[1], trace.experts, trace.slots)
            config.max_admissions = in_step
            found = cell(trace, config, times, background)
            table.append({"max_admissions": in_step, "max_background": background} | found)
    return table


def ratios(table: list[dict[str, float]], chosen: int) -> dict[str, float]:
    """Token times: the chosen limit in the step over the best one; the best with background loads over the best
    without, if they cost nothing but what does not fit the gaps, and if they share the link."""
    in_step = {row["max_admissions"]: row["ms_gaps"] for row in table if not row["max_background"]}
    best = min(in_step.values())
    found = {"chosen_over_best": in_step[chosen] / best, "most_over_best": in_step[IN_STEP[0]] / best}
    for cost in ("gaps", "shared"):
        found[f"background_{cost}"] = min(row[f"ms_{cost}"] for row in table if row["max_background"]) / best
    return {name: round(value, 4) for name, value in found.items()}


def traces(args: argparse.Namespace) -> Iterator[tuple[str, Trace]]:
    for kind in ("zipf", "drift"):
        for rows in (1, 4):
            picks = synthetic(kind, args.steps, SHAPE.moe_layers, SHAPE.experts, rows=rows, seed=args.seed)
            yield f"{kind}, {rows} rows", Trace(picks, SHAPE.experts, rows, SLOTS, args.steps // 3)
    for path in args.trace:
        picks, experts, rows = load_trace(path, 1)
        for streams in (1, 4) if rows == 1 else (1,):
            run = together(picks, streams)
            for slots in args.slots:
                name = f"{path.name}, {rows * streams} rows, {slots} slots"
                yield name, Trace(run, experts, rows * streams, slots, len(run) // 3)


def bars(found: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
    """The worst case for what was chosen, the best case for what was not."""
    columns = {name: [ratio[name] for ratio in found.values()] for name in next(iter(found.values()))}
    return {
        "admission.in_step_1": {
            "value": max(columns["chosen_over_best"]), "unit": "x",
            "says": "time of a token with one admission a step over that with the best limit, worst case",
        },
        "admission.in_step_8": {
            "value": max(columns["most_over_best"]), "unit": "x",
            "says": "the same with eight admissions a step",
        },
        "admission.background_at_best": {
            "value": min(columns["background_gaps"]), "unit": "x",
            "says": "time of a token with background loads over that without, best case: they move in idle gaps alone",
        },
        "admission.background_shared": {
            "value": min(columns["background_shared"]), "unit": "x",
            "says": "the same, best case where they share the link with the step's own reads",
        },
    }  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", default=[], help="recorded routing, .npz (repeatable)")
    parser.add_argument("--slots", type=int, nargs="+", help="experts that fit in the cache, for --trace")
    parser.add_argument("--steps", type=int, default=1200, help="of the synthetic traces; a third is not counted")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the result here (default: print it)")
    args = parser.parse_args(argv)
    if args.trace and not args.slots:
        parser.error("--trace needs --slots")
    chosen = _core.SplitConfig().max_admissions
    tables = {
        f"{name}; {host}": compare(trace, times)
        for name, trace in traces(args)
        for host, times in hosts(trace.rows).items()
    }
    found = {name: ratios(table, chosen) for name, table in tables.items()}
    result = {
        "what": "admission beside a CPU lane, in the step or in the background: simulated",
        "machine": machine(),
        "versions": {"glm53": commit(), "python": platform.python_version(), "numpy": np.__version__},
        "command": "python3 bench/trace_lanes.py " + " ".join(argv),
        "settings": {"hosts_ms": {f"{n}, {r} rows": asdict(t) for r in (1, 4) for n, t in hosts(r).items()},
                     "slots": SLOTS, "trace_slots": args.slots, "steps": args.steps, "seed": args.seed,
                     "max_admissions": chosen},
        "raw": {"ratios": found, "tables": tables},
        "bars": bars(found),
    }  # fmt: skip
    save_or_print(result, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
