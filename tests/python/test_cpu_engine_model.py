"""The CPU engine's model against stock exllamav3's answers, the float32 transformers oracle, and itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cpu_engine_helpers import (
    BUNDLED,
    checkpoint_dir,
    cpu_model,
    decode_logits,
    float_model,
    full_logits,
    golden_data,
    golden_dir,
    kl,
    oracle_logits,
    random_ids,
)

INDEX_TOPK = 64  # of the tiny preset


def golden(name: str) -> tuple[list[int], torch.Tensor]:
    data = golden_data()
    return data[f"{name}_ids"].tolist(), torch.from_numpy(data[f"{name}_logits"])


@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_agrees_with_stock_exllamav3(path: str) -> None:
    model, ours, stock = cpu_model(golden_dir()), [], []
    for name in ("text", "rand200"):
        ids, logits = golden(name)
        ours.append(full_logits(model, ids) if path == "prefill" else decode_logits(model, ids, 0))
        stock.append(logits)
    a, b = torch.cat(stock), torch.cat(ours)
    assert kl(a, b).median() <= 1e-3
    assert ((a - b).norm(dim=-1) / a.norm(dim=-1)).median() <= 1.2e-2
    assert (a.argmax(-1) == b.argmax(-1)).float().mean() >= 0.96


@pytest.mark.parametrize("name", ["text", "rand200"])
def test_agrees_with_the_transformers_oracle(name: str) -> None:
    ids, _ = golden(name)
    assert kl(oracle_logits(golden_dir(), ids), full_logits(cpu_model(golden_dir()), ids)).median() <= 2e-5
    assert kl(oracle_logits(golden_dir(), ids), decode_logits(cpu_model(golden_dir()), ids, 0)).median() <= 2e-5


def relative_rms(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """One figure a row."""
    return (reference - other).norm(dim=-1) / reference.norm(dim=-1)


@pytest.mark.parametrize("prompt", [0, 1, 17, INDEX_TOPK - 3, INDEX_TOPK + 9, 140])
def test_cached_decode_is_the_full_forward(prompt: int) -> None:
    model, ids = float_model(golden_dir()), random_ids(150, 3)
    full = full_logits(model, ids)[prompt:]
    assert (decode_logits(model, ids, prompt) - full).abs().max() <= 1e-4


@pytest.mark.parametrize("chunk", [1, 48, 64])
def test_chunked_prefill_is_the_full_forward(chunk: int) -> None:
    model, ids = float_model(golden_dir()), random_ids(150, 4)
    full = full_logits(model, ids)[140:]
    assert (decode_logits(model, ids, 140, chunk) - full).abs().max() <= 1e-4


@pytest.mark.parametrize("prompt", [20, INDEX_TOPK + 9])
def test_cached_decode_on_the_native_experts(prompt: int) -> None:
    model, ids = cpu_model(golden_dir()), golden("rand200")[0]
    full = full_logits(model, ids)[prompt:]
    assert relative_rms(full, decode_logits(model, ids, prompt)).median() <= 1e-4


def test_streams_decode_together_as_they_do_alone() -> None:
    model = cpu_model(golden_dir())
    lengths = [5, 37, 90, 150]
    ids = [random_ids(n + 24, 10 + n) for n in lengths]
    alone = [decode_logits(model, i, n) for i, n in zip(ids, lengths, strict=True)]
    with torch.inference_mode():
        states = [model.new_state() for _ in ids]
        for state, i, n in zip(states, ids, lengths, strict=True):
            model.prefill(state, i[:n])
        live = [0, 1, 2, 3]
        for step in range(24):
            if step == 12:
                live = [0, 2, 3]
            logits = model.step([states[b] for b in live], [ids[b][lengths[b] + step] for b in live])
            for row, b in zip(logits, live, strict=True):
                assert torch.equal(row, alone[b][step]), (step, b)


def test_swiglu_clamp_is_the_models() -> None:
    path = checkpoint_dir(esb=1.0, clamp=5.0)
    model, ids = cpu_model(path), golden("rand200")[0]
    reference = oracle_logits(path, ids)
    assert kl(reference, full_logits(model, ids)).median() <= 2e-5
    assert kl(reference[150:], decode_logits(model, ids, 150)).median() <= 2e-5


@pytest.mark.parametrize("bits", [2, 4])
def test_other_expert_rates_agree_with_the_oracle(bits: int) -> None:
    path, ids = checkpoint_dir(esb=1.0, expert_bits=bits), golden("text")[0]
    assert kl(oracle_logits(path, ids), full_logits(cpu_model(path), ids)).median() <= 2e-5


def test_without_the_clamp_the_comparison_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from glm53.checkpoint import ModelConfig
    from glm53.engine.cpu import experts

    path, ids = checkpoint_dir(esb=1.0, clamp=5.0), golden("rand200")[0]
    table = experts._core.ExpertTable

    class Unclamped:
        def __new__(cls, n: int, hidden: int, intermediate: int, limit: float) -> object:
            assert limit == ModelConfig.load(path).swiglu_limit
            return table(n, hidden, intermediate, 0.0)

    monkeypatch.setattr(experts._core, "ExpertTable", Unclamped)
    model = cpu_model.__wrapped__(path)
    assert kl(oracle_logits(path, ids), full_logits(model, ids)).median() > 2e-5


def test_no_decoded_expert_exists_in_the_process() -> None:
    scan = Path(__file__).with_name("expert_scan.py")
    command = [sys.executable, str(scan), str(golden_dir())]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.strip() == "ok", done.stderr


def test_native_experts_serve_every_routed_pick() -> None:
    model = cpu_model.__wrapped__(golden_dir())
    decode_logits(model, random_ids(50, 8), 40)
    stats = model.stats()
    assert stats["routed_picks_expected"] == 50 * 4 * 4
    assert stats["routed_picks_served"] == stats["cpu_moe"]["picks"] == stats["routed_picks_expected"]


def test_bundled_checkpoint_loads() -> None:
    logits = full_logits(cpu_model(BUNDLED), [1, 2, 3])
    assert logits.shape[0] == 3 and torch.isfinite(logits).all()


def test_gpu_packages_are_kept_out_of_transformers(tmp_path: Path) -> None:
    for name, function in (("fla", "chunk_kda"), ("causal_conv1d", "causal_conv1d_fn")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"def {function}(*a, **k): raise SystemExit('GPU code')\n")
    code = (
        "import inspect, sys\n"
        "from glm53.engine.cpu.glm5_next import modeling\n"
        "m = modeling()\n"
        "for f in (m.chunk_kimi_delta_attention, m.causal_conv1d_fn):\n"
        "    assert inspect.getclosurevars(f).nonlocals['is_new_implementation'] is False, f\n"
        "assert 'fla' not in sys.modules\n"
        "import fla, causal_conv1d\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=env, timeout=120
    )
    assert done.returncode == 0, done.stderr
