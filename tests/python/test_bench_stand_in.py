"""GPU benchmarks over the stand-in exllamav3 on the host device: what they call is there, what they count is right."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exllama_helpers import use_fakes
from tiny_checkpoint import TINY

from glm53.engine.exllama import engine, lane

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Path:
    use_fakes(monkeypatch)
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(lane.LaneTimer, "measure", lambda self, **_: (1_000, 1_000, 1_000))  # on a busy machine too
    import exllamav3

    def sampler(temperature: float = 0.0) -> Any:
        return exllamav3.CustomSampler([exllamav3.SS_Argmax()])

    for name in ("ComboSampler", "GreedySampler"):
        monkeypatch.setattr(exllamav3, name, sampler, raising=False)
    return BENCH


def test_decode_kl_records_exact_and_fast_one_after_the_other(bench: Path, tmp_path: Path) -> None:
    import decode_kl

    arguments = ["--prompts", "2", "--prompt", "20", "--new", "12", "--slots", "6", "--record", "exact", "fast"]
    assert decode_kl.main([str(TINY), "--out", str(tmp_path), *arguments]) == 0
    lanes, logits = {}, {}
    for path in ("exact", "fast"):
        with np.load(tmp_path / f"{path}.npz") as saved:
            lanes[path], logits[path] = json.loads(str(saved["lanes"])), saved["logits"].astype(np.float32)
    assert logits["exact"].shape[0] == 2 * 11  # the first token of an answer is the prompt's pass
    assert lanes["exact"]["cpu_picks"] == 0
    assert lanes["fast"]["cpu_picks"] > 0
    assert logits["fast"].shape == logits["exact"].shape
    assert set(decode_kl.compare(logits)) == {"exact | fast"}  # the stand-in's head makes much of a last bit: no limit


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_gpu_peer_measures_our_modes(bench: Path, mode: str) -> None:
    import gpu_peer

    args = argparse.Namespace(checkpoint=str(TINY), slots=6, new=8, runs=2)
    found = gpu_peer.work_ours(args, mode)
    assert (found["mode"], found["slots"]) == (mode, 6)
    assert min(found["greedy_tok_s"] + found["sampled_tok_s"]) > 0
    assert (found["stats"]["cpu_picks"] > 0) == (mode == "fast")
    assert (found["split"] is None) == (mode == "exact")


def test_decode_samples_the_hit_rate_of_the_expert_cache(
    bench: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import decode

    monkeypatch.setattr(decode, "POLL_S", 0.05)
    monkeypatch.setattr(engine, "_SNAPSHOT_S", 0.02)
    arguments = ["--device", "cuda", "--model-dir", str(TINY), "--mode", "exact", "-cs", "2048", "--runs", "1"]
    code = decode.main([*arguments, "--tokens", "400", "--prompt", "8", "--state-dir", str(tmp_path)])
    line = json.loads(capsys.readouterr().out)
    assert code == 0
    assert line["settings"]["mode"] == "exact"
    assert line["raw"]["hit_rate"]
    assert all(0 <= share <= 1 for _, share in line["raw"]["hit_rate"])
    tokens = [n for n, _ in line["raw"]["hit_rate"]]
    assert tokens == sorted(tokens)
    assert tokens[-1] <= 800
