"""The reference host on paper: the recorded result is what the recorded measurements and the cost model give."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import paper_host  # noqa: E402

from glm53.sizing import REFERENCE, SHAPE, Measured, decode_tok_s  # noqa: E402

MOE: dict[str, Any] = {
    "raw": {
        "clock_hz": [3.6e9],
        "variants": [
            {"isa": "avx512", "rows": 1, "threads": 1, "bytes_per_second": [9e9]},
            {"isa": "avx2", "rows": 1, "threads": 1, "bytes_per_second": [4.9e9, 5.0e9, 5.1e9]},
            {"isa": "avx2", "rows": 1, "threads": 2, "bytes_per_second": [9.5e9]},
            {"isa": "avx2", "rows": 2, "threads": 1, "bytes_per_second": [3e9]},
        ],
    }
}
EXACT = {"what": "random routing", "raw": {"ours": {"misses1": [{"ours": 4.8, "unique": 8.0}]}}}
LANE: dict[str, Any] = {
    "machine": {}, "versions": {},
    "figures": [{"threads": 1, "empty_us": 9.0}, {"threads": 2, "empty_us": 20.0}],
}  # fmt: skip


def test_threads_scale_as_the_second_one_did() -> None:
    assert paper_host.lane_rate(MOE, 1)[0] == pytest.approx(5.0e9)
    assert paper_host.lane_rate(MOE, 2)[0] == pytest.approx(9.5e9)
    assert paper_host.lane_rate(MOE, 22)[0] == pytest.approx(5.0e9 + 21 * 4.5e9)


def test_the_scenarios_are_the_cost_models() -> None:
    raw, bars = paper_host.evaluate(MOE, EXACT, LANE)
    by_name = {s["what"]: s for s in raw["scenarios"]}
    published = decode_tok_s(REFERENCE.hit_rate, REFERENCE, cpu=True)
    assert by_name["reference host as published"]["tok_s"] == pytest.approx(published, abs=0.005)
    assert bars["paper.fast_error"]["value"] == pytest.approx(abs(published / 28 - 1), abs=1e-4)
    known = Measured(handoff_ms=0.009 + paper_host.GPU_SIDE_MS, kernel_share=(5.0e9 + 21 * 4.5e9) / 136e9)
    expected = decode_tok_s(0.4, known.apply(REFERENCE), cpu=True, shape=SHAPE)
    assert by_name["all three"]["tok_s"] == pytest.approx(expected, abs=0.005) == bars["paper.ours_tok_s"]["value"]
    slower = by_name["all three, kernels at the CPU's base clock"]["cpu_expert_ms"]
    assert slower == pytest.approx(by_name["all three"]["cpu_expert_ms"] * 3.6 / 2.85, rel=1e-3)


def test_without_a_lane_the_hand_off_is_said_to_be_assumed() -> None:
    raw, _ = paper_host.evaluate(MOE, EXACT, None)
    assert raw["ours"]["handoff"] == {"host_ms": 0.03, "gpu_side_ms_assumed": None, "measured": False, "ms": 0.03}


def test_the_kernels_never_outrun_the_memory() -> None:
    faster = [{**v, "bytes_per_second": [1e11 * v["threads"]]} for v in MOE["raw"]["variants"]]
    fast = {"raw": {**MOE["raw"], "variants": faster}}
    assert paper_host.evaluate(fast, EXACT, LANE)[0]["ours"]["kernel"]["share_of_dram"] == 1.0


def test_the_recorded_result_is_what_the_recorded_measurements_give() -> None:
    recorded = json.loads(paper_host.latest("paper-host").read_text())
    read = {n: json.loads((BENCH / "results" / recorded["settings"][n]).read_text()) for n in ("moe", "exact")}
    raw, bars = paper_host.evaluate(read["moe"], read["exact"], recorded["raw"]["lane"])
    assert (raw, bars) == (recorded["raw"], recorded["bars"])
    assert raw["reference"]["exact_hit_rate_implied"]["12.6"] == pytest.approx(0.533, abs=0.002)
