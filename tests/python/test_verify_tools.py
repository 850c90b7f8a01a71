"""How `glm53 verify` and the GPU tests make every slot's expert change, whatever the model routes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exllama_helpers import make_settings, use_fakes

from glm53.engine.exllama import tools
from glm53.engine.exllama.loader import Loaded, LoadOptions, load

SLOTS = 8


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Loaded]:
    use_fakes(monkeypatch)
    made = load(make_settings(tmp_path), lambda stage, fraction: None, LoadOptions(max_slots=SLOTS))
    yield made
    made.close()


def owners(runtime: Any) -> set[int]:
    return set(np.flatnonzero(runtime.residency(0) >= 0).tolist())


def test_turned_over_heat_replaces_every_slot_where_the_policy_would_rightly_keep_them(loaded: Loaded) -> None:
    """Routing that never changes: twice as many experts as slots, picked in every step."""
    runtime, layers = loaded.runtime, len(loaded.store.layers)
    picks = np.tile(np.arange(2 * SLOTS // layers, dtype=np.int64), 4)

    def decode(steps: int) -> int:
        before = runtime.stats(0)["evictions"]
        for step in range(steps * layers):
            runtime.decode(step % layers, picks.ctypes.data, picks.size, 4, 0)
        return int(runtime.stats(0)["evictions"] - before)

    decode(300)
    kept = owners(runtime)
    assert decode(100) == 0
    assert owners(runtime) == kept
    tools.turn_heat_over(runtime, 0)
    assert decode(4) >= SLOTS
    assert len(owners(runtime)) == SLOTS
    assert not owners(runtime) & kept
    assert runtime.verify(0) == []


def test_every_round_of_the_verify_command_begins_with_cold_slots(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned, decoded = [], 0

    def turn(runtime: Any, stream: int) -> None:
        whole(runtime, stream)
        heat = runtime.export_heat(stream)
        cached = runtime.residency(stream) >= 0
        turned.append((runtime.stats(stream)["steps"], heat[cached].max(initial=0), heat[~cached].min()))

    whole = tools.turn_heat_over
    monkeypatch.setattr(tools, "turn_heat_over", turn)
    tools.churn(loaded, make_settings(tmp_path), 160)
    decoded = loaded.runtime.stats(0)["steps"]
    assert len(turned) == 3
    assert all(cold == 0 < hot for _, cold, hot in turned)
    assert len({steps for steps, *_ in turned} | {decoded}) == 4, "decode steps follow each"
