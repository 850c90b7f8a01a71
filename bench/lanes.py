#!/usr/bin/env python3
"""Rates of the four ways an expert's bytes can be read on this host; one JSON line.

    python bench/lanes.py [--gpu 0] [--out lanes.json]

  vram         the GPU reads its own memory (what a cached expert costs)
  pcie         the GPU reads page-locked host memory in place (what a miss costs)
  copy_engine  the copy engine moves page-locked host memory into VRAM, an expert at a time (admission, staging)
  cpu          the CPU kernels read experts of the real shape, on the threads that serving would use
and, beside them, dram: a plain read on one thread per physical core. GB is 10^9 bytes. A lane that cannot be measured
here is named with the reason, in the JSON and on standard error.
Exit code 0: at least one lane was measured; 2: none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common import command, emit, machine, say, versions

GB = 1e9
ROUNDS = 7
BLOCK = 1 << 29
"""Bytes that one round reads: more than any cache, little enough for a small card."""
SAYS = {
    "vram": "the GPU reads its own memory",
    "pcie": "the GPU reads page-locked host memory in place",
    "copy_engine": "page-locked host memory into VRAM, an expert a copy",
    "cpu": "experts of the real shape through the CPU kernels",
    "dram": "plain reads of host memory, a thread per physical core",
}


class NotHere(Exception):
    """A lane that this host does not have; the text says why."""


def device_seconds(work: Callable[[], Any]) -> list[float]:
    """Seconds of each round on the GPU's own clock, after one to warm up."""
    import torch

    times = []
    for _ in range(ROUNDS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return times[1:]


def pinned(count: int) -> Any:
    """Page-locked float32 host memory of zeros."""
    import torch

    return torch.zeros(count, dtype=torch.float32, pin_memory=True)


class Alias:
    """Page-locked host memory as the GPU addresses it: the same address, by unified virtual addressing."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape), "typestr": "<f4", "data": (tensor.data_ptr(), False), "version": 3,
        }  # fmt: skip


class Gpu:
    """The lanes that need one."""

    def __init__(self, index: int) -> None:
        import torch

        if not torch.cuda.is_available():
            raise NotHere("torch sees no GPU")
        torch.cuda.set_device(index)
        self.torch, self.name = torch, torch.cuda.get_device_name(index)

    def vram(self) -> dict[str, Any]:
        # float32: torch sums int32 by way of int64, which sets the pace of an HBM card instead of its memory
        block = self.torch.zeros(BLOCK // 4, dtype=self.torch.float32, device="cuda")
        return {"seconds": device_seconds(block.sum), "bytes": BLOCK}

    def pcie(self) -> dict[str, Any]:
        view = self.torch.as_tensor(Alias(pinned(BLOCK // 4)), device="cuda")
        return {"seconds": device_seconds(view.sum), "bytes": BLOCK}

    def copy_engine(self) -> dict[str, Any]:
        from glm53.sizing import SHAPE

        pieces = BLOCK // SHAPE.expert_bytes
        source = pinned(pieces * SHAPE.expert_bytes // 4).view(pieces, -1)
        target = self.torch.empty_like(source[0], device="cuda")

        def move() -> None:
            for piece in source:
                target.copy_(piece, non_blocking=True)

        return {"seconds": device_seconds(move), "bytes": pieces * SHAPE.expert_bytes}


def lanes(index: int) -> tuple[str | None, dict[str, Callable[[], dict[str, Any]]]]:
    """The GPU's name, and how each lane is measured."""
    from glm53.cli import lanes as host_lanes
    from glm53.config import Settings
    from glm53.host import Host

    host = Host()

    def through_host(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        found = measure()
        if found["gb_s"] is None:
            raise NotHere(found["text"])
        return found

    try:
        gpu: Gpu | None = Gpu(index)
        why = ""
    except (NotHere, ImportError, RuntimeError) as e:
        gpu, why = None, str(e)

    def on_gpu(name: str) -> dict[str, Any]:
        if gpu is None:
            raise NotHere(why)
        return dict(getattr(gpu, name)())

    return (gpu.name if gpu else None), {
        "vram": lambda: on_gpu("vram"),
        "pcie": lambda: on_gpu("pcie"),
        "copy_engine": lambda: on_gpu("copy_engine"),
        "cpu": lambda: through_host(lambda: host_lanes.cpu_kernel(Settings(), host)),
        "dram": lambda: through_host(lambda: host_lanes.dram(len(host.physical_cores()))),
    }


def measure(found: dict[str, Callable[[], dict[str, Any]]]) -> tuple[dict[str, Any], dict[str, str]]:
    """(raw figures with gb_s, reasons) by lane."""
    raw, missing = {}, {}
    for name, lane in found.items():
        try:
            figures = lane()
        except Exception as e:  # one lane must not hide the others
            missing[name] = str(e).splitlines()[0] if str(e) else type(e).__name__
            say(f"{name:<12} not measured: {missing[name]}")
            continue
        if "gb_s" not in figures:
            figures["gb_s"] = round(figures["bytes"] / median(figures["seconds"]) / GB, 2)
        raw[name] = figures
        say(f"{name:<12} {figures['gb_s']:>9.2f} GB/s  {SAYS[name]}")
    return raw, missing


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", type=int, default=0, help="index (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args(argv)
    gpu, found = lanes(args.gpu)
    raw, missing = measure(found)
    bars = {f"lane.{n}_gb_s": {"value": r["gb_s"], "unit": "GB/s", "says": SAYS[n]} for n, r in raw.items()}
    emit(
        {
            "what": "lanes of this host: the ways an expert's bytes can be read",
            "machine": machine(gpu),
            "versions": versions("glm53", "torch"),
            "command": command("lanes.py", argv),
            "settings": {"rounds": ROUNDS, "block_bytes": BLOCK, "gpu": args.gpu},
            "raw": {"lanes": raw, "not_measured": missing},
            "bars": bars,
        },
        args.out,
    )
    return 0 if raw else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
