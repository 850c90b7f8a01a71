"""Raw figures of a made-up run of bench/gpu_fast.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def counts(misses: int, cpu: int) -> dict[str, float]:
    return {"steps": 1000, "misses": misses, "cpu_picks": cpu, "lane_bytes": 6.0e9 * cpu, "lane_s": 0.1 * cpu}


def junit(names: Iterable[str], ok: bool = True) -> list[dict[str, Any]]:
    return [{"name": name, "ok": ok, "seconds": 1.0} for name in sorted(names)]


def synthetic(prefill_tests: Iterable[str]) -> dict[str, Any]:
    """A step of one stream takes 10 ms, its floor is 8 ms: 4, and 8 layers of 5 misses of 10 MB at 100 GB/s."""
    distances = {
        "exact | fast": {"positions": 1016, "kl_mean": 0.001, "top1": 0.999},
        "stock | stock-fp16": {"positions": 1016, "kl_mean": 0.002, "top1": 0.998},
    }
    return {
        "fast": {
            "decode1_tok_s": [90.0, 100.0], "decode4_tok_s": [160.0, 150.0], "fault1": None, "fault4": None,
            "counts1": counts(5000, 3000), "counts4": counts(20000, 9000), "ram": {"VmHWM": 25e9},
            "rates": {"cpu_gb_s": 60.0, "copy_gb_s": 40.0}, "moe_layers": 8, "expert_bytes": 10_000_000,
        },
        "floor": {"decode1_tok_s": [250.0, 240.0], "decode4_tok_s": [400.0]},
        "exact": {"decode1_tok_s": [50.0], "decode4_tok_s": [70.0], "ram": {"VmHWM": 24e9}},
        "stock-12": {"decode1_tok_s": [40.0], "decode4_tok_s": [32.0]},
        "stock-8": {"decode1_tok_s": [20.0], "decode4_tok_s": [40.0]},
        "stock-14": {"timed_out": True, "limit_s": 60.0},
        "kernel": {"expert_s": {"ours": [0.001, 0.001], "native": [0.003, 0.003], "swizzled": [0.002, 0.0015]}},
        "kl": {"raw": {"distances": distances, "lanes": {"fast": {"cpu_picks": 5}}, "failed": {}}},
        "equal": {"tests": junit(prefill_tests)},
    }  # fmt: skip
