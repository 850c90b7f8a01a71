"""The CPU lane through its bindings, and the split against the cost model that `glm53 plan` uses."""

import time

import numpy as np
import pytest

from glm53 import _core
from glm53.sizing import REFERENCE, layer_ms

HIDDEN, INTER, EXPERTS, BITS = 256, 384, 6, 3


def make_table(seed: int) -> _core.ExpertTable:
    rng = np.random.default_rng(seed)
    table = _core.ExpertTable(EXPERTS, HIDDEN, INTER, 10.0)
    for expert in range(EXPERTS):
        for part, k, n in (("gate", HIDDEN, INTER), ("up", HIDDEN, INTER), ("down", INTER, HIDDEN)):
            trellis = rng.integers(0, 2**16, (k // 16, n // 16, 16 * BITS), dtype=np.uint16)
            suh = np.full(k, k**-0.5, np.float16).view(np.uint16)
            table.set(expert, part, trellis, suh, np.ones(n, np.float16).view(np.uint16), BITS)
    return table


def make_arena() -> _core.HostArena:
    return _core.HostArena(_core.lane_block_bytes(HIDDEN), "CPU lane")


def test_ragged_jobs_give_what_cpu_moe_gives() -> None:
    tables, arena = [make_table(1), make_table(2)], make_arena()
    lane = _core.CpuLane(tables, arena, threads=2, spin_us=100)
    publisher, moe = _core.LanePublisher(arena, HIDDEN), _core.CpuMoe(threads=2)
    rng = np.random.default_rng(3)
    for number in range(1, 60):
        rows, k, layer = int(rng.integers(1, 9)), int(rng.integers(1, 4)), int(rng.integers(2))
        x = rng.standard_normal((rows, HIDDEN), np.float32)
        picks = rng.integers(0, EXPERTS, (rows, k)).astype(np.int32)
        weights = rng.standard_normal((rows, k), np.float32)
        here = rng.random((rows, k)) < 0.6
        lane.wake()
        assert publisher.publish(layer, x, np.where(here, picks, np.int32(-1)), weights) == number
        assert publisher.wait() == "ok"
        expected = np.empty_like(x)
        moe.forward(tables[layer], x, picks.astype(np.int64), np.where(here, weights, np.float32(0)), expected)
        np.testing.assert_allclose(publisher.result(rows), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    stats = lane.stats()
    assert (stats["jobs"], stats["bad_jobs"]) == (59, 0)
    assert not lane.failed
    assert lane.health() == {"verdict": "ok", "job": 0, "worker": -1, "reason": ""}


def test_a_bad_job_and_wrong_arguments() -> None:
    table, arena = make_table(1), make_arena()
    lane = _core.CpuLane([table], arena, threads=1)
    publisher = _core.LanePublisher(arena, HIDDEN)
    x, weights = np.zeros((1, HIDDEN), np.float32), np.ones((1, 1), np.float32)
    publisher.publish(0, x, np.full((1, 1), EXPERTS, np.int32), weights)
    assert publisher.wait() == "bad job"
    assert not lane.failed
    with pytest.raises(ValueError, match="x must be"):
        publisher.publish(0, x[:, :128].copy(), np.zeros((1, 1), np.int32), weights)
    with pytest.raises(ValueError, match="9 rows"):
        publisher.publish(0, np.zeros((9, HIDDEN), np.float32), np.zeros((9, 1), np.int32), np.ones((9, 1), np.float32))
    with pytest.raises(ValueError, match="expert table for every MoE layer"):
        _core.CpuLane([], make_arena())
    with pytest.raises(ValueError, match="bytes at a multiple of 64"):
        _core.CpuLane([table], _core.HostArena(4096, "small"))
    sealed = make_arena()
    sealed.seal()
    with pytest.raises(ValueError, match="sealed"):
        _core.CpuLane([table], sealed)


def test_workers_park_and_wake() -> None:
    table, arena = make_table(1), make_arena()
    lane = _core.CpuLane([table], arena, threads=2, spin_us=50)
    deadline = time.monotonic() + 20
    while lane.stats()["parked"] < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert lane.stats()["parked"] == 2
    publisher = _core.LanePublisher(arena, HIDDEN)
    ones = np.ones((1, HIDDEN), np.float32)
    publisher.publish(0, ones, np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32))
    assert publisher.wait() == "ok"
    assert np.any(publisher.result(1) != 0)


def test_the_split_is_the_cost_model_of_plan() -> None:
    config = _core.SplitConfig()
    config.handoff_ns, config.cpu_expert_ns = round(REFERENCE.handoff_ms * 1e6), round(REFERENCE.cpu_expert_ms * 1e6)
    config.pcie_expert_ns, config.cached_ns = round(REFERENCE.pcie_expert_ms * 1e6), round(REFERENCE.cached_ms * 1e6)
    for misses in range(9):
        out = _core.split_misses([1] * misses, 0, config)
        assert max(out["cpu_ns"], out["gpu_ns"]) / 1e6 == pytest.approx(layer_ms(misses, REFERENCE, cpu=True))
    config.max_cpu = 0
    for misses in range(9):
        out = _core.split_misses([1] * misses, 0, config)
        assert out["cpu"] == 0
        assert out["gpu_ns"] / 1e6 == pytest.approx(layer_ms(misses, REFERENCE, cpu=False))


def test_admitted_misses_stay_on_the_gpu() -> None:
    out = _core.split_misses([1, 1], 3, _core.SplitConfig())
    assert out["cpu"] == 2
    assert out["gpu_ns"] == 100_000 + 3 * 400_000
    with pytest.raises(ValueError, match="64 misses"):
        _core.split_misses([1] * 64, 1, _core.SplitConfig())
