"""One safetensors file: its header checked against its bytes, and positioned reads.

Own parser, because the readers need file offsets (expert bytes go straight into arenas) and the strictness: overlaps,
holes, trailing bytes and truncation are refused. Format: u64 little-endian header length, JSON, data.
States: open -> closed. The identity (size, mtime, inode) taken at open must still hold after every read.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
              "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}  # fmt: skip
_MAX_HEADER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `offset` is absolute in `file`, `nbytes` its length."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def short(value: object) -> str:
    """What a file says, as part of an error of one readable line."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"{short(twice)} appears twice in the header")
    return values


class SafetensorsFile:
    """Header and reads of one file. Raises CheckpointError for anything that is not exactly as the format says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer blocks
        except OSError as e:
            raise CheckpointError(f"{path}: cannot be opened ({e.strerror})") from e
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise CheckpointError(f"{path}: not a regular file; remove what does not belong")
            self._identity = self._stat()
            self.tensors = self._parse()
        except BaseException:
            self.close()
            raise

    def _stat(self) -> tuple[int, int, int]:
        s = os.fstat(self._fd)
        return s.st_size, s.st_mtime_ns, s.st_ino

    def _head(self) -> bytes:
        try:
            return os.pread(self._fd, 8, 0)
        except OSError as e:
            raise CheckpointError(f"{self.path}: read failed ({e.strerror})") from e

    def _parse(self) -> dict[str, TensorInfo]:
        size = self._identity[0]
        head = self._head()
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > _MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointError(
                f"{self.path}: not a safetensors file or truncated ({size} bytes, header of {length} announced); "
                "download it again"
            )
        try:
            entries = json.loads(os.pread(self._fd, length, 8), object_pairs_hook=_no_duplicates)
            entries.pop("__metadata__", None)
            tensors = {name: self._entry(name, e, 8 + length) for name, e in entries.items()}
        except (CheckpointError, MemoryError):
            raise
        except OSError as e:
            raise CheckpointError(f"{self.path}: read failed ({e.strerror})") from e
        except Exception as e:
            raise CheckpointError(f"{self.path}: corrupt safetensors header ({e}); download it again") from e
        self._check_extents(tensors, 8 + length)
        return tensors

    def _entry(self, name: str, entry: dict[str, Any], data: int) -> TensorInfo:
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if entry["dtype"] not in ITEM_BYTES or any(not isinstance(n, int) or n < 0 for n in (*shape, begin, end)):
            raise CheckpointError(f"{self.path}: {name}: corrupt header entry {short(entry)}; download it again")
        nbytes = math.prod(shape) * ITEM_BYTES[entry["dtype"]]
        if end - begin != nbytes:
            raise CheckpointError(
                f"{self.path}: {name}: {end - begin} bytes stored, {entry['dtype']} {list(shape)} needs {nbytes}; "
                "download it again"
            )
        return TensorInfo(name, entry["dtype"], shape, self.path, data + begin, nbytes)

    def _check_extents(self, tensors: dict[str, TensorInfo], data: int) -> None:
        size, at, last = self._identity[0], data, ""
        for t in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
            if t.offset + t.nbytes > size:
                raise CheckpointError(
                    f"{self.path}: {t.name}: file truncated ({size} bytes, tensor ends at {t.offset + t.nbytes}); "
                    "download it again"
                )
            if t.offset != at:
                what = f"overlaps {last}" if t.offset < at else f"follows a hole of {t.offset - at} bytes"
                raise CheckpointError(f"{self.path}: {t.name}: {what}; corrupt header, download it again")
            at, last = t.offset + t.nbytes, t.name
        if at != size:
            raise CheckpointError(f"{self.path}: {size - at} bytes beyond the last tensor; download it again")

    @property
    def version(self) -> tuple[int, int]:
        """(st_size, st_mtime_ns) at open."""
        return self._identity[:2]

    def read_into(self, tensor: TensorInfo, buffer: memoryview) -> None:
        """Fill a writable byte buffer of exactly `tensor.nbytes`. Raises CheckpointError if the file changed."""
        if buffer.nbytes != tensor.nbytes:
            raise ValueError(f"{tensor.name}: buffer of {buffer.nbytes} bytes for {tensor.nbytes}")
        done = 0
        while done < tensor.nbytes:
            try:
                n = os.preadv(self._fd, [buffer[done:]], tensor.offset + done)
            except OSError as e:
                raise CheckpointError(f"{self.path}: {tensor.name}: read failed ({e.strerror})") from e
            if n == 0:
                raise CheckpointError(f"{self.path}: {tensor.name}: file became shorter while reading; load it again")
            done += n
        if self._stat() != self._identity:
            raise self.changed(tensor.name)

    def changed(self, name: str) -> CheckpointError:
        """The error for a file that is no longer the one that was opened."""
        return CheckpointError(f"{self.path}: {name}: file changed while reading; retry when nothing writes to it")

    def verify_unchanged(self) -> None:
        """Raise CheckpointError if the path no longer names the file that was opened, or its content changed."""
        try:
            s = os.stat(self.path)
        except OSError:
            raise self.changed("whole file") from None
        if (s.st_size, s.st_mtime_ns, s.st_ino) != self._identity:
            raise self.changed("whole file")

    def close(self) -> None:
        """Release the descriptor; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_folder(model_dir: Path) -> Iterator[SafetensorsFile]:
    """Every *.safetensors of the folder in name order, whether an index lists it or not."""
    for path in sorted(model_dir.glob("*.safetensors")):
        yield SafetensorsFile(path)
