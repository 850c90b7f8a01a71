"""Guesses of the next layer's experts: the replay by hand, and a recording of the CPU engine."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoint import TINY

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import ahead_replay as ahead

from glm53.sizing import REFERENCE, layer_ms

ROOT = Path(__file__).resolve().parents[2]
COSTS = replace(REFERENCE, handoff_ms=1.0, cpu_expert_ms=10.0, pcie_expert_ms=1.0, cached_ms=0.5, fixed_ms=42 * 2.5)
"""2.5 ms of everything else a layer, and a CPU that is too slow to get anything."""


def recording(guess: tuple[int, int], tokens: int = 30) -> ahead.Recorded:
    """Two layers, 256 experts, no pick comes twice; `guess` is added to the true picks of layer 1."""
    picks = np.empty((tokens, 2, 2), np.int64)
    for t in range(tokens):
        picks[t] = [[(4 * t) % 256, (4 * t + 1) % 256], [(4 * t + 2) % 256, (4 * t + 3) % 256]]
    guesses = np.full((tokens, 2, 2), -1)
    guesses[:, 1] = (picks[:, 1] + np.array(guess)) % 256
    return ahead.Recorded(picks, guesses, 256)


@pytest.mark.parametrize("misses", range(9))
@pytest.mark.parametrize("cpu", [True, False])
def test_a_layer_takes_what_the_planner_says(misses: int, cpu: bool) -> None:
    took, busy = ahead.split(misses, REFERENCE, cpu)
    assert took == pytest.approx(layer_ms(misses, REFERENCE, cpu))
    assert 0 <= busy <= took


def test_right_guesses_are_hits_as_far_as_pcie_was_idle() -> None:
    plain = ahead.replay(recording((0, 0)), 2, 10, ranks=0, cpu=True, c=COSTS)
    assert plain["misses_per_layer"] == 2.0
    assert plain["token_ms"] == pytest.approx(2 * (0.5 + 2 * 1.0) + 2 * 2.5)
    one, two = (ahead.replay(recording((0, 0)), 2, 10, ranks=r, cpu=True, c=COSTS) for r in (1, 2))
    assert one["token_ms"] == pytest.approx(plain["token_ms"] - 1.0)
    assert two["token_ms"] == pytest.approx(
        plain["token_ms"] - 2.0
    )  # idle: 0.5 ms in the layer before and 2.5 behind it
    assert two["useful_per_layer"] == two["copies_per_layer"] == 1.0


def test_wrong_guesses_cost_nothing_and_give_nothing() -> None:
    plain = ahead.replay(recording((9, 9)), 2, 10, ranks=0, cpu=True, c=COSTS)
    wrong = ahead.replay(recording((9, 9)), 2, 10, ranks=2, cpu=True, c=COSTS)
    assert wrong["token_ms"] == pytest.approx(plain["token_ms"])
    assert (wrong["useful_per_layer"], wrong["copies_per_layer"]) == (0.0, 1.0)


def test_without_idle_time_nothing_is_copied() -> None:
    busy = replace(COSTS, fixed_ms=42 * 0.2)
    found = ahead.replay(recording((0, 0)), 2, 10, ranks=2, cpu=True, c=busy)
    assert found["copies_per_layer"] == 0.0


def test_accuracy_counts_picks_of_the_layer_the_guess_is_for() -> None:
    found = ahead.accuracy(recording((0, 9)))
    assert found["right_by_rank"] == [1.0, 0.0]
    assert found["right_by_rank_of_the_hottest"][0] < 0.2
    assert found["recall_at_k"] == 0.5
    assert found["by_chance"] == round(2 / 256, 4)


@pytest.mark.parametrize(("rest_ms", "verdict"), [(2.5, "kept"), (0.2, "dropped")])
def test_the_decision_follows_the_gain(rest_ms: float, verdict: str) -> None:
    raw = ahead.evaluate(recording((0, 0)), 2, 10, 0.02, replace(COSTS, fixed_ms=42 * rest_ms))
    assert raw["decision"].startswith(verdict)
    assert {(r["mode"], r["ranks"]) for r in raw["table"]} == {(m, r) for m in ("fast", "exact") for r in (0, 1, 2)}


def test_routing_that_its_heat_foretells_decides_nothing() -> None:
    same = recording((0, 0))
    same.picks[:] = same.picks[0]
    same.guesses[:] = same.guesses[0]
    assert ahead.evaluate(same, 2, 10, 0.02, COSTS)["decision"].startswith("undecided")


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


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "ids.npz", ids=np.arange(10))
    arguments = ["--model", str(tmp_path), "--ids", str(tmp_path / "ids.npz")]
    with pytest.raises(SystemExit, match="728 tokens wanted, there are 10"):
        ahead.token_ids(ahead.parse(arguments))
