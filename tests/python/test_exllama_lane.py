"""The CPU lane's Python side in pieces: its tables, what its workers and constants are made from, its measurement."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from exllama_helpers import FakeCopies, make_settings, use_fakes
from tiny_checkpoint import TINY

from glm53 import _core
from glm53.checkpoint import Checkpoint
from glm53.engine.exllama import lane, lane_costs
from glm53.engine.exllama.lane import CpuTier, ExpertMemory
from glm53.engine.exllama.lane_costs import Costs, LaneTimer, fit, overridden
from glm53.engine.exllama.scales import ExpertScales
from glm53.errors import ConfigError, DeviceError, EngineError
from glm53.host import Workers
from glm53.runtime import PinnedExperts

HIDDEN = 256


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    return use_fakes(monkeypatch)


@pytest.fixture
def memory(cuda: Any) -> ExpertMemory:
    with Checkpoint.open(TINY) as checkpoint:
        store = PinnedExperts(checkpoint, cuda.device, lambda stage, fraction: None)
        scales = ExpertScales(checkpoint, store.layers)
        store.finish()
        return ExpertMemory(store, scales)


def test_constants_are_a_line_through_the_jobs_times() -> None:
    times = {(n, 1): 110_000 + 104_000.0 * n for n in (0, 1, 2, 4, 8)}
    times[8, 4] = times[8, 1] + 24 * 26_000
    assert fit(times) == (110_000, 104_000, 26_000)
    assert fit({**times, (8, 4): times[8, 1] / 2})[2] == 0
    assert fit({**times, (8, 4): 1e9})[2] == 104_000  # a further row costs no more than the expert


def test_disturbed_times_never_give_a_senseless_constant() -> None:
    falling = {(0, 1): 900.0, (1, 1): 800.0, (2, 1): 850.0, (4, 1): 700.0, (4, 4): 9e12}
    assert fit(falling) == (900, 175, 175)
    huge = {(0, 1): 5e12, (4, 1): 9e12, (4, 4): 9e13}
    assert fit(huge) == (lane_costs.MOST_NS,) * 3
    assert lane_costs.lower_quartile([900, 10, 12, 11, 800, 700, 13, 14]) == 12


def test_settings_replace_measured_constants(tmp_path: Path) -> None:
    measured = Costs(100, 1000, 500, 4000, 300)
    settings = make_settings(tmp_path, ct_a=0.11, ct_b=0.104, ct_g=0.0)
    costs, chosen = overridden(measured, settings)
    assert costs == Costs(110_000, 104_000, 52_000, 4000, 0)
    assert chosen == ["ct_a", "ct_b", "ct_g"]
    assert overridden(measured, make_settings(tmp_path)) == (measured, [])
    split = costs.split()
    assert (split.handoff_ns, split.cpu_expert_ns, split.pcie_expert_ns, split.cached_ns) == (110_000, 104_000, 4000, 0)
    assert costs.as_ms() == {"a_ms": 0.11, "b_ms": 0.104, "b_row_ms": 0.052, "t_ms": 0.004, "g_ms": 0.0}


def test_workers_are_one_a_core_with_the_first_left_free_unless_told(tmp_path: Path) -> None:
    host: Any = SimpleNamespace(worker_cpus=lambda: [2, 3, 4, 5])

    def workers(**changes: Any) -> Workers:
        return Workers.of(make_settings(tmp_path, **changes), host)

    assert workers() == Workers(4, (2, 3, 4, 5))
    assert workers(ct_threads=2) == Workers(2, (2, 3))
    assert workers(ct_threads=9) == Workers(9, None)
    assert workers(ct_cpus=(7, 8, 9)) == Workers(3, (7, 8, 9))
    assert workers(ct_cpus=(7, 8, 9), ct_threads=1) == Workers(1, (7,))
    with pytest.raises(ConfigError, match="ct_threads = 4, but ct_cpus names 3 CPUs"):
        workers(ct_cpus=(7, 8, 9), ct_threads=4)


def test_a_cpu_without_vector_kernels_is_told_to_use_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane._core, "cpu_features", lambda: {"isa": "scalar"})
    with pytest.raises(DeviceError, match="use --mode exact"):
        lane.require_kernels(make_settings(tmp_path))
    lane.require_kernels(make_settings(tmp_path, isa="scalar"))


def test_tables_give_what_the_checkpoint_gives(memory: ExpertMemory) -> None:
    """The same picks through these tables and through tables over the checkpoint's own arrays."""
    random = np.random.default_rng(1)
    x = random.standard_normal((3, HIDDEN)).astype(np.float32)
    picks, weights = random.integers(0, 16, (3, 4)), random.random((3, 4)).astype(np.float32)
    moe, sums = _core.CpuMoe(threads=1), []
    with Checkpoint.open(TINY) as checkpoint:
        c = checkpoint.config
        for table, layer in zip(memory.tables, memory.store.layers, strict=True):
            own = _core.ExpertTable(c.n_routed_experts, c.hidden_size, c.moe_intermediate_size, c.swiglu_limit)
            for e in checkpoint.experts(layer):
                arrays = [checkpoint.read(t.name) for t in (e.trellis, e.suh, e.svh)]
                own.set(e.expert, e.which, *arrays, e.bits)
            for t in (table, own):
                out = np.zeros_like(x)
                moe.forward(t, x, picks, weights, out)
                sums.append(out)
    for ours, reference in zip(sums[::2], sums[1::2], strict=True):
        assert np.array_equal(ours, reference)
        assert np.abs(ours).max() > 0
    assert memory.scales.nbytes == len(memory.tables) * 16 * 2 * (3 * HIDDEN + 3 * 128)


def test_timed_jobs_go_round_all_experts_of_all_layers_so_that_no_cache_holds_them(memory: ExpertMemory) -> None:
    arena = _core.HostArena(_core.lane_block_bytes(HIDDEN), "lane")
    timer, seen = LaneTimer(SimpleNamespace(), arena, memory.tables, 4), []

    def publish(layer: int, x: Any, picks: Any, weights: Any) -> None:
        seen.extend((layer, int(expert)) for expert in picks[0])

    timer._publisher = SimpleNamespace(publish=publish, wait=lambda: "ok")
    everything = [(layer, e) for layer in range(len(memory.tables)) for e in range(memory.tables[0].experts)]
    for _ in range(len(everything) // 4):
        timer.job_ns(4, 1)
    assert sorted(seen) == everything


def test_a_lane_is_measured_with_jobs_of_every_size(memory: ExpertMemory) -> None:
    arena = _core.HostArena(_core.lane_block_bytes(HIDDEN), "lane")
    timed = _core.CpuLane(memory.tables, arena, 1)
    a, b, b_row = LaneTimer(timed, arena, memory.tables, 4).measure(budget_s=0.1)
    assert a >= 0
    assert b > 0
    assert b_row >= 0
    shapes = [(0, 1), (1, 1), (2, 1), (4, 1), (4, lane_costs.ROWS)]
    stats = timed.stats()
    rounds = stats["jobs"] // len(shapes)
    assert lane_costs.LEAST_ROUNDS < rounds <= lane_costs.ROUNDS + 1
    assert stats["jobs"] == rounds * len(shapes)
    assert stats["picks"] == rounds * sum(n * rows for n, rows in shapes)


def test_a_later_kernel_is_chosen_where_it_is_clearly_faster() -> None:
    times = {"a": [100.0, 90.0], "b": [89.0, 88.0], "c": [200.0, 80.0]}
    asked: list[str] = []

    def large_job_ns(name: str) -> float:
        asked.append(name)
        return times[name][asked.count(name) - 1]

    assert lane_costs.race(["a", "b", "c"], large_job_ns) == ("c", {"a": 90, "b": 88, "c": 80})
    assert asked == ["a", "b", "c"] * lane_costs.RACE_TURNS
    asked.clear()
    assert lane_costs.race(["a", "b"], large_job_ns)[0] == "a"  # 88 is not clearly less than 90


AVX512 = [isa for isa in _core.cpu_features()["isas"] if isa not in ("avx2", "scalar")]


@pytest.mark.skipif(len(AVX512) < 2, reason="this CPU has no AVX-512 kernels to choose from")
@pytest.mark.parametrize("fastest", AVX512)
def test_the_lane_runs_the_kernels_its_own_jobs_are_fastest_with(
    memory: ExpertMemory, cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fastest: str
) -> None:
    def large_job_ns(timer: LaneTimer) -> float:
        assert timer.job_ns(4, 1) > 0
        return 1e6 if timer._lane.isa == fastest else 2e6

    monkeypatch.setattr(LaneTimer, "large_job_ns", large_job_ns)
    monkeypatch.setattr(lane, "ExpertCopies", FakeCopies)
    tier = CpuTier(memory, cuda.device, make_settings(tmp_path, mode="fast", ct_threads=1))
    tier.measure(4)
    stats = tier.stats()
    assert stats["isa"] == fastest
    assert stats["raced_ms"] == {isa: 1.0 if isa == fastest else 2.0 for isa in AVX512}
    assert tier._make()[1].isa == fastest  # what replaces it after a failure
    tier.close(0)
    named = CpuTier(memory, cuda.device, make_settings(tmp_path, mode="fast", ct_threads=1, isa="scalar"))
    named.measure(4)
    assert (named.stats()["isa"], named.stats()["raced_ms"]) == ("scalar", {})
    named.close(0)


def test_a_large_job_has_a_tokens_experts(memory: ExpertMemory) -> None:
    arena = _core.HostArena(_core.lane_block_bytes(HIDDEN), "lane")
    timed = _core.CpuLane(memory.tables, arena, 1)
    assert LaneTimer(timed, arena, memory.tables, 4).large_job_ns() > 0
    assert timed.stats()["jobs"] == 2 * lane_costs.RACE_JOBS
    assert timed.stats()["picks"] == 4 * timed.stats()["jobs"]
    timed.close()


def test_the_dearer_of_both_measurements_counts(memory: ExpertMemory) -> None:
    class Timer:
        """B rises beside copies, B_row falls."""

        def measure(self, beside: Any = None) -> tuple[int, int, int]:
            if beside is None:
                return 20_000, 100_000, 30_000
            beside.begin(700_000)
            beside.end()
            return 90_000, 120_000, 10_000

    copies: Any = FakeCopies(None)
    found = lane_costs.measure(Timer(), copies, 8)  # type: ignore[arg-type]
    assert found == Costs(20_000, 120_000, 30_000, 500_000, lane_costs.LAUNCH_NS + 80_000)
    assert copies.asked_ns == [700_000]


def test_the_other_lane_is_kept_busy_during_every_job(memory: ExpertMemory) -> None:
    arena = _core.HostArena(_core.lane_block_bytes(HIDDEN), "lane")
    timed, copies = _core.CpuLane(memory.tables, arena, 1), FakeCopies(None)
    LaneTimer(timed, arena, memory.tables, 4).measure(budget_s=0.1, beside=copies)
    kinds = 5
    assert len(copies.times_ns) == len(copies.asked_ns) == timed.stats()["jobs"] - kinds
    assert min(copies.asked_ns) > 0


def test_copies_are_timed_by_the_device_and_as_many_as_the_time_needs(
    memory: ExpertMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    class Event:
        """Device time passes with each copy: 0.25 ms, half of it within VRAM."""

        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    copied: list[int] = []

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        copied.append(source.numel())
        clock[0] += 0.25 if source.data_ptr() in range(*bounds) else 0.125
        return self

    arena = memory.store.arena(memory.store.layers[0])
    bounds = (arena.address, arena.address + arena.bytes)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, device, **k: empty(*a, device="cpu", **k))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    copies = lane_costs.ExpertCopies(memory.store)
    assert copies.alone() == 250_000
    assert copies.within_vram() == 125_000
    assert copies.times_ns == []
    assert set(copied) == {memory.store.layout.stride}
    copied.clear()
    copies.begin(1_000_000)
    assert len(copied) == 6
    copies.end()
    assert copies.times_ns == [250_000]
    copies.begin(10**10)
    assert len(copied) == 6 + lane_costs.MOST_COPIES


def test_timed_copies_never_read_from_two_page_locked_pieces(
    memory: ExpertMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA refuses such a copy, and torch does not cut it."""
    stride, empty = memory.store.layout.stride, torch.empty
    piece = 3 * stride + stride // 2
    monkeypatch.setattr("glm53.runtime.PIN_CHUNK_BYTES", piece)
    monkeypatch.setattr(torch, "empty", lambda *a, device, **k: empty(*a, device="cpu", **k))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: SimpleNamespace(record=lambda: None))
    base, read = memory.store.arena(memory.store.layers[0]).address, set()
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source, **_: read.add(source.data_ptr() - base))
    lane_costs.ExpertCopies(memory.store)._queue(lane_costs.MOST_COPIES)
    assert read == {0, stride, 2 * stride}
    assert all(at // piece == (at + stride - 1) // piece for at in read)
    monkeypatch.setattr("glm53.runtime.PIN_CHUNK_BYTES", 1)
    assert memory.store.whole_copies == 1


def test_a_lane_that_fails_while_it_is_measured_is_an_error(memory: ExpertMemory) -> None:
    arena = _core.HostArena(_core.lane_block_bytes(HIDDEN), "lane")
    timer = LaneTimer(_core.CpuLane(memory.tables[:1], arena, 1), arena, memory.tables, 4)
    timer._next = 16  # the second layer, which this lane does not have
    with pytest.raises(EngineError, match="the CPU lane failed while it was measured: bad job"):
        timer.job_ns(1, 1)


def test_cpus_that_are_not_there_are_named(memory: ExpertMemory, cuda: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="CPU 99999 cannot be used by this process"):
        CpuTier(memory, cuda.device, make_settings(tmp_path, mode="fast", ct_cpus=(99999,)))


def test_a_closed_lane_still_tells_what_it_did(memory: ExpertMemory) -> None:
    arena = _core.HostArena(_core.lane_block_bytes(HIDDEN), "lane")
    closed = _core.CpuLane(memory.tables, arena, 2)
    LaneTimer(closed, arena, memory.tables, 4).job_ns(2, 1)
    closed.close()
    closed.close()
    closed.wake()
    assert closed.stats()["jobs"] == 1
    assert closed.health()["verdict"] == "ok"
