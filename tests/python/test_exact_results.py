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
    "exact.start_vs_read",
}  # fmt: skip
LATER = {"exact.moe_host_waits", "exact.vram_24gb"}
"""Recorded by calls that ran those stages."""
LESS_IS_BETTER = {"exact.miss_ratio", "exact.ram_over_experts_gb", "exact.start_vs_read", "exact.moe_host_waits"}


def recomputed(raw: dict[str, Any]) -> dict[str, Any]:
    ours, floor = raw["ours"], raw["floor"]
    stock = [raw[k] for k in raw if k.startswith("stock-") and not raw[k].get("timed_out")]
    flash = [t for t in raw["equal"]["tests"] if "flash" in t["name"]]
    kinds = [any(word in t["name"] for t in flash) for word in ("logits", "always staged", "in place", "taken_back")]
    found: dict[str, Any] = {"exact.equal": all(t["ok"] for t in raw["equal"]["tests"]) and all(kinds)}
    for n in (1, 4):
        name = f"decode{n}_tok_s"
        of_steps = f"steps{n}_tok_s" if all(f"steps{n}_tok_s" in side for side in (ours, floor)) else name
        missed = [m["ours"] for m in ours[f"misses{n}"]]
        gigabytes = ours["moe_layers"] * (sum(missed) / len(missed)) * ours["expert_bytes"] / 1e9
        seconds = n / max(floor[of_steps]) + gigabytes / ours["link_gb_s"]
        found[f"exact.decode{n}_of_floor"] = seconds * max(ours[of_steps]) / n
        found[f"exact.decode{n}_vs_stock"] = max(ours[name]) / max(x for s in stock for x in s[name])
    found["exact.miss_ratio"] = max(m["ours"] / m["fixed"] for n in (1, 4) for m in ours[f"misses{n}"])
    prefills = [x for s in stock for chunk in (2048, 8192) for x in s.get(f"prefill_{chunk}_s", [])]
    found["exact.prefill_vs_stock"] = min(prefills) / min(ours["prefill_8192_s"])
    found["exact.ram_over_experts_gb"] = (ours["ram"]["VmHWM"] - ours["experts_bytes"]) / 1e9
    found["exact.start_vs_read"] = ours["load_s"] / min(raw["read"]["cat_s"] + raw["read"]["readinto_s"])
    if "moe_trace" in ours:
        found["exact.moe_host_waits"] = sum(layer["waits"] for layer in ours["moe_trace"]["layers"])
    if "vram" in raw:
        found["exact.vram_24gb"] = [t["ok"] for t in raw["vram"]["tests"]] == [True]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_bars_follow_from_the_raw_figures(path: Path) -> None:
    document = json.loads(path.read_text())
    assert WANTED <= set(document["bars"]) <= WANTED | LATER
    for name, value in recomputed(document["raw"]).items():
        bar = document["bars"][name]
        assert bar["value"] == pytest.approx(value, rel=1e-6), name
        want = bar["want"]
        over = (
            value == want if isinstance(value, bool) else (value <= want if name in LESS_IS_BETTER else value >= want)
        )
        assert bar["ok"] == over, name


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_a_result_says_which_rates_its_shares_of_the_floor_are_of(path: Path) -> None:
    document = json.loads(path.read_text())
    sides = [document["raw"][name] for name in ("ours", "floor")]
    wanted = [f"{'steps' if all(f'steps{n}_tok_s' in s for s in sides) else 'decode'}{n}_tok_s" for n in (1, 4)]
    assert document["settings"]["of_floor_from"] == wanted


def test_there_is_a_result() -> None:
    assert FILES
