"""Chunked KDA (Kimi delta attention) with gradients, in matrix products: the training forward of the linear layers.

The recurrence, per head, with key dim K and value dim V:
S <- diag(exp g_t) S;  S <- S + k_t (beta_t (v_t - k_t^T S))^T;  o_t = q_t^T S.
A chunk of 64 steps is solved at once (the WY form of the delta rule); decays between two steps are split at the middle
of the row's block of 16, so that no exponent leaves float32 although g may reach -5 a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK, BLOCK = 64, 16
MAX_EXPONENT = 65.0  # half a block at -5 a step and one reset: nothing that counts is cut
RESET = -20.0  # added to g at a document's first token: nothing before it survives


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower triangular A [..., n, n], n a power of two: block substitution in float32."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        n, lead = a.shape[-1], a.shape[:-2]
        inverse = a.new_ones(*lead, n, 1, 1)  # inverses of the diagonal blocks, doubled in size level by level
        while (size := inverse.shape[-1]) < n:
            pairs = n // (2 * size)
            blocks = a.reshape(*lead, pairs, 2 * size, pairs, 2 * size).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
            top, bottom = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
            merged = a.new_zeros(*lead, pairs, 2 * size, 2 * size)
            merged[..., :size, :size] = top
            merged[..., size:, size:] = bottom
            merged[..., size:, :size] = -(bottom @ blocks[..., size:, :size] @ top)
            inverse = merged
        inverse = inverse.squeeze(-3)
        torch.set_float32_matmul_precision(precision)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        t = inverse.transpose(-1, -2)
        return (-(t @ grads[0] @ t)).tril(-1)


def _pair_products(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """sum_d x[i,d] k[j,d] exp(G_i - G_j) for all pairs of a chunk, x = q and x = k; only j <= i is meaningful (or
    finite).

    q, k, g: [..., CHUNK, D] with g cumulative. Both results are [..., CHUNK, CHUNK].
    """
    blocks, lead = CHUNK // BLOCK, q.shape[:-2]
    middle = g[..., BLOCK // 2 :: BLOCK, :]
    own = middle.repeat_interleave(BLOCK, dim=-2)
    decay = (g - own).clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    left = torch.cat([(x * decay).reshape(*lead, blocks, BLOCK, -1) for x in (q, k)], dim=-2)
    right = k.unsqueeze(-3) * (middle.unsqueeze(-2) - g.unsqueeze(-3)).clamp(max=MAX_EXPONENT).exp()
    both = left @ right.transpose(-1, -2)
    return both[..., :BLOCK, :].reshape(*lead, CHUNK, CHUNK), both[..., BLOCK:, :].reshape(*lead, CHUNK, CHUNK)


def intra(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Everything of a chunk that does not need the state before it. All [B, H, N, CHUNK, D], beta [B, H, N, CHUNK].

    Returns (attention q k, A = beta k k, value side, key side, q decayed, k decayed to the chunk's end, chunk decay).
    """
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    g = g.cumsum(-2)
    scores, a = _pair_products(q, k, g)
    scores, a = scores.tril(), a.tril(-1) * beta.unsqueeze(-1)
    last = g[..., -1:, :]
    return (
        scores,
        a,
        v * beta.unsqueeze(-1),
        k * g.exp() * beta.unsqueeze(-1),
        q * g.exp(),
        k * (last - g).exp(),
        last.exp().transpose(-1, -2),
    )


def kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, intra_fn: Any = intra) -> Tensor:  # noqa: PLR0917
    """Outputs [B, T, H, V] of KDA from zero state; q, k, v, g: [B, T, H, D] float32, beta [B, T, H]; T % 64 == 0."""
    b, t, h, d = q.shape
    q, k, v, g = (x.view(b, t // CHUNK, CHUNK, h, d).permute(0, 3, 1, 2, 4) for x in (q, k, v, g))
    beta = beta.view(b, t // CHUNK, CHUNK, h).permute(0, 3, 1, 2)
    scores, a, values, keys, q_in, k_out, decay = intra_fn(q, k, v, g, beta)
    solved = UnitLowerInverse.apply(a)
    u, w = solved @ values, solved @ keys
    state = q.new_zeros(b, h, d, v.shape[-1])
    states, news = [], []
    chunks = (x.unbind(2) for x in (u, w, decay, k_out))  # indexing would cost the backward a whole tensor a chunk
    for u_n, w_n, decay_n, k_n in zip(*chunks, strict=True):
        new = u_n - w_n @ state
        states.append(state)
        news.append(new)
        state = state * decay_n + k_n.transpose(-1, -2) @ new
    out = q_in @ torch.stack(states, 2) + scores @ torch.stack(news, 2)
    return out.permute(0, 2, 3, 1, 4).reshape(b, t, h, -1)
