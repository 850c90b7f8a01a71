"""What the GPU subcommands do: `glm53 prepare` compiles and warms everything once a host, `glm53 pin` fixes this
architecture's Triton picks, `glm53 verify` compares cached experts with their originals after making them move."""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...config import Settings
from ...console import say
from ...errors import EngineError
from ...hooks import VERSION
from ...runtime import PARTS
from ..protocol import SamplingParams
from . import pins
from .loader import Loaded, LoadOptions, architecture, load
from .passes import Upkeep
from .sampling import make_sampler

_VERIFY_PROMPT, _VERIFY_ROUND = 24, 64
"""Tokens of a prompt and of an answer while `glm53 verify` makes experts move."""
_HOT = 40_000
"""Heat that a cached expert does not get to from 0 by the prompts of a round: they count as picks too."""


@contextmanager
def _warmed(settings: Settings) -> Iterator[Loaded]:
    """A loaded model whose kernels have all run once."""
    stages: set[str] = set()

    def progress(stage: str, fraction: float) -> None:
        if stage not in stages:
            stages.add(stage)
            say(f"{stage} ...")

    start = time.monotonic()
    loaded = load(settings, progress, LoadOptions(use_heat=False, run_ahead=settings.run_ahead))
    try:
        say(f"loaded in {time.monotonic() - start:.0f} s; running every kernel once ...")
        failed = loaded.model.warmup(
            loaded.cache, max_chunk_size=settings.chunk_size, max_batch_size=settings.autosplit_max_batch_size
        )
        for label in failed:
            logging.getLogger(__name__).warning("warm-up pass failed: %s", label)
        yield loaded
    finally:
        loaded.close()


def prepare(settings: Settings, args: argparse.Namespace) -> int:
    """Compile exllamav3's extension and Triton's kernels into their caches; a later start finds them."""
    start = time.monotonic()
    with _warmed(settings):
        say(f"ready: caches are warm ({time.monotonic() - start:.0f} s)")
    return 0


def pin(settings: Settings, args: argparse.Namespace) -> int:
    """Write the Triton picks that this GPU's kernels run with to a file."""
    import triton

    arch = architecture(settings.gpu)
    out: Path = args.out or settings.state_dir / f"{arch}.json"
    with _warmed(settings):
        count = pins.write_pins(out, arch, VERSION, triton.__version__)
    say(f"{out}: {count} picks for {arch}; use it with --triton-pin {out}, and check the reference panel once with it")
    return 0


def turn_heat_over(runtime: Any, stream: int) -> None:
    """Make experts in slots cold and all others hot, so that the next decode steps replace what every slot holds.

    Without it a cache that holds the hottest experts rightly keeps them, and nothing moves. Between passes only.
    """
    cached = runtime.residency(stream) >= 0
    runtime.import_heat(np.where(cached, 0, _HOT).astype(np.uint16), stream)


def churn(loaded: Loaded, settings: Settings, steps: int) -> None:
    """Decode at least `steps` steps of random prompts, as many streams at once as allowed, and read one long prompt
    first, so that experts are admitted, evicted, lent away and brought back; heat is turned over every round."""
    exllamav3, streams = loaded.exllamav3, settings.autosplit_max_batch_size
    generator = exllamav3.Generator(
        loaded.model, loaded.cache, loaded.tokenizer, max_batch_size=streams, max_chunk_size=settings.chunk_size
    )
    draw, longest = random.Random(0), min(2 * loaded.passes.threshold, loaded.context // 2)

    def run(lengths: list[int], answer: int) -> None:
        for n in lengths:
            ids = torch.tensor([[draw.randrange(loaded.vocab_size) for _ in range(n)]], dtype=torch.long)
            sampler = make_sampler(exllamav3, SamplingParams(temperature=0.0), n)
            generator.enqueue(exllamav3.Job(input_ids=ids, max_new_tokens=answer, sampler=sampler))
        while generator.num_remaining_jobs():
            for result in generator.iterate():
                if result["stage"] == "error":
                    raise EngineError(" ".join(f"a forward pass failed: {result['error']}".split()))
        while loaded.passes.between(prompts_left=False) is Upkeep.NOW:
            torch.cuda.synchronize()

    run([longest], 1)
    for done in range(0, steps, _VERIFY_ROUND):
        turn_heat_over(loaded.runtime, loaded.passes.stream)
        run([_VERIFY_PROMPT] * streams, min(_VERIFY_ROUND, steps - done))


def verify(settings: Settings, args: argparse.Namespace) -> int:
    """Load, make the expert cache work, and compare every slot with its expert in host RAM; 1 if one differs."""
    loaded = load(settings, lambda stage, fraction: None)
    try:
        say(f"loaded in {loaded.times['total']:.0f} s; {args.steps} decode steps ...")
        churn(loaded, settings, args.steps)
        wrong = loaded.runtime.verify(loaded.passes.stream)
        stats = loaded.runtime.stats(loaded.passes.stream)
        experts = loaded.store.experts
    finally:
        loaded.close()
    moved = f"{stats['admissions'] + stats['refills']} copied in, {stats['evictions']} replaced"
    if not wrong:
        say(f"verified: all {stats['resident_slots']} cached experts equal their originals byte for byte ({moved})")
        return 0
    slot, entry, part = wrong[0]
    where = f"slot {slot}, MoE layer {entry // experts}, expert {entry % experts}, {PARTS[part]}"
    say(f"DAMAGED: {len(wrong)} parts of cached experts differ from their originals, first {where} ({moved})")
    return 1
