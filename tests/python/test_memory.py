"""HostArena and the device seam from Python: what a checkpoint loader does with them, and how they fail."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from glm53 import _core

HUGE = 2 << 20


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard.bin"
    path.write_bytes(np.arange(100_000, dtype=np.uint32).tobytes())
    return path


def version(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def test_tensors_are_read_into_reserved_ranges_and_seen_without_a_copy(shard: Path) -> None:
    arena = _core.HostArena(1024, "layer 7")
    assert (arena.name, arena.bytes, arena.state, arena.device_address) == ("layer 7", 1024, "empty", None)
    assert arena.address % HUGE == 0
    offsets = [arena.reserve(100), arena.reserve(400)]
    assert offsets == [0, 256]
    arena.read_file(str(shard), 4000, offsets[1], 400, version(shard))
    assert arena.state == "filling"
    arena.seal()
    assert arena.state == "sealed"
    view = arena.view(offsets[1], 400)
    assert view.dtype == np.uint8 and not view.flags.writeable
    assert view.ctypes.data == arena.address + 256
    np.testing.assert_array_equal(view.view(np.uint32), np.arange(1000, 1100))
    with pytest.raises(_core.ArenaError, match="sealed"):
        arena.write(0, np.zeros(1, np.uint8))
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.setflags(write=True)
    del arena
    gc.collect()
    assert view.view(np.uint32)[99] == 1099  # the view keeps the memory


def test_read_file_lets_other_threads_run(shard: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    arena = _core.HostArena(64, "waits")
    failure: list[BaseException] = []

    def read() -> None:
        try:
            arena.read_file(str(fifo), 0, 0, 64)  # opening a FIFO waits for its writer
        except _core.ArenaError as e:
            failure.append(e)

    reader = threading.Thread(target=read)
    reader.start()
    with fifo.open("wb"):  # were the GIL held by the reader, this line would never run
        pass
    reader.join(60)
    assert not reader.is_alive()
    assert "Illegal seek" in str(failure[0])  # and a pipe is refused, in words


def test_files_that_are_short_or_changed_are_refused_by_name(shard: Path) -> None:
    arena = _core.HostArena(4096, "bad")
    with pytest.raises(_core.ArenaError, match=r"shard\.bin' ends at byte 400000, 100 bytes from 399950"):
        arena.read_file(str(shard), 399_950, 0, 100)
    with pytest.raises(_core.ArenaError, match="incomplete"):
        arena.seal()
    before = version(shard)
    os.utime(shard, ns=(0, before[1] + 1))
    with pytest.raises(_core.ArenaError, match="changed since its header was read"):
        _core.HostArena(4096, "other").read_file(str(shard), 0, 0, 8, before)


def test_stats_count_bytes_and_pages(shard: Path) -> None:
    arena = _core.HostArena(HUGE + 1, "counted")
    assert arena.stats().resident_bytes == 0
    arena.read_file(str(shard), 0, 0, 8192)
    stats = arena.stats()
    assert (stats.bytes, stats.mapped_bytes, stats.read_bytes) == (HUGE + 1, 2 * HUGE, 8192)
    assert 8192 <= stats.resident_bytes <= HUGE
    assert stats.huge_bytes in (0, HUGE)
    assert stats.pinned_bytes == 0


def test_arenas_are_page_locked_through_the_device_and_released_with_it() -> None:
    device = _core.HostDevice(pin_chunk_bytes=HUGE)
    arena = _core.HostArena(3 * HUGE, "locked", device)
    assert arena.device_address == arena.address
    assert device.pinned_bytes == arena.stats().pinned_bytes == 3 * HUGE
    del arena
    gc.collect()
    assert device.pinned_bytes == 0
    device.fail_pin_after(1)
    with pytest.raises(_core.DeviceFailure, match=r"arena 'refused': page-locking 6\.29 MB failed"):
        _core.HostArena(3 * HUGE, "refused", device)
    assert device.pinned_bytes == 0


def test_an_arena_keeps_its_device() -> None:
    arena = _core.HostArena(16, "a", _core.HostDevice())
    gc.collect()
    arena.seal()
    assert arena.stats().pinned_bytes == HUGE


def test_a_device_that_does_not_exist() -> None:
    assert issubclass(_core.DeviceFailure, RuntimeError)
    with pytest.raises(_core.DeviceFailure, match="10000"):  # no such GPU, or no CUDA at all
        _core.cuda_device(10_000)
