#!/usr/bin/env python3
"""The reference host on paper: its published speeds from the cost model, and what our measured parts would give there.

    python3 bench/paper_host.py                                  # from the results that are recorded here
    python3 bench/paper_host.py --out bench/results/DATE-paper-host.json

Reads the recorded figures of the expert kernels (`cpu_moe.py`), of the expert cache (`gpu_exact.py`) and of fast mode
(`gpu_fast.py`); the arithmetic is `glm53.sizing`, which `glm53 plan` prints too. The reference host has an RTX 3090 on
PCIe 4.0 x16 and an EPYC 7443P (Zen 3: AVX2, no AVX-512) with 136 GB/s of DRAM.
The hand-off is the A that fast mode measured at its start. The rate of the CPU lane is carried over in two ways, since
neither is a measurement there:
  share    the share of the memory's plain read rate that the lane had on the machine of the fast result
  threads  the rate of one thread of the AVX2 kernels here, times what a second one added, for 22
Exit code 0: every bar held; 1: one was missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from common import save
from cpu_moe import commit, machine

from glm53.sizing import REFERENCE, SHAPE, Measured, decode_tok_s, implied_hit_rate

RESULTS = Path(__file__).resolve().parent / "results"
FAST, EXACT, PAPER = 28.15, 12.57, 28.0
"""Published tok/s of one stream in the two modes, and the figure the cost model was fitted to."""
BASE_CLOCK_HZ = 2.85e9
"""Of the reference CPU; the kernels are bound by arithmetic, so their rate goes with the clock."""


def latest(name: str, results: Path = RESULTS) -> Path:
    """The newest recorded result of that name."""
    found = sorted(results.glob(f"*-{name}.json"))
    if not found:
        raise SystemExit(f"paper_host: no *-{name}.json in {results}")
    return found[-1]


def lane_rate(moe: dict[str, Any], threads: int, isa: str = "avx2") -> tuple[float, float]:
    """(bytes/s of `threads` workers, clock in Hz): one thread's rate, times what a second one added, for the others."""
    by_threads = {v["threads"]: v for v in moe["raw"]["variants"] if v["isa"] == isa and v["rows"] == 1}
    one, two = (median(by_threads[n]["bytes_per_second"]) for n in (1, 2))
    return one * (1 + (threads - 1) * (two / one - 1)), median(moe["raw"]["clock_hz"])


def cache_hits(exact: dict[str, Any]) -> float:
    """Hit rate of our policy in decode steps of one stream, on the recorded model of random routing."""
    steps = exact["raw"]["ours"]["misses1"][0]
    return 1 - float(steps["ours"]) / float(steps["unique"])


def lane_share(fast: dict[str, Any]) -> float:
    """Expert bytes per second of the CPU lane in fast mode, from B, over the plain read rate of the same call."""
    run = fast["raw"]["fast"]
    return float(run["expert_bytes"] / run["lane"]["b_ms"] / 1e6 / run["rates"]["cpu_gb_s"])


def scenario(name: str, hits: float, known: Measured) -> dict[str, Any]:
    """tok/s of one stream in fast mode on the reference host with `known` in place of its own figures."""
    constants = known.apply(REFERENCE)
    rate = decode_tok_s(hits, constants, cpu=True)
    return {
        "what": name,
        "hit_rate": round(hits, 4),
        "handoff_ms": round(constants.handoff_ms, 4),
        "cpu_expert_ms": round(constants.cpu_expert_ms, 4),
        "fixed_ms": constants.fixed_ms,
        "tok_s": round(rate, 2),
        "gain": round(rate / decode_tok_s(REFERENCE.hit_rate, REFERENCE, cpu=True) - 1, 4),
    }


SHARE, THREADS = "our hand-off, lane by share, and hit rate", "our hand-off, lane by threads, and hit rate"


def scenarios(share: float, by_threads: float, slow: float, handoff_ms: float, hits: float) -> list[dict[str, Any]]:
    """The reference host as it is, each of our parts alone, and together; then with what is not built yet."""
    known = REFERENCE.hit_rate
    both = Measured(handoff_ms=handoff_ms, kernel_share=by_threads)
    return [
        scenario("reference host as published", known, Measured()),
        scenario("our hand-off alone", known, Measured(handoff_ms=handoff_ms)),
        scenario("our lane by share alone", known, Measured(kernel_share=share)),
        scenario("our lane by threads alone", known, Measured(kernel_share=by_threads)),
        scenario("our hit rate on random routing alone", hits, Measured()),
        scenario(SHARE, hits, Measured(handoff_ms=handoff_ms, kernel_share=share)),
        scenario(THREADS, hits, both),
        scenario("the same, kernels at the CPU's base clock", hits, Measured(handoff_ms, slow)),
        scenario("by threads, and a hit rate of .45 (not measured)", 0.45, both),
        scenario("by threads, .45, and 9 ms outside the experts (not measured)", 0.45, replace(both, fixed_ms=9.0)),
    ]  # fmt: skip


def evaluate(moe: dict[str, Any], exact: dict[str, Any], fast: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(raw figures, bars)."""
    threads, lane = REFERENCE.cpu_threads, fast["raw"]["fast"]["lane"]
    rate, clock = lane_rate(moe, threads)
    by_threads = min(1.0, rate / (REFERENCE.dram_gb_s * 1e9))
    slow = min(1.0, by_threads * BASE_CLOCK_HZ / clock)
    share, hits = lane_share(fast), cache_hits(exact)
    published = decode_tok_s(REFERENCE.hit_rate, REFERENCE, cpu=True)
    raw = {
        "reference": {
            "fast_tok_s": {"published": FAST, "model": round(published, 2), "at_hit_rate": REFERENCE.hit_rate},
            "exact_hit_rate_implied": {
                str(t): round(implied_hit_rate(t, REFERENCE, cpu=False), 4) for t in (EXACT, 12.6)
            },
        },
        "ours": {
            "lane": {
                "handoff_ms": lane["a_ms"], "expert_ms": lane["b_ms"], "workers": lane["workers"], "isa": lane["isa"],
                "share_of_dram": round(share, 4), "gpu": fast["machine"]["gpu"],
            },
            "kernel": {
                "isa": "avx2", "gb_s_of_one_thread": round(lane_rate(moe, 1)[0] / 1e9, 3), "clock_hz": clock,
                "gb_s_of_22_threads": round(rate / 1e9, 1), "share_of_dram": round(by_threads, 4),
                "share_at_base_clock": round(slow, 4),
            },
            "hit_rate": {"value": round(hits, 4), "on": exact["what"]},
        },
        "scenarios": scenarios(share, by_threads, slow, lane["a_ms"], hits),
    }  # fmt: skip
    tok_s = {s["what"]: s["tok_s"] for s in raw["scenarios"]}
    error = round(abs(published / PAPER - 1), 4)
    bars: dict[str, Any] = {"paper.fast_error": {"value": error, "want": "<= 0.05", "ok": error <= 0.05}}
    for name, what in (("paper.ours_tok_s", SHARE), ("paper.ours_by_threads_tok_s", THREADS)):
        bars[name] = {"value": tok_s[what], "want": f">= {FAST}", "ok": tok_s[what] >= FAST}
    return raw, bars


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moe", type=Path, help="result of cpu_moe.py (default: the newest recorded)")
    parser.add_argument("--exact", type=Path, help="result of gpu_exact.py (default: the newest recorded)")
    parser.add_argument("--fast", type=Path, help="result of gpu_fast.py (default: the newest recorded)")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    options = parser.parse_args()
    files = {"moe": options.moe or latest("cpu-moe"), "exact": options.exact or latest("exact")}
    files["fast"] = options.fast or latest("fast")
    raw, bars = evaluate(**{name: json.loads(path.read_text()) for name, path in files.items()})
    for s in raw["scenarios"]:
        constants = f"hits {s['hit_rate']:.3f}, A {s['handoff_ms']:.3f} ms, B {s['cpu_expert_ms']:.4f} ms"
        print(f"{s['tok_s']:6.2f} tok/s {s['gain']:+7.1%}  {s['what']} ({constants})")
    print(f"exact mode's {EXACT} tok/s implies a hit rate of {raw['reference']['exact_hit_rate_implied'][str(EXACT)]}")
    for name, bar in bars.items():
        print(f"{'ok  ' if bar['ok'] else 'MISS'} {name}: {bar['value']} (want {bar['want']})")
    if options.out:
        shown = [Path(a).name if Path(a).is_file() else a for a in sys.argv[1:]]
        result = {
            "what": "the reference host on paper: published speeds from the cost model, and our measured parts there",
            "machine": machine(),
            "versions": {"glm53": commit(), "python": platform.python_version()},
            "command": " ".join(["python3", "bench/paper_host.py", *shown]),
            "settings": {**{name: path.name for name, path in files.items()}, "expert_bytes": SHAPE.expert_bytes},
            "raw": raw,
            "bars": bars,
        }
        save(result, options.out)
    return 0 if all(bar["ok"] for bar in bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
