"""The runs of `gpu_exact.py` and `gpu_fast.py`: prompts through an exllamav3 generator, timed alike for all models."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from common import steps_rate
from exact_trace import moe_trace

PROMPT, LONG, SHORT = 300, 4103, 40


def ids_of(tokens: int, generator: Any) -> Any:
    import torch

    return torch.randint(0, 2000, (1, tokens), generator=generator)


def drawing(exllamav3: Any) -> Any:
    """The sampler of a request with temperature 1, as the server makes it, for every side. exllamav3's ComboSampler
    would list penalties that do nothing but ask for past ids, and what asks for those is never queued ahead."""
    return exllamav3.CustomSampler([exllamav3.SS_Temperature(1.0), exllamav3.SS_Sample()])


class Rates(NamedTuple):
    """Of one run: seconds to the first token of any stream; tok/s of all streams together after it; tok/s of the steps
    that all streams take part in (`common.steps_rate`)."""

    first_s: float
    tok_s: float
    steps_tok_s: float


class Runner:
    """Drives an exllamav3 generator; the same for all models."""

    def __init__(self, exllamav3: Any, generator: Any) -> None:
        self.exl, self.generator = exllamav3, generator

    def run(self, prompt: int, new: int, streams: int = 1, seed: int = 0) -> Rates:
        """`streams` prompts at once, each answered with `new` tokens."""
        import torch

        random = torch.Generator().manual_seed(seed)
        for s in range(streams):
            sampler = drawing(self.exl)
            job = self.exl.Job(input_ids=ids_of(prompt, random), max_new_tokens=new, sampler=sampler, seed=seed + s)
            self.generator.enqueue(job)
        torch.cuda.synchronize()
        start, first, last, n = time.perf_counter(), 0.0, 0.0, 0
        drawn: dict[int, list[float]] = {}
        while self.generator.num_remaining_jobs():
            results, now = self.generator.iterate(), time.perf_counter()
            for r in results:
                if r["stage"] == "error":
                    raise r["error"]
                if r["stage"] == "streaming":  # a token was drawn, though half a character's ids may be held back
                    drawn.setdefault(id(r["job"]), []).append(now)
                if r.get("token_ids") is not None:
                    first, last = first or now, now
                    n += r["token_ids"].numel()
        rate = (n - streams) / (last - first) if last > first else 0.0
        return Rates(first - start, rate, steps_rate(list(drawn.values())))

    def traced(self, loaded: Any, steps: int) -> dict[str, Any]:
        """The host's CUDA calls inside the MoE layers of decode steps alone; the prompt is read before."""
        import torch

        from glm53.hooks import moe_modules

        ids = ids_of(SHORT, torch.Generator().manual_seed(61))
        sampler = drawing(self.exl)
        self.generator.enqueue(self.exl.Job(input_ids=ids, max_new_tokens=steps + 2, sampler=sampler, seed=61))
        while not any(r.get("token_ids") is not None for r in self.generator.iterate()):
            pass

        def decode() -> None:
            while self.generator.num_remaining_jobs():
                self.generator.iterate()

        return moe_trace(decode, moe_modules(self.exl, loaded.model))

    def decode(self, new: int, streams: int, runs: int) -> dict[str, list[float]]:
        """Both rates of each run, after one run of the same shape."""
        self.run(PROMPT, new, streams, 40 + streams)
        found = [self.run(PROMPT, new, streams, 50 + i) for i in range(runs)]
        return {
            f"decode{streams}_tok_s": [rates.tok_s for rates in found],
            f"steps{streams}_tok_s": [rates.steps_tok_s for rates in found],
        }

    def settle(self, new: int) -> None:
        """Lets kernels and placement settle."""
        self.run(64, 16)
        for i in range(3):
            self.run(PROMPT, new, 1, 10 + i)

    def steps(self, prompt: int, seed: int) -> list[float]:
        """Seconds of each of the generator's rounds up to the first token, waiting for the device after each."""
        import torch

        ids = ids_of(prompt, torch.Generator().manual_seed(seed))
        sampler = drawing(self.exl)
        self.generator.enqueue(self.exl.Job(input_ids=ids, max_new_tokens=1, sampler=sampler, seed=seed))
        rounds = []
        while self.generator.num_remaining_jobs():
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.generator.iterate()
            torch.cuda.synchronize()
            rounds.append(time.perf_counter() - start)
        return rounds

    def prefill(self) -> list[float]:
        """Seconds to the first token of the long prompt, after one run."""
        return [self.run(LONG, 2, 1, 89 + i).first_s for i in range(3)][1:]
