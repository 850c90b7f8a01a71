"""Every recorded bar of exact mode is what its raw figures say, computed here a second time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
FILES = sorted(RESULTS.glob("*-exact*.json"))
WANTED = {
    "exact.equal", "exact.decode1_vs_stock", "exact.decode1_of_floor", "exact.decode4_vs_stock",
    "exact.decode4_of_floor", "exact.miss_ratio", "exact.prefill_vs_stock", "exact.ram_over_experts_gb",
}  # fmt: skip


def recomputed(raw: dict[str, Any]) -> dict[str, Any]:
    ours, floor = raw["ours"], raw["floor"]
    stock = [raw[k] for k in raw if k.startswith("stock-")]
    found: dict[str, Any] = {
        "exact.equal": all(t["ok"] for t in raw["equal"]["tests"]) and len(raw["equal"]["tests"]) > 10
    }
    for n in (1, 4):
        name = f"decode{n}_tok_s"
        seconds = n / max(ours[name])
        missed = [m["ours"] for m in ours[f"misses{n}"]]
        gigabytes = ours["moe_layers"] * (sum(missed) / len(missed)) * ours["expert_bytes"] / 1e9
        found[f"exact.decode{n}_of_floor"] = (n / max(floor[name]) + gigabytes / ours["link_gb_s"]) / seconds
        found[f"exact.decode{n}_vs_stock"] = max(ours[name]) / max(x for s in stock for x in s[name])
    found["exact.miss_ratio"] = max(m["ours"] / m["fixed"] for n in (1, 4) for m in ours[f"misses{n}"])
    prefills = [x for s in stock for k in s if k.startswith("prefill") for x in s[k]]
    found["exact.prefill_vs_stock"] = min(prefills) / min(ours["prefill_8192_s"])
    found["exact.ram_over_experts_gb"] = (ours["ram"]["VmHWM"] - ours["experts_bytes"]) / 1e9
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_bars_follow_from_the_raw_figures(path: Path) -> None:
    document = json.loads(path.read_text())
    assert set(document["bars"]) == WANTED
    for name, value in recomputed(document["raw"]).items():
        bar = document["bars"][name]
        assert bar["value"] == pytest.approx(value, rel=1e-6), name
        more_is_better = name not in ("exact.miss_ratio", "exact.ram_over_experts_gb")
        met = value == bar["want"] if isinstance(value, bool) else (value >= bar["want"]) == more_is_better
        assert bar["ok"] == met, name


def test_there_is_a_result() -> None:
    assert FILES
