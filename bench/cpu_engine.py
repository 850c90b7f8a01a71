#!/usr/bin/env python3
"""Speed of the CPU engine beside plain transformers, in one process, on a synthetic checkpoint.

    python bench/cpu_engine.py                     # makes the bench512 preset; exit code 1 if the bar is missed
    python bench/cpu_engine.py --context 4096 --threads 8 --out bench/results/cpu_engine.json

The oracle is transformers' own glm5_next with every expert decoded to float32 and its DynamicCache; both decode the
same tokens from the same context, in rounds that alternate. The oracle runs with one torch thread and with all of them
and its better median counts. Bar: 3 times the oracle at 1,024 tokens of context. One JSON object on stdout, as
bench/report.py reads it. Needs tests/oracle, so it runs from a checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import machine, save

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/oracle"))
BAR = 3.0


def arguments() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    p.add_argument("--checkpoint", type=Path, help="an EXL3 checkpoint; default: the preset, made on the spot")
    p.add_argument("--preset", default="bench512", choices=("tiny", "small", "bench512"))
    p.add_argument("--context", type=int, default=1024, help="tokens before the measured ones")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--tokens", type=int, default=8, help="tokens a round")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--out", type=Path, help="also write the JSON here")
    return p.parse_args()


def make_checkpoint(preset: str, out: Path) -> Path:
    """The preset's checkpoint, on the tests' tokenizer."""
    import make_tiny

    print(f"making {preset} ...", file=sys.stderr)
    out = out / preset
    tokenizer = str(ROOT / "tests/data/tiny-tokenizer.json")
    command = [sys.executable, make_tiny.__file__, str(out), "--preset", preset, "--cal", tokenizer]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


class Engine:
    """The CPU engine's model."""

    def __init__(self, path: Path, threads: int) -> None:
        from glm53.checkpoint import Checkpoint
        from glm53.engine.cpu.model import CpuModel

        with Checkpoint.open(path) as checkpoint:
            self._model = CpuModel(checkpoint, threads, lambda stage, fraction: None)
        self._state = self._model.new_state()
        self.kernels = self._model.isa

    def prefill(self, ids: list[int]) -> None:
        for at in range(0, len(ids), 128):
            self._model.prefill(self._state, ids[at : at + 128])

    def step(self, token: int) -> torch.Tensor:
        return self._model.step([self._state], [token])[0]


class Oracle:
    """transformers' model and cache, every tensor decoded."""

    def __init__(self, path: Path) -> None:
        import hf_oracle

        self._model, self._cache = hf_oracle.load(str(path))[0], None
        self.threads = 1

    def _feed(self, ids: list[int]) -> torch.Tensor:
        torch.set_num_threads(self.threads)
        out = self._model(input_ids=torch.tensor([ids]), cache=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = out.cache
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def prefill(self, ids: list[int]) -> None:
        for at in range(0, len(ids), 128):
            self._feed(ids[at : at + 128])

    def step(self, token: int) -> torch.Tensor:
        return self._feed([token])


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Tokens per second of both, and how far apart their logits are on the same tokens."""
    counts = sorted({1, args.threads})
    total = args.context + args.rounds * len(counts) * args.tokens
    ids = torch.randint(0, 2048, (total,), generator=torch.Generator().manual_seed(0)).tolist()
    engine, oracle = Engine(path, args.threads), Oracle(path)
    prompt = ids[: args.context]
    prefill = {"engine": seconds(lambda: engine.prefill(prompt)), "oracle": seconds(lambda: oracle.prefill(prompt))}
    names = ["engine", *(f"oracle, {n} torch threads" for n in counts)]
    times: dict[str, list[float]] = {name: [] for name in names}
    apart: list[float] = []
    for r in range(args.rounds * len(counts)):
        at = args.context + r * args.tokens
        oracle.threads = counts[r % len(counts)]
        logits = {}
        for side, name in ((engine, names[0]), (oracle, names[1 + r % len(counts)])):
            start = time.perf_counter()
            for token in ids[at : at + args.tokens]:
                logits[side] = side.step(token)
            times[name].append((time.perf_counter() - start) / args.tokens)
        apart.append(float((logits[engine] - logits[oracle]).norm() / logits[oracle].norm()))
    medians = {name: median(t) for name, t in times.items()}
    return {
        "decode_tokens_per_s": {name: round(1 / t, 2) for name, t in medians.items()},
        "decode_ratio": round(min(medians[n] for n in names[1:]) / medians["engine"], 2),
        "prefill_tokens_per_s": {n: round(args.context / t, 1) for n, t in prefill.items()},
        "logits_relative_rms_median": round(median(apart), 5),
        "expert_kernels": engine.kernels,
        "step_seconds": {name: [round(x, 5) for x in t] for name, t in times.items()},
    }


def versions() -> dict[str, str]:
    """What it ran."""
    import transformers

    import glm53

    return {
        "glm53": glm53.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def main() -> int:
    """Measure, print, compare with the bar."""
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="glm53-bench-") as scratch, torch.inference_mode():
        path = args.checkpoint or make_checkpoint(args.preset, Path(scratch))
        raw = measure(args, path)
    ratio = raw["decode_ratio"]
    bar = {"value": ratio, "want": BAR, "ok": ratio >= BAR}
    names = ("preset", "context", "rounds", "threads", "tokens")
    result = {
        "what": "CPU engine beside plain transformers (every expert decoded to float32), decoding one stream",
        "machine": machine(),
        "versions": versions(),
        "command": shlex.join(["python", "bench/cpu_engine.py", *sys.argv[1:]]),
        "settings": {name: getattr(args, name) for name in names},
        "raw": raw,
        "bars": {"cpu_engine.decode_vs_transformers": bar},
    }
    print(json.dumps(result, indent=1))
    if args.out:
        save(result, args.out)
    return 0 if bar["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
