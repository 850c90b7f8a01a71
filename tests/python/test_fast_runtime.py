"""ExpertRuntime with a CPU lane, through its bindings on the host device: a soak of everything an engine does, paired
with an exact runtime, and how the lane is attached, counted and lost.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from glm53 import _core

HIDDEN, INTER, EXPERTS, LAYERS, BITS, TOP_K = 256, 384, 16, 3, 3, 4
PART_BYTES = HIDDEN * INTER * BITS // 8
STRIDE = 3 * PART_BYTES
SHAPES = {"gate": (HIDDEN, INTER), "up": (HIDDEN, INTER), "down": (INTER, HIDDEN)}
Halves = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


def set_expert(table: Any, expert: int, parts: dict[str, npt.NDArray[np.uint8]]) -> None:
    """Point an ExpertTable at an expert's bytes, with scales that depend on nothing else."""
    for part, (k, n) in SHAPES.items():
        trellis = parts[part].view(np.uint16).reshape(k // 16, n // 16, 16 * BITS)
        suh = np.full(k, k**-0.5, np.float16).view(np.uint16)
        table.set(expert, part, trellis, suh, np.ones(n, np.float16).view(np.uint16), BITS)


class Experts:
    """Homes of all layers' experts, made once; `moe` computes from wherever a table points."""

    def __init__(self, device: Any) -> None:
        rng = np.random.default_rng(11)
        self.arenas = [_core.HostArena(EXPERTS * STRIDE, f"layer {layer}", device) for layer in range(LAYERS)]
        self.tables, self.moe = [], _core.CpuMoe(threads=2)
        for arena in self.arenas:
            arena.write(0, rng.integers(0, 256, EXPERTS * STRIDE, dtype=np.uint8))
            arena.seal()
            table = _core.ExpertTable(EXPERTS, HIDDEN, INTER, 10.0)
            for expert in range(EXPERTS):
                base = expert * STRIDE
                set_expert(
                    table, expert, {p: arena.view(base + i * PART_BYTES, PART_BYTES) for i, p in enumerate(SHAPES)}
                )
            self.tables.append(table)

    def sum(self, table: Any, picks: Ids, weights: Halves, x: Halves) -> Floats:
        out = np.empty(x.shape, np.float32)
        self.moe.forward(table, x.astype(np.float32), picks, weights.astype(np.float32), out)
        return out


class Runtime:
    """An ExpertRuntime over `experts`, and the tables its kernels would read."""

    def __init__(self, device: Any, experts: Experts, slots: int, **knobs: int) -> None:
        self.experts = experts
        self.tables = np.zeros((LAYERS, 3, EXPERTS), np.int64)
        addresses = [[part.ctypes.data for part in layer] for layer in self.tables]
        homes = [arena.address for arena in experts.arenas]
        self.rt = _core.ExpertRuntime(device, EXPERTS, slots, 4, [PART_BYTES] * 3, addresses, homes, knobs)

    def sum(self, layer: int, picks: Ids, weights: Halves, x: Halves) -> Floats:
        """What the GPU's kernels would give: every expert from where the tables lead, a weight of 0 left out."""
        table = _core.ExpertTable(EXPERTS, HIDDEN, INTER, 10.0)
        live = weights != 0
        for expert in np.unique(picks[live]).tolist():
            held = {}
            for i, part in enumerate(SHAPES):
                raw = (ctypes.c_uint8 * PART_BYTES).from_address(int(self.tables[layer, i, expert]))
                held[part] = np.frombuffer(raw, np.uint8)
            set_expert(table, expert, held)
        out = np.zeros(x.shape, np.float32)
        for row in range(len(x)):
            if live[row].any():
                here = live[row : row + 1]
                out[row] = self.experts.sum(
                    table, picks[row : row + 1][here][None], weights[row : row + 1][here][None], x[row : row + 1]
                )[0]
        return out

    def stats(self) -> dict[str, int]:
        return dict(self.rt.stats(0))


def split_config(**values: int) -> Any:
    config = _core.SplitConfig()
    for name, value in ({"handoff_ns": 60_000, "cpu_expert_ns": 100_000, "pcie_expert_ns": 100_000} | values).items():
        setattr(config, name, value)
    return config


def random_step(rng: np.random.Generator, rows: int) -> tuple[Ids, Halves, Halves]:
    """(picks, weights, x): skewed picks, so that experts are shared, evicted and wanted again."""
    ranks = np.argsort(rng.gumbel(size=(rows, EXPERTS)) - 0.9 * np.log1p(np.arange(EXPERTS)), axis=1)[:, ::-1]
    picks = np.ascontiguousarray(ranks[:, :TOP_K], np.int64)
    weights = rng.uniform(0.1, 0.6, (rows, TOP_K)).astype(np.float16)
    return picks, weights, rng.standard_normal((rows, HIDDEN)).astype(np.float16)


def resident_kib() -> int:
    """Memory in use: what the C library holds free for later is given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


@dataclass
class Soak:
    """One runtime with the lane and one without, both asked for the same things in random order."""

    rng: np.random.Generator
    experts: Experts
    fast: Runtime
    exact: Runtime
    arena: Any
    worst: float = 0.0
    done: Counter[str] = field(default_factory=Counter)

    @property
    def both(self) -> tuple[Any, Any]:
        return self.fast.rt, self.exact.rt

    def step(self, *, split: bool = True, cancelled: bool = False) -> None:
        layer, rows = int(self.rng.integers(LAYERS)), int(self.rng.integers(1, 9))
        picks, weights, x = random_step(self.rng, rows)
        given, chosen = weights.copy(), picks.copy()
        self.exact.rt.decode(layer, picks.ctypes.data, picks.size, rows, 0)
        if split:
            self.fast.rt.decode_split(layer, chosen.ctypes.data, chosen.size, rows, x.ctypes.data, given.ctypes.data, 0)
        else:
            self.fast.rt.decode(layer, chosen.ctypes.data, chosen.size, rows, 0)
        assert np.array_equal(chosen, picks)
        if cancelled:
            return
        out = self.fast.sum(layer, picks, given, x)
        if split:
            self.fast.rt.add_partial(rows, out.ctypes.data, False, 0)
        expected = self.exact.sum(layer, picks, weights, x)
        self.worst = max(self.worst, float(np.abs(out - expected).max() / np.abs(expected).max()))

    def plain(self) -> None:
        self.step(split=False)

    def cancelled(self) -> None:
        self.step(cancelled=True)

    def prompt(self) -> None:
        picks, _, _ = random_step(self.rng, 40)
        layer = int(self.rng.integers(LAYERS))
        for rt in self.both:
            rt.prompt(layer, picks.ctypes.data, picks.size, 40, 0)

    def long_prompt(self) -> None:
        """A long prompt, in one of three cases given up before its last layer."""
        picks, _, _ = random_step(self.rng, 40)
        stage = int(self.rng.integers(1, EXPERTS * STRIDE))
        layers = LAYERS if self.rng.random() < 0.7 else int(self.rng.integers(LAYERS))
        for rt in self.both:
            rt.begin_prompt(stage, 0, 1)
            for layer in range(layers):
                rt.enter_layer(layer, picks.ctypes.data, picks.size, 40)
            rt.finish_prompt()

    def free_staging(self) -> None:
        for rt in self.both:
            rt.free_staging()

    def lend(self) -> None:
        wanted = int(self.rng.integers(1, 6 * STRIDE))
        for rt in self.both:
            rt.lend(wanted, 0)

    def take_back(self) -> None:
        for rt in self.both:
            rt.take_back(0)

    def refill(self) -> None:
        for rt in self.both:
            rt.refill(2, 0, 1)

    def new_constants(self) -> None:
        split = split_config(
            handoff_ns=int(self.rng.integers(0, 200_000)),
            cpu_row_ns=int(self.rng.integers(0, 50_000)),
            max_cpu=int(self.rng.integers(0, 9)),
        )
        self.fast.rt.set_split(split, 0)

    def attach_again(self) -> None:
        self.fast.rt.detach_lane(0)
        self.fast.rt.attach_lane(self.arena, HIDDEN, split_config(), 30_000)

    def settle(self) -> int:
        """Resident KiB with every slot taken back and no staging."""
        self.free_staging()
        self.take_back()
        return resident_kib()

    def compare(self) -> None:
        assert np.array_equal(self.fast.rt.residency(0), self.exact.rt.residency(0))
        assert self.fast.rt.verify(0) == []
        assert self.fast.rt.lane_verdict() == "ok"

    def run(self, seconds: float) -> None:
        weights = {
            "step": 60, "plain": 8, "cancelled": 5, "prompt": 8, "long_prompt": 4, "free_staging": 2, "lend": 3,
            "take_back": 4, "refill": 8, "new_constants": 3, "attach_again": 1, "compare": 2,
        }  # fmt: skip
        names, odds = list(weights), np.array(list(weights.values())) / sum(weights.values())
        end = time.monotonic() + seconds
        while time.monotonic() < end or self.done["step"] < 100:
            name = names[self.rng.choice(len(names), p=odds)]
            getattr(self, name)()
            self.done[name] += 1


@pytest.fixture(scope="module")
def device() -> Any:
    return _core.HostDevice()


@pytest.fixture(scope="module")
def experts(device: Any) -> Experts:
    return Experts(device)


def make_lane(experts: Experts, arena: Any, **options: Any) -> Any:
    return _core.CpuLane(experts.tables, arena, **({"threads": 2, "spin_us": 50, "limit_ms": 20_000} | options))


def lane_arena(device: Any) -> Any:
    return _core.HostArena(_core.lane_block_bytes(HIDDEN), "CPU lane", device)


def test_soak_beside_exact_memory_flat_no_wrong_sum(
    device: Any, experts: Experts, request: pytest.FixtureRequest
) -> None:
    seconds = float(request.config.getoption("--soak-seconds"))
    knobs = {"margin": 0, "max_admissions": 1}
    arena = lane_arena(device)
    lane = make_lane(experts, arena)
    soak = Soak(
        np.random.default_rng(5),
        experts,
        Runtime(device, experts, 12, **knobs),
        Runtime(device, experts, 12, **knobs),
        arena,
    )
    soak.fast.rt.attach_lane(arena, HIDDEN, split_config(), 30_000)
    soak.run(seconds / 4)
    before = soak.settle()
    soak.run(seconds * 3 / 4)
    grown_kib = soak.settle() - before
    soak.compare()
    soak.fast.rt.detach_lane(0)
    assert soak.worst < 1e-5
    assert grown_kib < 1 << 10
    stats, exact = soak.fast.stats(), soak.exact.stats()
    assert stats["cpu_steps"] == lane.stats()["jobs"] > 50
    assert stats["cpu_bytes"] == lane.stats()["expert_bytes"] == stats["cpu_picks"] * STRIDE
    assert stats["home_bytes"] + stats["cpu_bytes"] == exact["home_bytes"]
    same = set(stats) - {"cpu_steps", "cpu_picks", "cpu_bytes", "home_bytes", "host_waits"}
    assert {name: stats[name] for name in same} == {name: exact[name] for name in same}
    assert not lane.failed


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_step_sends_as_many_experts_as_split_misses_says(device: Any, experts: Experts, rows: int) -> None:
    rng = np.random.default_rng(rows)
    arena = lane_arena(device)
    lane = make_lane(experts, arena)
    for handoff_ns in (0, 50_000, 110_000, 350_000):
        config = split_config(handoff_ns=handoff_ns, cpu_row_ns=30_000)
        runtime = Runtime(device, experts, 4, max_admissions=0)
        runtime.rt.attach_lane(arena, HIDDEN, config, 30_000)
        picks, weights, x = random_step(rng, rows)
        coldest_first = sorted(Counter(picks.ravel().tolist()).values())
        expected = _core.split_misses(coldest_first, 0, config)["cpu"]
        given = weights.copy()
        runtime.rt.decode_split(0, picks.ctypes.data, picks.size, rows, x.ctypes.data, given.ctypes.data, 0)
        assert len(set(picks[given == 0].tolist())) == expected == runtime.stats()["cpu_picks"]
        runtime.rt.detach_lane(0)
    assert lane.health()["verdict"] == "ok"


def test_a_half_sum(device: Any, experts: Experts) -> None:
    arena = lane_arena(device)
    lane = make_lane(experts, arena)
    runtime = Runtime(device, experts, 4, max_admissions=0)
    runtime.rt.attach_lane(arena, HIDDEN, split_config(), 30_000)
    picks, weights, x = random_step(np.random.default_rng(2), 2)
    given = weights.copy()
    runtime.rt.decode_split(0, picks.ctypes.data, picks.size, 2, x.ctypes.data, given.ctypes.data, 0)
    out = np.full((2, HIDDEN), 2.0, np.float16)
    runtime.rt.add_partial(2, out.ctypes.data, True, 0)
    partial = experts.sum(experts.tables[0], picks, np.where(given == 0, weights, np.float16(0)), x)
    np.testing.assert_allclose(out, 2.0 + partial, rtol=1e-3)
    assert lane.stats()["jobs"] == 1


def test_a_lane_that_nobody_serves_is_lost_and_the_gpu_goes_on(device: Any, experts: Experts) -> None:
    rng = np.random.default_rng(3)
    arena = lane_arena(device)
    runtime = Runtime(device, experts, 4, max_admissions=0)
    runtime.rt.attach_lane(arena, HIDDEN, split_config(), 50)
    picks, weights, x = random_step(rng, 2)
    given, out = weights.copy(), np.ones((2, HIDDEN), np.float32)
    runtime.rt.decode_split(0, picks.ctypes.data, picks.size, 2, x.ctypes.data, given.ctypes.data, 0)
    assert runtime.rt.lane_verdict() == "ok"
    runtime.rt.add_partial(2, out.ctypes.data, False, 0)
    assert runtime.rt.lane_verdict() == "stalled"
    assert np.all(out == 1.0)
    given = weights.copy()
    runtime.rt.decode_split(0, picks.ctypes.data, picks.size, 2, x.ctypes.data, given.ctypes.data, 0)
    assert np.array_equal(given, weights)
    runtime.rt.detach_lane(0)
    assert runtime.rt.lane_verdict() == "ok"


def test_what_cannot_be_attached_or_stepped(device: Any, experts: Experts) -> None:
    runtime = Runtime(device, experts, 4)
    arena = lane_arena(device)
    picks, weights, x = random_step(np.random.default_rng(1), 2)

    def split(n: int, rows: int) -> None:
        runtime.rt.decode_split(0, picks.ctypes.data, n, rows, x.ctypes.data, weights.ctypes.data, 0)

    with pytest.raises(RuntimeError, match="no CPU lane is attached"):
        split(picks.size, 2)
    with pytest.raises(ValueError, match="not a CPU lane's of hidden size 512"):
        runtime.rt.attach_lane(arena, 2 * HIDDEN, split_config(), 1000)
    with pytest.raises(ValueError, match="1 to 60000 ms, not 0"):
        runtime.rt.attach_lane(arena, HIDDEN, split_config(), 0)
    with pytest.raises(ValueError, match="must be 0 to 1 s"):
        runtime.rt.attach_lane(arena, HIDDEN, split_config(handoff_ns=-1), 1000)
    assert not runtime.rt.has_lane
    lane = make_lane(experts, arena)
    runtime.rt.attach_lane(arena, HIDDEN, split_config(), 1000)
    with pytest.raises(RuntimeError, match="attached already"):
        runtime.rt.attach_lane(arena, HIDDEN, split_config(), 1000)
    with pytest.raises(ValueError, match="9 picks of 9 rows"):
        split(9, 9)
    split(picks.size, 2)
    with pytest.raises(ValueError, match="had 2 rows, not 1"):
        runtime.rt.add_partial(1, np.zeros((1, HIDDEN), np.float32).ctypes.data, False, 0)
    assert not lane.failed
