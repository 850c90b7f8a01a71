"""The routed experts on the native kernels: quantised bytes in one arena a layer, never decoded to a matrix.

States: `ExpertStore.load` fills one exact-size arena per MoE layer from the checkpoint's files, then the tables are
constant. `RoutedExperts` stands at transformers' `layer.mlp.experts` and counts the picks it serves
(engine thread only).
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ... import _core
from ...checkpoint import Checkpoint, ExpertLinear
from ...engine.protocol import Progress
from ...errors import CheckpointError

ARENA_ALIGN = 256
"""Bytes between starts of tensors in a HostArena."""
_READERS = 4


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ARENA_ALIGN) * ARENA_ALIGN


Place = tuple[int, int, int, int, int, int]
"""Address and size in bytes of an expert linear's trellis, suh and svh."""


def layer_bytes(linears: list[ExpertLinear]) -> int:
    """Bytes of one layer's arena."""
    return sum(_aligned(t.nbytes) for x in linears for t in (x.trellis, x.suh, x.svh))


class ExpertStore:
    """Arena and native table of every MoE layer; `tables` by layer index, in layer order."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress) -> None:
        self._checkpoint = checkpoint
        self._arenas: list[Any] = []
        self.tables: dict[int, Any] = {}
        self.nbytes = 0
        layers = checkpoint.config.moe_layers
        with ThreadPoolExecutor(_READERS, "glm53-read") as readers:
            for done, i in enumerate(layers):
                progress("routed experts", done / len(layers))
                self.tables[i] = self._load(i, readers)
        progress("routed experts", 1.0)

    def _load(self, layer: int, readers: ThreadPoolExecutor) -> Any:
        """Read one layer's experts into its own arena, seal it, and tell the native table where they lie."""
        c, linears = self._checkpoint.config, self._checkpoint.experts(layer)
        arena = _core.HostArena(layer_bytes(linears), f"experts of layer {layer}")
        self._arenas.append(arena)
        self.nbytes += arena.bytes
        places = list(readers.map(functools.partial(self._read, arena), linears))
        arena.seal()
        table = _core.ExpertTable(c.n_routed_experts, c.hidden_size, c.moe_intermediate_size, c.swiglu_limit)
        for x, place in zip(linears, places, strict=True):
            try:
                table.set_address(x.expert, x.which, *place, x.bits)
            except ValueError as e:
                raise CheckpointError(f"{x.trellis.file}: {x.trellis.name}: {e}") from e
        return table

    def _read(self, arena: Any, linear: ExpertLinear) -> Place:
        """Address and size of trellis, suh and svh after reading them."""
        place: list[int] = []
        for info in (linear.trellis, linear.suh, linear.svh):
            at = arena.reserve(info.nbytes)
            try:
                version = self._checkpoint.file_version(info.file)
                arena.read_file(str(info.file), info.offset, at, info.nbytes, version)
            except RuntimeError as e:
                raise CheckpointError(f"{info.file}: {info.name}: {e}; load it again") from e
            place += (arena.address + at, info.nbytes)
        return cast(Place, tuple(place))


class RoutedExperts(nn.Module):
    """y = sum of weight * expert(x) over each row's picks, computed by CpuMoe from the quantised arena."""

    def __init__(self, moe: Any, table: Any) -> None:
        super().__init__()
        self._moe, self._table = moe, table
        self.picks = 0
        self.trace: list[npt.NDArray[np.int64]] | None = None

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """x (rows, hidden) float32, top_k_index (rows, k) int64, top_k_weights (rows, k) float32 -> (rows, hidden)."""
        rows = x.contiguous()
        out = torch.empty_like(rows)
        picks = top_k_index.contiguous().numpy()
        self._moe.forward(self._table, rows.numpy(), picks, top_k_weights.contiguous().numpy(), out.numpy())
        self.picks += picks.size
        if self.trace is not None:
            self.trace.append(picks.copy())
        return out

    def mark(self) -> tuple[int, int]:
        """Where the counters stand, for `rewind`."""
        return self.picks, len(self.trace or [])

    def rewind(self, mark: tuple[int, int]) -> None:
        """Forget what was counted since `mark`: a pass that failed half way reached some layers and not others."""
        self.picks, traced = mark
        if self.trace is not None:
            del self.trace[traced:]
