"""Times of a MoE layer's parts on the hosts that simulations of decode are run for, and the split they give.

Three hosts: the reference one (`glm53.sizing`); the machine that fast mode was measured on, from its newest recorded
result; and that machine with a CPU lane that computes experts as fast as its memory was read there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from glm53 import _core
from glm53.sizing import REFERENCE, SHAPE

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """Milliseconds; `fixed` is what one MoE layer's share of the rest of a token takes."""

    handoff: float
    cpu_expert: float
    cpu_row: float
    pcie_expert: float
    cached: float
    fixed: float
    between: float | None = None
    """The part of `fixed` that passes between the experts of two layers, with the link idle; None: all of it."""
    router: float = 0.0
    """Router and top-k of one layer."""
    decide: float = 0.0
    """The part of `between` behind the router: the policy's step, the split, the CPU's job."""

    @property
    def gap(self) -> float:
        return self.fixed if self.between is None else self.between

    def split(self) -> Any:
        """The native split's constants."""
        config = _core.SplitConfig()
        for name in ("handoff", "cpu_expert", "cpu_row", "pcie_expert", "cached"):
            setattr(config, f"{name}_ns", round(getattr(self, name) * 1e6))
        return config


def layer_split(rows: Sequence[int], rest_ms: float, times: LaneTimes, cpu: bool) -> tuple[float, float]:
    """(time of a layer's experts, time its reads keep the link busy), ms: the best split of the cost model.

    rows: of each missed expert, what the CPU would take first comes first; rest_ms: reads that are not to be split.
    """
    lane = times.handoff
    best = (times.cached + rest_ms + len(rows) * times.pcie_expert, rest_ms + len(rows) * times.pcie_expert)
    for n, row in enumerate(rows if cpu else (), 1):
        lane += times.cpu_expert + (row - 1) * times.cpu_row
        busy = rest_ms + (len(rows) - n) * times.pcie_expert
        best = min(best, (max(lane, times.cached + busy), busy))
    return best


def reference() -> LaneTimes:
    """All that is not routed experts is taken as spread over the layers, none of it as router or `decide`."""
    fixed = REFERENCE.fixed_ms / SHAPE.moe_layers
    return LaneTimes(
        REFERENCE.handoff_ms, REFERENCE.cpu_expert_ms, REFERENCE.cpu_expert_ms / 4, REFERENCE.pcie_expert_ms,
        REFERENCE.cached_ms, fixed,
    )  # fmt: skip


def outside_ms(profile: dict[str, Any]) -> float:
    """Of a profiled step what comes once a step: sampling, head, embedding, the host between two steps."""
    first, *others = (layer["before"] for layer in profile["layers"])
    return float(first - mean(others) + max(0.0, profile["step_ms"] - profile["layers_ms"]))


def measured(fast: dict[str, Any], rows: int) -> LaneTimes:
    """From a result of gpu_fast.py: the lane's constants, and the profile of a step of 1 or 4 streams. `decide` is that
    of one stream, whose median holds no admitted copy; what comes once a step is spread over the whole model."""
    lane, profile = fast["raw"]["fast"]["lane"], fast["raw"]["fast"][f"layers{rows}"]
    decide = mean(layer["decide"] for layer in fast["raw"]["fast"]["layers1"]["layers"])
    router = mean(layer["router"] for layer in profile["layers"][1:])
    between = decide + router + mean(layer["before"] + layer["cpu"] for layer in profile["layers"][1:])
    fixed = between + outside_ms(profile) / SHAPE.moe_layers
    return LaneTimes(
        lane["a_ms"], lane["b_ms"], lane["b_row_ms"], lane["t_ms"], lane["g_ms"], round(fixed, 4), round(between, 4),
        round(router, 4), round(decide, 4),
    )  # fmt: skip


def newest_fast(results: Path = RESULTS) -> Path:
    """The newest recorded result of fast mode that has a lane's constants and a step's profile."""
    for path in sorted(results.glob("*-fast.json"), reverse=True):
        if {"lane", "rates", "layers1", "layers4"} <= set(json.loads(path.read_text())["raw"].get("fast", {})):
            return path
    raise SystemExit(f"no *-fast.json with the CPU lane's constants in {results}")


def hosts(rows: int, fast: dict[str, Any] | None = None) -> dict[str, LaneTimes]:
    """The hosts for steps of `rows` streams (1 or 4), by name; fast: a result of gpu_fast.py, the newest if None."""
    fast = json.loads(newest_fast().read_text()) if fast is None else fast
    ours = measured(fast, rows)
    rate = fast["raw"]["fast"]["rates"]["cpu_gb_s"]
    quick = fast["raw"]["fast"]["expert_bytes"] / rate / 1e6
    scale = quick / ours.cpu_expert
    return {
        "reference": reference(),
        "measured": ours,
        "memory-rate": replace(ours, cpu_expert=round(quick, 4), cpu_row=round(ours.cpu_row * scale, 4)),
    }
