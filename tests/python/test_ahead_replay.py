"""Guesses of the next layer's experts: the replay by hand, and a recording of the CPU engine."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import TINY

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import ahead_replay as ahead
from lane_hosts import LaneTimes

ROOT = Path(__file__).resolve().parents[2]
TIMES = LaneTimes(handoff=1.0, cpu_expert=10.0, cpu_row=0.0, pcie_expert=1.0, cached=0.5, fixed=2.5)
"""2.5 ms of everything else a layer, and a CPU that is too slow to get anything."""


def recording(guess: tuple[int, int], tokens: int = 30) -> ahead.Recorded:
    """Two layers, 256 experts, no pick comes twice; `guess` is added to the true picks of layer 1."""
    picks = np.empty((tokens, 2, 2), np.int64)
    for t in range(tokens):
        picks[t] = [[(4 * t) % 256, (4 * t + 1) % 256], [(4 * t + 2) % 256, (4 * t + 3) % 256]]
    guesses = np.full((tokens, 2, 2), -1)
    guesses[:, 1] = (picks[:, 1] + np.array(guess)) % 256
    return ahead.Recorded(picks, guesses, 256)


def replay(guess: tuple[int, int], times: LaneTimes = TIMES, **options: Any) -> dict[str, float]:
    return ahead.replay(ahead.steps(recording(guess), 2), 10, times, **{"cpu": True, **options})


def test_right_guesses_are_hits_as_far_as_pcie_was_idle() -> None:
    plain = replay((0, 0), ranks=0)
    assert plain["misses_per_layer"] == 2.0
    assert plain["token_ms"] == pytest.approx(2 * (0.5 + 2 * 1.0) + 2 * 2.5)
    one, two = (replay((0, 0), ranks=r) for r in (1, 2))
    assert one["token_ms"] == pytest.approx(plain["token_ms"] - 1.0)
    assert two["token_ms"] == pytest.approx(
        plain["token_ms"] - 2.0
    )  # idle: 0.5 ms in the layer before and 2.5 behind it
    assert two["useful_per_layer"] == two["copies_per_layer"] == 1.0


def test_wrong_guesses_cost_nothing_and_give_nothing() -> None:
    plain, wrong = replay((9, 9), ranks=0), replay((9, 9), ranks=2)
    assert wrong["token_ms"] == pytest.approx(plain["token_ms"])
    assert (wrong["useful_per_layer"], wrong["copies_per_layer"]) == (0.0, 1.0)


def test_what_is_idle_and_what_counts_depends_on_the_way() -> None:
    """1.7 ms between the layers, 0.4 of them behind the router, and 0.5 in the layer before."""
    times = replace(TIMES, between=1.7, router=0.1, decide=0.4)
    plain = replay((0, 0), times, ranks=0)["token_ms"]
    best, finished, whole = (replay((0, 0), times, ranks=2, way=way) for way in ("best", "finished", "whole"))
    assert plain - best["token_ms"] == pytest.approx(2.0)
    assert plain - finished["token_ms"] == pytest.approx(1.3 - 2 * 0.1)
    assert plain - whole["token_ms"] == pytest.approx(1.0 - 2 * 0.1)
    assert (best["copies_per_layer"], whole["copies_per_layer"]) == (1.0, 0.5)
    assert finished["copies_per_layer"] == pytest.approx(1.3 / 2)
    slow = replay((9, 9), times, ranks=1, way="whole")["token_ms"]
    assert slow == pytest.approx(plain + 2 * 0.1)


def test_a_copy_that_hardly_began_leaves_the_expert_to_the_cpu() -> None:
    step = ahead.Step({5: 1}, [(0, 5)])
    times = replace(TIMES, handoff=0.1, cpu_expert=0.2, cached=0.0)
    assert ahead.layer_ms(step, {5: 0.9}, times, True)[0] == pytest.approx(0.1)
    assert ahead.layer_ms(step, {5: 0.1}, times, True) == (pytest.approx(0.3), 0.0)


def test_without_idle_time_nothing_is_copied() -> None:
    assert replay((0, 0), replace(TIMES, fixed=0.2), ranks=2, way="whole")["copies_per_layer"] == 0.0


def test_a_guess_that_a_slot_holds_keeps_its_rank() -> None:
    found = ahead.steps(recording((0, 0)), 4)
    held = next(iter(ahead.residents(recording((0, 0)), 4, None)))
    assert held == set()
    assert found[0][1] == ahead.Step({2: 1, 3: 1}, [(0, 2), (1, 3)])
    same = recording((0, 0))
    same.picks[:], same.guesses[:] = same.picks[0], same.guesses[0]
    same.guesses[:, 1, 1] = 200
    assert ahead.steps(same, 4)[9][1] == ahead.Step({}, [(1, 200)])


def test_streams_decode_the_parts_of_a_recording_together() -> None:
    one = recording((0, 9), tokens=8)
    four = one.streams(4)
    assert four.picks.shape == four.guesses.shape == (2, 2, 8)
    assert four.picks[1, 1].tolist() == [int(p) for part in range(4) for p in one.picks[2 * part + 1, 1]]
    best, second = (one.guesses[[1, 3, 5, 7], 1, r].tolist() for r in (0, 1))
    assert four.guesses[1, 1].tolist() == best + second
    assert one.streams(1).picks.tolist() == one.picks.tolist()


def test_accuracy_counts_picks_of_the_layer_the_guess_is_for() -> None:
    found = ahead.accuracy(recording((0, 9)))
    assert found["right_by_rank"] == [1.0, 0.0]
    assert found["right_by_rank_of_the_hottest"][0] < 0.2
    assert found["recall_at_k"] == 0.5
    assert found["by_chance"] == round(2 / 256, 4)


@pytest.mark.parametrize(("rest_ms", "verdict"), [(2.5, "worth building"), (0.2, "not worth building")])
def test_the_decision_follows_the_gain(rest_ms: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "hosts", lambda rows: {"one": TIMES, "two": replace(TIMES, fixed=rest_ms)})
    raw = ahead.evaluate(recording((0, 0)), 2, 10, 0.05)
    assert raw["decision"].startswith(verdict)
    assert {(r["mode"], r["rows"], r["ranks"]) for r in raw["table"]} == {
        (m, n, r) for m in ("fast", "exact") for n in (1, 4) for r in (0, 1, 2)
    }
    assert set(ahead.bars(raw)) >= {"ahead.finished.one.1", "ahead.best.two.4", "ahead.right_at_rank_2"}


def test_routing_that_its_heat_foretells_decides_nothing() -> None:
    same = recording((0, 0))
    same.picks[:] = same.picks[0]
    same.guesses[:] = same.guesses[0]
    assert ahead.evaluate(same, 2, 10, 0.05)["decision"].startswith("undecided")


def test_a_recording_of_the_cpu_engine(tmp_path: Path) -> None:
    """Ranks come from the next router on this layer's input; picks are those that the experts computed."""
    model = TINY
    out, saved = tmp_path / "r.json", tmp_path / "g.npz"
    common = ["--tokens", "24", "--context", "16", "--warmup", "8", "--out", str(out)]
    assert ahead.main(["--model", str(model), "--save", str(saved), *common]) == 0
    first = json.loads(out.read_text())
    with np.load(saved) as data:
        picks, guesses, experts = data["picks"], data["guesses"], int(data["experts"])
    config = json.loads((model / "config.json").read_text())["text_config"]
    layers = config["mlp_layer_types"].count("sparse")
    assert picks.shape == (24, layers, config["num_experts_per_tok"])
    assert experts == config["n_routed_experts"]
    assert (guesses[:, 0] == -1).all()
    assert first["raw"]["accuracy"]["right_by_rank"][0] > 2 * first["raw"]["accuracy"]["by_chance"]
    assert ahead.main(["--trace", str(saved), *common]) == 0
    assert json.loads(out.read_text())["raw"] == first["raw"]


def test_documents_are_decoded_each_behind_its_own_context(tmp_path: Path) -> None:
    np.savez(tmp_path / "ids.npz", ids=np.arange(20), lengths=[5, 3, 12])
    arguments = ["--model", str(tmp_path), "--ids", str(tmp_path / "ids.npz"), "--context", "3", "--tokens", "7"]
    assert ahead.documents(ahead.parse(arguments)) == [[0, 1, 2, 3, 4], [8, 9, 10, 11, 12, 13, 14, 15]]


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "ids.npz", ids=np.arange(200))
    arguments = ["--model", str(tmp_path), "--ids", str(tmp_path / "ids.npz")]
    with pytest.raises(SystemExit, match="528 tokens are missing"):
        ahead.documents(ahead.parse(arguments))


def test_the_recorded_gains_are_those_of_the_recorded_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = json.loads(sorted((ROOT / "bench/results").glob("*-ahead-nano.json"))[-1].read_text())
    with np.load(ROOT / "bench/traces/nano.npz") as data:
        trace = ahead.Recorded(data["picks"].astype(np.int64), data["guesses"].astype(np.int64), int(data["experts"]))
    settings = recorded["settings"]
    of_four = {n.split(",")[0]: LaneTimes(**t) for n, t in settings["hosts_ms"].items() if n.endswith("4 rows")}
    monkeypatch.setattr(ahead, "hosts", lambda rows: of_four)
    found = ahead.compare(trace.streams(4), settings["slots"], settings["warmup"] // 4, True)
    assert found == [r for r in recorded["raw"]["table"] if (r["rows"], r["mode"]) == (4, "fast")]
    assert ahead.bars(recorded["raw"]) == recorded["bars"]
