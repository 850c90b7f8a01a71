"""Owns the native objects of a GPU engine: the device, one pinned arena per MoE layer, and the expert runtime.

States of an ExpertStore: filling (layers are mapped, page-locked and read by worker threads) -> sealed (`finish`).
Threads: the store's own pool fills; `address` may be asked from any thread and waits for that layer's mapping only.
Costs: every routed expert's bytes of host RAM, once; page-locking 0.03-0.13 s/GiB; reading at the disk's speed.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _core
from .checkpoint import Checkpoint, ExpertLinear, require_ram
from .engine.protocol import Progress
from .errors import CheckpointError, DeviceError

PARTS = ("gate", "up", "down")
PART_ALIGN = 256
FILL_THREADS = 8


def open_cuda(index: int) -> Any:
    """The GPU. Raises DeviceError with the driver's own reason."""
    try:
        return _core.cuda_device(index)
    except RuntimeError as e:
        raise DeviceError(f"GPU {index} cannot be used: {e}") from None


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """How an expert lies in an arena and in a slot: gate, up, down one after the other, `stride` bytes in all."""

    part_bytes: tuple[int, int, int]

    @property
    def offsets(self) -> tuple[int, int, int]:
        """Where each part begins, in bytes from the expert's address."""
        gate, up, _ = (-(-n // PART_ALIGN) * PART_ALIGN for n in self.part_bytes)
        return 0, gate, gate + up

    @property
    def stride(self) -> int:
        """Bytes from one expert to the next."""
        return sum(-(-n // PART_ALIGN) * PART_ALIGN for n in self.part_bytes)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ExpertLayout:
        """The one layout all routed experts share. Raises CheckpointError if they differ (mixed bit rates)."""
        found: dict[str, int] = {}
        for layer in checkpoint.config.moe_layers:
            for linear in checkpoint.experts(layer):
                info = linear.trellis
                if found.setdefault(linear.which, info.nbytes) != info.nbytes:
                    raise CheckpointError(
                        f"{info.file}: {info.name}: {info.nbytes} bytes, other experts have {found[linear.which]}; "
                        "the expert cache needs one bit rate for all routed experts"
                    )
        if not found:
            raise CheckpointError(f"{checkpoint.path}: no MoE layer, nothing to cache")
        return cls((found["gate"], found["up"], found["down"]))


class ExpertStore:
    """Every routed expert's trellises in page-locked host memory, one arena per MoE layer, one copy in all."""

    def __init__(self, checkpoint: Checkpoint, device: Any, progress: Progress, threads: int = FILL_THREADS) -> None:
        config = checkpoint.config
        self.layers = config.moe_layers
        self.experts = config.n_routed_experts
        self.layout = ExpertLayout.of(checkpoint)
        self.bytes = len(self.layers) * self.experts * self.layout.stride
        require_ram(self.bytes, "the routed experts, page-locked in host RAM,")
        self._device, self._progress = device, progress
        self._read = 0
        self._total = sum(self.layout.part_bytes) * self.experts * len(self.layers)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="glm53-fill")
        self._tensors = {layer: checkpoint.experts(layer) for layer in self.layers}
        self._arenas: dict[int, Future[Any]] = {layer: self._pool.submit(self._make, layer) for layer in self.layers}
        self._fills: dict[int, Future[None]] = {layer: self._pool.submit(self._fill, layer) for layer in self.layers}

    def _make(self, layer: int) -> Any:
        try:
            return _core.HostArena(self.experts * self.layout.stride, f"experts of layer {layer}", self._device)
        except RuntimeError as e:
            raise DeviceError(
                f"page-locking {self.experts * self.layout.stride / 1e9:.1f} GB for layer {layer} failed: {e}; "
                "free RAM, or raise the memlock limit (systemd: LimitMEMLOCK=infinity, shell: ulimit -l unlimited)"
            ) from None

    def _fill(self, layer: int) -> None:
        arena = self._arenas[layer].result()
        versions: dict[Path, tuple[int, int]] = {}
        for linear in self._tensors[layer]:
            info = linear.trellis
            if info.file not in versions:
                stat = os.stat(info.file)
                versions[info.file] = (stat.st_size, stat.st_mtime_ns)
            try:
                arena.read_file(str(info.file), info.offset, self._offset(linear), info.nbytes, versions[info.file])
            except RuntimeError as e:
                raise CheckpointError(f"{info.file}: {info.name}: {e}") from None
            self._read += info.nbytes
        self._progress("experts", min(1.0, self._read / self._total))

    def _offset(self, linear: ExpertLinear) -> int:
        return linear.expert * self.layout.stride + self.layout.offsets[PARTS.index(linear.which)]

    def arena(self, layer: int) -> Any:
        """The layer's arena, once it is mapped and page-locked; raises what that met."""
        return self._arenas[layer].result()

    def finish(self) -> None:
        """Wait until every byte is in place and make the arenas read-only."""
        try:
            for layer in self.layers:
                self._fills[layer].result()
                self.arena(layer).seal()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._tensors.clear()

    def abandon(self) -> None:
        """Stop filling after a failed load and release the arenas; never raises."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._fills.clear()
        self._arenas.clear()
