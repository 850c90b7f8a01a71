"""Mixed load on fast mode for a long time, for `gpu_fast.py`: memory stays flat and no step goes wrong.

A slice is some seconds of random prompts and answers, up to four streams at once, some of them cancelled; then fixed
texts are decoded again, token by token, and each step's logits are compared with those of exact steps, taken at the
beginning in the same process with the lane taken out. After each slice every cached expert is compared with its home.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from decode_kl import Forced
from exact_process import peak_ram

SLICE_S = 25.0
TEXTS, PROMPT, NEW = 4, 40, 48
STREAMS, CANCEL = 4, 0.01


class Soak:
    """One loaded model under load. `vram` gives bytes in use; `seconds` is the clock."""

    def __init__(self, exllamav3: Any, loaded: Any, generator: Any, vram: Any, seconds: Any = time.monotonic) -> None:
        self.exl, self.loaded, self.generator, self._vram, self._seconds = exllamav3, loaded, generator, vram, seconds
        self._draw = random.Random(5)
        self._texts = [[self._token() for _ in range(PROMPT + NEW)] for _ in range(TEXTS)]
        lane, loaded.passes.lane = loaded.passes.lane, None
        try:
            self._reference = self._decode_texts()
        finally:
            loaded.passes.lane = lane
        self.first = self.distance()

    def _token(self) -> int:
        return self._draw.randrange(min(2000, self.loaded.vocab_size))

    def _iterate(self) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = self.generator.iterate()
        fault = self.loaded.passes.fault()
        if fault is not None:
            raise RuntimeError(fault)
        for r in results:
            if r["stage"] == "error":
                raise r["error"]
        return results

    def _decode_texts(self) -> Any:
        """Logits of the decode steps of every text, one stream after the other: (steps, V) float32."""
        import torch

        kept: list[Any] = []
        for ids in self._texts:
            sampler = Forced(ids[PROMPT:], self.loaded.vocab_size)
            prompt = torch.tensor([ids[:PROMPT]])
            self.generator.enqueue(self.exl.Job(input_ids=prompt, max_new_tokens=NEW, sampler=sampler))
            while self.generator.num_remaining_jobs():
                self._iterate()
            kept += sampler.logits[1:NEW]
        return torch.stack(kept)

    def distance(self) -> dict[str, float]:
        """Of the same tokens decoded now from the exact ones: mean and largest KL, share of equal likeliest tokens."""
        now, reference = self._decode_texts().double().log_softmax(-1), self._reference.double().log_softmax(-1)
        kl = (reference.exp() * (reference - now)).sum(-1)
        top1 = (reference.argmax(-1) == now.argmax(-1)).double().mean()
        return {"kl_mean": float(kl.mean()), "kl_max": float(kl.max()), "top1": float(top1)}

    def slice(self, length_s: float) -> dict[str, Any]:
        """Load for that long, then the comparison."""
        import torch

        counts = {"requests": 0, "cancelled": 0, "tokens": 0}
        end, jobs = self._seconds() + length_s, []  # type: ignore[var-annotated]
        while self._seconds() < end or self.generator.num_remaining_jobs():
            while self._seconds() < end and self.generator.num_remaining_jobs() < STREAMS:
                ids = torch.tensor([[self._token() for _ in range(self._draw.choice((1, 5, 60, 300, 1500)))]])
                wanted = self._draw.randrange(1, 120)
                sampler = Forced([self._token() for _ in range(wanted)], self.loaded.vocab_size)
                jobs.append(self.exl.Job(input_ids=ids, max_new_tokens=wanted, sampler=sampler))
                self.generator.enqueue(jobs[-1])
                counts["requests"] += 1
            for r in self._iterate():
                counts["tokens"] += 0 if r.get("token_ids") is None else r["token_ids"].numel()
                jobs = [job for job in jobs if not (r["eos"] and job is r["job"])]
            if jobs and self._draw.random() < CANCEL * len(jobs):
                self.generator.cancel(jobs.pop(self._draw.randrange(len(jobs))))
                counts["cancelled"] += 1
            self.loaded.passes.between(prompts_left=False)
        wrong = len(self.loaded.runtime.verify(self.loaded.passes.stream))
        memory = {"rss": peak_ram()["VmRSS"], "vram": int(self._vram())}
        return {**counts, **memory, "mismatches": wrong, **self.distance()}


def growth(values: list[int]) -> float:
    """The last third's smallest over the first third's largest, less 1: above 0, it never came back down."""
    third = max(1, len(values) // 3)
    return min(values[-third:]) / max(values[:third]) - 1


def work_soak(args: argparse.Namespace) -> dict[str, Any]:
    """Slices until `--soak` seconds are over."""
    import exllamav3 as exl
    import torch
    from fast_work import lane_settings
    from gpu_exact import without

    from glm53.config import Settings
    from glm53.engine.exllama.ahead import run_ahead
    from glm53.engine.exllama.loader import LoadOptions, load

    state = Path(tempfile.mkdtemp())
    values: dict[str, Any] = {"model_dir": Path(args.checkpoint), "mode": "fast", "state_dir": state}
    settings = Settings(**values, cache_tokens=16384, **lane_settings(args))
    options = LoadOptions(max_slots=args.slots, **without(args))
    loaded = load(settings, lambda stage, fraction: None, options)
    generator = exl.Generator(  # its store of recurrent states is full before the first third is over
        loaded.model, loaded.cache, loaded.tokenizer, max_batch_size=STREAMS, recurrent_cache_size=1 << 28
    )
    run_ahead(generator, loaded)
    soak, slices, end = Soak(exl, loaded, generator, torch.cuda.memory_reserved), [], time.monotonic() + args.soak
    slice_s = min(SLICE_S, args.soak)
    while time.monotonic() < end:
        slices.append(soak.slice(slice_s))
        print(slices[-1], flush=True)
    grown = {name: growth([s[name] for s in slices]) for name in ("rss", "vram")}
    before, worst = soak.first, max(s["kl_max"] for s in slices)
    loaded.close()
    return {
        "without": args.without,
        "first": before,
        "worst_kl": worst,
        "growth": grown,
        "lane": lane_settings(args),
        "slice_s": slice_s,
        "slices": slices,
    }
