"""Kimi delta attention on our state: one token at a time, and many tokens in chunks.

Source: glm5_next `LinearAttention`; recurrence per head and token, S (head_dim, head_dim), g the log decay per channel:
  S <- diag(exp g) S;  u = beta (v - k S);  S <- S + k' u;  o = q S.
Over a chunk with inclusive sums G of g this is a unit triangular system in the u's, whose coefficients are
sum_c k_ic k_jc exp(G_ic - G_jc). transformers builds that tensor channel by channel (64 x 64 x 128 a head); here it is
one product of k exp(G - R) and k exp(R - G). R is G at the middle of the chunk and the chunk is short enough that
neither factor leaves float32, which the lower bound of g guarantees.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...checkpoint import ModelConfig
from .fused import fuse, rms_norm
from .state import KdaState

_MAX_CHUNK = 16
_SAFE_EXPONENT = 40.0


class Kda:
    """One layer. Build it once; the module's projections become views of fused weights."""

    def __init__(self, module: Any, config: ModelConfig) -> None:
        gate = module.forget_gate
        self._m, self._c = module, config
        self._in = fuse([module.q_proj, module.k_proj, module.v_proj, gate.f_a_proj, module.g_a_proj, module.b_proj])
        self._out: torch.Tensor = module.o_proj.weight
        w, d = config.kda_dim, config.kda_head_dim
        self._split = [3 * w, d, d, config.kda_num_heads]
        self._conv = module.conv1d.weight[:, 0]
        self._rate = torch.exp(gate.A_log).repeat_interleave(d)
        self._rate_dt = self._rate * gate.dt_bias
        self._chunk = max(1, min(_MAX_CHUNK, int(2 * _SAFE_EXPONENT / abs(config.kda_gate_lower_bound))))

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (rows, hidden) -> qkv (rows, 3 kda_dim), g (rows, kda_dim), gate (rows, heads, d), beta (rows, heads)."""
        c, m = self._c, self._m
        qkv, f, gate, b = torch.split_with_sizes(F.linear(x, self._in), self._split, -1)
        g = torch.addcmul(self._rate_dt, self._rate, m.forget_gate.f_b_proj(f)).sigmoid_().mul_(c.kda_gate_lower_bound)
        gate = m.g_b_proj(gate).view(x.shape[0], c.kda_num_heads, c.kda_head_dim).sigmoid_()
        return qkv, g, gate, torch.sigmoid(b)

    def _normed(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Convolved qkv (rows, 3 * kda_dim) -> q scaled and normalised, k normalised, v: (heads, rows, d) each."""
        c, d = self._c, self._c.kda_head_dim
        q, k, v = F.silu(qkv).view(-1, 3, c.kda_num_heads, d).permute(1, 2, 0, 3).unbind(0)
        q = q / torch.sqrt(q.square().sum(-1, keepdim=True) + 1e-6) * d**-0.5
        return q, k / torch.sqrt(k.square().sum(-1, keepdim=True) + 1e-6), v

    def _finish(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(out, self._m.o_norm.weight, self._c.rms_norm_eps) * gate
        return F.linear(normed.reshape(normed.shape[0], -1), self._out)

    def decode(self, x: torch.Tensor, state: KdaState) -> torch.Tensor:
        """x (1, hidden) -> (1, hidden); advances the state by one token."""
        heads, d = self._c.kda_num_heads, self._c.kda_head_dim
        qkv, g, gate, beta = self._project(x)
        window = state.conv[0]
        window.copy_(torch.cat([window[:, 1:], qkv.T], dim=1))
        q, k, v = self._normed(torch.mul(window, self._conv).sum(-1)[None])
        memory = state.recurrent[0].mul_(g.exp_().view(heads, d, 1))
        delta = (v - torch.bmm(k, memory)).mul_(beta.view(heads, 1, 1))
        memory.baddbmm_(k.transpose(1, 2), delta)
        return self._finish(torch.bmm(q, memory).transpose(0, 1), gate)

    def prefill(self, x: torch.Tensor, state: KdaState) -> torch.Tensor:
        """x (rows, hidden) -> (rows, hidden); advances the state by all rows."""
        c, rows = self._c, x.shape[0]
        qkv, g, gate, beta = self._project(x)
        inputs = torch.cat([state.conv[0, :, 1:], qkv.T], dim=1)
        mixed = F.conv1d(inputs[None], self._conv[:, None], groups=inputs.shape[0])[0]
        state.conv[0].copy_(torch.cat([state.conv[0], qkv.T], dim=1)[:, -c.kda_conv_kernel :])
        q, k, v = self._normed(mixed.T.contiguous())
        g = g.view(rows, c.kda_num_heads, c.kda_head_dim).transpose(0, 1)
        beta = beta.T.unsqueeze(-1)
        out = torch.empty(rows, c.kda_num_heads, c.kda_head_dim)
        for at in range(0, rows, self._chunk):
            part = slice(at, at + self._chunk)
            o = _chunk((q[:, part], k[:, part], v[:, part]), g[:, part], beta[:, part], state.recurrent[0])
            out[part] = o.transpose(0, 1)
        return self._finish(out, gate)


def _chunk(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], g: torch.Tensor, beta: torch.Tensor, memory: torch.Tensor
) -> torch.Tensor:
    """One chunk: q, k, v, g (heads, rows, d), beta (heads, rows, 1); updates memory (heads, d, d) and returns o."""
    q, k, v = qkv
    total = g.cumsum(1)
    rows = total.shape[1]
    middle = total[:, rows // 2 : rows // 2 + 1]
    up, down = (total - middle).exp(), (middle - total).exp()
    decay = total.exp()
    k_down = k * down
    system = torch.bmm(k * up, k_down.transpose(1, 2)).mul_(beta)
    rest = (v - torch.bmm(k * decay, memory)).mul_(beta)
    u = torch.linalg.solve_triangular(system, rest, upper=False, unitriangular=True)
    inside = torch.bmm(q * up, k_down.transpose(1, 2)).tril_()
    out = torch.bmm(q * decay, memory).baddbmm_(inside, u)
    to_end = (total[:, -1:] - total).exp().mul_(k)
    memory.mul_(decay[:, -1].unsqueeze(-1)).baddbmm_(to_end.transpose(1, 2), u)
    return out


class KdaModule(nn.Module):
    """Stands at transformers' `layer.self_attn` of a KDA layer during prefill."""

    def __init__(self, kda: Kda, layer: int) -> None:
        super().__init__()
        self._kda, self._layer = kda, layer

    def forward(self, hidden_states: torch.Tensor, cache: Any, **_: Any) -> torch.Tensor:
        """hidden_states (1, rows, hidden) -> the same shape; `cache` is a prefill.StateCache."""
        return self._kda.prefill(hidden_states[0], cache.kda(self._layer))[None]
