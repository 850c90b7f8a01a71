"""A MoE layer whose "experts" are checksums of the bytes that its address tables lead to."""

from __future__ import annotations

import ctypes
import zlib
from types import SimpleNamespace

import torch

from .block_sparse_mlp_routing import routing_dots

MAX_BSZN = 8


class BlockSparseMLP:
    def __init__(self, stc, layer: int, experts: int, top_k: int, hidden: int) -> None:
        self.key = f"model.language_model.layers.{layer}.mlp"
        self.stc, self.hidden_size = stc, hidden
        self.num_experts = self.num_local_experts = experts
        self.num_experts_per_tok = top_k
        self.cpu_split_first, self.cpu_offload, self.support_fused, self.bc = None, False, True, object()
        factors = torch.arange(1, experts + 1, dtype=torch.float64) * (layer + 1)
        self.routing_cfg = {"top_k": top_k, "factors": factors}
        self.routing_fn = routing_dots
        self.caps: dict[str, bool] = {}

    def load(self, device: object) -> None:
        self.sizes, self.kept = {}, []
        for part in ("gate", "up", "down"):
            keys = [f"{self.key}.experts.{e}.{part}_proj.trellis" for e in range(self.num_experts)]
            tensors = [self.stc.get_tensor(k, device) for k in keys]
            self.kept += tensors
            self.sizes[part] = tensors[0].numel() * 2
            table = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.long)
            setattr(self, f"multi_{part}", SimpleNamespace(ptrs_trellis=table))

    def prepare_for_device(self, x, params):
        return x

    def forward(self, x, params):
        y = x.view(-1)
        selected, weights = self.routing_fn(y.numel(), self.routing_cfg, y, params)
        out = torch.zeros_like(y)
        for row in range(y.numel()):
            for expert, weight in zip(selected[row].tolist(), weights[row].tolist(), strict=True):
                for part, size in self.sizes.items():
                    address = int(getattr(self, f"multi_{part}").ptrs_trellis[expert])
                    out[row] += weight * (zlib.crc32(ctypes.string_at(address, size)) % 1000) / 1000
        return torch.sin(x + out.view(x.shape))
