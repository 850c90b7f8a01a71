"""One token of each running stream: the same mathematics as glm5_next's layers, arranged for single tokens.

What differs from the modules (whose weights it uses, so nothing is stored twice):
* MLA is absorbed: queries are taken into the latent space, and attention reads the latents of the selected rows only,
  instead of expanding kv_b over the whole cache each token; pools come from the state instead of being rebuilt.
* projections that read the same input are one matrix product (their weights are views of one tensor);
* mHC's Sinkhorn runs on two scaling vectors instead of on the matrix.
Each stream goes through on its own. One product over several rows would round differently from a product over one, the
expert kernels' int16 activations widen that to 6e-5 of the logits, and an answer would depend on who runs beside it;
alone, it is bit for bit the same. Batching would buy a factor of 1.6 at four streams in the products that fit in cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from ...checkpoint import ModelConfig
from .fused import fuse, rms_norm
from .kda import Kda, KdaModule
from .prefill import extend_pools
from .state import KdaState, MlaState, StreamState

F32 = npt.NDArray[np.float32]


class HyperConnection:
    """mHC of one site: streams (hc, hidden) -> block input, and how the block's output is mixed back in.

    Source: glm5_next `HyperConnection`. Sinkhorn keeps M = diag(u) E diag(v), so each normalisation of rows or columns
    is a matrix-vector product on E and an update of u or v; the eps of the original enters as u / (u * (E v) + eps).
    """

    def __init__(self, module: Any, config: ModelConfig) -> None:
        self._hc, self._eps, self._iters = config.hc_mult, config.hc_eps, config.hc_sinkhorn_iters
        self._rms_eps = config.rms_norm_eps
        hc = self._hc
        self._fn = module.fn
        self._base = module.base
        self._gain = torch.cat([module.scale[i].expand(n) for i, n in enumerate((hc, hc, hc * hc))]).contiguous()

    def __call__(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """streams (hc, hidden) -> post (hc, 1), comb transposed (hc, hc), block input (1, hidden)."""
        hc = self._hc
        flat = streams.view(1, -1)
        scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self._rms_eps)
        mix = F.linear(flat, self._fn).mul_(scale).mul_(self._gain).add_(self._base)
        gates = torch.sigmoid(mix[:, : 2 * hc])
        comb = torch.from_numpy(self._sinkhorn(mix[0, 2 * hc :].numpy().reshape(hc, hc)))
        return gates[0, hc:, None] * 2, comb.T, gates[:, :hc].add(self._eps) @ streams

    def _sinkhorn(self, logits: F32) -> F32:
        """softmax over rows, then alternating column and row normalisation; (hc, hc)."""
        eps = np.float32(self._eps)
        e = np.exp(logits - logits.max(1, keepdims=True))
        e = e / e.sum(1, keepdims=True) + eps
        et = np.ascontiguousarray(e.T)
        u = np.ones(e.shape[0], np.float32)
        v = u / (et @ u + eps)
        for _ in range(self._iters - 1):
            u = u / (u * (e @ v) + eps)
            v = v / (v * (et @ u) + eps)
        out: F32 = u[:, None] * e * v
        return out


class MlaDecode:
    """Absorbed sparse MLA of one token. Source: glm5_next `Attention` and `Indexer`."""

    def __init__(self, module: Any, config: ModelConfig) -> None:
        self._m, self._c = module, config
        index = module.indexer
        self._in = fuse(
            [module.q_a_proj, module.kv_a_proj_with_mqa, index.wk, index.weights_proj],
            (index, "index_kpool_compress_gate"),
        )
        self._out: torch.Tensor = module.o_proj.weight
        self._q = fuse([module.q_b_proj, index.wq_b])
        c = config
        self._split = [c.q_lora_rank, c.kv_lora_rank, c.index_head_dim, c.index_n_heads, c.index_head_dim]
        self._q_split = [c.num_attention_heads * c.qk_nope_head_dim, c.index_n_heads * c.index_head_dim]
        kv = module.kv_b_proj.weight.view(c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        self._key, self._value = kv[:, : c.qk_nope_head_dim], kv[:, c.qk_nope_head_dim :].transpose(1, 2)

    def __call__(self, x: torch.Tensor, mla: MlaState, n: int) -> torch.Tensor:
        """x (1, hidden) -> (1, hidden); appends row `n` to the layer's latents, keys and pools."""
        c, m, index = self._c, self._m, self._m.indexer
        q_low, latent, key, head_weights, gate = torch.split_with_sizes(F.linear(x, self._in), self._split, -1)
        q_low = rms_norm(q_low, m.q_a_layernorm.weight, c.rms_norm_eps)
        key = F.layer_norm(key, key.shape[-1:], index.k_norm.weight, index.k_norm.bias, index.k_norm.eps)
        mla.reserve(n + 1, n)
        mla.latent[n] = rms_norm(latent, m.kv_a_layernorm.weight, c.rms_norm_eps)[0]
        mla.keys[n] = torch.cat([key[0], gate[0], torch.ones(1)])
        extend_pools(mla, n + 1, index.index_kpool_compress_ape)
        q, q_index = torch.split_with_sizes(F.linear(q_low, self._q), self._q_split, -1)
        picked = self._select(mla, n + 1, q_index.view(c.index_n_heads, c.index_head_dim), head_weights[0])
        lat = mla.latent[: n + 1] if picked is None else mla.latent[picked]
        scores = torch.bmm(q.reshape(c.num_attention_heads, 1, c.qk_nope_head_dim), self._key).squeeze(1) @ lat.T
        mean = scores.mul_(c.qk_nope_head_dim**-0.5).softmax(-1) @ lat
        return F.linear(torch.bmm(mean.unsqueeze(1), self._value).view(1, -1), self._out)

    def _select(self, mla: MlaState, rows: int, q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        """Row indices the token attends to: the best index_topk / kpool pools and the incomplete tail; None = all."""
        c = self._c
        pools, keep = mla.pools_done, c.index_topk // c.index_kpool
        if pools <= keep:
            return None
        scores = F.relu((q @ mla.pools[:pools].T).mul_(c.index_head_dim**-0.5))
        best = ((weights * c.index_n_heads**-0.5) @ scores).topk(keep, sorted=False).indices
        picked = (best[:, None] * c.index_kpool + torch.arange(c.index_kpool)).view(-1)
        return torch.cat([picked, torch.arange(pools * c.index_kpool, rows)])


class MlpDecode:
    """Dense or shared-expert SwiGLU with the clamp, and the router in front of the routed experts."""

    def __init__(self, module: Any, config: ModelConfig, sparse: bool) -> None:
        self._c, self._m, self._sparse = config, module, sparse
        self._glu = module.shared_experts if sparse else module
        self._gate_up = fuse([self._glu.gate_proj, self._glu.up_proj])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (1, hidden) -> (1, hidden)."""
        limit = self._c.swiglu_limit
        gate, up = F.linear(x, self._gate_up).chunk(2, -1)
        y = F.linear(F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit), self._glu.down_proj.weight)
        return y + self._routed(x) if self._sparse else y

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        c, router = self._c, self._m.gate
        scores = F.linear(x, router.weight).sigmoid_()
        picks = (scores + router.e_score_correction_bias).topk(c.num_experts_per_tok, sorted=False).indices
        weights = scores.gather(1, picks)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        routed: torch.Tensor = self._m.experts(x, picks, weights * c.routed_scaling_factor)
        return routed


class _Layer:
    def __init__(self, module: Any, config: ModelConfig, index: int) -> None:
        self._eps, self._index = config.rms_norm_eps, index
        self._attn_hc, self._ffn_hc = (HyperConnection(m, config) for m in (module.attn_hc, module.ffn_hc))
        self._attn_norm, self._ffn_norm = module.input_layernorm.weight, module.post_attention_layernorm.weight
        if config.layer_types[index] == "linear_attention":
            self._attention: Kda | MlaDecode = Kda(module.self_attn, config)
            module.self_attn = KdaModule(self._attention, index)
        else:
            self._attention = MlaDecode(module.self_attn, config)
        self._mlp = MlpDecode(module.mlp, config, config.mlp_layer_types[index] == "sparse")

    def __call__(self, streams: torch.Tensor, state: StreamState) -> torch.Tensor:
        post, comb, x = self._attn_hc(streams)
        y = self._attend(rms_norm(x, self._attn_norm, self._eps), state)
        streams = torch.addmm(post * y, comb, streams)
        post, comb, x = self._ffn_hc(streams)
        return torch.addmm(post * self._mlp(rms_norm(x, self._ffn_norm, self._eps)), comb, streams)

    def _attend(self, x: torch.Tensor, state: StreamState) -> torch.Tensor:
        own = state.layers[self._index]
        if isinstance(self._attention, Kda):
            assert isinstance(own, KdaState)
            return self._attention.decode(x, own)
        assert isinstance(own, MlaState)
        return self._attention(x, own, state.length)


class Decoder:
    """The whole text model for single tokens. Build it once; the model's projections become views of fused weights."""

    def __init__(self, model: Any, config: ModelConfig) -> None:
        self._c = config
        self._text, self._head = model.model.language_model, model.lm_head.weight
        self._layers = [_Layer(m, config, i) for i, m in enumerate(self._text.layers)]

    def step(self, state: StreamState, token: int) -> torch.Tensor:
        """Feed one token to a stream and advance its state. Returns logits (vocabulary,) float32."""
        streams = self._text.embed_tokens.weight[token].expand(self._c.hc_mult, -1).contiguous()
        for layer in self._layers:
            streams = layer(streams, state)
        state.length += 1
        hidden = rms_norm(streams.mean(0, keepdim=True), self._text.norm.weight, self._c.rms_norm_eps)
        return F.linear(hidden, self._head)[0]
