"""The report of `gpu_fast.py`: one JSON from the stages' files, each bar computed from the raw figures beside it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from common import print_bars, save
from exact_bars import floor_rates, read_raw, step_key

GB = 1e9
PREFILL_MUST_HAVE = {
    "test_prompts_of_any_length_are_bit_for_bit_those_of_stock[flash]",
    "test_prompts_of_any_length_are_bit_for_bit_those_of_stock[tiny]",
}
"""Without one of these, the claim that prompts are equal is not made."""
LEAST_POSITIONS = 1000
SOAK_SLICE_S = 25.0
"""Seconds of load in a slice, of records that do not say it."""
MOST_GROWTH, MOST_DRIFT = 0.01, 2.0
"""Memory under load: a share of what it was; distance from exact steps: over what it was before the load."""
Bars = dict[str, tuple[Any, Any, bool]]


def floor_s(raw: dict[str, Any], streams: int) -> float:
    """Seconds a step cannot do without: with every expert in VRAM, and the missing bytes over both lanes together."""
    fast, floor = raw["fast"], raw["floor"]
    counts, rates = fast[f"counts{streams}"], fast["rates"]
    missing = fast["moe_layers"] * counts["misses"] / counts["steps"] * fast["expert_bytes"]
    resident = streams / max(floor[step_key(streams, fast, floor)])
    return float(resident + missing / ((rates["cpu_gb_s"] + rates["copy_gb_s"]) * GB))


def speed_bars(raw: dict[str, Any]) -> Bars:
    """Decode against stock's best, exact mode and the floor: figures of one call."""
    fast, out = raw["fast"], {}  # type: dict[str, Any], Bars
    stock = [v for k, v in raw.items() if k.startswith("stock-") and "decode1_tok_s" in v]
    for n, wanted in ((1, 2.1), (4, 2.5)):
        name = f"decode{n}_tok_s"
        best = max(fast[name])
        if stock:
            versus = best / max(max(s[name]) for s in stock)
            out[f"fast.decode{n}_vs_stock"] = (versus, wanted, versus >= wanted)
        if "decode1_tok_s" in raw.get("floor", {}):
            share = floor_s(raw, n) / (n / max(fast[step_key(n, fast, raw["floor"])]))
            out[f"fast.decode{n}_of_floor"] = (share, 0.7, share >= 0.7)
    if "decode1_tok_s" in raw.get("exact", {}):
        versus = max(fast["decode1_tok_s"]) / max(raw["exact"]["decode1_tok_s"])
        out["fast.decode1_vs_exact"] = (versus, 1.2, versus >= 1.2)
        over = (fast["ram"]["VmHWM"] - raw["exact"]["ram"]["VmHWM"]) / GB
        out["fast.ram_over_exact_gb"] = (over, 3.0, over <= 3.0)
    busy = [fast[f"counts{n}"] for n in (1, 4)]
    seconds = sum(c["lane_s"] for c in busy)
    if seconds:
        rate = sum(c["lane_bytes"] for c in busy) / seconds / GB
        out["fast.cpu_lane_gbs"] = (rate, 60.0, rate >= 60.0)
    return out


def kl_bar(raw: dict[str, Any]) -> Bars:
    """The worst checkpoint's ratio; a path that never used its lane, or too few positions, proves nothing."""
    ratios, met = [], True
    for record in (v for k, v in raw.items() if k.startswith("kl")):
        distances = record.get("raw", {}).get("distances", {})
        if not {"exact | fast", "stock | stock-fp16"} <= set(distances):
            return {}
        ours, noise = distances["exact | fast"], distances["stock | stock-fp16"]
        if (
            min(ours["positions"], noise["positions"]) < LEAST_POSITIONS
            or not record["raw"]["lanes"]["fast"]["cpu_picks"]
        ):
            return {}
        ratios.append(ours["kl_mean"] / noise["kl_mean"] if noise["kl_mean"] else float(ours["kl_mean"] > 0))
        met = met and ratios[-1] <= 1.0 and ours["top1"] >= noise["top1"]
    return {"fast.kl_vs_noise": (max(ratios), 1.0, met)} if ratios else {}


def soak_bars(raw: dict[str, Any]) -> Bars:
    """Minutes of load over all calls; clean: flat memory, every cached expert equal to its home, and steps as near to
    exact ones after each slice as before the load."""
    records = [v for k, v in raw.items() if k.startswith("soak") and v.get("slices")]
    if not records:
        return {}
    minutes = sum(len(r["slices"]) * r.get("slice_s", SOAK_SLICE_S) for r in records) / 60
    clean = all(
        max(r["growth"].values()) <= MOST_GROWTH
        and not any(s["mismatches"] for s in r["slices"])
        and max(s["kl_mean"] for s in r["slices"]) <= MOST_DRIFT * r["first"]["kl_mean"]
        for r in records
    )
    return {"fast.soak_clean": (clean, True, clean), "fast.soak_minutes": (minutes, 20.0, minutes >= 20.0)}


def bars(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each bar from the raw figures alone; a bar whose figures are missing is left out."""
    out: Bars = {}
    fast = raw.get("fast", {})
    if "decode1_tok_s" in fast and fast.get("fault1") is None and fast.get("fault4") is None and "rates" in fast:
        out |= speed_bars(raw)
    out |= kl_bar(raw) | soak_bars(raw)
    if "expert_s" in raw.get("kernel", {}):
        kernel = raw["kernel"]
        times = {name: statistics.median(values) for name, values in kernel["expert_s"].items()}
        ratio = min(t for name, t in times.items() if name != "ours") / times["ours"]
        out["fast.cpu_kernel_vs_stock"] = (ratio, 1.25, ratio >= 1.25)
    if "tests" in raw.get("equal", {}):
        tests = [t for t in raw["equal"]["tests"] if not t.get("skipped")]
        equal = all(t["ok"] for t in tests) and {t["name"] for t in tests} >= PREFILL_MUST_HAVE
        out["fast.prefill_equal"] = (equal, True, equal)
    return {k: {"value": v, "want": w, "ok": ok} for k, (v, w, ok) in out.items()}


def report(folder: Path, out: Path, prompt_tokens: int) -> None:
    """Write the result file and print its bars."""
    meta, raw = json.loads((folder / "meta.json").read_text()), read_raw(folder)
    fast = raw.get("fast", {})
    document = {
        "what": "fast mode against exact mode, stock exllamav3 and both lanes' floor: 8 sparse layers of real shape",
        **meta,
        "settings": {
            "prompt_tokens": prompt_tokens,
            **{k: fast.get(k) for k in ("slots", "ct_cpus")},
            **floor_rates(fast, raw.get("floor", {})),
        },
        "raw": raw,
        "bars": bars(raw),
    }
    save(document, out)
    print_bars(document["bars"])
