"""packaging/check_wheel.py: what it lets pass and what not, on lists of file names."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def check() -> Any:
    spec = importlib.util.spec_from_file_location("check_wheel", ROOT / "packaging" / "check_wheel.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def names(check: Any) -> list[str]:
    """A wheel as auditwheel leaves it: with entries for folders."""
    data = [f"glm53-0.1.0.data/data/{name}" for name in check.DATA]
    native, page = "glm53/_core.cpython-311-x86_64-linux-gnu.so", "glm53/server/web/index.html"
    return ["glm53/", "glm53/models/", "glm53/models/nano/", *check.NEEDED, *data, native, page]


def test_a_whole_wheel_has_no_problems(check: Any, names: list[str]) -> None:
    assert check.problems(names) == []


@pytest.mark.parametrize("extra", ["glm53/models/other/config.json", "tests/x.py", "glm53/a.cpp", "glm53/_core.2.so"])
def test_what_is_too_much_is_named(check: Any, names: list[str], extra: str) -> None:
    assert any(extra in p for p in check.problems([*names, extra]))


def test_what_is_missing_is_named(check: Any, names: list[str]) -> None:
    for gone in check.NEEDED:
        assert check.problems([n for n in names if n != gone]) == [f"missing: {gone}"]


def test_the_bundled_checkpoint_is_complete_in_the_tree(check: Any) -> None:
    wanted = [n for n in check.NEEDED if n.startswith(check.MODEL)]
    assert len(wanted) == 6
    assert all((ROOT / "python" / n).is_file() for n in wanted)
