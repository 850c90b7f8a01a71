"""The bundled nano checkpoint really chats, thinks and calls tools: the ten fixed questions over HTTP, on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm53.cli import model_dir

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.nano import cpu_check, heldout

DEMO = Path(__file__).parents[2] / "scripts" / "demo"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with cpu_check.server(model_dir.BUNDLED) as url:
        yield url


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("question", heldout.questions(), ids=lambda q: q.text)
def test_fixed_question(question: heldout.Question, thinking: bool, url: str) -> None:
    row = cpu_check.ask_question(url, question, thinking)
    assert row["right"], row


def test_unseen_tool_requests(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    some = heldout.tool_requests()[::10]
    monkeypatch.setattr(heldout, "tool_requests", lambda: some)
    rows = cpu_check.ask_tools(url)
    assert sum(r["right"] for r in rows) >= 0.8 * len(rows), [r for r in rows if not r["right"]]
