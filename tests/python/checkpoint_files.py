"""Checkpoint files taken apart and put together again, and how the strict reader refuses one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from glm53.checkpoint import Checkpoint
from glm53.errors import CheckpointError

Tensors = dict[str, tuple[str, list[int], bytes]]
EXPERT = "model.language_model.layers.1.mlp.experts.3.up_proj"


def read_file(path: Path) -> Tensors:
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n])
    return {
        k: (e["dtype"], e["shape"], raw[8 + n + e["data_offsets"][0] : 8 + n + e["data_offsets"][1]])
        for k, e in header.items()
        if k != "__metadata__"
    }


def write_file(path: Path, tensors: Tensors, change: Callable[[dict[str, Any]], None] | None = None) -> None:
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    if change:
        change(header)
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(d for _, _, d in tensors.values()))


def refuse(path: Path, *parts: str) -> None:
    """Opening fails with one line holding all the parts, and leaves no file open."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    for part in parts:
        assert part in message, message
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of this loop, and what other threads close meanwhile
            assert not Path(os.readlink(f"/proc/self/fd/{number}")).is_relative_to(path.resolve())


def edit(weights: Path, change: Callable[[Tensors], None]) -> None:
    tensors = read_file(weights)
    change(tensors)
    write_file(weights, tensors)
