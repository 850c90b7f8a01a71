"""The scale vectors of routed experts, a layer's in one block of plain host memory: read in bulk, ahead of who asks.

States: reading (a thread of its own, layer after layer) -> abandoned (`abandon`: blocks are forgotten, their bytes stay
while this object lives). Threads: any may ask, and waits for that layer alone.
Costs: 0.45 GB of host RAM for GLM-5.3-Flash; one call a layer without the GIL.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ... import _core
from ...checkpoint import Checkpoint, ExpertLinear, TensorInfo
from ...errors import CheckpointError
from ...runtime import PARTS, read_tensors

SCALES = ("suh", "svh")


@dataclass(frozen=True, slots=True)
class ScaleBlock:
    """One layer's scales: expert after expert, `stride` bytes each, float16 vectors at `places`.

    `places`: (part, "suh" or "svh") -> (offset from the expert's first byte, bytes).
    """

    arena: Any
    stride: int
    places: dict[tuple[str, str], tuple[int, int]]
    linears: list[ExpertLinear]

    def address(self, linear: ExpertLinear, kind: str) -> int:
        """Where one vector begins."""
        return int(self.arena.address) + linear.expert * self.stride + self.places[linear.which, kind][0]


class ExpertScales:
    """suh and svh of the layers' routed experts."""

    def __init__(self, checkpoint: Checkpoint, layers: tuple[int, ...]) -> None:
        self._checkpoint, self.config = checkpoint, checkpoint.config
        self._arenas: list[Any] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="glm53-scales")
        self._blocks: dict[int, Future[ScaleBlock]] = {layer: self._pool.submit(self._read, layer) for layer in layers}

    def _read(self, layer: int) -> ScaleBlock:
        linears = self._checkpoint.experts(layer)
        places: dict[tuple[str, str], tuple[int, int]] = {}
        stride = 0
        for linear in linears[: len(PARTS)]:
            for kind in SCALES:
                nbytes = getattr(linear, kind).nbytes
                places[linear.which, kind] = stride, nbytes
                stride += nbytes
        placed = [_placed(linear, kind, stride, places) for linear in linears for kind in SCALES]
        arena = _core.HostArena(stride * self.config.n_routed_experts, f"scales of layer {layer}")
        self._arenas.append(arena)
        read_tensors(self._checkpoint, arena, placed, f"the experts' scales of layer {layer}")
        arena.seal()
        return ScaleBlock(arena, stride, places, linears)

    def block(self, layer: int) -> ScaleBlock:
        """The layer's scales; waits for the reading, raises what that met."""
        return self._blocks[layer].result()

    def layer(self, layer: int) -> list[tuple[ExpertLinear, int, int]]:
        """(linear, address of suh, address of svh) of the layer's experts."""
        block = self.block(layer)
        return [(linear, block.address(linear, "suh"), block.address(linear, "svh")) for linear in block.linears]

    @property
    def nbytes(self) -> int:
        """Host memory of the scales."""
        return sum(arena.bytes for arena in self._arenas)

    def abandon(self) -> None:
        """Stop reading and forget where it went, not the bytes; idempotent, never raises."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._blocks.clear()


def _placed(
    linear: ExpertLinear, kind: str, stride: int, places: dict[tuple[str, str], tuple[int, int]]
) -> tuple[TensorInfo, int]:
    """A vector and where it goes in the layer's block. Raises CheckpointError for one of another length."""
    info: TensorInfo = getattr(linear, kind)
    at, nbytes = places[linear.which, kind]
    if info.nbytes != nbytes:
        raise CheckpointError(f"{info.file}: {info.name}: {info.nbytes} bytes, other experts have {nbytes}")
    return info, linear.expert * stride + at
