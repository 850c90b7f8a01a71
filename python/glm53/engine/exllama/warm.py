"""The learned warm start: how often each expert was picked, kept between runs in the state directory.

File: npz with `heat` uint16 (moe layers, experts) and a `key` naming the checkpoint it belongs to. Written to a
temporary name and renamed, so that a crash leaves the old one. A file that does not fit is ignored with a warning.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)
FILE_NAME = "expert-heat.npz"

Heat = npt.NDArray[np.uint16]


def checkpoint_key(model_dir: Path, layers: int, experts: int) -> str:
    """Identity of a checkpoint: shape and the size of each of its tensor files."""
    files = sorted((p.name, p.stat().st_size) for p in model_dir.glob("*.safetensors"))
    return f"{layers}x{experts}:" + ",".join(f"{name}={size}" for name, size in files)


def save(path: Path, key: str, heat: Heat) -> None:
    """Write atomically. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as f:
            np.savez_compressed(f, heat=heat, key=np.array(key))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path, key: str, size: int) -> Heat | None:
    """The saved heat (size,), or None when there is none that fits."""
    try:
        with np.load(path, allow_pickle=False) as data:
            heat: Any = data["heat"]
            found = str(data["key"])
    except FileNotFoundError:
        return None
    except Exception as e:
        log.warning("%s: unreadable routing statistics are ignored (%s)", path, e)
        return None
    if found != key or heat.dtype != np.uint16 or heat.size != size:
        log.warning("%s: routing statistics of another checkpoint are ignored", path)
        return None
    return np.ascontiguousarray(heat.reshape(-1))
