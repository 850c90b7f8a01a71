#!/usr/bin/env python3
"""Speed of routed experts on the CPU: real shapes that do not fit in the caches, in their on-disk order.

    python3 bench/cpu_moe.py                               # a table, then one JSON line; exit code 1 if a bar is missed
    python3 bench/cpu_moe.py --out bench/results/cpu_moe.json

Runs the native benchmark (built with `cmake --preset bench` when it is not there): whole experts, that is gate, up,
SwiGLU, down and all rotations, so that "GB/s" is trellis bytes over the time of the whole expert. The clock is measured
with a chain of additions beside each run, the memory's read bandwidth in between. The table goes to standard error.
Standard library only.
Exit code 0: every bar held; 1: one was missed; 2: the measurement failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from common import cpu_name, save

ROOT = Path(__file__).resolve().parents[1]
BINARY = ROOT / "build" / "bench" / "bench" / "native" / "bench_cpu_moe"

# GB/s at 1, 2 and 4 rows, ms for a whole expert at 1 row; one core each.
BARS = {
    "avx512": {1: 6.7, 2: 5.8, 4: 4.2, "ms": 1.5},
    "avx2": {1: 4.3, 2: 3.4, 4: 2.5, "ms": 2.2},
}
BAR_TWO_THREADS = 1.9


class Failed(Exception):
    """The measurement could not be made; the text says why."""


def build(target: str) -> None:
    """Configures and builds a native benchmark."""
    for command in (
        ["cmake", "--preset", "bench"],
        ["cmake", "--build", "--preset", "bench", "--target", target],
    ):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def measure(binary: Path, arguments: list[str]) -> dict[str, Any]:
    """The native benchmark's JSON object."""
    if binary == BINARY and not binary.exists():
        build("bench_cpu_moe")
    try:
        done = subprocess.run([str(binary), *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise Failed(f"cannot run {binary}: {error}") from None
    if done.returncode:
        raise Failed(f"{binary.name} failed: {done.stderr.strip()}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def machine() -> dict[str, Any]:
    """Processor, cores and memory of this machine."""
    return {
        "cpu": cpu_name(),
        "logical_cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg(),
    }


def commit() -> str:
    """The working tree's commit, with "+" where tracked files differ from it; empty outside a repository."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def find(raw: dict[str, Any], isa: str, rows: int, threads: int) -> dict[str, Any] | None:
    """One variant's measurements, None where this processor lacks the instruction set."""
    for variant in raw["variants"]:
        if (variant["isa"], variant["rows"], variant["threads"]) == (isa, rows, threads):
            found: dict[str, Any] = variant
            return found
    return None


def at_least(value: float, want: float) -> dict[str, Any]:
    return {"value": round(value, 3), "want": f">= {want}", "ok": value >= want}


def at_most(value: float, want: float) -> dict[str, Any]:
    return {"value": round(value, 3), "want": f"<= {want}", "ok": value <= want}


def judge(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Bars by name, from the medians over the rounds."""
    bars = {}
    for isa, wanted in BARS.items():
        one = find(raw, isa, 1, 1)
        two = find(raw, isa, 1, 2)
        if one is None or two is None:
            continue
        for rows in (1, 2, 4):
            variant = find(raw, isa, rows, 1)
            assert variant is not None
            bars[f"{isa} GB/s, {rows} row{'s'[: rows - 1]}"] = at_least(
                median(variant["bytes_per_second"]) / 1e9, wanted[rows]
            )
        bars[f"{isa} ms per expert"] = at_most(median(one["seconds_per_expert"]) * 1e3, wanted["ms"])
        # Pairs of neighbouring runs, so that another load on the machine meets both.
        ratios = [b / a for a, b in zip(one["bytes_per_second"], two["bytes_per_second"], strict=True)]
        bars[f"{isa} two threads / one"] = at_least(median(ratios), BAR_TWO_THREADS)
    if not bars:
        raise Failed("this processor has neither AVX2 nor AVX-512: there is nothing to measure")
    return bars


def say(text: str) -> None:
    print(text, file=sys.stderr)


def report(raw: dict[str, Any], bars: dict[str, dict[str, Any]]) -> None:
    """Prints the table, for people."""
    reads = {1: median(raw["read_bytes_per_second_1"]), 2: median(raw["read_bytes_per_second_2"])}
    say(
        f"clock {median(raw['clock_hz']) / 1e9:.2f} GHz; plain read {reads[1] / 1e9:.1f} GB/s on 1 thread, "
        f"{reads[2] / 1e9:.1f} GB/s on 2"
    )
    say(f"{'':8}rows threads  GB/s (best)    ms/expert  bytes/cycle  of read")
    for variant in raw["variants"]:
        rate = median(variant["bytes_per_second"])
        say(
            f"{variant['isa']:8}{variant['rows']:4}{variant['threads']:8}"
            f"{rate / 1e9:7.2f} ({max(variant['bytes_per_second']) / 1e9:5.2f})"
            f"{median(variant['seconds_per_expert']) * 1e3:12.3f}{median(variant['bytes_per_cycle']):13.2f}"
            f"{rate / reads[variant['threads']]:9.0%}"
        )
    for name, bar in bars.items():
        say(f"{'ok  ' if bar['ok'] else 'MISS'} {name}: {bar['value']} (want {bar['want']})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, default=BINARY, help="the native benchmark")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bits", type=int, default=3, choices=(2, 3, 4), help="K of the experts (bars exist for 3)")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    options = parser.parse_args()
    arguments = ["--rounds", str(options.rounds), "--bits", str(options.bits)]
    try:
        raw = measure(options.binary, arguments)
        bars = judge(raw) if options.bits == 3 else {}
    except Failed as error:
        print(f"cpu_moe: {error}", file=sys.stderr)
        return 2
    report(raw, bars)
    result = {
        "what": "routed experts on the CPU, whole expert, not in cache, on-disk order",
        "machine": machine(),
        "versions": {"glm53": commit(), "python": platform.python_version()},
        "command": " ".join(["python3", "bench/cpu_moe.py", *sys.argv[1:]]),
        "settings": raw.pop("settings"),
        "raw": raw,
        "bars": bars,
    }
    print(json.dumps(result))
    if options.out:
        save(result, options.out)
    return 0 if all(bar["ok"] for bar in bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
