"""A MoE layer that computes its experts from the bytes that its address tables lead to, row by row, in float32.

As stock's decode kernels do, it leaves out a pick whose weight is 0 and gives its rows in a buffer of all layers.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from glm53 import _core

from .block_sparse_mlp_routing import routing_dots

MAX_BSZN = 8
ROWS_TOGETHER = 40
PARTS = ("gate", "up", "down")
LIMIT = 10.0
_kernels = []
_shared_out: dict[int, torch.Tensor] = {}


def kernels():
    if not _kernels:
        _kernels.append(_core.CpuMoe(threads=1))
    return _kernels[0]


class BC:
    """The native object: for an expert with many rows it looks at that expert's own tensors, not at the tables."""

    def __init__(self, layer) -> None:
        self._own = [[x.inner.trellis for x in linears] for linears in (layer.gates, layer.ups, layer.downs)]
        self.read = []

    def run_bszN(self, *args):
        raise NotImplementedError

    def run_single_expert(self, y, expert):
        raise NotImplementedError

    def run_single_expert_dq(self, y, expert, *buffers):
        addresses = buffers[-1]  # not one of stock's: where this stand-in says what it reads
        addresses[:] = [part[expert].data_ptr() for part in self._own]
        self.read.append((expert, addresses[0]))


class BlockSparseMLP:
    def __init__(self, stc, layer: int, experts: int, top_k: int, hidden: int) -> None:
        self.key = f"model.language_model.layers.{layer}.mlp"
        self.stc, self.hidden_size = stc, hidden
        self.num_experts = self.num_local_experts = experts
        self.num_experts_per_tok = top_k
        self.cpu_split_first, self.cpu_offload, self.support_fused, self.bc = None, False, True, object()
        self.router_pre_norm = self.routed_pre_norm = self.routed_post_norm = self.shared_experts_post_norm = None
        self.latent_in = self.latent_out = self.routing_device = None
        self.alt_residual_channel, self.tp_reduce = False, False
        self.activation_fn, self.act_limit = "silu", LIMIT
        self.routing_cfg = {"top_k": top_k, "layer": layer, "experts": experts}
        self.routing_fn = routing_dots
        self.caps: dict[str, bool] = {}

    def load(self, device: object) -> None:
        self.kept, self.scales, self.sizes, linears = [], {}, {}, []
        for part in PARTS:
            keys = [f"{self.key}.experts.{e}.{part}_proj" for e in range(self.num_experts)]
            tensors = [self.stc.get_tensor(f"{k}.trellis", device) for k in keys]
            self.kept += tensors
            linears.append([SimpleNamespace(inner=SimpleNamespace(trellis=t)) for t in tensors])
            self.scales[part] = [[self.stc.get_tensor(f"{k}.{v}", device) for v in ("suh", "svh")] for k in keys]
            for codebook in ("mcg", "mul1"):
                marked = [f"{k}.{codebook}" for k in keys if self.stc.has_tensor(f"{k}.{codebook}")]
                self.kept += [self.stc.get_tensor(k, "cpu") for k in marked]
            self.sizes[part] = (tensors[0].numel() * 2, tensors[0].shape[2] // 16)
            table = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.long)
            setattr(self, f"multi_{part}", SimpleNamespace(ptrs_trellis=table))
        self.intermediate = self.scales["gate"][0][1].numel()
        self.gates, self.ups, self.downs = linears
        self.bc = BC(self)

    def prepare_for_device(self, x, params):
        return x

    def forward(self, x, params, out_dtype=None):
        y = x.view(-1, self.hidden_size)
        rows = y.shape[0]
        selected, weights = self.routing_fn(rows, self.routing_cfg, y, params)
        if rows <= MAX_BSZN:
            out = _shared_out.setdefault(self.hidden_size, torch.empty(MAX_BSZN, self.hidden_size))[:rows]
        else:
            out = torch.empty(rows, self.hidden_size)
        picks = torch.where(weights != 0, selected, -1)
        counts = torch.bincount(picks[picks >= 0], minlength=self.num_experts).tolist()
        alone = {e for e, n in enumerate(counts) if n > ROWS_TOGETHER and rows > MAX_BSZN}
        table = self._table([e for e, n in enumerate(counts) if n], alone)
        for row in range(rows):
            self._row(table, y[row], picks[row], weights[row], out[row])
        out = out.view(x.shape)
        return out if out_dtype is None else out.to(out_dtype)

    def _table(self, experts, alone):
        table = _core.ExpertTable(self.num_experts, self.hidden_size, self.intermediate, LIMIT)
        for e in experts:
            addresses = [int(getattr(self, f"multi_{part}").ptrs_trellis[e]) for part in PARTS]
            if e in alone:
                self.bc.run_single_expert_dq(None, e, None, None, None, addresses)
            for part, address in zip(PARTS, addresses, strict=True):
                suh, svh = self.scales[part][e]
                nbytes, bits = self.sizes[part]
                table.set_address(e, part, address, nbytes, suh.data_ptr(), suh.numel() * 2, svh.data_ptr(),
                                  svh.numel() * 2, bits)  # fmt: skip
        return table

    @staticmethod
    def _row(table, y, picks, weights, out) -> None:
        active = picks >= 0
        chosen = picks[active].view(1, -1).contiguous().numpy()
        factors = weights[active].float().view(1, -1).contiguous().numpy()
        result = np.zeros((1, y.numel()), np.float32)
        if chosen.size:
            kernels().forward(table, y.float().view(1, -1).numpy(), chosen, factors, result)
        out.copy_(torch.from_numpy(result[0]))
