"""The tests' random checkpoint, `TINY`: five layers at toy size, the one that tests/data holds stock's answers to.

It is made from its recipe (tests/oracle/make_tiny.py, a fixed seed, a few seconds) at the first import and kept in
build/; a change of the recipe makes another. Written once under another name and then renamed, so that test processes
may start at the same time.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "tests/data/tiny-tokenizer.json"
RECIPE = (ROOT / "tests/oracle/make_tiny.py", ROOT / "tests/oracle/exl3_ref.py", TOKENIZER)
WEIGHTS = "6c73992d5487e2628bf99cd0358d2c83d4d46af91a92e5f3f2883137eee48662"
"""SHA-256 of the model.safetensors that stock exllamav3 answered with; tests/python/test_checkpoint.py compares."""


def make() -> Path:
    """The folder of the checkpoint."""
    key = hashlib.sha256(b"".join(p.read_bytes() for p in RECIPE)).hexdigest()[:12]
    parent = ROOT / "build" / f"test-checkpoint-{key}"
    out = parent / "tiny"
    if out.exists():
        return out
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        made = Path(folder) / "tiny"
        command = [sys.executable, str(RECIPE[0]), str(made), "--esb", "1.0", "--cal", str(TOKENIZER)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        try:
            made.rename(out)
        except OSError:  # another process was first
            if not out.exists():
                raise
    return out


TINY = make()
