"""Checkpoints, models and the transformers oracle that several CPU engine tests share; each is made once a session."""

from __future__ import annotations

import atexit
import functools
import gc
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_checkpoint import TINY, TOKENIZER

from glm53.cli import model_dir

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = model_dir.BUNDLED
sys.path.insert(0, str(ROOT / "tests/oracle"))


@functools.cache
def scratch() -> Path:
    """A folder that lives as long as the test session."""
    path = Path(tempfile.mkdtemp(prefix="glm53-tests-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def checkpoint_dir(**options: Any) -> Path:
    """A synthetic checkpoint of the `tiny` preset; options as `make_tiny.build` (esb, clamp, cb, mtp, expert_bits)."""
    import make_tiny

    name = "-".join(f"{k}{v}" for k, v in sorted(options.items())) or "plain"
    out = scratch() / f"tiny-{name}"
    make_tiny.build(str(out), make_tiny.PRESETS["tiny"], cal=str(TOKENIZER), **options)
    return out


def golden_dir() -> Path:
    """The checkpoint that tests/data/tiny-exllamav3-1.5.1.npz was recorded on."""
    return TINY


@functools.cache
def golden_data() -> dict[str, np.ndarray]:
    """What stock exllamav3 1.5.1 answered on `golden_dir()`."""
    with np.load(ROOT / "tests/data/tiny-exllamav3-1.5.1.npz") as data:
        return dict(data)


@functools.cache
def cpu_model(path: Path) -> Any:
    """The CPU engine's model, without its engine thread."""
    from glm53.checkpoint import Checkpoint
    from glm53.engine.cpu.model import CpuModel

    with Checkpoint.open(path) as checkpoint, torch.inference_mode():
        return CpuModel(checkpoint, 1, lambda stage, fraction: None)


@functools.cache
def float_model(path: Path) -> Any:
    """The CPU engine's model with the oracle's float32 experts in place of the native ones.

    The native kernels round activations to int16, so two paths that differ in the last bit of a float differ by 6e-5
    of the logits behind them. What is said about the rest of the model is measured without that.
    """
    model = cpu_model.__wrapped__(path)
    for i in model.config.moe_layers:
        model._text.layers[i].mlp.experts = oracle(path).model.language_model.layers[i].mlp.experts
    return model


@functools.cache
def oracle(path: Path) -> Any:
    """transformers' own model with every tensor decoded to float32."""
    import hf_oracle

    return hf_oracle.load(str(path))[0]


@atexit.register
def forget_models() -> None:
    """Native objects must go before the interpreter takes its modules apart, or nanobind reports them as leaked."""
    cpu_model.cache_clear()
    float_model.cache_clear()
    gc.collect()


def oracle_logits(path: Path, ids: list[int]) -> torch.Tensor:
    """(tokens, vocabulary) of one uncached forward."""
    with torch.inference_mode():
        logits: torch.Tensor = oracle(path)(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def full_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """(tokens, vocabulary) of one prefill pass of the CPU engine's model."""
    with torch.inference_mode():
        logits: torch.Tensor = model.logits(model.prefill(model.new_state(), ids))
    return logits


def decode_logits(model: Any, ids: list[int], prompt: int, chunk: int = 10_000) -> torch.Tensor:
    """Logits at positions prompt..end: prefill in chunks up to `prompt`, then one token at a time."""
    with torch.inference_mode():
        state = model.new_state()
        for at in range(0, prompt, chunk):
            model.prefill(state, ids[at : min(at + chunk, prompt)])
        return torch.stack([model.step([state], [i])[0] for i in ids[prompt:]])


def kl(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL divergence per row, reference first."""
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def random_ids(n: int, seed: int) -> list[int]:
    """Token ids that are ordinary text tokens of the tiny tokenizer."""
    ids: list[int] = np.random.default_rng(seed).integers(0, 2048, n).tolist()
    return ids
