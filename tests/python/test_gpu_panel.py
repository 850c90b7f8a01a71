"""bench/gpu_panel.py without a GPU: its servers are the CPU engine's, its reference that engine's own answers."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_engine_helpers import ROOT, checkpoint_dir, cpu_model, full_logits, random_ids
from exllama_helpers import use_fakes
from tiny_checkpoint import TINY

BENCH = ROOT / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_panel

    return gpu_panel


def options(folder: Path, flash: Path, **changes: Any) -> argparse.Namespace:
    values = {"out": str(folder), "flash": flash, "bundled": BENCH, "budget": 400.0, "vram_gb": 0.0, "slots": 8,
              "serve_options": "--device cpu", "stages": "", "shortest": 0.0, **changes}  # fmt: skip
    return argparse.Namespace(**values)


def own_panel(checkpoint: Path) -> dict[str, Any]:
    import make_ref_panel

    prompts = [random_ids(60, seed) for seed in (1, 2)]
    entries = [make_ref_panel.prompt_of(f"own {i}", ids, full_logits(cpu_model(checkpoint), ids).numpy(), 2084)
               for i, ids in enumerate(prompts)]  # fmt: skip
    return {"top_k": make_ref_panel.TOP_K, "texts": {}, "prompts": entries}


def test_a_server_meets_the_panel_and_without_the_clamp_it_does_not(bench: Any, tmp_path: Path) -> None:
    checkpoint = checkpoint_dir(esb=1.0, clamp=5.0)
    (tmp_path / "flash.panel").write_text(json.dumps(own_panel(checkpoint)))
    made = bench.Stages(options(tmp_path, checkpoint, stages="exact-flash,no-clamp,exact-bundled"))
    made.run()
    raw = {p.stem: json.loads(p.read_text()) for p in tmp_path.glob("*.json")}
    assert raw["exact-flash"]["met"] is True, raw["exact-flash"]["score"]
    assert raw["no-clamp"]["met"] is False
    assert raw["exact-flash"]["stats"]
    assert "no panel of bundled" in (tmp_path / "exact-bundled.error").read_text()
    bars = bench.bars(raw)
    assert bars["panel.missing_clamp_found"]["ok"] is True
    assert bars["panel.exact_top1"] == {"value": 1.0, "want": ">= 1.0", "ok": True}
    assert bars["panel.exact_kl"]["ok"] is True
    assert "panel.fast_top1" not in bars


def test_a_checkpoint_without_its_clamp_is_the_same_but_for_one_number(bench: Any, tmp_path: Path) -> None:
    checkpoint = checkpoint_dir(esb=1.0, clamp=5.0)
    made = bench.without_clamp(checkpoint, tmp_path / "m")
    assert {p.name for p in made.iterdir()} == {p.name for p in checkpoint.iterdir()}
    before, after = (json.loads((p / "config.json").read_text()) for p in (checkpoint, made))
    after["text_config"]["swiglu_limit"] = before["text_config"]["swiglu_limit"]
    if "swiglu_limit" in before:
        after["swiglu_limit"] = before["swiglu_limit"]
    assert before == after
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare)
    (bare / "config.json").write_text('{"text_config": {}}')
    with pytest.raises(ValueError, match="no swiglu_limit"):
        bench.without_clamp(bare, tmp_path / "n")


def pick(warps: int, **kwargs: int) -> dict[str, Any]:
    return {"kwargs": kwargs, "num_warps": warps, "num_stages": 2}


def test_other_picks_are_legal_and_differ_wherever_they_can(bench: Any) -> None:
    legal = {"a": [pick(4, BV=32), pick(8, BV=32), pick(4, BV=64)], "b": [pick(4), pick(8)], "c": [pick(4)]}
    rows = {"a": [{"key": [1], **pick(4, BV=32)}], "b": [{"key": [2], **pick(4)}], "c": [{"key": [3], **pick(4)}]}
    document = {"arch": "sm_90", "picks": rows}
    found = bench.other_picks(document, legal, 0)
    assert found["arch"] == "sm_90"
    assert found["picks"] == {
        "a": [{"key": [1], **pick(4, BV=64)}],  # a block size, not only the warps
        "b": [{"key": [2], **pick(8)}],
        "c": [{"key": [3], **pick(4)}],  # there is no other
    }
    assert document["picks"]["a"][0]["kwargs"] == {"BV": 32}


def scored(top1: float, kl: float) -> dict[str, Any]:
    return {"score": {"top1": top1, "kl_mean": kl}, "met": top1 >= 1 and kl <= 1e-6}


def test_a_bar_is_the_worst_of_the_checkpoints_and_needs_the_real_shape(bench: Any) -> None:
    raw = {"exact-flash": scored(1.0, 1e-9), "exact-bundled": scored(1.0, 5e-8)}
    raw |= {"fast-flash": scored(0.999, 1e-9), "fast-bundled": scored(1.0, 2e-5)}
    raw |= {"no-clamp": scored(0.7, 0.4), "wrong-picks": scored(1.0, 0.0)}
    bars = bench.bars(raw)
    assert (bars["panel.exact_top1"]["value"], bars["panel.exact_kl"]["value"]) == (1.0, 5e-8)
    assert bars["panel.exact_kl"]["ok"]
    assert (bars["panel.fast_top1"]["ok"], bars["panel.fast_kl"]["ok"]) == (False, False)
    assert bars["panel.missing_clamp_found"]["ok"] is True
    assert bars["panel.wrong_picks_found"]["ok"] is False  # nothing noticed: the panel does not see them
    assert "panel.exact_top1" not in bench.bars({"exact-bundled": scored(1.0, 0.0)})
    assert "panel.exact_top1" not in bench.bars({"exact-flash": {"skipped": True}, "exact-bundled": scored(1.0, 0.0)})


def test_a_server_that_cannot_start_is_an_error_of_its_stage(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "flash.panel").write_text("{}")
    made = bench.Stages(options(tmp_path, tmp_path / "nothing", stages="exact-flash,fast-flash"))
    made.run()
    assert "did not become ready" in (tmp_path / "exact-flash.error").read_text()
    assert (tmp_path / "fast-flash.error").exists()  # the next one was tried all the same
    late = bench.Stages(options(tmp_path, tmp_path, stages="kl", budget=0.0, shortest=1.0))
    late.run()
    assert json.loads((tmp_path / "kl.json").read_text())["skipped"] is True


def test_every_stage_has_a_limit_and_the_report_is_a_result(bench: Any, tmp_path: Path) -> None:
    assert all(stage.partition("-")[0] in bench.LIMITS for stage in bench.STAGES.split(","))
    meta = {"machine": {"gpu": "g", "cpu": "c"}, "versions": {}, "command": "x", "settings": {}}
    for name, content in {"meta": meta, "exact-flash": scored(1.0, 0.0)}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    out = tmp_path / "made" / "r.json"
    out.parent.mkdir()
    bench.report(tmp_path, out)
    document = json.loads(out.read_text())
    assert set(document) >= {"what", "machine", "versions", "command", "settings", "raw", "bars"}
    assert list(document["bars"]) == ["panel.exact_top1", "panel.exact_kl"]


@pytest.mark.parametrize(
    ("outcomes", "wanted"),
    [([False], (False, 1)), ([True, None, False], (False, 3)), ([None, True, True], (True, 3))],
    ids=["found at once", "equal, does not run, found", "does not run, equal, equal"],
)
def test_other_picks_are_tried_until_the_panel_notices(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: list[Any], wanted: tuple[bool, int]
) -> None:
    (tmp_path / "flash.pins").write_text(json.dumps({"picks": {"a": [{"key": [1], **pick(4, BV=32)}]}}))
    monkeypatch.setattr(bench, "legal_picks", lambda: {"a": [pick(4, BV=32), pick(4, BV=64)]})
    made, left = bench.Stages(options(tmp_path, tmp_path)), list(outcomes)

    def score(case: Any, limit: float) -> None:
        assert json.loads(case.pins.read_text())["picks"]["a"][0]["kwargs"] == {"BV": 64}
        outcome = left.pop(0)
        if outcome is None:
            raise RuntimeError("out of shared memory")
        (tmp_path / "wrong-picks.json").write_text(json.dumps({"met": outcome}))

    monkeypatch.setattr(made, "score", score)
    made.wrong_picks("wrong-picks", 60.0)
    assert json.loads((tmp_path / "wrong-picks.json").read_text()) == {"met": wanted[0], "sets_tried": wanted[1]}


def test_other_picks_of_which_none_runs_are_an_error(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash.pins").write_text(json.dumps({"picks": {}}))
    monkeypatch.setattr(bench, "legal_picks", dict)
    made = bench.Stages(options(tmp_path, tmp_path))

    def fails(case: Any, limit: float) -> None:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(made, "score", fails)
    with pytest.raises(RuntimeError, match="out of shared memory"):
        made.wrong_picks("wrong-picks", 60.0)


def test_a_panel_is_made_from_the_stand_in_for_stock(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of make_ref_panel.py that needs a GPU: windows of the documents, one pass each, the picks written."""
    import make_ref_panel

    from glm53.engine.exllama import pins

    use_fakes(monkeypatch)
    import exllamav3

    monkeypatch.setattr(exllamav3.Config, "infer_params", argparse.Namespace(), raising=False)
    seen: list[Any] = []
    monkeypatch.setattr(pins, "write_pins", lambda *a: seen.append(a))
    monkeypatch.setattr(make_ref_panel, "version", lambda name: "0")
    out, picks = tmp_path / "p.json", tmp_path / "pins.json"
    arguments = ["--model", str(TINY), "--out", str(out), "--prompts", "3", "--tokens", "40", "--fewest", "100"]
    monkeypatch.setattr("sys.argv", ["make_ref_panel.py", *arguments, "--write-pins", str(picks)])
    assert make_ref_panel.main() == 0
    panel = json.loads(out.read_text())
    assert seen == [(picks, "sm_00", "0", "0")]
    assert panel["positions"] == 3 * 41
    assert {len(p["ids"]) for p in panel["prompts"]} == {42}
    assert all(len(top) == make_ref_panel.TOP_K for p in panel["prompts"] for top in p["top"])
    first = panel["prompts"][0]
    model = exllamav3.Model.from_config(exllamav3.Config.from_directory(str(TINY)))
    model.load()
    logits = model.forward(torch.tensor([first["ids"]]))[0].float().numpy()
    assert first["top"] == make_ref_panel.top_of(logits[:-1], 2084)
