"""The hooks over exllamav3's own Python: the signatures are those they were made for, what they replace gives the same.

Skipped unless GLM53_EXLLAMAV3 names the unpacked wheel (`pip download --no-deps exllamav3==1.5.1`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WHEEL = os.environ.get("GLM53_EXLLAMAV3", "")


@pytest.mark.skipif(not WHEEL, reason="GLM53_EXLLAMAV3 names no folder with exllamav3's source")
def test_the_hooks_fit_exllamav3s_own_python() -> None:
    program = Path(__file__).with_name("exllamav3_hooked.py")
    done = subprocess.run([sys.executable, program, WHEEL], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
