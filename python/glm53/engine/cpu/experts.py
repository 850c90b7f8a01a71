"""The routed experts on the native kernels: quantised bytes in one arena a layer, never decoded to a matrix.

States: `ExpertStore.load` fills one exact-size arena per MoE layer from the checkpoint's files, then the tables are
constant. `RoutedExperts` stands at transformers' `layer.mlp.experts` and counts the picks it serves
(engine thread only).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ... import _core
from ...checkpoint import Checkpoint, ExpertLinear
from ...engine.protocol import Progress
from ...errors import CheckpointError

ARENA_ALIGN = 64
"""Bytes between starts of tensors in an arena: a cache line."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ARENA_ALIGN) * ARENA_ALIGN


def layer_bytes(linears: list[ExpertLinear]) -> int:
    """Bytes of one layer's arena."""
    return sum(_aligned(t.nbytes) for x in linears for t in (x.trellis, x.suh, x.svh))


class ExpertStore:
    """Arena and native table of every MoE layer, in layer order."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress) -> None:
        config = checkpoint.config
        self._arenas: list[npt.NDArray[np.uint8]] = []
        self.tables: dict[int, Any] = {}
        self.nbytes = 0
        layers = config.moe_layers
        for done, i in enumerate(layers):
            progress("routed experts", done / len(layers))
            self.tables[i] = self._load(checkpoint, checkpoint.experts(i))
        progress("routed experts", 1.0)

    def _load(self, checkpoint: Checkpoint, linears: list[ExpertLinear]) -> Any:
        c = checkpoint.config
        arena = np.empty(layer_bytes(linears), np.uint8)
        self._arenas.append(arena)
        self.nbytes += arena.nbytes
        table = _core.ExpertTable(c.n_routed_experts, c.hidden_size, c.moe_intermediate_size, c.swiglu_limit)
        at = 0
        for x in linears:
            parts: list[npt.NDArray[Any]] = []
            for info, dtype in ((x.trellis, np.uint16), (x.suh, np.uint16), (x.svh, np.uint16)):
                view = arena[at : at + info.nbytes]
                checkpoint.read_into(info, view.data)
                parts.append(view.view(dtype).reshape(info.shape))
                at += _aligned(info.nbytes)
            try:
                table.set(x.expert, x.which, parts[0], parts[1], parts[2], x.bits)
            except ValueError as e:
                raise CheckpointError(f"{x.trellis.file}: {x.trellis.name}: {e}") from e
        return table


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
