"""What a GPU engine reads experts from: the device, and one pinned arena per MoE layer, filled from the checkpoint. The
native `ExpertRuntime` over these arenas is made by the engine's loader.

States of PinnedExperts: filling (worker threads make and page-lock the layers in order, and read each as soon as it is
there) -> sealed (`finish`).
Threads: the store's own pools fill; `arena` may be asked from any thread and waits for that layer's mapping only.
Costs: every routed expert's bytes of host RAM, once; zeroing them, page-locking at 0.03-0.13 s/GiB, and reading at the
speed of the disk or of copying from page cache, side by side. One call a layer, without the GIL: the thread that builds
exllamav3's modules meanwhile is not disturbed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

from . import _core
from .checkpoint import Checkpoint, ExpertLinear, TensorInfo, require_ram
from .engine.protocol import Progress
from .errors import CheckpointError, DeviceError

PARTS = ("gate", "up", "down")
PART_ALIGN = 256
MAKE_THREADS, FILL_THREADS = 8, 8
PIN_CHUNK_BYTES = 1 << 30
"""An arena is page-locked in pieces of this size (device.h). CUDA refuses a copy that reads from two of them: native
copies are cut there, torch's are not."""


def open_cuda(index: int) -> Any:
    """The GPU. Raises DeviceError with the driver's own reason."""
    try:
        return _core.cuda_device(index)
    except RuntimeError as e:
        raise DeviceError(f"GPU {index} cannot be used: {e}") from None


def read_tensors(checkpoint: Checkpoint, arena: Any, placed: Sequence[tuple[TensorInfo, int]], what: str) -> None:
    """Read tensors to their offsets in an arena: in the files' order, in one call without the GIL. Raises
    CheckpointError, with `what` in it, for a file that cannot be read or is not the one whose header was read."""
    order = sorted(placed, key=lambda pair: (pair[0].file, pair[0].offset))
    files = sorted({info.file for info, _ in order})
    index = {path: i for i, path in enumerate(files)}
    pieces = [(index[info.file], info.offset, at, info.nbytes) for info, at in order]
    try:
        arena.read_files([(str(path), checkpoint.file_version(path)) for path in files], pieces)
    except RuntimeError as e:
        raise CheckpointError(f"reading {what}: {e}") from None


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
    def of(cls, checkpoint: Checkpoint, linears: Iterable[ExpertLinear]) -> ExpertLayout:
        """The one layout these routed experts share. Raises CheckpointError if they differ (mixed bit rates)."""
        found: dict[str, int] = {}
        for linear in linears:
            info = linear.trellis
            if found.setdefault(linear.which, info.nbytes) != info.nbytes:
                raise CheckpointError(
                    f"{info.file}: {info.name}: {info.nbytes} bytes, other experts have {found[linear.which]}; "
                    "the expert cache needs one bit rate for all routed experts"
                )
        if not found:
            raise CheckpointError(f"{checkpoint.path}: no MoE layer, nothing to cache")
        return cls((found["gate"], found["up"], found["down"]))


class PinnedExperts:
    """Routed experts' trellises in page-locked host memory, one arena per MoE layer, one copy in all.

    `layers`: which MoE layers (default: all of the text model, without MTP layers).
    """

    def __init__(
        self, checkpoint: Checkpoint, device: Any, progress: Progress, layers: tuple[int, ...] | None = None
    ) -> None:
        config = checkpoint.config
        self.layers = config.moe_layers if layers is None else layers
        self.experts = config.n_routed_experts
        self._tensors = {layer: checkpoint.experts(layer) for layer in self.layers}
        self.layout = ExpertLayout.of(checkpoint, chain.from_iterable(self._tensors.values()))
        self.bytes = len(self.layers) * self.experts * self.layout.stride
        require_ram(self.bytes, "the routed experts, page-locked in host RAM,")
        self._device, self._progress, self._checkpoint = device, progress, checkpoint
        self._read, self._read_lock = 0, threading.Lock()
        self._total = sum(self.layout.part_bytes) * self.experts * len(self.layers)
        self._start_s = time.monotonic()
        self._times = dict.fromkeys(("populate_s", "pin_s", "read_s", "arenas_wall_s", "wall_s"), 0.0)
        self._makers = ThreadPoolExecutor(MAKE_THREADS, thread_name_prefix="glm53-pin")
        self._pool = ThreadPoolExecutor(FILL_THREADS, thread_name_prefix="glm53-fill")
        self._started = threading.Event()
        try:
            self._arenas: dict[int, Future[Any]] = {i: self._makers.submit(self._make, i) for i in self.layers}
            self._fills: dict[int, Future[None]] = {i: self._pool.submit(self._fill, i) for i in self.layers}
        finally:
            self._started.set()  # also where no more threads can be had: those that started must be able to end

    def _make(self, layer: int) -> Any:
        self._started.wait()  # a thread's stack is mapped memory: beside pages being made its start takes long
        try:
            made = _core.HostArena(self.experts * self.layout.stride, f"experts of layer {layer}", self._device)
            self._times["arenas_wall_s"] = time.monotonic() - self._start_s
            return made
        except RuntimeError as e:
            raise DeviceError(
                f"page-locking {self.experts * self.layout.stride / 1e9:.1f} GB for layer {layer} failed: {e}; "
                "free RAM, or raise the memlock limit (systemd: LimitMEMLOCK=infinity, shell: ulimit -l unlimited)"
            ) from None

    def _fill(self, layer: int) -> None:
        arena = self._arenas[layer].result()
        placed = [(linear.trellis, self._offset(linear)) for linear in self._tensors[layer]]
        read_tensors(self._checkpoint, arena, placed, f"the experts of layer {layer}")
        nbytes = sum(info.nbytes for info, _ in placed)
        with self._read_lock:
            self._read += nbytes
            share = self._read / self._total
        self._times["wall_s"] = time.monotonic() - self._start_s
        self._progress("experts", share)

    def _offset(self, linear: ExpertLinear) -> int:
        return linear.expert * self.layout.stride + self.layout.offsets[PARTS.index(linear.which)]

    def arena(self, layer: int) -> Any:
        """The layer's arena, once it is mapped and page-locked; raises what that met."""
        return self._arenas[layer].result()

    @property
    def whole_copies(self) -> int:
        """Experts at an arena's beginning each of which one copy of torch's may read: none lies across two pieces."""
        return max(1, min(self.experts, PIN_CHUNK_BYTES // self.layout.stride))

    def finish(self) -> None:
        """Wait until every byte is in place and make the arenas read-only."""
        try:
            for layer in self.layers:
                self._fills[layer].result()
                self.arena(layer).seal()
        finally:
            self._end_pools()
            self._tensors.clear()
        for layer in self.layers:
            for name, seconds in self.arena(layer).times.items():
                self._times[name] += seconds

    @property
    def times(self) -> dict[str, float]:
        """Seconds, once finished: `populate_s`, `pin_s`, `read_s` of all threads together; `arenas_wall_s` and `wall_s`
        from the beginning until the last arena was page-locked and the last byte was there."""
        return {name: round(seconds, 6) for name, seconds in self._times.items()}

    def abandon(self) -> None:
        """Stop filling after a failed load and release the arenas; never raises."""
        self._end_pools()
        self._fills.clear()
        self._arenas.clear()

    def _end_pools(self) -> None:
        for pool in (self._makers, self._pool):  # the fills wait for the makers: those first
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in (self._makers, self._pool):
            pool.shutdown(wait=True)
