"""docs/results.md is what the results give, and every figure that the documents state is on it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGE = ROOT / "docs" / "results.md"
AGAIN = "run: python3 bench/report.py --markdown docs/results.md"
sys.path.insert(0, str(ROOT / "bench"))

import report  # noqa: E402
import report_markdown  # noqa: E402

KNOWN = json.loads((ROOT / "bench/bars.json").read_text())
GIVEN = json.loads((ROOT / "bench/given.json").read_text())
RESULTS = report.load(ROOT / "bench/results")
EVERY = [(k, report_markdown.as_bar(b)) for _, r in RESULTS for k, b in (r.get("bars") or {}).items()]
BARS = {k: report_markdown.as_bar(b) for _, r in RESULTS for k, b in (r.get("bars") or {}).items()}


def unproved(words: str) -> list[str]:
    """Figures with a unit or ratio that no result and no stated size or setting gives."""
    measured = list(report_markdown.quotable(RESULTS, KNOWN))
    stated = {g["figure"] for g in GIVEN}
    return [
        written
        for written, number, unit in report_markdown.figures_in(words)
        if written not in stated and not report_markdown.is_measured(number, unit, measured)
    ]


def test_the_page_is_what_the_results_give() -> None:
    assert PAGE.read_text() == report_markdown.markdown(RESULTS, KNOWN, GIVEN), AGAIN


def test_the_page_says_what_is_not_met_and_what_is_not_measured() -> None:
    page = PAGE.read_text()
    head = page.split("## Figures that are no measurements")[0]
    failed = [k for k, b in EVERY if b.get("ok") is False]
    for name in failed:
        assert f"| {name} |" in page.split("## Not met")[1].split("## Not measured yet")[0]
    for name in {k for k, v in KNOWN.items() if "wanted" in v} - set(BARS):
        assert f"| {name} |" in head.split("## Not measured yet")[1]


def test_the_page_begins_with_what_was_measured_on_a_gpu() -> None:
    headings = [line[3:] for line in PAGE.read_text().splitlines() if line.startswith("## ")]
    assert headings[2].startswith("Exact mode against stock")
    assert headings[3].startswith("Fast mode against exact mode")


def test_every_recorded_bar_is_explained() -> None:
    """In bench/bars.json, or by the result itself."""
    assert {k for k, b in BARS.items() if "says" not in KNOWN.get(k, b)} == set()


def test_what_a_bar_says_needs_no_other_beside_it() -> None:
    """In the table of what is not met each stands alone."""
    told = {k: KNOWN.get(k, b)["says"] for k, b in EVERY if "want" in b} | {k: v["says"] for k, v in KNOWN.items()}
    assert [k for k, says in told.items() if says.startswith("the same")] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_every_figure_of_a_document_is_recorded(document: Path) -> None:
    """Record it in bench/results (its unit is in bench/bars.json); what is no measurement goes to bench/given.json."""
    if document != PAGE:
        assert unproved(document.read_text()) == []


@pytest.mark.parametrize("given", GIVEN, ids=lambda g: g["figure"])
def test_a_stated_figure_is_in_its_source(given: dict[str, Any]) -> None:
    assert given["there"] in (ROOT / given["source"]).read_text()


def test_a_figure_out_of_nowhere_is_found() -> None:
    assert unproved("It decodes 77.7 tok/s, 9.99x stock's speed, in 123 ms.") == ["77.7 tok/s", "9.99x", "123 ms"]


def test_a_recorded_figure_may_be_rounded_but_not_changed() -> None:
    ratio = BARS["exact.decode1_vs_stock"]["value"]
    assert unproved(f"{ratio:.2f}x, {ratio:.1f} times") == []
    assert unproved(f"{ratio + 0.02:.2f}x") == [f"{ratio + 0.02:.2f}x"]
    assert unproved(f"{ratio:.2f} GB/s") == [f"{ratio:.2f} GB/s"]


def parts_of(command: str) -> list[list[str]]:
    """The calls of Python in a command: script or -m module, then its arguments."""
    calls = [shlex.split(part) for part in re.split(r"\s*(?:;|&&)\s*", command)]
    return [words[1:] for words in calls if words[0] in ("python", "python3")]


COMMANDS = {r["command"] for _, r in RESULTS} | {v["command"] for v in KNOWN.values() if v.get("command")}
SCRIPTS = sorted({" ".join(w[: 2 if w[0] == "-m" else 1]) for c in COMMANDS for w in parts_of(c)})


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_command_is_one_that_its_script_takes(script: str) -> None:
    named = script.split()
    done = subprocess.run([sys.executable, *named, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    calls = [w for c in COMMANDS for w in parts_of(c) if w[: len(named)] == named]
    options = {o for words in calls for o in words if o.startswith("--")}
    assert {o for o in options if not re.search(rf"{o}(?![\w-])", done.stdout)} == set()
