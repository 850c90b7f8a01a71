"""bench/make_flash.py: the checkpoint of the GPU benches has the model's shape and is the same whenever it is made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import make_flash  # noqa: E402

from glm53.checkpoint import Checkpoint  # noqa: E402
from glm53.sizing import SHAPE  # noqa: E402

LITTLE = {"hidden": 256, "inter": 512, "moe": 128, "experts": 16, "topk": 4, "kda_heads": 4, "heads": 4, "q_lora": 128,
          "kv_lora": 128, "nope": 64, "vdim": 64, "idx_heads": 16, "idx_topk": 64}  # fmt: skip


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def test_its_layers_have_the_models_shape() -> None:
    shape = make_flash.SHAPE
    assert shape["experts"] == SHAPE.experts
    assert shape["topk"] == SHAPE.picks
    drawn = make_flash.Draws("cpu", 0).linear(shape["hidden"], shape["moe"], 3, "mul1", None)
    assert 3 * drawn["trellis"].numel() * 2 == SHAPE.expert_bytes


def test_it_is_a_checkpoint_and_the_same_whenever_it_is_made(tmp_path: Path) -> None:
    import make_tiny
    import torch

    own = make_tiny.random_exl3
    shape = {**make_flash.SHAPE, **LITTLE, "layers": make_flash.DENSE + 1}
    for name in ("once", "again"):
        make_flash.make(tmp_path / name, shape, "cpu")
    assert make_tiny.random_exl3 is own
    once, again = tensors(tmp_path / "once"), tensors(tmp_path / "again")
    assert once.keys() == again.keys()
    assert all(torch.equal(once[k], again[k]) for k in once)
    with Checkpoint.open(tmp_path / "once") as checkpoint:
        assert checkpoint.config.mlp_layer_types == ("dense", "dense", "dense", "sparse")
        assert checkpoint.config.n_routed_experts == 16


@pytest.mark.parametrize(
    ("arguments", "words"), [(["new", "--layers", "0"], "at least one"), (["full"], "full is not empty")]
)
def test_what_cannot_be_made_is_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    command = [sys.executable, str(ROOT / "bench/make_flash.py"), *arguments, "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
