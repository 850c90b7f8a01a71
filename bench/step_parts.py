#!/usr/bin/env python3
"""Where a decode step of fast mode goes, part by part, and what keeps it from its floor: from a recorded profile.

    python3 bench/step_parts.py --out bench/results/DATE-step-parts.json

Reads the newest result of gpu_fast.py that has a profile (`layers1`, `layers4`: medians of CUDA events at the seams of
each layer, bench/fast_profile.py), and measures nothing. Of a step, in ms, summed over the layers:
  before, router, decide, experts, cpu   as fast_profile.py names them, without what comes once a step
  once       sampling, head, embedding, the host between two steps
Its floor is a step with every expert in VRAM plus the missing bytes over both lanes together at the rates measured at
start. The step is longer than that by three parts, which sum up to the difference:
  lane       what a split would save if the CPU computed experts as fast as its memory was read at start
  whole      what it would still take beyond the floor: the hand-off, and lanes that end apart, for an expert is whole
  rest       all else: what the cost model does not say of the experts, launches, and errors of the two figures that
             come from other runs (below 0 where the step with every expert in VRAM is recorded too slow)
Exit code 0: written.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import replace
from math import floor
from pathlib import Path
from statistics import median
from typing import Any

from common import save_or_print
from cpu_moe import commit, machine
from exact_bars import step_key
from fast_profile import PARTS
from lane_hosts import LaneTimes, hosts, layer_split, newest_fast, outside_ms

SAYS = {
    "before": "attention, hyper-connections, norms of all layers",
    "router": "router and top-k of all layers",
    "decide": "policy, split, job for the CPU, admitted copies of all layers",
    "experts": "exllamav3's kernels, reads over PCIe among them, of all layers",
    "cpu": "waiting for the CPU's sum and adding it, all layers",
    "once": "what comes once a step: sampling, head, embedding, the host between two steps",
    "step": "a decode step of 8 sparse layers, profiled",
    "floor": "its floor: every expert in VRAM, and the missing bytes over both lanes together",
    "bytes": "of that floor the missing bytes",
    "lane": "over the floor because the CPU computes experts slower than its memory can be read",
    "whole": "over the floor because of the hand-off and of experts that are whole",
    "rest": "over the floor for all other reasons; below 0 where the floor is recorded too high",
}
RATES = {
    "lane": "expert bytes a second of the CPU lane, from the time of an expert measured at start",
    "memory": "bytes a second that the lane's workers read plainly, while the link copied",
    "core": "expert bytes a second of one worker's kernels, alone",
}


def experts_ms(misses: float, more_rows: float, times: LaneTimes) -> float:
    """The cost model's time of a layer at a mean number of misses: between those of the whole numbers around it.
    more_rows: rows of an expert beyond its first, on average."""
    low, times = floor(misses), replace(times, cpu_expert=times.cpu_expert + more_rows * times.cpu_row)
    at = [layer_split([1] * n, 0.0, times, True)[0] for n in (low, low + 1)]
    return at[0] + (misses - low) * (at[1] - at[0])


def parts(fast: dict[str, Any], streams: int) -> dict[str, float]:
    """Every part of a step of 1 or 4 streams, ms."""
    run, resident = fast["raw"]["fast"], fast["raw"]["floor"]
    profile, counts, rates = run[f"layers{streams}"], run[f"counts{streams}"], run["rates"]
    found = {part: sum(layer[part] for layer in profile["layers"]) for part in PARTS}
    found["once"] = outside_ms(profile)
    found["step"] = max(profile["step_ms"], profile["layers_ms"])
    found["before"] = found["step"] - found["once"] - sum(found[part] for part in PARTS[1:])
    layers, misses = run["moe_layers"], counts["misses"] / counts["steps"]
    found["bytes"] = layers * misses * run["expert_bytes"] / (rates["cpu_gb_s"] + rates["copy_gb_s"]) / 1e6
    in_vram = 1000 * streams / max(resident[step_key(streams, run, resident)])
    found["floor"] = in_vram + found["bytes"]
    more_rows = streams * 8 * counts["steps"] / (counts["hits"] + counts["misses"]) - 1
    slow, quick = (experts_ms(misses, more_rows, hosts(streams, fast)[name]) for name in ("measured", "memory-rate"))
    found["lane"] = layers * (slow - quick)
    found["whole"] = layers * (quick - run["lane"]["g_ms"]) - found["bytes"]
    found["rest"] = found["step"] - found["floor"] - found["lane"] - found["whole"]
    return {name: round(value, 4) for name, value in found.items()}


def lane_rates(fast: dict[str, Any]) -> dict[str, float]:
    """GB/s: what the lane computes at B, what its workers read plainly, and what one core computes alone."""
    run = fast["raw"]["fast"]
    one = median(fast["raw"]["kernel"]["expert_s"]["ours"])
    found = {
        "lane": run["expert_bytes"] / run["lane"]["b_ms"] / 1e6,
        "memory": run["rates"]["cpu_gb_s"],
        "core": run["expert_bytes"] / one / 1e9,
    }
    return {name: round(value, 2) for name, value in found.items()}


def bars(raw: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Each part, the floor's share of the step, and the rates."""
    found: dict[str, Any] = {
        f"step.{name}_gbs": {"value": value, "unit": "GB/s", "says": RATES[name]}
        for name, value in raw["rates"].items()
    }
    for streams, step in ((n, raw[n]) for n in ("1", "4")):
        for name, value in step.items():
            found[f"step.{name}_{streams}"] = {"value": value, "unit": "ms", "says": f"{SAYS[name]}; streams {streams}"}
        found[f"step.floor_share_{streams}"] = {
            "value": round(step["floor"] / step["step"], 4),
            "says": f"the floor's share of that step; streams {streams}",
        }
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result here (default: print it)")
    args = parser.parse_args(argv)
    path = newest_fast()
    fast = json.loads(path.read_text())
    raw = {**{str(streams): parts(fast, streams) for streams in (1, 4)}, "rates": lane_rates(fast)}
    result = {
        "what": "where a decode step of fast mode goes, and what keeps it from its floor: 8 sparse layers",
        "machine": {**fast["machine"], "computed_on": machine()["cpu"]},
        "versions": {"glm53": commit(), "python": platform.python_version()},
        "command": "python3 bench/step_parts.py " + " ".join(argv),
        "settings": {"fast": path.name, **{k: fast["raw"]["fast"][k] for k in ("lane", "rates")}},
        "raw": raw,
        "bars": bars(raw),
    }
    save_or_print(result, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
