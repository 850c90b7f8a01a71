"""Options of the tests. `PYTEST_ADDOPTS="--soak-seconds 60" scripts/test` gives them to every run below."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", type=float, default=10.0, help="how long a soak test runs (default: 10)")
