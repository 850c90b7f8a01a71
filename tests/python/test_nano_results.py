"""Every recorded bar of the nano checkpoint is what its raw figures say, computed here a second time."""

from __future__ import annotations

import json
import math
import statistics
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from glm53.cli import model_dir  # noqa: E402
from tools.nano import heldout, record  # noqa: E402
from tools.nano.answers import contains  # noqa: E402

RESULTS = ROOT / "bench" / "results"
FILES = sorted(RESULTS.glob("*-nano.json"))
FILES = [p for p in FILES if json.loads(p.read_text())["what"].startswith("nano checkpoint")]
WANTED = {
    "nano.questions": ">= 20",
    "nano.tools": ">= 90",
    "nano.kl_stock_vs_cpu": "<= 0.002",
    "nano.top1_stock_vs_cpu": ">= 0.99",
    "nano.ppl_ratio": "<= 1.25",
    "nano.wheel_mb": "<= 10",
    "nano.cpu_tok_s": ">= 40",
}


def right_question(row: dict[str, Any]) -> bool:
    """Judged again from what the server answered."""
    question = next(q for q in heldout.questions() if q.text == row["question"])
    if question.case is None:
        return contains(row["reply"] or "", question.wanted)
    calls = [(c["name"], c["arguments"]) for c in question.case.calls]
    return [tuple(c) for c in row["calls"]] == calls and contains(row["answer"] or "", question.wanted)


def right_tools(rows: list[dict[str, Any]]) -> int:
    cases = [c for c, _ in heldout.tool_requests()]
    assert [r["request"] for r in rows] == [c.user for c in cases]
    wanted = [[(c["name"], c["arguments"]) for c in case.calls] for case in cases]
    return sum([tuple(c) for c in row["calls"]] == w for row, w in zip(rows, wanted, strict=True))


def mean_kl(rows: list[dict[str, Any]]) -> float:
    return float(np.average([r["kl"] for r in rows], weights=[r["positions"] for r in rows]))


def by_kind(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Dialogues and running text apart, where a run recorded which is which."""
    found = {}
    for name, running in (("chat", False), ("text", True)):
        part = [r for r in rows if "text" in r and r["text"] == running]
        if part:
            found[f"nano.kl_{name}"] = mean_kl(part)
            found[f"nano.top1_{name}"] = sum(r["same"] for r in part) / sum(r["positions"] for r in part)
    return found


def recomputed(raw: dict[str, Any]) -> dict[str, float]:
    positions = sum(r["positions"] for r in raw["stock_vs_cpu"])
    assert positions == raw["stock"]["logit_positions"] >= 2000
    fixed = "float32_vs_bfloat16_kda_same_picks"
    drafts = raw["stock"].get("drafts", {})
    tried = drafts.get("accepted", 0) + drafts.get("refused", 0)
    return {
        **by_kind(raw["stock_vs_cpu"]),
        **({"nano.kl_" + fixed: mean_kl(raw[fixed])} if fixed in raw else {}),
        **({"nano.drafts_accepted": drafts["accepted"] / tried} if tried else {}),
        "nano.questions": sum(right_question(row) for row in raw["cpu_questions"]),
        "nano.tools": right_tools(raw["cpu_tools"]),
        "nano.kl_stock_vs_cpu": mean_kl(raw["stock_vs_cpu"]),
        "nano.top1_stock_vs_cpu": sum(r["same"] for r in raw["stock_vs_cpu"]) / positions,
        "nano.kl_float32_vs_cpu": mean_kl(raw["float32_vs_cpu"]),
        "nano.top1_float32_vs_cpu": sum(r["same"] for r in raw["float32_vs_cpu"]) / positions,
        "nano.kl_stock_vs_float32": mean_kl(raw["stock_vs_float32"]),
        "nano.kl_float32_vs_bfloat16_kda": mean_kl(raw["float32_vs_bfloat16_kda"]),
        "nano.ppl_ratio": math.exp(raw["stock"]["nll"]) / math.exp(raw["fp32_nll"]),
        "nano.wheel_mb": sum(raw["deflated_bytes"].values()) / 1e6,
        "nano.cpu_tok_s": 1 / statistics.median(raw["cpu_step_s"][8:]),
        "nano.clamp_share": raw["clamp_share_of_active_units"],
        "nano.picks_kept": raw["picks_kept"],
    }


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_bars_follow_from_the_raw_figures(path: Path) -> None:
    document = json.loads(path.read_text())
    found = recomputed(document["raw"])
    assert set(document["bars"]) == set(found)
    for name, value in found.items():
        bar = document["bars"][name]
        assert bar["value"] == pytest.approx(value, rel=1e-9), name
        assert bar.get("want") == WANTED.get(name), name
        if name in WANTED:
            sign, limit = WANTED[name].split()
            assert bar["ok"] == (value >= float(limit) if sign == ">=" else value <= float(limit)), name


def test_a_run_without_some_stages_has_the_other_bars() -> None:
    assert record.bars({"stock": {}, "cpu_step_s": [9.0] * 8 + [0.05, 0.02, 0.02]}) == {
        "nano.cpu_tok_s": {"value": 50.0, "want": ">= 40", "ok": True}
    }


def test_dialogues_and_running_text_are_told_apart_and_drafts_counted() -> None:
    rows = [
        {"text": False, "positions": 300, "kl": 0.001, "same": 300},
        {"text": True, "positions": 100, "kl": 0.009, "same": 96},
        {"text": False, "positions": 100, "kl": 0.005, "same": 98},
    ]
    raw = {"stock_vs_cpu": rows, "stock": {"drafts": {"accepted": 3, "refused": 1}}}
    found = {name: bar["value"] for name, bar in record.bars(raw).items()}
    assert found == pytest.approx(
        {
            "nano.kl_stock_vs_cpu": 0.0034,
            "nano.top1_stock_vs_cpu": 0.988,
            "nano.kl_chat": 0.002,
            "nano.top1_chat": 0.995,
            "nano.kl_text": 0.009,
            "nano.top1_text": 0.96,
            "nano.drafts_accepted": 0.75,
        }
    )
    assert record.bars({"stock": {"drafts": {"error": "no"}}}) == {}


def test_the_checkpoint_in_the_tree_is_the_measured_one_and_fits_the_wheel(tmp_path: Path) -> None:
    """Deflated here again; another zlib may differ a little."""
    raw = json.loads(FILES[-1].read_text())["raw"]
    with zipfile.ZipFile(tmp_path / "wheel", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(model_dir.BUNDLED.iterdir()):
            archive.write(path, path.name)
    sizes = {i.filename: i.compress_size for i in archive.infolist()}
    assert set(sizes) == set(raw["deflated_bytes"])
    assert sum(sizes.values()) == pytest.approx(sum(raw["deflated_bytes"].values()), rel=0.02)
    assert sum(sizes.values()) <= 10e6


def test_the_saved_routing_gives_the_recorded_share() -> None:
    raw = json.loads(FILES[-1].read_text())["raw"]
    with np.load(FILES[-1].with_name(FILES[-1].stem + "-traces.npz")) as data:
        picks, experts = data["picks"], int(data["experts"])
    assert (list(picks.shape), experts) == (raw["trace_shape"], 32)
    again = [
        len(set(a) & set(b)) / 8 for x, y in zip(picks[1:], picks[:-1], strict=True) for a, b in zip(x, y, strict=True)
    ]
    assert float(np.mean(again)) == pytest.approx(raw["picks_kept"])
