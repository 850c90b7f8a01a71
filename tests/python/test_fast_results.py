"""Every recorded bar of fast mode is what its raw figures say, computed here a second time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fast_figures import synthetic

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "bench" / "results").glob("*-fast*.json"))
LESS_IS_BETTER = {"fast.kl_vs_noise", "fast.ram_over_exact_gb"}
STEPS = "made up, with rates of steps"
PREFILL = "test_prompts_of_any_length_are_bit_for_bit_those_of_stock"


def recomputed(raw: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    fast = raw.get("fast", {})
    stock = [raw[k] for k in raw if k.startswith("stock-") and "decode1_tok_s" in raw[k]]
    if "rates" in fast:
        for n in (1, 4):
            name, counts = f"decode{n}_tok_s", fast[f"counts{n}"]
            if stock:
                found[f"fast.decode{n}_vs_stock"] = max(fast[name]) / max(x for s in stock for x in s[name])
            if name in raw.get("floor", {}):
                gigabytes = fast["moe_layers"] * (counts["misses"] / counts["steps"]) * fast["expert_bytes"] / 1e9
                seconds = gigabytes / (fast["rates"]["cpu_gb_s"] + fast["rates"]["copy_gb_s"])
                floor = raw["floor"]
                key = f"steps{n}_tok_s" if f"steps{n}_tok_s" in fast and f"steps{n}_tok_s" in floor else name
                found[f"fast.decode{n}_of_floor"] = (n / max(floor[key]) + seconds) * max(fast[key]) / n
        moved = sum(fast[f"counts{n}"]["lane_bytes"] for n in (1, 4))
        found["fast.cpu_lane_gbs"] = moved / 1e9 / sum(fast[f"counts{n}"]["lane_s"] for n in (1, 4))
        if "ram" in raw.get("exact", {}):
            found["fast.decode1_vs_exact"] = max(fast["decode1_tok_s"]) / max(raw["exact"]["decode1_tok_s"])
            found["fast.ram_over_exact_gb"] = (fast["ram"]["VmHWM"] - raw["exact"]["ram"]["VmHWM"]) / 1e9
    distances = [v["raw"]["distances"] for k, v in raw.items() if k.startswith("kl") and "raw" in v]
    if distances:
        ratios = [d["exact | fast"]["kl_mean"] / d["stock | stock-fp16"]["kl_mean"] for d in distances]
        found["fast.kl_vs_noise"] = max(ratios)
    if "expert_s" in raw.get("kernel", {}):
        middle = {k: sorted(v)[len(v) // 2 - 1 : len(v) // 2 + 1] for k, v in raw["kernel"]["expert_s"].items()}
        times = {k: sum(v) / 2 if len(raw["kernel"]["expert_s"][k]) % 2 == 0 else v[-1] for k, v in middle.items()}
        found["fast.cpu_kernel_vs_stock"] = min(times["native"], times["swizzled"]) / times["ours"]
    if "tests" in raw.get("equal", {}):
        of_prompts = [t for t in raw["equal"]["tests"] if t["name"].startswith(PREFILL) and not t.get("skipped")]
        ran = [t for t in raw["equal"]["tests"] if not t.get("skipped")]
        found["fast.prefill_equal"] = len(of_prompts) >= 2 and all(t["ok"] for t in ran)
    soaks = [v for k, v in raw.items() if k.startswith("soak")]
    if soaks:
        found["fast.soak_minutes"] = sum(len(v["slices"]) * v.get("slice_s", 25.0) for v in soaks) / 60
        found["fast.soak_clean"] = all(
            v["growth"]["rss"] <= 0.01
            and v["growth"]["vram"] <= 0.01
            and all(s["mismatches"] == 0 and s["kl_mean"] <= 2 * v["first"]["kl_mean"] for s in v["slices"])
            for v in soaks
        )
    return found


def made_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import fast_bars

    raw = synthetic(fast_bars.PREFILL_MUST_HAVE)
    if kind == STEPS:
        raw["fast"] |= {"steps1_tok_s": [100.0], "steps4_tok_s": [200.0, 180.0]}
        raw["floor"] |= {"steps1_tok_s": [250.0], "steps4_tok_s": [500.0]}
    return {"raw": raw, "bars": fast_bars.bars(raw)}


@pytest.mark.parametrize("path", ["made up", STEPS, *FILES], ids=lambda p: getattr(p, "name", p))
def test_bars_follow_from_the_raw_figures(path: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(path.read_text()) if isinstance(path, Path) else made_up(path, monkeypatch)
    found = recomputed(document["raw"])
    assert set(document["bars"]) <= set(found)
    for name, bar in document["bars"].items():
        value, want = found[name], bar["want"]
        assert bar["value"] == pytest.approx(value, rel=1e-6), name
        met = value == want if isinstance(want, bool) else value <= want if name in LESS_IS_BETTER else value >= want
        assert bar["ok"] == met or (name == "fast.kl_vs_noise" and not bar["ok"]), name
