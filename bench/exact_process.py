"""Processes of `gpu_exact.py`'s stages: one with a limit, its peak of RAM, and the read a start is compared with."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any


def run_limited(command: list[str], limit: float, **kwargs: Any) -> tuple[int | None, str]:
    """Exit status (None: over the limit, ended with all its children) and output of a command."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, **kwargs)
        try:
            code: int | None = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # stock's CPU worker outlives a parent that was ended
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        return code, output.read()


def plain_read(checkpoint: Path) -> dict[str, Any]:
    """Seconds to read the checkpoint's tensor files from page cache: `cat`, and one thread into one buffer."""
    files = sorted(checkpoint.glob("*.safetensors"))
    out: dict[str, Any] = {"bytes": sum(p.stat().st_size for p in files), "cat_s": [], "readinto_s": []}
    buffer = memoryview(bytearray(16 << 20))
    for _ in range(2):
        start = time.perf_counter()
        with Path(os.devnull).open("wb") as sink:
            subprocess.run(["cat", *map(str, files)], stdout=sink, check=True)
        out["cat_s"].append(time.perf_counter() - start)
        start = time.perf_counter()
        for path in files:
            with path.open("rb", buffering=0) as f:
                while f.readinto(buffer):
                    pass
        out["readinto_s"].append(time.perf_counter() - start)
    return out


def peak_ram() -> dict[str, int]:
    """Peak and present resident bytes of this process, by the kernel's own account."""
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")):
            name, value = line.split(":")
            fields[name] = int(value.split()[0]) * 1024
    return fields
