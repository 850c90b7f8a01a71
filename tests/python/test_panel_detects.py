"""What a reference panel finds out: the CPU engine meets it; without the clamp or with one wrong weight it does not."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cpu_engine_helpers import BUNDLED, ROOT, checkpoint_dir, cpu_model, full_logits, golden_data, oracle_logits
from safetensors import safe_open
from tiny_checkpoint import TINY

from glm53.tokenizer import Tokenizer

TINY_PANEL = ROOT / "tests/data/tiny-panel.json"
NANO_PANEL = ROOT / "bench/panels/nano-recorded.json"
LIMITS = {"stock": (0.96, 0.02), "nano": (0.98, 0.003), "oracle": (0.98, 0.005)}
"""Top-1 and KL that the CPU engine stays within, and a fault does not: against stock exllamav3 (float16 on a GPU) on
the tiny and on the bundled checkpoint, and against transformers in float32."""


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def score(panel: dict[str, Any], checkpoint: Path) -> tuple[float, float]:
    """(top-1, mean KL) of the CPU engine's model over a panel, by the client's own arithmetic."""
    client, maker = tool("score_ref_panel"), tool("make_ref_panel")
    model, rows, usable = cpu_model.__wrapped__(checkpoint), [], Tokenizer(checkpoint).size
    for prompt in panel["prompts"]:
        measured = [dict(map(tuple, top)) for top in maker.top_of(full_logits(model, prompt["ids"]).numpy(), usable)]
        rows.append(client.score_prompt(prompt, measured, None))
    total = client.summary(rows)
    return total["top1"], total["kl_mean"]


def changed(checkpoint: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    out = folder / "changed"
    shutil.copytree(checkpoint, out)
    change(out)
    return out


def without_clamp(checkpoint: Path) -> None:
    """A limit that nothing reaches."""
    path = checkpoint / "config.json"
    path.write_text(path.read_text().replace('"swiglu_limit": 10.0', '"swiglu_limit": 60000.0'))


def wrong_weight(checkpoint: Path) -> None:
    """One routed expert's down projection, of 64, gets another one's bytes, in place."""
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    names = sorted(k for k in header if k.endswith("mlp.experts.3.down_proj.trellis"))
    other = names[0].replace("experts.3.", "experts.7.")
    (a, b), (c, d) = header[names[0]]["data_offsets"], header[other]["data_offsets"]
    data[start + a : start + b] = data[start + c : start + d]
    path.write_bytes(data)


def within(figures: tuple[float, float], limits: str) -> bool:
    return figures[0] >= LIMITS[limits][0] and figures[1] <= LIMITS[limits][1]


def test_a_panel_finds_one_wrong_weight(tmp_path: Path) -> None:
    panel = json.loads(TINY_PANEL.read_text())
    assert within(score(panel, TINY), "stock")
    broken = changed(TINY, tmp_path, wrong_weight)
    with safe_open(broken / "model.safetensors", "pt") as new, safe_open(TINY / "model.safetensors", "pt") as old:
        assert sum(not torch.equal(new.get_tensor(k), old.get_tensor(k)) for k in old.keys()) == 1  # noqa: SIM118
    assert not within(score(panel, broken), "stock")


def test_the_bundled_panel_is_met_and_finds_a_wrong_weight_and_a_missing_clamp(tmp_path: Path) -> None:
    """2,234 positions of held-out text of the trained checkpoint, whose experts reach the clamp."""
    panel = json.loads(NANO_PANEL.read_text())
    assert panel["positions"] == 2234
    assert within(score(panel, BUNDLED), "nano")
    for name, fault in (("weight", wrong_weight), ("clamp", without_clamp)):
        (tmp_path / name).mkdir()
        assert not within(score(panel, changed(BUNDLED, tmp_path / name, fault)), "nano")


def test_a_panel_of_clamped_experts_finds_a_missing_clamp(tmp_path: Path) -> None:
    """No expert of the tiny checkpoint reaches the clamp, so this panel is of one whose experts do; transformers in
    float32 is its reference."""
    checkpoint, maker = checkpoint_dir(esb=1.0, clamp=5.0), tool("make_ref_panel")
    prompts = [golden_data()[f"{name}_ids"] for name in ("text", "rand200")]
    entries = [maker.prompt_of(f"{i}", p, oracle_logits(checkpoint, p.tolist()).numpy(), Tokenizer(checkpoint).size)
               for i, p in enumerate(prompts)]  # fmt: skip
    panel = {"prompts": entries}
    assert within(score(panel, checkpoint), "oracle")
    assert not within(score(panel, changed(checkpoint, tmp_path, without_clamp)), "oracle")
