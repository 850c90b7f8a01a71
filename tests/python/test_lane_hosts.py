"""Hosts of the decode simulations, the split they give, and a step's parts: against the planner, and by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import lane_hosts  # noqa: E402
import step_parts  # noqa: E402

from glm53 import _core  # noqa: E402
from glm53.sizing import REFERENCE, layer_ms  # noqa: E402

LAYER = {"before": 0.2, "router": 0.01, "decide": 0.02, "experts": 0.7, "cpu": 0.03}
FAST: dict[str, Any] = {
    "raw": {
        "fast": {
            "moe_layers": 3,
            "expert_bytes": 10_000_000,
            "rates": {"cpu_gb_s": 100.0, "copy_gb_s": 50.0},
            "lane": {"a_ms": 0.1, "b_ms": 0.2, "b_row_ms": 0.05, "t_ms": 0.2, "g_ms": 0.05},
            "layers1": {"step_ms": 5.0, "layers_ms": 4.0, "layers": [{**LAYER, "before": 1.3}, LAYER, LAYER]},
            "layers4": {"step_ms": 3.0, "layers_ms": 4.0, "layers": [{**LAYER, "decide": 0.3}] * 3},
            "counts1": {"steps": 30, "hits": 90, "misses": 150},
            "decode1_tok_s": [200.0],
        },
        "floor": {"decode1_tok_s": [400.0, 500.0]},
        "kernel": {"expert_s": {"ours": [0.002, 0.004, 0.003]}},
    }
}


@pytest.mark.parametrize("misses", range(9))
@pytest.mark.parametrize("cpu", [True, False])
def test_a_layer_takes_what_the_planner_says(misses: int, cpu: bool) -> None:
    took, busy = lane_hosts.layer_split([1] * misses, 0.0, lane_hosts.reference(), cpu)
    assert took == pytest.approx(layer_ms(misses, REFERENCE, cpu))
    assert 0 <= busy <= took


@pytest.mark.parametrize("rows", [[1, 1, 1, 1, 2, 3], [4, 4], [1]])
def test_a_layer_takes_what_the_native_split_says(rows: list[int]) -> None:
    for times in lane_hosts.hosts(4).values():
        native = _core.split_misses(rows, 0, times.split())
        expected = max(native["cpu_ns"], native["gpu_ns"]) / 1e6
        assert lane_hosts.layer_split(rows, 0.0, times, True)[0] == pytest.approx(expected, abs=1e-5)


def test_reads_that_are_not_to_be_split_keep_the_link_busy() -> None:
    times = lane_hosts.LaneTimes(1.0, 1.0, 0.0, 1.0, 0.5, 0.0)
    assert lane_hosts.layer_split([], 0.25, times, True) == (0.75, 0.25)
    assert lane_hosts.layer_split([1, 1, 1], 0.25, times, True) == (2.75, 2.25)
    assert lane_hosts.layer_split([1, 1, 1], 0.25, times, False) == (3.75, 3.25)


def test_what_was_measured_becomes_a_hosts_times() -> None:
    assert lane_hosts.outside_ms(FAST["raw"]["fast"]["layers1"]) == pytest.approx(1.1 + 1.0)
    one, four = (lane_hosts.measured(FAST, rows) for rows in (1, 4))
    assert (one.handoff, one.cpu_expert, one.cpu_row, one.pcie_expert, one.cached) == (0.1, 0.2, 0.05, 0.2, 0.05)
    assert one.between == one.gap == pytest.approx(0.2 + 0.01 + 0.02 + 0.03)
    assert one.fixed == pytest.approx(0.26 + 2.1 / 42)
    assert (one.router, one.decide) == (0.01, 0.02)
    assert four.fixed == four.between == pytest.approx(0.26)  # nothing once a step, and no admitted copy


def test_a_step_is_its_parts_and_what_is_over_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = lane_hosts.LaneTimes(0.1, 0.1, 0.025, 0.2, 0.05, 0.0)
    slow = lane_hosts.measured(FAST, 1)
    monkeypatch.setattr(step_parts, "hosts", lambda rows, fast: {"measured": slow, "memory-rate": quick})
    found = step_parts.parts(FAST, 1)
    assert found["once"] == pytest.approx(2.1)
    of_step = ("before", "router", "decide", "experts", "cpu", "once")
    assert sum(found[part] for part in of_step) == pytest.approx(found["step"]) == 5.0
    assert found["before"] == pytest.approx(5.0 - 2.1 - 3 * 0.76)
    assert found["bytes"] == pytest.approx(3 * 5 * 10 / 150)
    assert found["floor"] == pytest.approx(1000 / 500 + found["bytes"])
    assert found["lane"] == pytest.approx(3 * (0.65 - 0.45))  # five misses: 2 or 3 of them on the CPU
    assert found["whole"] == pytest.approx(3 * (0.45 - 0.05) - found["bytes"])
    over = found["lane"] + found["whole"] + found["rest"]
    assert found["floor"] + over == pytest.approx(found["step"])


def test_the_lanes_rates_are_of_an_experts_bytes() -> None:
    assert step_parts.lane_rates(FAST) == {"lane": 50.0, "memory": 100.0, "core": 3.33}


def test_the_recorded_parts_are_those_of_the_recorded_profile() -> None:
    recorded = json.loads(sorted((BENCH / "results").glob("*-step-parts.json"))[-1].read_text())
    fast = json.loads((BENCH / "results" / recorded["settings"]["fast"]).read_text())
    parts = {n: step_parts.parts(fast, int(n)) for n in ("1", "4")}
    assert recorded["raw"] == {**parts, "rates": step_parts.lane_rates(fast)}
    assert recorded["bars"] == step_parts.bars(recorded["raw"])
