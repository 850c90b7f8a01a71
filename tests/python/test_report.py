"""bench/report.py: every figure of every result is on the page, drawn to scale, and nothing comes from elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPORT = Path(__file__).parents[2] / "bench" / "report.py"
BASE = {"what": "speed & <care>", "machine": "box", "versions": {"python": "3"}, "command": "python3 bench/x.py --a 1"}


def make(folder: Path, *results: Any) -> subprocess.CompletedProcess[str]:
    for i, result in enumerate(results):
        (folder / f"r{i}.json").write_text(result if isinstance(result, str) else json.dumps(result))
    command = [sys.executable, "-S", "-I", str(REPORT), "--results", str(folder), "--out", str(folder / "page.html")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_figures_commands_and_plots_are_on_the_page(tmp_path: Path) -> None:
    sweep = {
        "prefill": [{"tokens": 8192, "tok_s": 700.5}],
        "decode": [{"streams": 1, "tok_s": 28.0}, {"streams": 4, "tok_s": 34.0}],
    }
    stack = {
        "kind": "stack",
        "title": "Time of a token",
        "unit": "ms",
        "x": ["fast"],
        "series": {"copies": [6], "rest": [2]},
    }
    done = make(
        tmp_path, {**BASE, "raw": sweep, "bars": {"a.b": 0.12345, "c.d": 3}}, {**BASE, "raw": [], "plots": [stack]}
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    for wanted in (
        "a.b",
        "0.1235",
        "python3 bench/x.py --a 1",
        "Prefill by prompt length",
        "700.5 tok/s",
        "Time of a token",
    ):
        assert wanted in page
    assert "speed &amp; &lt;care&gt;" in page
    assert "<care>" not in page
    assert not re.search(r"(src|href)=|https?://|<script|@import", page)
    heights = {v: float(h) for h, v in re.findall(r'height="([\d.]+)" fill="[^"]+"><title>(\d+) ms', page)}
    assert heights["6"] == pytest.approx(3 * heights["2"], rel=0.01)
    tops = sorted(float(y) for y in re.findall(r'<rect x="[\d.]+" y="([\d.]+)"[^>]+><title>\d+ ms', page))
    assert tops[1] - tops[0] == pytest.approx(heights["2"], abs=0.2)  # piled up, not side by side


def test_a_training_curve_is_drawn(tmp_path: Path) -> None:
    curve = [[1, 0.1, 8.0], [10, 1.0, 4.0], [100, 9.0, 2.0]]
    assert make(tmp_path, {**BASE, "raw": {"training": {"curve": curve}}}).returncode == 0
    (points,) = re.findall(r'<polyline points="([^"]+)"', (tmp_path / "page.html").read_text())
    heights = [float(p.split(",")[1]) for p in points.split()]
    assert len(heights) == 3
    assert heights == sorted(heights)  # the loss falls, so y grows downwards


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ("{", "Expecting"),
        ({"what": "x"}, "lacks machine"),
        ({**BASE, "raw": {}, "plots": [{"kind": "bars", "title": "t", "x": [1, 2], "series": {"a": [1]}}]}, "unequal"),
    ],
)
def test_a_bad_result_is_named_in_one_line(bad: Any, word: str, tmp_path: Path) -> None:
    done = make(tmp_path, bad)
    assert done.returncode == 2
    assert word in done.stderr
    assert "r0.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_results_is_an_error(tmp_path: Path) -> None:
    done = make(tmp_path)
    assert done.returncode == 2
    assert "no results" in done.stderr
