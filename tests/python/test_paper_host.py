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
FAST: dict[str, Any] = {
    "machine": {"gpu": "a GPU"},
    "raw": {
        "fast": {
            "expert_bytes": 8_000_000,
            "rates": {"cpu_gb_s": 100.0},
            "lane": {"a_ms": 0.05, "b_ms": 0.2, "workers": 14, "isa": "avx512"},
        }
    },
}


def test_threads_scale_as_the_second_one_did() -> None:
    assert paper_host.lane_rate(MOE, 1)[0] == pytest.approx(5.0e9)
    assert paper_host.lane_rate(MOE, 2)[0] == pytest.approx(9.5e9)
    assert paper_host.lane_rate(MOE, 22)[0] == pytest.approx(5.0e9 + 21 * 4.5e9)


def test_the_scenarios_are_the_cost_models() -> None:
    raw, bars = paper_host.evaluate(MOE, EXACT, FAST)
    by_name = {s["what"]: s for s in raw["scenarios"]}
    published = decode_tok_s(REFERENCE.hit_rate, REFERENCE, cpu=True)
    assert by_name["reference host as published"]["tok_s"] == pytest.approx(published, abs=0.005)
    assert bars["paper.fast_error"]["value"] == pytest.approx(abs(published / 28 - 1), abs=1e-4)
    for share, scenario, bar in (
        (40.0 / 100.0, paper_host.SHARE, "paper.ours_tok_s"),
        ((5.0e9 + 21 * 4.5e9) / 136e9, paper_host.THREADS, "paper.ours_by_threads_tok_s"),
    ):
        known = Measured(handoff_ms=0.05, kernel_share=share)
        expected = decode_tok_s(0.4, known.apply(REFERENCE), cpu=True, shape=SHAPE)
        assert by_name[scenario]["tok_s"] == pytest.approx(expected, abs=0.005) == bars[bar]["value"]
    slower = by_name["the same, kernels at the CPU's base clock"]["cpu_expert_ms"]
    assert slower == pytest.approx(by_name[paper_host.THREADS]["cpu_expert_ms"] * 3.6 / 2.85, rel=1e-3)


def test_the_kernels_never_outrun_the_memory() -> None:
    faster = [{**v, "bytes_per_second": [1e11 * v["threads"]]} for v in MOE["raw"]["variants"]]
    fast = {"raw": {**MOE["raw"], "variants": faster}}
    assert paper_host.evaluate(fast, EXACT, FAST)[0]["ours"]["kernel"]["share_of_dram"] == 1.0


def test_the_recorded_result_is_what_the_recorded_measurements_give() -> None:
    recorded = json.loads(paper_host.latest("paper-host").read_text())
    read = {n: json.loads((BENCH / "results" / recorded["settings"][n]).read_text()) for n in ("moe", "exact", "fast")}
    raw, bars = paper_host.evaluate(**read)
    assert (raw, bars) == (recorded["raw"], recorded["bars"])
    assert raw["reference"]["exact_hit_rate_implied"]["12.6"] == pytest.approx(0.533, abs=0.002)
