"""What the nano training saves is what exllamav3 loads and converts: every tensor, under its names, MTP layer included.

Skipped unless GLM53_EXLLAMAV3 names the unpacked wheel (`pip download --no-deps exllamav3==1.5.1`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

WHEEL = os.environ.get("GLM53_EXLLAMAV3", "")
if not WHEEL:
    pytest.skip("GLM53_EXLLAMAV3 names no folder with exllamav3's source", allow_module_level=True)

from nano_helpers import small_model  # noqa: E402

from tools.nano import config, mtp, train  # noqa: E402


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("nano-export")
    model = small_model(out)
    written = (out / "config.json").read_text()
    train.save(model, out)
    (out / "config.json").write_text(written)
    return out


def reads(folder: Path) -> subprocess.CompletedProcess[str]:
    program = Path(__file__).with_name("exllamav3_reads.py")
    return subprocess.run(
        [sys.executable, str(program), WHEEL, str(folder)], capture_output=True, text=True, timeout=300, check=False
    )


def test_every_tensor_is_asked_for_and_none_is_missing(saved: Path) -> None:
    done = reads(saved)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["unread"] == []
    # three an expert and of the shared one, the router, MLA and its indexer, eh_proj
    assert found["linears"]["mtp"] == 3 * config.EXPERTS + 3 + 1 + 7 + 1
    assert found["linears"]["text"] > 3 * 3 * config.EXPERTS


def test_a_tensor_of_the_mtp_layer_that_is_missing_is_noticed(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for path in saved.iterdir():
        if path.name != mtp.FILE:
            (tmp_path / path.name).symlink_to(path)
    tensors = load_file(saved / mtp.FILE)
    del tensors["model.language_model.layers.4.mlp.experts.5.up_proj.weight"]
    save_file(tensors, tmp_path / mtp.FILE)
    done = reads(tmp_path)
    assert done.returncode != 0
    assert "experts.5.up_proj" in done.stderr
