"""Fixtures of the tests over exllamav3's generator, with a GPU and without one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer


def exllamav3_folder() -> Path:
    """The unpacked wheel that GLM53_EXLLAMAV3 names; the module that asks is skipped where it names none."""
    folder = os.environ.get("GLM53_EXLLAMAV3", "")
    if not folder:
        pytest.skip("GLM53_EXLLAMAV3 names no folder with exllamav3's source", allow_module_level=True)
    return Path(folder)


@pytest.fixture(scope="module")
def forget(live: LiveServer) -> Callable[[], None]:
    """A new generator knows no page and no state."""
    engine: Any = live.engine

    def renew() -> None:
        engine._generator = engine._make_generator()

    return renew


@pytest.fixture(scope="module")
def reuse_rounding() -> float:
    """The same passes over the same tokens: exllamav3 ends one where a prompt's last whole page does in any case."""
    return 0.0
