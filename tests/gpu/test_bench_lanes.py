"""bench/lanes.py on a GPU: every lane is measured, and their rates are in the order that physics gives them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
BENCH = Path(__file__).parents[2] / "bench"


def test_every_lane_is_measured() -> None:
    done = subprocess.run([sys.executable, str(BENCH / "lanes.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line["raw"]["not_measured"] == {}
    rates = {name: lane["gb_s"] for name, lane in line["raw"]["lanes"].items()}
    assert rates["vram"] > 2 * rates["pcie"]
    assert 0.5 < rates["pcie"] / rates["copy_engine"] < 1.5  # the same link
    assert line["machine"]["gpu"]
