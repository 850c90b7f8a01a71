"""CpuMoe against experts decoded by the Python reference and computed in float64."""

import functools
import math
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from glm53 import _core

sys.path.insert(0, str(Path(__file__).parents[1] / "oracle"))
import exl3_ref

ISAS = _core.cpu_features()["isas"]
LIMIT = 10.0
TOLERANCE = 5e-4  # relative RMS of a whole expert: the affine codebook's floor is about 3.8e-4
PARTS = ("gate", "up", "down")


@dataclass
class Expert:
    """One random expert: EXL3 tensors by part, and its weights (in, out) in float64."""

    tensors: dict[str, dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]
    bits: int

    def reference(self, x: torch.Tensor, limit: float) -> torch.Tensor:
        """(rows, hidden) float64: exllamav3's clamp order, after silu and both sides of up."""
        gate = torch.nn.functional.silu(x @ self.weights["gate"])
        up = x @ self.weights["up"]
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (gate * up) @ self.weights["down"]


@functools.lru_cache(maxsize=8)
def make_expert(hidden: int, inter: int, bits: int, seed: int, gain: float = 1.4) -> Expert:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate": (hidden, inter), "up": (hidden, inter), "down": (inter, hidden)}
    tensors, weights = {}, {}
    for part, (k, n) in shapes.items():
        std = gain * k**-0.5 if part != "down" else None
        t = exl3_ref.random_exl3(k, n, bits, "mul1", generator, std)
        tensors[part] = t
        weights[part] = exl3_ref.weight(t["trellis"], t["suh"], t["svh"], "mul1", torch.float64)
    return Expert(tensors, weights, bits)


def make_table(experts: list[Expert], hidden: int, inter: int, limit: float) -> _core.ExpertTable:
    table = _core.ExpertTable(len(experts), hidden, inter, limit)
    for index, expert in enumerate(experts):
        for part in PARTS:
            t = expert.tensors[part]
            table.set(index, part, t["trellis"], t["suh"], t["svh"], expert.bits)
    return table


def forward(
    moe: _core.CpuMoe, table: _core.ExpertTable, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    out = torch.full(x.shape, math.nan)
    moe.forward(table, x, picks, weights, out)
    return out


def reference(
    experts: list[Expert], x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor, limit: float
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for pick, weight in zip(picks[row].tolist(), weights[row].double(), strict=True):
            out[row] += weight * experts[pick].reference(x[row : row + 1].double(), limit)[0]
    return out


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).pow(2).mean() / expected.pow(2).mean()).sqrt().item()


@pytest.mark.parametrize("isa", ISAS)
def test_real_expert_accuracy(isa: str) -> None:
    """Hidden 4096, intermediate 2048, K = 3, 1 to 8 rows, with the clamp at work on both sides."""
    hidden, inter = 4096, 2048
    expert = make_expert(hidden, inter, 3, seed=1, gain=5.0)
    x = torch.randn(8, hidden, generator=torch.Generator().manual_seed(2))
    gate = torch.nn.functional.silu(x.double() @ expert.weights["gate"])
    up = x.double() @ expert.weights["up"]
    assert (gate > LIMIT).float().mean() > 0.01
    assert (up > LIMIT).float().mean() > 0.01
    assert (up < -LIMIT).float().mean() > 0.01
    expected = expert.reference(x.double(), LIMIT)
    assert relative_rms(expert.reference(x.double(), 0.0), expected) > 0.05  # without the clamp this test fails
    table = make_table([expert], hidden, inter, LIMIT)
    moe = _core.CpuMoe(threads=1, isa=isa)
    rows_tested = range(1, 9) if isa != "scalar" else (1, 8)
    for rows in rows_tested:
        picks = torch.zeros(rows, 1, dtype=torch.int64)
        out = forward(moe, table, x[:rows], picks, torch.ones(rows, 1))
        for row in range(rows):
            assert relative_rms(out[row], expected[row]) <= TOLERANCE, (rows, row)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("hidden", "inter"), [(256, 128), (128, 256), (384, 512)])
def test_small_experts(isa: str, bits: int, hidden: int, inter: int) -> None:
    experts = [make_expert(hidden, inter, bits, seed, 5.0) for seed in range(3)]
    table = make_table(experts, hidden, inter, LIMIT)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, hidden, generator=generator)
    picks = torch.randint(0, 3, (5, 2), generator=generator)
    weights = torch.rand(5, 2, generator=generator)
    out = forward(_core.CpuMoe(threads=2, isa=isa), table, x, picks, weights)
    assert relative_rms(out, reference(experts, x, picks, weights, LIMIT)) <= 1e-3  # few terms, so a wider spread


@pytest.mark.parametrize("isa", ISAS)
def test_mixed_rates_and_no_limit(isa: str) -> None:
    mixed = make_expert(256, 128, 3, 0, 5.0)
    other = make_expert(256, 128, 4, 1, 5.0)
    table = _core.ExpertTable(1, 256, 128, 0.0)
    for part, source in (("gate", mixed), ("up", other), ("down", mixed)):
        t = source.tensors[part]
        table.set(0, part, t["trellis"], t["suh"], t["svh"], source.bits)
    expert = Expert({}, {**mixed.weights, "up": other.weights["up"]}, 0)
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(0))
    picks, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    out = forward(_core.CpuMoe(threads=1, isa=isa), table, x, picks, weights)
    assert relative_rms(out, reference([expert], x, picks, weights, 0.0)) <= 1e-3


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40, 300])
def test_rows_and_threads(rows: int, threads: int) -> None:
    """Any number of rows, an expert picked by many rows, by none, and twice by one row."""
    experts = [make_expert(256, 256, 3, seed) for seed in range(6)]
    table = make_table(experts, 256, 256, LIMIT)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 256, generator=generator)
    picks = torch.randint(0, 5, (rows, 3), generator=generator)
    picks[:, 0] = 2
    weights = torch.rand(rows, 3, generator=generator)
    moe = _core.CpuMoe(threads=threads)
    out = forward(moe, table, x, picks, weights)
    assert relative_rms(out, reference(experts, x, picks, weights, LIMIT)) <= 1e-3
    assert torch.equal(out, forward(moe, table, x, picks, weights))
    one = forward(_core.CpuMoe(threads=1), table, x, picks, weights)
    assert relative_rms(out, one.double()) <= 1e-6


def test_stats_count_what_was_served() -> None:
    experts = [make_expert(256, 128, 3, seed) for seed in range(3)]
    table = make_table(experts, 256, 128, LIMIT)
    moe = _core.CpuMoe(threads=1)
    picks = torch.tensor([[0, 1], [0, 2], [0, 1]])
    forward(moe, table, torch.randn(3, 256), picks, torch.ones(3, 2))
    stats = moe.stats()
    assert (stats["calls"], stats["rows"], stats["picks"]) == (1, 3, 6)
    assert stats["expert_bytes"] == 3 * (3 * 256 * 128 * 3 // 8)  # each expert decoded once for its rows
    assert stats["seconds"] > 0


def test_outliers_and_non_finite_rows() -> None:
    """One huge channel costs accuracy only within its block; a NaN or inf row stays visible and stays alone."""
    expert = make_expert(512, 256, 3, 0)
    table = make_table([expert], 512, 256, LIMIT)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    x[0, 7] = 300.0
    x[1, 3] = math.nan
    picks, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    for isa in ISAS:
        out = forward(_core.CpuMoe(threads=1, isa=isa), table, x, picks, weights)
        assert relative_rms(out[0], expert.reference(x[:1].double(), LIMIT)[0]) <= 1e-3
        assert out[1].isnan().all()
        assert relative_rms(out[2], expert.reference(x[2:].double(), LIMIT)[0]) <= 1e-3
        zero = forward(_core.CpuMoe(threads=1, isa=isa), table, torch.zeros(1, 512), picks[:1], weights[:1])
        assert not zero.any()


def test_bad_picks_are_errors() -> None:
    expert = make_expert(256, 128, 3, 0)
    table = _core.ExpertTable(2, 256, 128, LIMIT)
    for part in PARTS:
        t = expert.tensors[part]
        table.set(0, part, t["trellis"], t["suh"], t["svh"], 3)
    moe = _core.CpuMoe(threads=1)
    x, weights, out = torch.randn(1, 256), torch.ones(1, 1), torch.full((1, 256), 7.0)
    for pick in (-1, 2, 2**40):
        with pytest.raises(IndexError, match=f"picks expert {pick} of 2"):
            moe.forward(table, x, torch.tensor([[pick]]), weights, out)
    with pytest.raises(ValueError, match="expert 1 lacks"):
        moe.forward(table, x, torch.tensor([[1]]), weights, out)
    assert (out == 7.0).all()
    moe.forward(table, x, torch.tensor([[0]]), weights, out)  # still usable
    assert moe.stats()["calls"] == 1


def test_bad_arguments() -> None:
    expert = make_expert(256, 128, 3, 0)
    t = expert.tensors["gate"]
    table = _core.ExpertTable(1, 256, 128, LIMIT)
    with pytest.raises(ValueError, match="expert 0 gate trellis: 12288 bytes, expected 16384"):
        table.set(0, "gate", t["trellis"], t["suh"], t["svh"], 4)
    with pytest.raises(ValueError, match="suh: 256 bytes, expected 512"):
        table.set(0, "gate", t["trellis"], t["svh"], t["suh"], 3)
    with pytest.raises(ValueError, match="K = 2, 3 or 4, not 5"):
        table.set(0, "gate", t["trellis"], t["suh"], t["svh"], 5)
    with pytest.raises(IndexError, match="expert 1 of a table of 1"):
        table.set(1, "gate", t["trellis"], t["suh"], t["svh"], 3)
    with pytest.raises(ValueError, match="part 'middle'"):
        table.set(0, "middle", t["trellis"], t["suh"], t["svh"], 3)
    with pytest.raises(ValueError, match="multiple of 128"):
        _core.ExpertTable(1, 200, 128, LIMIT)
    with pytest.raises(ValueError, match="limit"):
        _core.ExpertTable(1, 256, 128, -1.0)
    with pytest.raises(ValueError, match="no CPU kernels 'sse'"):
        _core.CpuMoe(isa="sse")
    with pytest.raises(ValueError, match="CPU 100000"):
        _core.CpuMoe(cpus=[100000])
    with pytest.raises(ValueError, match=r"x has shape \(1, 128\), expected \(1, 256\)"):
        moe = _core.CpuMoe(threads=1)
        moe.forward(
            table, torch.zeros(1, 128), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), torch.zeros(1, 256)
        )
    with pytest.raises(TypeError):  # a converted copy would lose the result
        moe.forward(
            table,
            torch.zeros(1, 256),
            torch.zeros(1, 1, dtype=torch.int64),
            torch.ones(1, 1),
            torch.zeros(1, 256, dtype=torch.float64),
        )


def test_addresses_and_pinned_workers() -> None:
    """Raw addresses into memory that Python keeps, and one worker pinned to each given CPU."""
    expert = make_expert(256, 128, 3, 0)
    arena = {
        part: [np.array(expert.tensors[part][name].numpy()) for name in ("trellis", "suh", "svh")] for part in PARTS
    }
    table = _core.ExpertTable(1, 256, 128, LIMIT)
    for part, arrays in arena.items():
        places = [value for array in arrays for value in (array.ctypes.data, array.nbytes)]
        table.set_address(0, part, *places, 3)
    moe = _core.CpuMoe(cpus=_core.physical_cpus())
    assert moe.threads == len(_core.physical_cpus())
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    picks, weights = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    out = forward(moe, table, x, picks, weights)
    assert relative_rms(out, reference([expert], x, picks, weights, LIMIT)) <= 1e-3


def test_arrays_outlive_their_names() -> None:
    expert = make_expert(256, 128, 3, 0)
    table = _core.ExpertTable(1, 256, 128, LIMIT)
    for part in PARTS:
        t = {name: expert.tensors[part][name].clone() for name in ("trellis", "suh", "svh")}
        table.set(0, part, t["trellis"], t["suh"], t["svh"], 3)
        del t
    x, picks, weights = torch.randn(1, 256), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    out = forward(_core.CpuMoe(threads=1), table, x, picks, weights)
    assert relative_rms(out, reference([expert], x, picks, weights, LIMIT)) <= 1e-3


def test_calls_from_several_threads() -> None:
    experts = [make_expert(256, 256, 3, seed) for seed in range(4)]
    table = make_table(experts, 256, 256, LIMIT)
    moe = _core.CpuMoe(threads=2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 256, generator=generator)
    picks, weights = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]]), torch.rand(4, 2, generator=generator)
    expected = forward(moe, table, x, picks, weights)
    results: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(20):
            results.append(forward(moe, table, x, picks, weights))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 80
    assert all(torch.equal(result, expected) for result in results)
