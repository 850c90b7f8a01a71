"""`glm53 prepare` (compile and warm everything once a host) and `glm53 pin` (fix this architecture's Triton picks)."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...config import Settings
from ...console import say
from ...hooks import VERSION
from . import pins
from .loader import Loaded, LoadOptions, architecture, load


@contextmanager
def _warmed(settings: Settings) -> Iterator[Loaded]:
    """A loaded model whose kernels have all run once."""
    stages: set[str] = set()

    def progress(stage: str, fraction: float) -> None:
        if stage not in stages:
            stages.add(stage)
            say(f"{stage} ...")

    start = time.monotonic()
    loaded = load(settings, progress, LoadOptions(use_heat=False))
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
