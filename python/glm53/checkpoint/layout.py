"""The tensors of an EXL3 GLM-5.3-Flash checkpoint: names, shapes and kinds, as exllamav3 1.5.1's converter writes them.

Orientation: an EXL3 linear of (in_features, out_features) holds trellis [in/16, out/16, 16 K], suh [in], svh [out],
both sizes padded up to 128; a plain weight is [out, in]. "KEY.mul1" / "KEY.mcg" mark the codebook, neither is 3INST.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .model_config import ModelConfig

BASE = "model.language_model"
EXPERT_LINEARS = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Plain:
    """An unquantised tensor (BF16, F16 or F32); `flat` = axes of length 1 may stand around it."""

    name: str
    shape: tuple[int, ...]
    flat: bool = False


@dataclass(frozen=True, slots=True)
class Linear:
    """A quantised linear y = x W; `expert` = it belongs to the routed experts (stricter codebook and bit rates)."""

    key: str
    in_features: int
    out_features: int
    expert: bool = False


def expert_key(layer: int, expert: int, which: str) -> str:
    """Key of one routed expert's linear; `which` is gate, up or down."""
    return f"{BASE}.layers.{layer}.mlp.experts.{expert}.{which}_proj"


def _glu(prefix: str, c: ModelConfig, inter: int, expert: bool = False) -> Iterator[Linear]:
    yield Linear(f"{prefix}.gate_proj", c.hidden_size, inter, expert)
    yield Linear(f"{prefix}.up_proj", c.hidden_size, inter, expert)
    yield Linear(f"{prefix}.down_proj", inter, c.hidden_size, expert)


def _kda(a: str, c: ModelConfig) -> Iterator[Plain | Linear]:
    h, d, n, w = c.hidden_size, c.kda_head_dim, c.kda_num_heads, c.kda_dim
    yield Linear(f"{a}.qkv_proj", h, 3 * w)
    yield Linear(f"{a}.o_proj", w, h)
    yield Plain(f"{a}.conv1d.weight", (3 * w, 1, c.kda_conv_kernel))
    yield Plain(f"{a}.A_log", (n,), flat=True)
    yield Plain(f"{a}.dt_bias", (w,), flat=True)
    yield Plain(f"{a}.b_proj.weight", (n, h))
    for name in ("f", "g"):
        yield Plain(f"{a}.{name}_a_proj.weight", (d, h))
        yield Plain(f"{a}.{name}_b_proj.weight", (w, d))
    yield Plain(f"{a}.o_norm.weight", (d,))


def _mla(a: str, c: ModelConfig) -> Iterator[Plain | Linear]:
    h, n, dk, dv, di = c.hidden_size, c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim, c.index_head_dim
    yield Linear(f"{a}.q_a_proj", h, c.q_lora_rank)
    yield Linear(f"{a}.q_b_proj", c.q_lora_rank, n * dk)
    yield Linear(f"{a}.kv_a_proj_with_mqa", h, c.kv_lora_rank)
    yield Linear(f"{a}.o_proj", n * dv, h)
    yield Linear(f"{a}.indexer.wq_b", c.q_lora_rank, c.index_n_heads * di)
    yield Plain(f"{a}.q_a_layernorm.weight", (c.q_lora_rank,))
    yield Plain(f"{a}.kv_a_layernorm.weight", (c.kv_lora_rank,))
    yield Plain(f"{a}.kv_b_proj.weight", (n * (dk + dv), c.kv_lora_rank))
    yield Plain(f"{a}.indexer.wk.weight", (di, h))
    yield Plain(f"{a}.indexer.weights_proj.weight", (c.index_n_heads, h))
    yield Plain(f"{a}.indexer.k_norm.weight", (di,))
    yield Plain(f"{a}.indexer.k_norm.bias", (di,))
    yield Plain(f"{a}.indexer.index_kpool_compress_ape", (c.index_kpool, di))
    yield Plain(f"{a}.indexer.index_kpool_compress_gate", (di, h))


def _mlp(m: str, c: ModelConfig, sparse: bool) -> Iterator[Plain | Linear]:
    if not sparse:
        yield from _glu(m, c, c.intermediate_size)
        return
    yield Plain(f"{m}.gate.weight", (c.n_routed_experts, c.hidden_size))
    yield Plain(f"{m}.gate.e_score_correction_bias", (c.n_routed_experts,))
    yield from _glu(f"{m}.shared_experts", c, c.moe_intermediate_size * c.n_shared_experts)
    for e in range(c.n_routed_experts):
        yield from _glu(f"{m}.experts.{e}", c, c.moe_intermediate_size, expert=True)


def expected(c: ModelConfig) -> Iterator[Plain | Linear]:
    """Every tensor or linear of the text model and its head."""
    h, mix = c.hidden_size, (2 + c.hc_mult) * c.hc_mult
    yield Plain(f"{BASE}.embed_tokens.weight", (c.vocab_size, h))
    yield Plain(f"{BASE}.norm.weight", (h,))
    yield Linear("lm_head", h, c.vocab_size)
    for i in range(c.num_hidden_layers):
        k = f"{BASE}.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Plain(f"{k}.{norm}.weight", (h,))
        for site in ("attn", "ffn"):
            yield Plain(f"{k}.hc_{site}_fn", (mix, c.hc_mult * h))
            yield Plain(f"{k}.hc_{site}_base", (mix,))
            yield Plain(f"{k}.hc_{site}_scale", (3,))
        attention = _kda if c.layer_types[i] == "linear_attention" else _mla
        yield from attention(f"{k}.self_attn", c)
        yield from _mlp(f"{k}.mlp", c, c.mlp_layer_types[i] == "sparse")


def expected_mtp(c: ModelConfig) -> Iterator[Plain | Linear]:
    """What drafting needs besides: the MTP layers behind the last one, as exllamav3's Glm5NextMTPModel reads them."""
    h, first, count = c.hidden_size, c.num_hidden_layers, c.num_nextn_predict_layers
    for i in range(first, first + count):
        k = f"{BASE}.layers.{i}"
        if i == first:
            yield Plain(f"{k}.enorm.weight", (h,))
            yield Plain(f"{k}.hnorm.weight", (h,))
            yield Linear(f"{k}.eh_proj", 2 * h, h)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Plain(f"{k}.{norm}.weight", (h,))
        yield from _mla(f"{k}.self_attn", c)
        yield from _mlp(f"{k}.mlp", c, sparse=True)
    yield Plain(f"{BASE}.layers.{first + count - 1}.shared_head.norm.weight", (h,))


def unused(name: str, c: ModelConfig) -> bool:
    """Tensors a complete checkpoint may hold and text generation leaves alone: the vision tower and the MTP layers."""
    first = c.num_hidden_layers
    mtp = tuple(f"{BASE}.layers.{first + i}." for i in range(max(1, c.num_nextn_predict_layers)))
    return name.startswith(("model.visual.", *mtp))
