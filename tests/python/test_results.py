"""Recorded results: the common form, bars that say what their own figures say, and a report that reads them all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import test_exact_results
import test_fast_results

BENCH = Path(__file__).resolve().parents[2] / "bench"
FILES = sorted((BENCH / "results").glob("*.json"))
LESS_IS_BETTER = test_exact_results.LESS_IS_BETTER | test_fast_results.LESS_IS_BETTER
KEYS = {"what", "machine", "versions", "command", "settings", "raw", "bars"}


def holds(name: str, bar: dict[str, Any]) -> bool:
    """Whether the value meets what is wanted; more is better unless the bar says otherwise."""
    value, want = bar["value"], bar["want"]
    if isinstance(want, str):  # ">= 6.7", "<= 1.5"
        sign, _, limit = want.partition(" ")
        return bool({">=": value >= float(limit), "<=": value <= float(limit)}[sign])
    if isinstance(want, bool):
        return bool(value == want)
    less = bar.get("less_is_better", name in LESS_IS_BETTER)
    return bool(value <= want if less else value >= want)


def test_bars_are_compared_in_their_direction() -> None:
    assert holds("a", {"value": 3.1, "want": 3})
    assert not holds("a", {"value": 2.9, "want": 3})
    assert holds("a", {"value": 2.9, "want": 3, "less_is_better": True})
    assert not holds("exact.miss_ratio", {"value": 1.2, "want": 1.15})
    assert not holds("a", {"value": False, "want": True})
    assert not holds("a", {"value": 1.756, "want": ">= 1.9"})
    assert holds("a", {"value": 1.321, "want": "<= 1.5"})


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_a_result_has_the_common_form_and_honest_bars(path: Path) -> None:
    result = json.loads(path.read_text())
    assert not KEYS - set(result), f"lacks {sorted(KEYS - set(result))}"
    assert result["command"]
    assert "cpu" in result["machine"]
    assert result["bars"]
    for name, bar in result["bars"].items():
        if "want" in bar:  # a figure without a limit is held to nothing
            assert bar["ok"] == holds(name, bar), name
        else:
            assert set(bar) <= {"value", "unit", "says"}, name


def test_the_report_reads_every_result(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    done = subprocess.run(
        [sys.executable, str(BENCH / "report.py"), "--out", str(out)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = sorted((BENCH / "results").glob("*.jsonl"))
    count = len(FILES) + sum(len(path.read_text().splitlines()) for path in lines)
    assert f"{count} results" in done.stdout
    assert all(path.name in out.read_text() for path in [*FILES, *lines])
