"""The GPU engine on no GPU: the real engine, loader, hooks and expert runtime over the stand-in exllamav3 and the host
device."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_checkpoint import TINY

from glm53 import _core
from glm53.config import Settings
from glm53.engine.exllama import ExllamaEngine, lane
from glm53.engine.protocol import GenerationRequest, SamplingParams

FAKES = Path(__file__).parent / "fakes"
PROMPTS = ([5], [7, 8, 9, 10, 11, 12, 13], list(range(30, 230)))
GREEDY = SamplingParams(temperature=0.0)


class FakeCuda:
    """What the engine asks of torch.cuda, on the host device; `free` is the VRAM it reports."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.device = _core.HostDevice()


class FakeCopies:
    """Stands for `lane_costs.ExpertCopies`: a copy takes 0.4 ms alone, 0.5 ms beside the CPU lane."""

    def __init__(self, store: Any) -> None:
        self.times_ns: list[int] = []
        self.asked_ns: list[int] = []

    def alone(self) -> int:
        return 400_000

    def within_vram(self) -> int:
        return 20_000

    def begin(self, ns: int) -> None:
        self.asked_ns.append(ns)

    def end(self) -> None:
        self.times_ns.append(500_000)


def use_fakes(monkeypatch: pytest.MonkeyPatch, free: int = 4 * 10**9) -> FakeCuda:
    """Make `import exllamav3` find the stand-in, and torch.cuda and the device seam the host."""
    for name in [n for n in sys.modules if n == "exllamav3" or n.startswith("exllamav3.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(FAKES))
    cuda = FakeCuda(free)

    def stream(handle: int) -> Any:
        return SimpleNamespace(cuda_stream=handle, synchronize=lambda: None)

    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "set_device": lambda index: None,
        "synchronize": lambda *a: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda *a: (cuda.free, cuda.free),
        "memory_allocated": lambda *a: 0,
        "memory_reserved": lambda *a: 0,
        "max_memory_allocated": lambda *a: 1 << 20,
        "reset_peak_memory_stats": lambda *a: None,
        "get_device_name": lambda *a: "host",
        "get_device_capability": lambda *a: (0, 0),
        "current_stream": lambda *a: stream(16),
        "Stream": lambda: stream(32),
        "Event": lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(_core, "cuda_device", lambda index: cuda.device)
    monkeypatch.setattr(lane, "ExpertCopies", FakeCopies)
    return cuda


def make_settings(tmp_path: Path, **changes: Any) -> Settings:
    """Settings for the bundled checkpoint with everything learned going to `tmp_path`."""
    base = Settings(model_dir=TINY, mode="exact", state_dir=tmp_path, cache_tokens=8192, chunk_size=512)
    return dataclasses.replace(base, **changes)


async def collect(stream: Any) -> tuple[list[int], Any]:
    """A stream's token ids and how it ended."""
    ids, finish = [], None
    async for delta in stream:
        ids += [t.id for t in delta.tokens]
        finish = delta.finish
    return ids, finish


def stock_answer(prompt: list[int], steps: int) -> list[int]:
    """Tokens of the unpatched stand-in."""
    import exllamav3

    config = exllamav3.Config.from_directory(str(TINY))
    model = exllamav3.Model.from_config(config)
    model.load()
    ids = list(prompt)
    for _ in range(steps):
        ids.append(int(model.forward(torch.tensor([ids[-1:]]))[0, -1].float().argmax()))
    return ids[len(prompt) :]


async def answers(engine: ExllamaEngine, prompts: Any, steps: int, **extra: Any) -> list[tuple[list[int], Any]]:
    """Token ids and end of greedy answers to `prompts`, all at once."""
    requests = [GenerationRequest(str(i), p, steps, sampling=GREEDY, **extra) for i, p in enumerate(prompts)]
    return list(await asyncio.gather(*(collect(engine.submit(r)) for r in requests)))
