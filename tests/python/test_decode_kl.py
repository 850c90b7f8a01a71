"""bench/decode_kl.py without a GPU: the forced sampler, the distances, and a path that fails."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "bench" / "decode_kl.py"


@pytest.fixture(scope="module")
def tool() -> Any:
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("decode_kl", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_sampler_hands_out_its_tokens_and_keeps_the_logits(tool: Any) -> None:
    sampler = tool.Forced([5, 9, 7], usable=10)
    drawn = []
    for step in range(3):
        logits = torch.zeros(1, 1, 16)
        logits[..., step] = 1.0
        token = sampler.forward(logits, None, 123, None, logit_mask=None)
        assert token.shape == (1, 1)
        drawn.append(int(token))
    assert drawn == [5, 9, 7]
    assert [int(row.argmax()) for row in sampler.logits] == [0, 1, 2]
    assert all(row.shape == (10,) for row in sampler.logits)


def test_distances_are_kl_and_agreement(tool: Any) -> None:
    p, q = np.log(np.array([[0.5, 0.5], [0.9, 0.1]])), np.log(np.array([[0.25, 0.75], [0.9, 0.1]]))
    found = tool.compare({"stock": p, "stock-fp16": p, "exact": p, "fast": q})
    assert found["stock | stock-fp16"]["kl_mean"] == pytest.approx(0, abs=1e-12)
    expected = (0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)) / 2
    assert found["exact | fast"]["kl_mean"] == pytest.approx(expected)
    assert found["exact | fast"]["top1"] == 0.5
    bars = tool.bars(found)
    assert (bars["decode.fast_kl"]["ok"], bars["decode.fast_top1"]["ok"]) == (False, False)
    alone = tool.bars(tool.compare({"exact": p, "fast": p}))
    assert alone == {"decode.fast_kl": {"value": pytest.approx(0)}, "decode.fast_top1": {"value": 1.0}}


def test_fast_is_held_to_the_distance_between_stocks_own_paths(tool: Any) -> None:
    rows = np.log(np.array([[0.6, 0.4], [0.9, 0.1]]))
    near, far = np.log(np.array([[0.61, 0.39], [0.9, 0.1]])), np.log(np.array([[0.45, 0.55], [0.9, 0.1]]))
    bars = tool.bars(tool.compare({"stock": rows, "stock-fp16": far, "exact": rows, "fast": near}))
    assert (bars["decode.fast_kl"]["ok"], bars["decode.fast_top1"]["ok"]) == (True, True)
    assert bars["decode.fast_kl"]["want"] == f"<= {bars['decode.noise_floor_kl']['value']}"
    swapped = tool.bars(tool.compare({"stock": rows, "stock-fp16": near, "exact": rows, "fast": far}))
    assert (swapped["decode.fast_kl"]["ok"], swapped["decode.fast_top1"]["ok"]) == (False, False)


def test_a_path_that_fails_is_recorded_and_the_exit_code_says_so(tmp_path: Path) -> None:
    out = tmp_path / "kl.json"
    command = [sys.executable, str(SCRIPT), str(tmp_path / "nothing"), "--out", str(out), "--paths", "stock"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert json.loads(out.read_text())["raw"]["failed"]["stock"]


def test_exact_and_fast_share_a_process_and_one_that_fails_leaves_the_other(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that records what it was asked for and fails at fast, as a lane that stalls would."""
    seen = tmp_path / "seen"
    child = f"""
import sys, os, numpy as np
argv = sys.argv[1:]
paths, out = argv[argv.index("--record") + 1:], argv[argv.index("--out", argv.index("--out") + 1) + 1]
open({str(seen)!r}, "a").write(" ".join(paths) + " " + os.environ.get("EXL3_INT8_GEMV", "-") + "\\n")
for path in paths:
    if path == "fast":
        sys.exit("the lane stalled")
    np.savez(f"{{out}}/{{path}}.npz", logits=np.zeros((2, 3), np.float16), lanes="{{}}")
"""
    script = tmp_path / "child.py"
    script.write_text(child.replace("\\\\n", "\\n"))
    monkeypatch.setattr(tool, "__file__", str(script))
    argv = ["checkpoint", "--out", str(tmp_path / "kl.json")]
    found, lanes, failed = tool.run_paths(tool.parse_args(argv), argv)
    assert seen.read_text().splitlines() == ["stock -", "stock-fp16 0", "exact fast -"]
    assert sorted(found) == sorted(lanes) == ["exact", "stock", "stock-fp16"]
    assert failed == {"fast": "the lane stalled"}
