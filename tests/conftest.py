"""Options of the tests, and how Hypothesis works in all of them.

`PYTEST_ADDOPTS="--soak-seconds 60" scripts/test` gives options to every run below. Hypothesis has no time limits and
tries the same examples everywhere: one that fails once in many runs would stop an unrelated change on somebody else's
machine. With FUZZ_EXAMPLES set (how many of each kind, see tests/server/test_fuzz.py) it draws new ones; an example
that fails is printed as a decorator that repeats it.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

# A proxy is for other machines, not for the servers that tests start on this one.
for name in ("no_proxy", "NO_PROXY"):
    os.environ[name] = ",".join(filter(None, ("127.0.0.1,localhost", os.environ.get(name))))

settings.register_profile(
    "glm53",
    deadline=None,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("glm53")
pytest.register_assert_rewrite("checkpoint_files")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", type=float, default=10.0, help="how long a soak test runs (default: 10)")
    parts = "run_ahead,single_experts,bulk_scales"
    parser.addoption("--without", default="", help=f"parts of the GPU loader to leave out: {parts}")
