"""How much RAM this process may still take: the machine's and its cgroup's view."""

from __future__ import annotations

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


def available_ram(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes this process may still allocate: least of MemAvailable and the cgroup v2 limits; None = unknown."""
    rooms = [r for r in (_meminfo_available(proc), _cgroup_available(proc, cgroup)) if r is not None]
    return min(rooms, default=None)


def require_ram(needed: int, what: str, available: int | None = None) -> None:
    """Raise ResourceError with both numbers if `needed` bytes for `what` are more than there is."""
    have = available_ram() if available is None else available
    if have is not None and needed > have:
        raise ResourceError(
            f"{what} needs {needed / 2**30:.1f} GiB of RAM, {have / 2**30:.1f} GiB are available: "
            "free memory, raise the cgroup limit (MemoryMax), or use a smaller checkpoint"
        )
