"""The four lanes that decide this host's speed, measured in well under a minute: DRAM, PCIe, the CPU kernel, the disk.

Each lane gives {"gb_s": rate or None, "text": one line}; GB is 10^9 bytes. Medians of a few rounds on memory that does
not fit in the caches. A lane that cannot be measured says why instead of a number.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ..config import Settings
from ..host import Host, Workers
from ..sizing import GB, GIB, SHAPE

ROUNDS = 5
DRAM_BYTES = GIB
DISK_BYTES = GIB
DISK_SECONDS = 8.0
HIDDEN, INTERMEDIATE, BITS = 4096, 2048, 3
KERNEL_EXPERTS = 24
"""24 experts of the real shape are 226 MB: more than the caches of one socket."""

Lane = dict[str, Any]


def measure(settings: Settings, host: Host) -> dict[str, Lane]:
    """All lanes by name."""
    lanes: dict[str, Callable[[], Lane]] = {
        "dram": lambda: dram(len(host.physical_cores())),
        "pcie": lambda: pcie(settings.gpu),
        "cpu kernel": lambda: cpu_kernel(settings, host),
        "disk": lambda: disk(settings.model_dir),
    }
    return {name: _guarded(lane) for name, lane in lanes.items()}


def _guarded(lane: Callable[[], Lane]) -> Lane:
    try:
        return lane()
    except Exception as e:  # a lane that cannot be measured must not hide the others
        return _none(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")


def _none(why: str) -> Lane:
    return {"gb_s": None, "text": f"not measured ({why})"}


def _threads(n: int) -> str:
    return "1 thread" if n == 1 else f"{n} threads"


def dram(threads: int) -> Lane:
    """Read rate with one thread per physical core (numpy's integer sum, which is bound by memory)."""
    part = DRAM_BYTES // 8 // max(threads, 1)
    buffers = [np.ones(part, np.int64) for _ in range(max(threads, 1))]
    with ThreadPoolExecutor(len(buffers)) as pool:
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            list(pool.map(np.sum, buffers))
            times.append(time.perf_counter() - start)
    rate = part * 8 * len(buffers) / GB / median(times)
    return {"gb_s": round(rate, 1), "text": f"{rate:.1f} GB/s read on {_threads(threads)} (at least)"}


def pcie(gpu: int) -> Lane:
    """Copies of one expert from page-locked memory to the GPU."""
    import torch

    if not torch.cuda.is_available():
        return _none("torch sees no GPU")
    device = torch.device("cuda", gpu)
    source = torch.empty(SHAPE.expert_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(50):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) / 50)
    rate = SHAPE.expert_bytes / GB / median(times)
    text = f"{rate:.1f} GB/s to the GPU, {median(times) * 1000:.3f} ms an expert"
    return {"gb_s": round(rate, 2), "ms_per_expert": round(median(times) * 1000, 4), "text": text}


def cpu_kernel(settings: Settings, host: Host) -> Lane:
    """One row through experts of the real shape, random weights, with the threads that serving would use.

    Where the setting `isa` leaves open which AVX-512 kernels run, all are tried and the fastest counts, as the CPU lane
    does at its start.
    """
    from .. import _core

    threads, table = Workers.of(settings, host).threads, _random_experts()
    tried = [settings.isa or "auto"]
    if settings.isa is None:
        tried = [isa for isa in _core.cpu_features()["isas"] if isa not in {"avx2", "scalar"}] or tried
    each, moe = min(
        (_expert_seconds(_core.CpuMoe(threads=threads, isa=isa), table) for isa in tried), key=itemgetter(0)
    )
    rate = SHAPE.expert_bytes / GB / each
    of = f", the fastest of {', '.join(sorted(tried))}" if len(tried) > 1 else ""
    text = f"{rate:.1f} GB/s of expert bytes, {each * 1000:.3f} ms an expert on {_threads(moe.threads)} ({moe.isa}{of})"
    return {"gb_s": round(rate, 2), "ms_per_expert": round(each * 1000, 4), "threads": moe.threads, "text": text}


def _random_experts() -> Any:
    from .. import _core

    rng = np.random.default_rng(0)
    table = _core.ExpertTable(KERNEL_EXPERTS, HIDDEN, INTERMEDIATE, 10.0)
    for expert in range(KERNEL_EXPERTS):
        for part, k, n in (
            ("gate", HIDDEN, INTERMEDIATE),
            ("up", HIDDEN, INTERMEDIATE),
            ("down", INTERMEDIATE, HIDDEN),
        ):
            trellis = rng.integers(0, 2**16, (k // 16, n // 16, 16 * BITS), dtype=np.uint16)
            suh = np.full(k, k**-0.5, np.float16).view(np.uint16)
            table.set(expert, part, trellis, suh, np.ones(n, np.float16).view(np.uint16), BITS)
    return table


def _expert_seconds(moe: Any, table: Any) -> tuple[float, Any]:
    """Median seconds an expert of a token's picks takes in `moe`, and `moe`."""
    x, out = np.random.default_rng(0).standard_normal((1, HIDDEN), np.float32), np.zeros((1, HIDDEN), np.float32)
    weights = np.full((1, SHAPE.picks), 1 / SHAPE.picks, np.float32)
    times = []
    for i in range(3 * KERNEL_EXPERTS // SHAPE.picks):
        picks = (np.arange(SHAPE.picks, dtype=np.int64)[None] + i * SHAPE.picks) % KERNEL_EXPERTS
        start = time.perf_counter()
        moe.forward(table, x, picks, weights, out)
        times.append((time.perf_counter() - start) / SHAPE.picks)
    return median(times), moe


def disk(model_dir: Path) -> Lane:
    """Cold reads of the checkpoint, or of a file written for it where there is none yet."""
    files = sorted(model_dir.glob("*.safetensors"), key=lambda p: -p.stat().st_size)
    if files:
        return _read_rate(files[0], "reading the checkpoint")
    folder = model_dir.absolute()
    while not folder.is_dir():
        folder = folder.parent
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".glm53-doctor-") as scratch:
        block = os.urandom(2**24)
        for _ in range(16):
            scratch.write(block)
        scratch.flush()
        os.fsync(scratch.fileno())
        return _read_rate(Path(scratch.name), f"reading a test file in {folder}")


def _read_rate(path: Path, what: str) -> Lane:
    """Rate of reading up to 1 GiB or 8 s of `path`, after dropping it from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        buffer, total, start = bytearray(2**24), 0, time.perf_counter()
        while total < DISK_BYTES and time.perf_counter() - start < DISK_SECONDS:
            count = os.preadv(fd, [buffer], total)
            if count == 0:
                break
            total += count
        seconds = time.perf_counter() - start
    finally:
        os.close(fd)
    rate = total / GB / seconds
    return {"gb_s": round(rate, 2), "text": f"{rate:.2f} GB/s {what} ({total / GIB:.2f} GiB)"}
