"""Experts with very many rows of a prompt: exllamav3 runs each alone, and reads it through tensors of its own.

Those lead to the home in host RAM, not through the address tables: an expert with more than 512 rows (the longer the
pass, the more of them a layer has) would be read over PCIe once more, though it lies in a slot or a staging buffer.
Here its three trellis tensors are led there for that call, and back. The native object holds the same tensors: torch's
`set_` gives a tensor other storage in place, so both see it. The bytes are the same wherever they lie.
States: led home, but during a call. Threads: the engine thread. Costs: six `set_` a call, one storage per address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...runtime import ExpertLayout


class _DeviceBytes:
    """VRAM that torch did not allocate, in the form it takes as a tensor."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """(nbytes,) uint8 over memory that outlives it."""
    if device.type == "cuda":
        return torch.as_tensor(_DeviceBytes(address, nbytes), device=device)
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


@torch.inference_mode()  # exllamav3 loads in this mode, and such tensors change in no other
def _lead(tensors: list[torch.Tensor], places: list[tuple[Any, int]]) -> None:
    for tensor, (storage, offset) in zip(tensors, places, strict=True):
        tensor.set_(storage, offset, tensor.shape, tensor.stride())


class SingleExperts:
    """For `hooks.Patch`: entered around every call that runs one expert alone."""

    def __init__(self, runtime: Any, modules: list[Any], layout: ExpertLayout, counts: dict[str, int]) -> None:
        self._rt, self._layout, self._counts = runtime, layout, counts
        self._parts = [(m.gates, m.ups, m.downs) for m in modules]
        self._storages: dict[int, Any] = {}
        counts |= {"single_experts": 0, "single_experts_in_vram": 0}

    @contextmanager
    def __call__(self, layer: int, expert: int) -> Iterator[None]:
        self._counts["single_experts"] += 1
        tensors = [linears[expert].inner.trellis for linears in self._parts[layer]]
        home = tensors[0].data_ptr()
        address = self._rt.expert_address(layer, expert) if self._rt.in_prompt else home
        if address == home:
            yield
            return
        self._counts["single_experts_in_vram"] += 1
        before = [(t.untyped_storage(), t.storage_offset()) for t in tensors]
        storage = self._storage(address, tensors[0].device)
        there = [(storage, at // t.element_size()) for t, at in zip(tensors, self._layout.offsets, strict=True)]
        try:
            _lead(tensors, there)
            yield
        finally:
            _lead(tensors, before)

    def _storage(self, address: int, device: torch.device) -> Any:
        storage = self._storages.get(address)
        if storage is None:
            storage = bytes_at(address, self._layout.stride, device).untyped_storage()
            self._storages[address] = storage
        return storage
