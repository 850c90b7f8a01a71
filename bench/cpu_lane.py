#!/usr/bin/env python3
"""The CPU lane as a publisher on this host sees it: hand-off, bytes per second, and the constants A and B of the split.

    python3 bench/cpu_lane.py                              # 1 .. all cores but one; prints the table
    python3 bench/cpu_lane.py --threads 14 --out lane.json

Runs the native benchmark (built with `cmake --preset bench` when it is not there). The publisher is a host thread: a
GPU adds the latency of its writes and reads over PCIe. "empty" is a job without experts that finds the workers
spinning, "parked" one that finds them asleep. A and B are the line through the medians of jobs of 1, 2, 3 ... experts:
time = A + B * experts. "of CpuMoe" compares with CpuMoe on as many threads, in the same process, "of kernel" with the
expert kernels alone, each thread on experts of its own: what sharing the work, rotations and sums leave of their speed.
Standard library only.
Exit code 0: measured; 2: the measurement failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from statistics import linear_regression, median, quantiles
from typing import Any

from common import save
from cpu_moe import ROOT, Failed, build, commit, machine, measure

BINARY = ROOT / "build" / "bench" / "bench" / "native" / "bench_cpu_lane"


def summary(worker: dict[str, Any], expert_bytes: int) -> dict[str, Any]:
    """Figures of one number of workers; times in microseconds, GB is 10^9 bytes."""
    counts = [job["experts"] for job in worker["jobs"]]
    times = [median(job["seconds"]) for job in worker["jobs"]]
    fit = linear_regression(counts, times) if len(counts) > 1 else None
    largest = worker["jobs"][-1]
    ratios = [moe / lane for lane, moe in zip(largest["seconds"], largest["moe_seconds"], strict=True)]
    return {
        "threads": worker["threads"],
        "isa": worker["isa"],
        "empty_us": round(median(worker["empty_seconds"]) * 1e6, 2),
        "empty_p90_us": round(quantiles(worker["empty_seconds"], n=10)[-1] * 1e6, 2),
        "parked_us": round(median(worker["parked_seconds"]) * 1e6, 2),
        "gb_s": round(counts[-1] * expert_bytes / times[-1] / 1e9, 3),
        "gb_s_by_experts": [round(n * expert_bytes / t / 1e9, 3) for n, t in zip(counts, times, strict=True)],
        "speed_of_cpu_moe": round(median(ratios), 3),
        "speed_of_kernel": [
            round(n * median(worker["kernel_seconds"]) / t, 3) for n, t in zip(counts, times, strict=True)
        ],
        "handoff_us": None if fit is None else round(fit.intercept * 1e6, 1),
        "expert_us": None if fit is None else round(fit.slope * 1e6, 1),
    }


def report(rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    print(
        f"{'threads':>7} {'empty us (p90)':>18} {'parked us':>10} {'GB/s':>7} {'of CpuMoe':>10} "
        f"{'of kernel':>10} {'A us':>8} {'B us':>8}"
    )
    for row in rows:
        empty = f"{row['empty_us']:.1f} ({row['empty_p90_us']:.1f})"
        a, b = (f"{row[k]:.1f}" if row[k] is not None else "-" for k in ("handoff_us", "expert_us"))
        print(
            f"{row['threads']:>7} {empty:>18} {row['parked_us']:>10.1f} {row['gb_s']:>7.2f} "
            f"{row['speed_of_cpu_moe']:>10.2f} {row['speed_of_kernel'][-1]:>10.2f} {a:>8} {b:>8}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, default=BINARY, help="the native benchmark")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="workers at most")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=1, help="rows that all pick the same experts")
    parser.add_argument("--experts-a-job", type=int, default=8)
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    options = parser.parse_args()
    arguments = ["--threads", str(options.threads), "--rounds", str(options.rounds), "--rows", str(options.rows)]
    arguments += ["--experts-a-job", str(options.experts_a_job)]
    try:
        if options.binary == BINARY:
            build("bench_cpu_lane")
        raw = measure(options.binary, arguments)
    except Failed as error:
        print(f"cpu_lane: {error}", file=sys.stderr)
        return 2
    rows = [summary(worker, raw["settings"]["expert_bytes"]) for worker in raw["workers"]]
    report(rows)
    if options.out:
        result = {
            "what": "the CPU lane from publishing a job to its result, host publisher, experts not in cache",
            "machine": machine(),
            "versions": {"glm53": commit(), "python": platform.python_version()},
            "command": " ".join(["python3", "bench/cpu_lane.py", *sys.argv[1:]]),
            "settings": raw.pop("settings"),
            "figures": rows,
            "raw": raw,
        }
        save(result, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
