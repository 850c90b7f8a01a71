"""How much RAM this process may still take: the machine's, its cgroup's and its own limit's view."""

from __future__ import annotations

import resource
from pathlib import Path

from ..errors import ResourceError


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _meminfo_available(proc: Path) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_available(proc: Path, cgroup: Path) -> int | None:
    """Least room under any memory.max from our cgroup v2 up to the root; page cache counts as room."""
    try:
        entry = next(e for e in (proc / "self/cgroup").read_text().splitlines() if e.startswith("0::"))
    except (OSError, StopIteration):
        return None
    here = cgroup / entry[3:].lstrip("/")
    room: int | None = None
    while True:
        limit, used = _number(here / "memory.max"), _number(here / "memory.current")
        if limit is not None and used is not None:
            left = max(limit - used + _reclaimable(here / "memory.stat"), 0)
            room = left if room is None else min(room, left)
        if here == cgroup or cgroup not in here.parents:
            return room
        here = here.parent


def _reclaimable(stat: Path) -> int:
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))


def _limit_available(proc: Path) -> int | None:
    """Address space left under this process's own limit (`ulimit -v`); None without one."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        pages = int((proc / "self/statm").read_text().split()[0])
    except OSError:
        return limit
    return max(limit - pages * resource.getpagesize(), 0)


def available_ram(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes this process may still allocate: the least of MemAvailable, cgroup v2 and `ulimit -v`; None = unknown."""
    rooms = (_meminfo_available(proc), _cgroup_available(proc, cgroup), _limit_available(proc))
    return min((r for r in rooms if r is not None), default=None)


def require_ram(needed: int, what: str, available: int | None = None) -> None:
    """Raise ResourceError with both numbers if `needed` bytes for `what` are more than there is."""
    have = available_ram() if available is None else available
    if have is not None and needed > have:
        raise ResourceError(
            f"{what} needs {needed / 2**30:.1f} GiB of RAM, {have / 2**30:.1f} GiB are available: "
            "free memory, raise the limit (MemoryMax of the service, ulimit -v), or use a smaller checkpoint"
        )
