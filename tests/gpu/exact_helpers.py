"""Runs one checkpoint through stock exllamav3 (every expert in VRAM) and through our engine, in one process.

Both in one process, because exllamav3 and Triton choose kernels by timing them: two processes may choose differently
and then differ by themselves.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glm53.config import Settings
from glm53.engine.exllama import pins
from glm53.engine.exllama.ahead import run_ahead
from glm53.engine.exllama.loader import Loaded, LoadOptions, architecture, load
from glm53.engine.exllama.passes import Passes

PROMPTS = (1, 8, 300, 4103)
STEPS = 128
WITHOUT: tuple[str, ...] = ()
"""Fields of LoadOptions that --without sets to false, to tell at whose door a difference lies."""


@dataclass
class Answers:
    """What one side answered: logits per prompt length, greedy tokens of one stream, of four, and after a long prompt
    (whose last tokens exllamav3 reads in a pass of their own: here the last layers are still staged)."""

    logits: dict[int, torch.Tensor]
    one: list[list[int]]
    four: list[list[int]]
    long: list[list[int]]


def prompt_ids(tokens: int, seed: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * tokens + seed)
    return torch.randint(0, min(vocab, 2000), (1, tokens), generator=generator)


def forward_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """(tokens, vocabulary) logits of a pass without a cache."""
    with torch.inference_mode():
        return model.forward(ids, {"attn_mode": "flash_attn_nc"})[0].cpu()


def greedy(exllamav3: Any, generator: Any, prompts: list[torch.Tensor], steps: int, **more: Any) -> list[list[int]]:
    """Greedy tokens of prompts that decode together; more: arguments of their jobs, another sampler among them."""
    out: list[list[int]] = [[] for _ in prompts]
    more = {"sampler": exllamav3.GreedySampler(), **more}
    for i, ids in enumerate(prompts):
        generator.enqueue(exllamav3.Job(input_ids=ids, max_new_tokens=steps, identifier=i, **more))
    while generator.num_remaining_jobs():
        for r in generator.iterate():
            if r["stage"] == "error":
                raise r["error"]
            for part in (r, r.get("held") or {}):
                if part.get("token_ids") is not None:
                    out[r["identifier"]] += part["token_ids"].reshape(-1).tolist()
    return out


def answer(exllamav3: Any, model: Any, generator: Any, lengths: tuple[int, ...] = PROMPTS) -> Answers:
    """Ask everything once."""
    vocab = model.config.vocab_size
    logits = {n: forward_logits(model, prompt_ids(n, 0, vocab)) for n in lengths}
    one = greedy(exllamav3, generator, [prompt_ids(40, 1, vocab)], STEPS)
    four = greedy(exllamav3, generator, [prompt_ids(20 + 13 * i, 2 + i, vocab) for i in range(4)], STEPS)
    longest = [prompt_ids(PROMPTS[-1], 9, vocab)] if PROMPTS[-1] in lengths else []
    return Answers(logits, one, four, [greedy(exllamav3, generator, [ids], 16)[0] for ids in longest])


def make_generator(exllamav3: Any, model: Any, cache: Any, tokenizer: Any, chunk: int = 8192) -> Any:
    return exllamav3.Generator(
        model, cache, tokenizer, max_batch_size=4, max_chunk_size=chunk, recurrent_cache_size=1 << 28
    )


def stock_answers(path: Path) -> Answers:
    """Load with every expert in VRAM, answer, unload."""
    import exllamav3

    shipped = pins.pin_path(architecture(0), None)
    if shipped is not None:  # the engine will use these picks: so must stock
        pins.apply_pins(shipped, architecture(0))
    config = exllamav3.Config.from_directory(str(path))
    model = exllamav3.Model.from_config(config)
    cache = exllamav3.Cache(model, max_num_tokens=8192, max_batch_size=4)
    model.load(device="cuda:0", progressbar=False)
    tokenizer = exllamav3.Tokenizer.from_config(config)
    try:
        generator = make_generator(exllamav3, model, cache, tokenizer)
        answer(exllamav3, model, generator, PROMPTS[:2])  # lets every kernel choice be made
        return answer(exllamav3, model, generator)
    finally:
        model.unload()
        del generator, cache, model
        gc.collect()
        torch.cuda.empty_cache()


def load_ours(path: Path, state: Path, options: LoadOptions, **changes: Any) -> Loaded:
    values: dict[str, Any] = {"model_dir": path, "mode": "exact", "state_dir": state, "cache_tokens": 8192}
    options = dataclasses.replace(options, **dict.fromkeys(WITHOUT, False))
    return load(Settings(**{**values, **changes}), lambda stage, fraction: None, options)


SLOTS = {"tiny": 12, "flash": 60}
"""Far fewer than there are experts, by the checkpoint's kind."""


class Parts:
    """Our engine's parts with a generator of their own, so that the same code asks both sides."""

    def __init__(self, checkpoint: Path, state: Path, **changes: Any) -> None:
        import exllamav3

        slots = SLOTS["tiny" if checkpoint.name == "tiny" else "flash"]
        self.exllamav3 = exllamav3
        self.loaded = load_ours(checkpoint, state, LoadOptions(max_slots=slots), **changes)
        self.runtime, self.model, self.passes = self.loaded.runtime, self.loaded.model, self.loaded.passes
        self.generator = make_generator(exllamav3, self.model, self.loaded.cache, self.loaded.tokenizer)
        self.ahead = run_ahead(self.generator, self.loaded)

    def close(self) -> None:
        self.loaded.close()
        for name in ("runtime", "model", "passes", "generator", "ahead"):
            setattr(self, name, None)
        gc.collect()
        torch.cuda.empty_cache()


def differences(ours: Answers, stock: Answers) -> list[str]:
    """What is not bit for bit the same; [] is the claim."""
    found = []
    for n, logits in ours.logits.items():
        if not torch.equal(logits, stock.logits[n]):
            rows = (logits != stock.logits[n]).any(-1).nonzero().reshape(-1)
            found.append(f"logits of {n} tokens: {rows.numel()} rows differ, first {int(rows[0])}")
    for name in ("one", "four", "long") if ours.long else ("one", "four"):
        for i, (a, b) in enumerate(zip(getattr(ours, name), getattr(stock, name), strict=True)):
            if a != b:
                at = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
                found.append(f"greedy {name}[{i}]: {len(a)} and {len(b)} tokens, part at {at}")
    return found


def settle(passes: Passes, seconds: float = 20.0) -> None:
    """What the engine does between passes until nothing is lent and the slots are full again."""
    end = time.monotonic() + seconds
    while passes.between(prompts_left=False):
        assert time.monotonic() < end, "slots are still lent, or still empty"
        torch.cuda.synchronize()
