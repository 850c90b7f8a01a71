"""Training forward over the parameters of transformers' Glm5NextForConditionalGeneration: the same function, made fast.

Differences from transformers' own forward, none of which changes the result: documents packed in a row do not see each
other; KDA runs in chunks of matrix products (`kda.py`); every expert runs on every token in one product, weighted by
the (mostly zero) routing weights, which for 32 tiny experts beats sorting tokens; the indexer is left out, since a
row is shorter than `index_topk` and every visible token is selected. `noise` perturbs expert weights and routing
scores in training so that 3-bit experts and a flipped eighth pick cost little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .kda import RESET, intra, kda

CONV_TAPS = 4


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def mix_logits(  # noqa: PLR0917
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(collapse weights, expand weights, mixing matrix before Sinkhorn) of a hyper-connection; streams [B, T, 4,
    H] fp32.
    """
    flat = streams.flatten(2)
    out = F.linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps), fn)
    pre = torch.sigmoid(out[..., :4] * scale[0] + base[:4]) + hc_eps
    post = 2 * torch.sigmoid(out[..., 4:8] * scale[1] + base[4:8])
    comb = torch.softmax((out[..., 8:] * scale[2] + base[8:]).unflatten(-1, (4, 4)), -1) + hc_eps
    return pre, post, comb


def sinkhorn(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """Column- and row-normalise 4x4 matrices [..., 4, 4]; as transformers, columns first and last."""
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def collapse(streams: Tensor, pre: Tensor, norm: Tensor, eps: float) -> Tensor:
    return rms((pre.unsqueeze(-1) * streams).sum(2), norm, eps)


def expand(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post x y + comb^T streams, written without a batched 4x4 product."""
    mixed = (comb.unsqueeze(-1) * streams.unsqueeze(-2)).sum(2)
    return mixed + post.unsqueeze(-1) * y.float().unsqueeze(-2)


def swiglu(gate_up: Tensor, weights: Tensor, limit: float) -> Tensor:
    """Clamped SwiGLU times routing weight; gate_up [N, E, 2, I], weights [N, E] -> [N, E, I]."""
    gate, up = gate_up[:, :, 0].float().clamp(max=limit), gate_up[:, :, 1].float().clamp(-limit, limit)
    return (F.silu(gate) * up * weights.unsqueeze(-1)).to(gate_up.dtype)


def conv_silu(x: Tensor, weight: Tensor, same: Tensor) -> Tensor:
    """Causal depthwise convolution over time and SiLU; x [B, T, C], weight [C, K].

    same: [B, T, K] float, 1 where the token under tap j (K - 1 - j steps back) is in the same document.
    """
    taps = weight.shape[-1]
    padded = F.pad(x.float(), (0, 0, taps - 1, 0))
    out = padded[:, taps - 1 :] * weight[:, taps - 1]
    for j in range(taps - 1):
        out = out + padded[:, j : j + x.shape[1]] * weight[:, j] * same[:, :, j : j + 1]
    return F.silu(out)


def same_document(documents: Tensor, taps: int) -> Tensor:
    """For `conv_silu`: documents [B, T] (the running number of each token's document, from 1)."""
    padded = F.pad(documents, (taps - 1, 0))
    return torch.stack([padded[:, j : j + documents.shape[1]] == documents for j in range(taps)], -1).float()


def forget(x: Tensor, dt_bias: Tensor, a_log: Tensor, bound: float, fresh: Tensor) -> Tensor:
    """Log decay [B, T, heads, D] of the safe forget gate, with a reset at every document start."""
    g = (x.float() + dt_bias).unflatten(-1, (a_log.shape[0], -1))
    return bound * torch.sigmoid(a_log.exp().unsqueeze(-1) * g) + RESET * fresh[:, :, None, None]


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms(x, weight, eps) * torch.sigmoid(gate.float())


@dataclass
class Noise:
    """Perturbations of a training step: relative std on expert weights, absolute std on routing scores."""

    experts: float = 0.0
    routing: float = 0.0


@dataclass
class Ops:
    """The elementwise parts, each replaceable by a compiled version of itself."""

    mix_logits: Callable[..., Any] = mix_logits
    sinkhorn: Callable[..., Any] = sinkhorn
    collapse: Callable[..., Any] = collapse
    expand: Callable[..., Any] = expand
    swiglu: Callable[..., Any] = swiglu
    conv_silu: Callable[..., Any] = conv_silu
    forget: Callable[..., Any] = forget
    gated_norm: Callable[..., Any] = gated_norm
    intra: Callable[..., Any] = intra


@dataclass
class Step:
    """One forward's settings and what it leaves behind.

    Per MoE layer, the routing picks [N, k], by score; the edges [N]: the weights of the last expert picked and of the
    first left out, as a share of all picked; and units over the clamp. The final hidden state [B, T, H].
    """

    ops: Ops
    dtype: torch.dtype
    fresh: Tensor
    noise: Noise = field(default_factory=Noise)
    picks: list[Tensor] = field(default_factory=list)
    edges: list[Tensor] = field(default_factory=list)
    clamped: list[Tensor] | None = None
    hidden: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.documents = self.fresh.long().cumsum(1)
        self.same = same_document(self.documents, CONV_TAPS)


def linear(x: Tensor, weight: Tensor, step: Step) -> Tensor:
    return F.linear(x.to(step.dtype), weight.to(step.dtype))


def _noisy(weight: Tensor, std: float) -> Tensor:
    if not std:
        return weight
    scale = weight.detach().square().mean((-1, -2), keepdim=True).sqrt() * std
    return weight + scale * torch.randn_like(weight)


def linear_attention(m: Any, x: Tensor, step: Step) -> Tensor:
    qkv = torch.cat([linear(x, p.weight, step) for p in (m.q_proj, m.k_proj, m.v_proj)], -1)
    q, k, v = step.ops.conv_silu(qkv, m.conv1d.weight.squeeze(1), step.same).chunk(3, -1)
    heads = (m.num_heads, m.head_dim)
    gate = m.forget_gate
    g = step.ops.forget(
        linear(linear(x, gate.f_a_proj.weight, step), gate.f_b_proj.weight, step),
        gate.dt_bias,
        gate.A_log,
        gate.safe_gate_lower_bound,
        step.fresh,
    )
    beta = torch.sigmoid(linear(x, m.b_proj.weight, step).float())
    out = kda(q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, heads), g, beta, step.ops.intra)
    z = linear(linear(x, m.g_a_proj.weight, step), m.g_b_proj.weight, step).unflatten(-1, heads)
    return linear(
        step.ops.gated_norm(out, z, m.o_norm.weight, m.o_norm.variance_epsilon).flatten(2), m.o_proj.weight, step
    )


def visible(step: Step) -> Tensor:
    """[B, 1, T, T]: the tokens of its own document that a token sees."""
    return (step.documents.unsqueeze(2) == step.documents.unsqueeze(1)).tril().unsqueeze(1)


def full_attention(m: Any, x: Tensor, step: Step, mask: Tensor) -> Tensor:
    b, t, _ = x.shape
    eps = m.q_a_layernorm.variance_epsilon
    q = linear(rms(linear(x, m.q_a_proj.weight, step), m.q_a_layernorm.weight, eps), m.q_b_proj.weight, step)
    latent = rms(linear(x, m.kv_a_proj_with_mqa.weight, step), m.kv_a_layernorm.weight, eps)
    kv = linear(latent, m.kv_b_proj.weight, step).view(b, t, m.num_heads, -1).transpose(1, 2)
    k, v = kv.split([m.qk_nope_head_dim, m.v_head_dim], -1)
    q = q.view(b, t, m.num_heads, -1).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=m.scaling)
    return linear(out.transpose(1, 2).reshape(b, t, -1), m.o_proj.weight, step)


def route(gate: Any, x: Tensor, step: Step) -> Tensor:
    """Routing weights [N, E], zero where not picked."""
    scores = F.linear(x.float(), gate.weight).sigmoid()
    choice = scores.detach() + gate.e_score_correction_bias
    if step.noise.routing:
        choice = choice + step.noise.routing * torch.randn_like(choice)
    order = choice.topk(gate.top_k + 1, dim=-1).indices
    picks = order[:, : gate.top_k]
    step.picks.append(picks)
    kept = scores.gather(1, picks)
    total = kept.sum(-1, keepdim=True) + 1e-20
    step.edges.append(scores.gather(1, order[:, -2:]).sum(-1) / total.squeeze(-1))
    kept = kept / total * gate.routed_scaling_factor
    return torch.zeros_like(scores).scatter(1, picks, kept)


def dense_mlp(m: Any, x: Tensor, step: Step) -> Tensor:
    gate_up = torch.stack([linear(x, m.gate_proj.weight, step), linear(x, m.up_proj.weight, step)], 1).unsqueeze(1)
    hidden = step.ops.swiglu(gate_up, x.new_ones(x.shape[0], 1), m.swiglu_limit)
    return linear(hidden.squeeze(1), m.down_proj.weight, step)


def moe(m: Any, x: Tensor, step: Step) -> Tensor:
    """Routed and shared experts; x [N, H]."""
    weights = route(m.gate, x, step)
    e = m.experts
    gate_up_w, down_w = _noisy(e.gate_up_proj, step.noise.experts), _noisy(e.down_proj, step.noise.experts)
    count, twice, h = gate_up_w.shape
    gate_up = linear(x, gate_up_w.reshape(count * twice, h), step).view(-1, count, 2, twice // 2)
    if step.clamped is not None:
        picked = weights > 0
        over = (gate_up[:, :, 0] > e.swiglu_limit) | (gate_up[:, :, 1].abs() > e.swiglu_limit)
        step.clamped.append(over[picked].float().mean())
    hidden = step.ops.swiglu(gate_up, weights, e.swiglu_limit).flatten(1)
    out = linear(hidden, down_w.permute(1, 0, 2).reshape(h, -1), step)
    return out.float() + dense_mlp(m.shared_experts, x, step).float()


def hyper(hc: Any, streams: Tensor, norm: Any, step: Step) -> tuple[Tensor, Tensor, Tensor]:
    pre, post, comb = step.ops.mix_logits(streams, hc.fn, hc.base, hc.scale, hc.input_norm.eps, hc.hc_eps)
    comb = step.ops.sinkhorn(comb, hc.hc_sinkhorn_iters, hc.hc_eps)
    return step.ops.collapse(streams, pre, norm.weight, norm.variance_epsilon), post, comb


def forward(model: Any, ids: Tensor, step: Step) -> Tensor:
    """Logits [B, T, V] in step.dtype; ids [B, T] int64, T % 64 == 0, step.fresh [B, T] bool."""
    text = model.model.language_model
    b, t = ids.shape
    mask = visible(step)
    streams = F.embedding(ids, text.embed_tokens.weight).float().unsqueeze(2).expand(-1, -1, 4, -1).contiguous()
    for layer in text.layers:
        x, post, comb = hyper(layer.attn_hc, streams, layer.input_layernorm, step)
        attention = (
            linear_attention(layer.self_attn, x, step)
            if layer.block_type == "linear_attention"
            else full_attention(layer.self_attn, x, step, mask)
        )
        streams = step.ops.expand(streams, attention, post, comb)
        x, post, comb = hyper(layer.ffn_hc, streams, layer.post_attention_layernorm, step)
        flat = x.reshape(b * t, -1)
        y = moe(layer.mlp, flat, step) if hasattr(layer.mlp, "experts") else dense_mlp(layer.mlp, flat, step)
        streams = step.ops.expand(streams, y.view(b, t, -1), post, comb)
    step.hidden = rms(streams.mean(2), text.norm.weight, text.norm.variance_epsilon)
    return linear(step.hidden, model.lm_head.weight, step)
