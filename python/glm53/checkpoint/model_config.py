"""config.json of a GLM-5.3-Flash checkpoint as one frozen, validated object."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import CheckpointError
from .safetensors_file import short

LayerType = Literal["linear_attention", "indexed_attention"]
MlpType = Literal["dense", "sparse"]

EXAMPLE = "an EXL3 checkpoint such as turboderp/GLM-5.3-Flash-exl3 at revision 3.05bpw"
_MAX_INTEGER = 2**31 - 1
_SMALLEST, _LARGEST = 1e-37, 1e37
_LAYER_TYPES: dict[str, LayerType] = {
    "linear_attention": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "indexed_attention": "indexed_attention",
    "full_attention": "indexed_attention",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions of the text model. Names follow config.json's `text_config`; kda_* come from `linear_attn_config`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    layer_types: tuple[LayerType, ...]
    mlp_layer_types: tuple[MlpType, ...]
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    swiglu_limit: float
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_kpool: int
    kda_num_heads: int
    kda_head_dim: int
    kda_conv_kernel: int
    kda_gate_lower_bound: float
    hc_mult: int
    hc_eps: float
    hc_sinkhorn_iters: int
    rms_norm_eps: float
    max_position_embeddings: int

    @property
    def kda_dim(self) -> int:
        """Channels of one of q, k, v in a KDA layer."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts."""
        return tuple(i for i, kind in enumerate(self.mlp_layer_types) if kind == "sparse")

    @property
    def mtp_layers(self) -> tuple[int, ...]:
        """Indices that the MTP layers have in tensor names; all of them have routed experts."""
        return tuple(range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers))

    @classmethod
    def load(cls, model_dir: Path) -> ModelConfig:
        """Read and validate `model_dir/config.json`. Raises CheckpointError."""
        path = model_dir / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{model_dir}: no config.json; point the model directory at {EXAMPLE}") from None
        except (OSError, ValueError, RecursionError) as e:
            raise CheckpointError(f"{path}: not readable JSON ({e}); download the checkpoint again") from e
        if not isinstance(raw, dict):
            raise CheckpointError(f"{path}: not a JSON object; download the checkpoint again")
        kind = raw.get("model_type")
        if kind != "glm5_next":
            raise CheckpointError(f'{path}: model_type is {kind!r}, this server needs "glm5_next": use {EXAMPLE}')
        return _from_text_config(_Fields(path, raw).section("text_config"))


class _Fields:
    """Typed access to one JSON object; every complaint names the file and the field."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def fail(self, name: str, need: str) -> CheckpointError:
        found = short(self.values.get(name))
        return CheckpointError(f"{self.path}: {self.prefix}{name} is {found}, need {need}")

    def section(self, name: str) -> _Fields:
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.fail(name, "an object")
        return _Fields(self.path, value, f"{self.prefix}{name}.")

    def integer(
        self, name: str, default: int | None = None, *, low: int = 1, high: int = _MAX_INTEGER, multiple: int = 1
    ) -> int:
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high or value % multiple:
            limit = f" and <= {high}" if isinstance(value, int) and value > high else ""
            step = f", a multiple of {multiple}" if multiple > 1 else ""
            raise self.fail(name, f"an integer >= {low}{limit}{step}")
        return value

    def number(self, name: str, default: float | None = None, *, sign: int = 1) -> float:
        """A finite float32 number other than 0, of the given sign."""
        value: Any = self.values.get(name, default)
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not numeric or not _SMALLEST <= sign * value <= _LARGEST:
            raise self.fail(name, f"a {'positive' if sign > 0 else 'negative'} number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value

    def exactly(self, name: str, value: object, default: object = None) -> None:
        if self.values.get(name, value if default is None else default) != value:
            raise self.fail(name, f"{value!r} (nothing else is implemented)")

    def strings(self, name: str, length: int, names: dict[str, Any]) -> tuple[Any, ...]:
        value = self.values.get(name)
        if (
            not isinstance(value, list)
            or len(value) != length
            or any(not isinstance(v, str) or v not in names for v in value)
        ):
            raise self.fail(name, f"a list of {length} out of {', '.join(sorted(names))}")
        return tuple(names[v] for v in value)


def _check_eos(text: _Fields) -> None:
    value = text.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise text.fail("eos_token_id", "a token id or a list of them")


def _from_text_config(t: _Fields) -> ModelConfig:
    layers = t.integer("num_hidden_layers")
    for name, value in (("scoring_func", "sigmoid"), ("hidden_act", "silu"), ("n_group", 1), ("topk_group", 1),
                        ("qk_rope_head_dim", 0), ("attention_bias", False)):  # fmt: skip
        t.exactly(name, value)
    indexers = t.values.get("indexer_types") or []
    if not isinstance(indexers, list) or any(kind != "full" for kind in indexers):
        raise t.fail("indexer_types", '"full" for every layer')
    _check_eos(t)
    kda = t.section("linear_attn_config")
    experts = t.integer("n_routed_experts")
    kpool = t.integer("index_kpool")
    return ModelConfig(
        vocab_size=t.integer("vocab_size"),
        hidden_size=t.integer("hidden_size", multiple=128),
        num_hidden_layers=layers,
        num_nextn_predict_layers=t.integer("num_nextn_predict_layers", 0, low=0),
        layer_types=t.strings("layer_types", layers, _LAYER_TYPES),
        mlp_layer_types=t.strings("mlp_layer_types", layers, {"dense": "dense", "sparse": "sparse"}),
        intermediate_size=t.integer("intermediate_size", multiple=128),
        moe_intermediate_size=t.integer("moe_intermediate_size", multiple=128),
        n_routed_experts=experts,
        n_shared_experts=t.integer("n_shared_experts", 1),
        num_experts_per_tok=min(t.integer("num_experts_per_tok"), experts),
        routed_scaling_factor=t.number("routed_scaling_factor"),
        norm_topk_prob=t.flag("norm_topk_prob", True),
        swiglu_limit=t.number("swiglu_limit"),
        num_attention_heads=t.integer("num_attention_heads"),
        q_lora_rank=t.integer("q_lora_rank", multiple=128),
        kv_lora_rank=t.integer("kv_lora_rank", multiple=128),
        qk_nope_head_dim=t.integer("qk_nope_head_dim"),
        v_head_dim=t.integer("v_head_dim"),
        index_n_heads=t.integer("index_n_heads"),
        index_head_dim=t.integer("index_head_dim"),
        index_topk=t.integer("index_topk", multiple=kpool),
        index_kpool=kpool,
        kda_num_heads=kda.integer("num_heads"),
        kda_head_dim=kda.integer("head_dim"),
        kda_conv_kernel=kda.integer("short_conv_kernel_size", low=2),
        kda_gate_lower_bound=kda.number("gate_lower_bound", sign=-1),
        hc_mult=t.integer("hc_mult"),
        hc_eps=t.number("hc_eps", 1e-6),
        hc_sinkhorn_iters=t.integer("hc_sinkhorn_iters", 20, high=1000),
        rms_norm_eps=t.number("rms_norm_eps"),
        max_position_embeddings=t.integer("max_position_embeddings"),
    )
