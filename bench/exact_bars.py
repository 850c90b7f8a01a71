"""The report of `gpu_exact.py`: one JSON from the stages' files, each bar computed from the raw figures beside it."""

from __future__ import annotations

import json
import statistics
import xml.etree.ElementTree as Tree
from pathlib import Path
from typing import Any

from common import print_bars, save

GB = 1e9
EQUAL_MUST_HAVE = {
    "test_logits_and_greedy_tokens_equal_stock[flash]",
    "test_prompts_equal_stock_whichever_way_they_are_read[flash-always staged]",
    "test_prompts_equal_stock_whichever_way_they_are_read[flash-read in place]",
    "test_still_equal_after_all_slots_were_lent_and_taken_back[flash]",
}
"""Without one of these, the claim of equality is not made."""


def junit_rows(path: Path) -> list[dict[str, Any]]:
    """The tests of a pytest junit file."""
    rows = []
    for case in Tree.parse(path).getroot().iter("testcase"):
        bad = [*case.iter("failure"), *case.iter("error")]
        row = {"name": case.get("name"), "ok": not bad, "seconds": float(case.get("time", 0))}
        rows.append(row | ({"skipped": True} if list(case.iter("skipped")) else {}))
    return rows


def read_raw(folder: Path) -> dict[str, Any]:
    """Every stage's record by name. A stage without one that failed or ran into its limit is recorded as that."""
    raw = {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json")) if p.stem != "meta"}
    for path in sorted(folder.glob("*.xml")):
        raw[path.stem] = {**raw.get(path.stem, {}), "tests": junit_rows(path)}
    return raw


def step_key(streams: int, *records: dict[str, Any]) -> str:
    """The rate that a share of the floor is made of, the same in all records: of the steps that all streams take part
    in, or that of the whole run where a record is older than that figure."""
    key = f"steps{streams}_tok_s"
    return key if all(max(r.get(key) or [0.0]) > 0 for r in records) else f"decode{streams}_tok_s"


def floor_rates(*records: dict[str, Any]) -> dict[str, Any]:
    """For a result's settings: which rates its shares of the floor are made of."""
    if not all("decode1_tok_s" in r and "decode4_tok_s" in r for r in records):
        return {}
    return {"of_floor_from": [step_key(n, *records) for n in (1, 4)]}


def speed_bars(raw: dict[str, Any]) -> dict[str, tuple[Any, Any, bool]]:
    """Decode, misses and prefill against stock and the floor."""
    ours, floor = raw["ours"], raw["floor"]
    stock = [v for k, v in raw.items() if k.startswith("stock-") and "decode1_tok_s" in v]
    out: dict[str, tuple[Any, Any, bool]] = {}
    ratios = []
    for n, wanted in ((1, 1.5), (4, 1.9)):
        best, key = max(ours[f"decode{n}_tok_s"]), step_key(n, ours, floor)
        misses = statistics.fmean(m["ours"] for m in ours[f"misses{n}"])
        transfer = ours["moe_layers"] * misses * ours["expert_bytes"] / (ours["link_gb_s"] * GB)
        limit = n / max(floor[key]) + transfer
        of_floor = limit / (n / max(ours[key]))
        if stock:
            versus = best / max(max(s[f"decode{n}_tok_s"]) for s in stock)
            out[f"exact.decode{n}_vs_stock"] = (versus, wanted, versus >= wanted)
        out[f"exact.decode{n}_of_floor"] = (of_floor, 0.85, of_floor >= 0.85)
        ratios += [m["ours"] / m["fixed"] for m in ours[f"misses{n}"]]
    out["exact.miss_ratio"] = (max(ratios), 1.15, max(ratios) <= 1.15)
    stock_s = [min(s[k]) for s in stock for k in ("prefill_2048_s", "prefill_8192_s") if k in s]
    if stock_s:
        prefill = min(stock_s) / min(ours["prefill_8192_s"])
        out["exact.prefill_vs_stock"] = (prefill, 2.0, prefill >= 2.0)
    return out


def bars(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each bar from the raw figures alone; a bar whose figures are missing is left out."""
    out: dict[str, tuple[Any, Any, bool]] = {}
    if "tests" in raw.get("equal", {}):
        tests = [t for t in raw["equal"]["tests"] if not t.get("skipped")]
        equal = all(t["ok"] for t in tests) and {t["name"] for t in tests} >= EQUAL_MUST_HAVE
        out["exact.equal"] = (equal, True, equal)
    ours = raw.get("ours", {})
    if "decode1_tok_s" in ours and "decode1_tok_s" in raw.get("floor", {}):
        out |= speed_bars(raw)
    if "ram" in ours:
        over = (ours["ram"]["VmHWM"] - ours["experts_bytes"]) / GB
        out["exact.ram_over_experts_gb"] = (over, 6.0, over <= 6.0)
    if "load_s" in ours and "read" in raw:
        start = ours["load_s"] / min(min(v) for k, v in raw["read"].items() if k.endswith("_s"))
        out["exact.start_vs_read"] = (start, 1.5, start <= 1.5)
    if "moe_trace" in ours and all(layer["runs"] and layer["calls"] for layer in ours["moe_trace"]["layers"]):
        waits = sum(layer["waits"] for layer in ours["moe_trace"]["layers"])
        out["exact.moe_host_waits"] = (waits, 0, waits == 0)
    if "tests" in raw.get("vram", {}):
        tests = raw["vram"]["tests"]
        met = bool(tests) and all(t["ok"] and not t.get("skipped") for t in tests)
        out["exact.vram_24gb"] = (met, True, met)
    return {k: {"value": v, "want": w, "ok": ok} for k, (v, w, ok) in out.items()}


def report(folder: Path, out: Path, prompt_tokens: int) -> None:
    """Write the result file and print its bars."""
    meta, raw = json.loads((folder / "meta.json").read_text()), read_raw(folder)
    ours = raw.get("ours", {})
    document = {
        "what": "exact mode against stock exllamav3 and the PCIe floor: 8 sparse layers of real shape, random weights",
        **meta,
        "settings": {
            "prompt_tokens": prompt_tokens, **{k: ours.get(k) for k in ("slots", "chunk")},
            **floor_rates(ours, raw.get("floor", {})),
        },
        "raw": raw,
        "bars": bars(raw),
    }  # fmt: skip
    save(document, out)
    print_bars(document["bars"])
