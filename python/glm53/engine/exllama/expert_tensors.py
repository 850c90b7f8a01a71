"""What exllamav3 gets for the tensors of routed experts while it loads: a few bulk operations a layer, not thousands.

A layer of GLM-5.3-Flash has 288 x 3 linears of four tensors each. exllamav3 alone would allocate, read and copy them
one by one; here the trellises are views of the layer's page-locked arena, the scales are views of one block that is
copied to VRAM in one piece, and the codebook's marker, of which only the presence counts, is what the strict reader
found.
States: a layer's tensors are made when the first of them is asked for, once. Threads: the loading thread alone.
Costs: the VRAM of the scales as long as the model lives, as with exllamav3's own; a copy of 10 MB a layer.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch

from ...checkpoint import MARKERS
from ...errors import DeviceError
from ...runtime import PARTS, PinnedExperts
from .scales import SCALES, ExpertScales, ScaleBlock

_Made = dict[tuple[str, str], tuple[torch.Tensor, ...]]


class ExpertTensors:
    """Tensors for `hooks.TrellisSource`: those of the layers that `store` and `scales` hold. Without `bulk_scales` only
    the trellises: exllamav3 then loads scales and markers itself, for measurements."""

    def __init__(self, store: PinnedExperts, scales: ExpertScales, gpu: int, *, bulk_scales: bool = True) -> None:
        from exllamav3.ext import exllamav3_ext as ext

        self._bulk = bulk_scales
        self._ext, self._store, self._scales, self._gpu = ext, store, scales, gpu
        self._made: dict[int, _Made] = {}
        self.waited_s = 0.0

    @property
    def expected(self) -> int:
        """Tensors that exllamav3 gets from here when it loads these layers: trellis, suh, svh and marker of every
        linear."""
        linears = [e for layer in self._store.layers for e in self._scales.block(layer).linears]
        return sum(3 + (e.codebook in MARKERS) if self._bulk else 1 for e in linears)

    def tensor(self, layer: int, expert: int, part: str, kind: str) -> torch.Tensor | None:
        """trellis: int16 (in/16, out/16, 16 K) over the arena; suh, svh: float16 (in,), (out,) in VRAM; marker: int32
        () in RAM. None for a layer that is not in the store (the MTP head), and for what is left to exllamav3."""
        if kind != "trellis" and not self._bulk:
            return None
        if layer not in self._made:
            if layer not in self._store.layers:
                return None
            self._made[layer] = self._make(layer)
        found = self._made[layer].get((part, kind))
        return None if found is None else found[expert]

    def _make(self, layer: int) -> _Made:
        start = time.monotonic()
        alias, block = self._alias(layer), self._scales.block(layer)
        self.waited_s += time.monotonic() - start
        layout, made = self._store.layout, _Made()
        places = zip(PARTS, layout.offsets, layout.part_bytes, block.linears[: len(PARTS)], strict=True)
        for part, at, nbytes, linear in places:
            trellises = _fields(alias, layout.stride, at, nbytes, torch.int16)
            made[part, "trellis"] = trellises.view(-1, *linear.trellis.shape).unbind(0)
        if self._bulk:
            self._add_scales(made, block, alias.device)
        return made

    def _add_scales(self, made: _Made, block: ScaleBlock, device: torch.device) -> None:
        in_vram = torch.empty(block.arena.bytes, dtype=torch.uint8, device=device)
        in_vram.copy_(_over(block.arena))
        for part, linear in zip(PARTS, block.linears[: len(PARTS)], strict=True):
            for kind in SCALES:
                made[part, kind] = _fields(in_vram, block.stride, *block.places[part, kind], torch.float16).unbind(0)
            if linear.codebook in MARKERS:
                made[part, linear.codebook] = (_marker(linear.codebook),) * self._store.experts

    def _alias(self, layer: int) -> torch.Tensor:
        """The whole arena as a uint8 CUDA tensor; waits until it is page-locked."""
        arena = self._store.arena(layer)
        if arena.device_address != arena.address:
            raise DeviceError(f"layer {layer}: the GPU sees pinned memory at another address than the CPU")
        alias: torch.Tensor = self._ext.pinned_cuda_view(_over(arena), self._gpu)
        return alias


def _over(arena: Any) -> torch.Tensor:
    """An arena's bytes as a uint8 CPU tensor; the arena must outlive it."""
    return torch.frombuffer((ctypes.c_uint8 * arena.bytes).from_address(arena.address), dtype=torch.uint8)


def _fields(block: torch.Tensor, stride: int, at: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """(records, elements): the field at byte `at` of every `stride` bytes; rows are contiguous, nothing is copied."""
    return block.view(-1, stride)[:, at : at + nbytes].view(dtype)


def _marker(codebook: str) -> torch.Tensor:
    value = MARKERS[codebook]
    return torch.tensor(value - (1 << 32) if value >> 31 else value, dtype=torch.int32)
