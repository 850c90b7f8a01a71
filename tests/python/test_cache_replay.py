"""The policy through its binding and bench/trace_replay.py: textbook policies by hand, and the bars it prints."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from glm53 import _core

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trace_replay", ROOT / "bench" / "trace_replay.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["trace_replay"] = module
    spec.loader.exec_module(module)
    return module


def one_layer(*entries: int) -> np.ndarray:
    """One pick a step."""
    return np.array(entries, np.int64).reshape(-1, 1, 1)


def test_replay_reports_distinct_picks_hits_and_admissions_and_carries_on() -> None:
    config = _core.ClockConfig(2, 8, 3)
    policy = _core.ClockPolicy(config)
    first = policy.replay(np.array([[[0, 1, 1], [5, 5, 5]]], np.int64))
    np.testing.assert_array_equal(first, [[[2, 0, 2], [1, 0, 1]]])
    assert sorted(policy.owners().tolist()) == [0, 1, 13]
    second = policy.replay(np.array([[[0, 1, 2], [5, 6, 5]]], np.int64))
    np.testing.assert_array_equal(second, [[[3, 2, 0], [2, 1, 0]]])


def test_replay_refuses_what_the_policy_cannot_run() -> None:
    with pytest.raises(ValueError, match="layers, experts and slots"):
        _core.ClockPolicy(_core.ClockConfig(2, 8, 0))
    policy = _core.ClockPolicy(_core.ClockConfig(2, 8, 3))
    for picks in (np.zeros((1, 3, 4), np.int64), np.zeros((1, 2, 65), np.int64)):
        with pytest.raises(ValueError, match="replay: picks are"):
            policy.replay(picks)


def test_textbook_policies_follow_their_definitions(bench: ModuleType) -> None:
    picks = one_layer(0, 1, 2, 0, 3, 1, 0)  # three slots

    def hits(policy: object) -> list[int]:
        found = []
        for step, layers in bench.requests(picks, 8):
            for entry in itertools.chain.from_iterable(layers):
                if policy.request(entry)[0]:  # type: ignore[attr-defined]
                    found.append(step)
            policy.end_step()  # type: ignore[attr-defined]
        return found

    assert hits(bench.Lru(3)) == [3, 6]  # 3 evicts 1, which evicts 2
    assert hits(bench.PlainClock(3)) == [3, 5]  # 3 clears every bit and takes 0, the oldest; 1 stays
    assert hits(bench.Lrfu(3, math.inf, False)) == [3, 6]  # 0 has two picks; 3 and 1 replace singles
    assert hits(bench.Lrfu(3, math.inf, True)) == [3, 5, 6]  # 3 does not beat a single
    assert hits(bench.Lrfu(3, 1e-3, False)) == hits(bench.Lru(3))


def optimum(entries: list[int], slots: int) -> int:
    """Fewest misses of any policy that may bypass, by trying every choice."""
    states = {frozenset[int](): 0}
    for entry in entries:
        following: dict[frozenset[int], int] = {}
        for state, misses in states.items():
            choices = [state]
            cost = misses + (entry not in state)
            if entry not in state:
                choices += [state | {entry}] if len(state) < slots else [state - {v} | {entry} for v in state]
            for choice in choices:
                following[choice] = min(cost, following.get(choice, 1 << 30))
        states = following
    return min(states.values())


def test_belady_is_the_optimum(bench: ModuleType) -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        entries = rng.integers(0, 6, 30).tolist()
        assert bench.replay_belady(one_layer(*entries), 6, 3, 0)["misses"] == optimum(entries, 3)


def test_fixed_counts_the_hottest_of_each_layer_in_hindsight(bench: ModuleType) -> None:
    picks = np.array([[[0, 1], [2, 2]], [[0, 3], [2, 4]], [[0, 1], [4, 4]]], np.int64)
    assert bench.replay_fixed(picks, 8, 2, 0) == {"distinct": 10, "misses": 5, "admissions": 0}
    assert bench.replay_fixed(picks, 8, 2, 2)["misses"] == 1


def test_a_recorded_trace_gives_one_json_line_per_policy_whose_bars_follow_from_raw(
    bench: ModuleType, tmp_path: Path
) -> None:
    trace = tmp_path / "routing.npz"
    picks = bench.synthetic("drift", 240, 4, 96, rows=1, seed=3)
    np.savez(trace, picks=picks, experts=96)
    command = [sys.executable, str(ROOT / "bench/trace_replay.py"), "--trace", str(trace), "--slots", "64"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = {line["what"].rpartition(" ")[2]: line for line in map(json.loads, out.splitlines())}
    assert {"ours", "clock", "lru", "lfu", "fixed", "belady"} <= set(lines)
    for line in lines.values():
        assert set(line) == {"what", "machine", "versions", "command", "settings", "raw", "bars"}
        assert line["machine"]["cpus"] and line["machine"]["cpu"] != "x86_64"
        raw, steps = line["raw"], line["settings"]["steps"] - line["settings"]["warmup"]
        assert raw["distinct"] == steps * 4 * 8
        assert line["bars"]["misses_per_layer"] == pytest.approx(raw["misses"] / (steps * 4), abs=1e-4)
        assert line["bars"]["misses_of_fixed"] == pytest.approx(
            raw["misses"] / raw["references"]["fixed"]["misses"], abs=1e-4
        )
        assert raw["misses"] >= lines["belady"]["raw"]["misses"]
    assert lines["ours"]["raw"]["misses"] < lines["clock"]["raw"]["misses"]
    assert lines["ours"]["raw"]["admissions"] < lines["clock"]["raw"]["admissions"] / 2


def test_replay_lanes_is_replay_with_a_split_and_loads_in_the_background() -> None:
    split = _core.SplitConfig()
    split.handoff_ns, split.cpu_expert_ns, split.pcie_expert_ns, split.cached_ns = 10, 40, 100, 20
    split.cpu_row_ns = 0
    picks = np.array([[[0, 1, 2]], [[0, 1, 2]], [[0, 1, 2]], [[5, 5, 5]], [[0, 1, 5]], [[5, 5, 5]]], np.int64)
    config = _core.ClockConfig(1, 8, 2)
    config.max_admissions = config.margin = 0
    out = _core.ClockPolicy(config).replay_lanes(picks, 1, split, 1)
    # one load behind a token, there for the token after the next, while slots are empty or the newcomer is hotter.
    # The CPU takes 2 of 3 misses, both of 2, 1 of 1
    assert out[:, 0, :4].tolist() == [
        [3, 0, 0, 2],
        [3, 0, 0, 2],
        [3, 1, 0, 2],
        [1, 0, 0, 1],
        [3, 2, 0, 1],
        [1, 0, 0, 1],
    ]
    assert out[0, 0, 4:6].tolist() == [10 + 2 * 40, 20 + 100]
    assert out[:, 0, 6].tolist() == [1, 1, 0, 0, 0, 1]
    alone = _core.ClockConfig(1, 8, 2)
    replayed = _core.ClockPolicy(alone).replay(picks, 1)
    np.testing.assert_array_equal(_core.ClockPolicy(alone).replay_lanes(picks, 1, split)[:, :, :3], replayed)
    split.max_cpu = -1
    with pytest.raises(ValueError, match="max_cpu"):
        _core.ClockPolicy(config).replay_lanes(picks, 1, split)


def test_what_admitting_costs_beside_a_cpu_lane() -> None:
    import trace_lanes

    picks = np.array([[[0, 1, 2, 3]]] * 3 + [[[0, 1, 2, 4]]], np.int64)
    times = trace_lanes.LaneTimes(0.1, 0.1, 0.0, 0.4, 0.1, 1.0)
    trace = trace_lanes.Trace(picks, 8, 1, 4, 1)
    table = trace_lanes.compare(trace, times)
    rows = {(row["max_admissions"], row["max_background"]): row for row in table}
    nothing = rows[0, 0]
    assert (nothing["hit_rate"], nothing["on_cpu"], nothing["ms_gaps"]) == (0.0, 3.0, 1.5)
    assert nothing["ms_shared"] == nothing["ms_gaps"]
    one = rows[1, 0]  # two, then three slots are filled when a step comes: 2 + 2 + 2 misses, one of them admitted
    assert one["admissions"] == 1.0 and one["hit_rate"] == pytest.approx(6 / 12, abs=1e-4)
    loading = rows[0, 4]  # all four are resident from the third token on; expert 4 is not hotter than 3 then
    assert loading["loads"] == 0.0 and loading["hit_rate"] == pytest.approx(7 / 12, abs=1e-4)
    slower = rows[0, 2]  # two behind the first token, which does not count, two behind the second
    assert slower["loads"] == pytest.approx(2 / 3, abs=1e-4)
    reads, token = 0.4, 1.5  # of the second token, whose loads those are: four misses, three on the CPU
    assert slower["ms_shared"] - slower["ms_gaps"] == pytest.approx(2 * 0.4 * reads / token / 3, abs=1e-4)
    ratios = trace_lanes.ratios(table, 1)
    best = min(row["ms_gaps"] for (_, background), row in rows.items() if not background)
    loads = min(row["ms_gaps"] for (_, background), row in rows.items() if background)
    assert ratios["background_gaps"] == pytest.approx(loads / best, abs=1e-4)
    assert ratios["chosen_over_best"] == pytest.approx(one["ms_gaps"] / best, abs=1e-4)


def test_a_recorded_stream_can_be_cut_into_streams_that_decode_together(bench: ModuleType, tmp_path: Path) -> None:
    picks = np.arange(24).reshape(6, 2, 2)
    assert bench.together(picks, 3)[1].tolist() == [[4, 5, 12, 13, 20, 21], [6, 7, 14, 15, 22, 23]]
    np.savez(tmp_path / "t.npz", picks=picks[:5], experts=24)
    command = [sys.executable, str(ROOT / "bench/trace_replay.py"), "--trace", str(tmp_path / "t.npz"), "--slots", "9"]
    options = ["--streams", "2", "--warmup", "0", "--policy", "ours", "--beside", "lfu"]
    run = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    line = json.loads(run.stdout)
    assert (line["settings"]["steps"], line["settings"]["rows"], line["settings"]["picks"]) == (2, 2, 4)
    assert line["raw"]["distinct"] == 16
    assert line["bars"]["misses_of_lfu"] == 1.0


def test_bad_arguments_say_what_there_is(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench/trace_replay.py"), "--synthetic", "zipf", "--slots", "9"]
    run = subprocess.run([*command, "--policy", "nosuch"], check=False, capture_output=True, text=True)
    assert run.returncode != 0 and "no policy is called nosuch; there are fixed, belady, ours" in run.stderr
    run = subprocess.run([*command, "--knob", "speed=9"], check=False, capture_output=True, text=True)
    assert run.returncode != 0 and "no knob is called speed; there are window" in run.stderr


def test_the_hit_rate_over_time_is_cut_into_pieces_that_end_with_the_trace(bench: ModuleType) -> None:
    per_step = np.array([[4, 0, 4]] * 60 + [[4, 3, 0]] * 65, np.int64)  # distinct, hits, admissions
    points = bench.curve(per_step, rows=2)
    assert points[0] == [4, 0.0]
    assert points[-1] == [250, 0.75]
    assert len(points) == 63
    assert points[29] == [120, 0.0]
    assert points[30] == [124, 0.75]


def test_the_line_of_ours_has_the_hit_rate_over_time(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--synthetic", "zipf", "--slots", "30", "--steps", "120", "--experts", "32", "--policy", "ours"])
    line = json.loads(capsys.readouterr().out)
    shares = [share for _, share in line["raw"]["hit_rate"]]
    assert shares[0] < 0.1  # the cache was cold
    assert line["raw"]["hit_rate"][-1][0] == 120
    late = shares[20:]
    assert sum(late) / len(late) == pytest.approx(line["bars"]["hit_rate"], abs=0.02)
