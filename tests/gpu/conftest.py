"""Checkpoints of the GPU tests: the bundled one, and one of the real layers' shape in the folder GLM53_TEST_FLASH."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import exact_helpers
import pytest
from exact_helpers import stock_answers
from tiny_checkpoint import TINY

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))  # the cases and live_server, for test_http
pytest.register_assert_rewrite("engine_cases", "engine_chat_cases")


def pytest_configure(config: pytest.Config) -> None:
    exact_helpers.WITHOUT = tuple(filter(None, config.getoption("--without").split(",")))


@pytest.fixture(scope="module", params=["tiny", "flash"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    if request.param == "tiny":
        return TINY
    flash = os.environ.get("GLM53_TEST_FLASH")
    if not flash:
        pytest.skip("GLM53_TEST_FLASH names no checkpoint of real shape")
    return Path(flash)


@pytest.fixture(scope="module")
def stock(checkpoint: Path) -> Any:
    return stock_answers(checkpoint)
