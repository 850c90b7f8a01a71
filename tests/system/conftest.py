"""Outcomes of the system tests, for the record that the boot test writes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

OUTCOMES = pytest.StashKey[dict[str, bool]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    outcomes = item.config.stash.setdefault(OUTCOMES, {})
    name = item.nodeid.rsplit("::", 1)[-1]
    if report.when == "call" or report.failed:
        outcomes[name] = bool(report.passed and outcomes.get(name, True))
    return report
