"""bench/fast_soak.py on the stand-in: load that ends, streams that are cancelled, and a wrong step that is seen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exllama_helpers import make_settings, use_fakes

from glm53.engine.exllama.loader import LoadOptions, load

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import fast_soak

    monkeypatch.setattr(fast_soak, "TEXTS", 2)
    monkeypatch.setattr(fast_soak, "NEW", 12)
    monkeypatch.setattr(fast_soak, "CANCEL", 0.05)
    return fast_soak


@pytest.fixture
def make(soak: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    use_fakes(monkeypatch)
    made: list[Any] = []

    def start(mode: str) -> Any:
        import exllamav3

        settings = make_settings(tmp_path, mode=mode, ct_threads=2, ct_a=0.001, ct_b=0.001, ct_t=10.0)
        loaded = load(settings, lambda stage, fraction: None, LoadOptions(max_slots=6))
        made.append(loaded)
        generator = exllamav3.Generator(loaded.model, loaded.cache, loaded.tokenizer, max_batch_size=4)
        ticks = itertools.count()
        return soak.Soak(exllamav3, loaded, generator, lambda: 1000, lambda: float(next(ticks)))

    yield start
    for loaded in made:
        loaded.close()


def test_a_slice_loads_cancels_ends_and_compares(make: Any) -> None:
    running = make("exact")  # without a lane every step is the reference's
    assert running.first == {"kl_mean": 0.0, "kl_max": 0.0, "top1": 1.0}
    found = running.slice(400.0)
    assert found["requests"] > 4
    assert found["cancelled"] > 0
    assert found["tokens"] > 50
    assert (found["mismatches"], found["kl_max"], found["top1"]) == (0, 0.0, 1.0)
    assert running.generator.num_remaining_jobs() == 0


def test_a_fast_slice_uses_the_lane_and_the_reference_does_not(make: Any) -> None:
    running = make("fast")
    assert running.loaded.passes.lane is running.loaded.tier
    assert running.slice(60.0)["requests"] > 0
    assert running.loaded.runtime.stats(0)["cpu_picks"] > 0


def test_a_step_that_goes_wrong_is_seen(make: Any) -> None:
    running = make("exact")
    module = running.loaded.model.moe[1]
    forward = module.forward
    module.forward = lambda *a: forward(*a) * 1.5
    assert running.distance()["kl_max"] > 1e-3


def test_a_fault_of_the_lane_ends_the_soak(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running = make("exact")
    monkeypatch.setattr(running.loaded.passes, "fault", lambda: "the CPU lane stalled: x")
    with pytest.raises(RuntimeError, match="the CPU lane stalled"):
        running.slice(5.0)


def test_growth_is_what_never_came_back(soak: Any) -> None:
    assert soak.growth([100, 110, 105, 100, 130, 108]) == pytest.approx(108 / 110 - 1)
    assert soak.growth([100, 120, 140, 160, 180, 200]) == pytest.approx(0.5)
