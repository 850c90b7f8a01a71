"""The nano run's second half with stand-ins for what needs CUDA: whatever fails, what was made before is there."""

from __future__ import annotations

import json
import math
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.nano import kernels, run_all

FOUND = {
    "nll": 1.1,
    "questions": [{"question": "q", "thinking": t, "right": True} for t in (True, True, False)],
    "tools": [{"request": "r", "right": i != 1, "new_value": "v" if i < 2 else ""} for i in range(4)],
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> run_all.Run:
    arguments = ["run_all", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--smoke"]
    monkeypatch.setattr(sys, "argv", arguments)
    return run_all.Run(run_all.parse())


def stages(run: run_all.Run, monkeypatch: pytest.MonkeyPatch, convert: bool = True, stock: bool = True) -> None:
    """Children that write what the real ones write, or fail: stock half way."""

    def child(module: str, args: list[str], limit: float) -> bool:
        if module.endswith("convert"):
            if convert:
                run.exl3_dir.mkdir()
                (run.exl3_dir / "model.safetensors").write_bytes(b"x" * 1000)
                (run.exl3_dir / "model.safetensors.index.json").write_text("{}")
                (run.exl3_dir / "quantization_config.json").write_text('{\n    "bits": 3.05\n}')
            return convert
        found = FOUND if stock else {"nll": FOUND["nll"]}
        (run.work / "stock.json").write_text(json.dumps(found))
        if stock:
            (run.work / "stock-logits.npz").write_bytes(b"npz")
        return stock

    monkeypatch.setattr(run, "child", child)


def record(run: run_all.Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.out / "results.json").read_text())
    return found


def test_quantised_and_judged(run: run_all.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stages(run, monkeypatch)
    assert run_all.quantise(run)
    run_all.judge(run, 1.0)
    with tarfile.open(run.out / "nano-exl3.tar") as tar:
        assert tar.getnames() == ["model.safetensors", "quantization_config.json"]
    assert (run.exl3_dir / "quantization_config.json").read_text() == '{"bits":3.05}'
    bars = record(run)["bars"]
    assert bars["nano.ppl_ratio"] == pytest.approx(math.exp(0.1))
    assert bars["nano.questions"] == {"True": 2, "False": 1}
    assert bars["nano.tools"] == 3
    assert record(run)["raw"]["stock"]["tools_with_new_values_right"] == 1
    assert (run.out / "stock-logits.npz").exists()


def test_what_stock_found_before_it_failed_is_kept(run: run_all.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stages(run, monkeypatch, stock=False)
    assert run_all.quantise(run)
    run_all.judge(run, 1.0)
    assert set(record(run)["bars"]) == {"nano.ppl_ratio"}
    assert record(run)["raw"]["stock_complete"] is False


def test_a_reference_that_fails_costs_its_figures_only(run: run_all.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: Any, model: Any) -> float:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(run_all, "reference", broken)
    value = run_all.reference_or_why(run, None)
    assert math.isnan(value)
    stages(run, monkeypatch)
    assert run_all.quantise(run)
    run_all.judge(run, value)
    assert "nano.ppl_ratio" not in record(run)["bars"]
    assert record(run)["bars"]["nano.tools"] == 3
    assert "out of memory" in record(run)["raw"]["reference_error"]


def test_a_stage_that_fails_or_hangs_leaves_its_log(run: run_all.Run, tmp_path: Path) -> None:
    assert not run.child("tools.nano.no_such_stage", [], 30)
    assert any("no_such_stage" in key for key in record(run)["raw"])
    assert run.child("this", [], 30) is True  # the module of the Zen of Python: prints and ends


def test_shipped_choices_are_one_a_kernel() -> None:
    picks = kernels.shipped("sm_90")
    assert "chunk_gla_fwd_kernel_o" in picks
    assert all({"kwargs", "num_warps", "num_stages"} <= set(row) for row in picks.values())
    assert kernels.shipped("sm_00") == {}
