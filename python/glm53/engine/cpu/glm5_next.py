"""transformers' glm5_next, imported without optional kernels and built without its own weight loading.

`from_pretrained` on an EXL3 folder warns and runs with random weights, so parameters are created empty ("meta") and
assigned from our strict reader; any parameter left over is an error. Packages that transformers prefers when they can
be imported (fla, causal_conv1d) are GPU code: they are hidden from its import, and the functions they would replace
belong to KDA, which is ours (kda.py).
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...checkpoint import Checkpoint
from ...errors import CheckpointError, EngineError
from ..protocol import Progress
from .exl3 import dense

_MODULE = "transformers.models.glm5_next.modeling_glm5_next"
_GPU_PACKAGES = ("fla", "causal_conv1d")


@contextmanager
def _without_gpu_packages() -> Iterator[None]:
    saved = {name: sys.modules.get(name) for name in _GPU_PACKAGES}
    sys.modules.update(dict.fromkeys(_GPU_PACKAGES))  # type: ignore[arg-type]  # None makes `import` fail
    try:
        yield
    finally:
        for name, module in saved.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _no_advice(record: logging.LogRecord) -> bool:
    """Drop transformers' advice to install the GPU packages."""
    return "reference PyTorch implementation" not in record.getMessage()


def modeling() -> Any:
    """transformers' glm5_next module, imported on its pure torch functions. Raises EngineError without transformers."""
    logging.getLogger("transformers.integrations.hub_kernels").addFilter(_no_advice)
    try:
        with _without_gpu_packages():
            return importlib.import_module(_MODULE)
    except ImportError as e:
        raise EngineError(f"the CPU engine needs transformers with glm5_next ({e}): pip install 'glm53[cpu]'") from e


def build(checkpoint: Checkpoint, progress: Progress) -> Any:
    """Glm5NextForConditionalGeneration (text only, float32, eval) without routed expert weights.

    The `experts` module of every MoE layer is removed; the caller puts its own there.
    """
    module = modeling()
    config = _hf_config(checkpoint.path)
    with torch.device("meta"):
        model = module.Glm5NextForConditionalGeneration(config)
    model.model.visual = None
    for i in checkpoint.config.moe_layers:
        model.model.language_model.layers[i].mlp.experts = None
    for name, tensor in _parameters(checkpoint, progress):
        _assign(model, name, tensor)
    left = [n for n, p in (*model.named_parameters(), *model.named_buffers()) if p.is_meta]
    if left:
        raise CheckpointError(f"{checkpoint.path}: the checkpoint has nothing for {left[0]} (and {len(left) - 1} more)")
    model.eval().requires_grad_(False)
    return model


def _hf_config(model_dir: Path) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_dir)
    except Exception as e:
        raise CheckpointError(f"{model_dir / 'config.json'}: {' '.join(str(e).split())}") from e
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._attn_implementation = config.text_config._attn_implementation = "sdpa"
    return config


def _assign(model: Any, name: str, tensor: torch.Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    old = getattr(owner, leaf)
    if old.shape != tensor.shape:
        raise CheckpointError(f"{name}: shape {list(tensor.shape)}, the model has {list(old.shape)}")
    if isinstance(old, torch.nn.Parameter):
        setattr(owner, leaf, torch.nn.Parameter(tensor, requires_grad=False))
    else:
        setattr(owner, leaf, tensor)


def _parameters(ck: Checkpoint, progress: Progress) -> Iterator[tuple[str, torch.Tensor]]:
    """(transformers parameter name, float32 tensor) for everything but the routed experts."""
    base, layers = "model.language_model", ck.config.num_hidden_layers
    yield f"{base}.embed_tokens.weight", _plain(ck, f"{base}.embed_tokens.weight")
    yield f"{base}.norm.weight", _plain(ck, f"{base}.norm.weight")
    yield "lm_head.weight", dense(ck.linear("lm_head"))
    for i in range(layers):
        progress("dense weights", i / layers)
        yield from _layer(ck, i, f"{base}.layers.{i}")
    progress("dense weights", 1.0)


def _plain(ck: Checkpoint, name: str) -> torch.Tensor:
    return torch.from_numpy(ck.f32(name))


def _layer(ck: Checkpoint, i: int, k: str) -> Iterator[tuple[str, torch.Tensor]]:
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{k}.{norm}.weight", _plain(ck, f"{k}.{norm}.weight")
    for site in ("attn", "ffn"):
        for part in ("fn", "base", "scale"):
            yield f"{k}.{site}_hc.{part}", _plain(ck, f"{k}.hc_{site}_{part}")
    if ck.config.layer_types[i] == "linear_attention":
        yield from _kda(ck, f"{k}.self_attn")
    else:
        yield from _mla(ck, f"{k}.self_attn")
    if ck.config.mlp_layer_types[i] == "dense":
        mlp = f"{k}.mlp"
    else:
        mlp = f"{k}.mlp.shared_experts"
        yield f"{k}.mlp.gate.weight", _plain(ck, f"{k}.mlp.gate.weight")
        bias = f"{k}.mlp.gate.e_score_correction_bias"
        yield bias, _plain(ck, bias)
    for part in ("gate", "up", "down"):
        yield f"{mlp}.{part}_proj.weight", dense(ck.linear(f"{mlp}.{part}_proj"))


def _kda(ck: Checkpoint, a: str) -> Iterator[tuple[str, torch.Tensor]]:
    q, k, v = dense(ck.linear(f"{a}.qkv_proj")).chunk(3)
    yield from ((f"{a}.{n}_proj.weight", w) for n, w in (("q", q), ("k", k), ("v", v)))
    yield f"{a}.o_proj.weight", dense(ck.linear(f"{a}.o_proj"))
    yield f"{a}.conv1d.weight", _plain(ck, f"{a}.conv1d.weight")
    for name in ("f_a_proj.weight", "f_b_proj.weight"):
        yield f"{a}.forget_gate.{name}", _plain(ck, f"{a}.{name}")
    for name in ("dt_bias", "A_log"):
        yield f"{a}.forget_gate.{name}", _plain(ck, f"{a}.{name}").flatten()
    for name in ("b_proj", "g_a_proj", "g_b_proj", "o_norm"):
        yield f"{a}.{name}.weight", _plain(ck, f"{a}.{name}.weight")


def _mla(ck: Checkpoint, a: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "indexer.wq_b"):
        yield f"{a}.{name}.weight", dense(ck.linear(f"{a}.{name}"))
    for name in ("q_a_layernorm.weight", "kv_a_layernorm.weight", "kv_b_proj.weight", "indexer.wk.weight",
                 "indexer.weights_proj.weight", "indexer.k_norm.weight", "indexer.k_norm.bias",
                 "indexer.index_kpool_compress_ape", "indexer.index_kpool_compress_gate"):  # fmt: skip
        yield f"{a}.{name}", _plain(ck, f"{a}.{name}")
