"""Look at a model folder before anything is loaded: is it an EXL3 GLM-5.3-Flash checkpoint, and if not, what is it?

Only cheap checks that give a better message than a failed load; the checkpoint reader stays the judge of the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CheckpointError

T = TypeVar("T")
BUNDLED = Path(__file__).resolve().parent.parent / "models" / "nano"
GET_ONE = "run `glm53 pull`, or name an EXL3 checkpoint with --model-dir"


def _readable(look: Callable[[Path], T]) -> Callable[[Path], T]:
    """`look`, with a CheckpointError where this user may not look into the folder."""

    @wraps(look)
    def checked(path: Path) -> T:
        try:
            return look(path)
        except OSError as e:
            raise CheckpointError(
                f"{path}: cannot be read ({e.strerror}); let this user read it, or name another folder with --model-dir"
            ) from None

    return checked


@_readable
def is_missing(path: Path) -> bool:
    """True where a download may start: nothing there yet, or an unfinished download of our own. Raises CheckpointError
    where this user may not look."""
    if not path.exists():
        return True
    if not path.is_dir() or (path / "config.json").exists():
        return False
    names = {p.name for p in path.iterdir()}
    return not names or ".cache" in names or names <= {"lost+found"}


@_readable
def check(path: Path) -> dict[str, Any]:
    """The parsed config.json of a usable-looking folder. Raises CheckpointError: one line that says what to do."""
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder; {GET_ONE}")
    if path.is_file():
        kind = "a GGUF file" if path.suffix == ".gguf" else "a file"
        raise CheckpointError(f"{path}: {kind}, not a folder with an EXL3 checkpoint; {GET_ONE}")
    if not any(path.iterdir()):
        raise CheckpointError(f"{path}: the folder is empty; {GET_ONE}")
    if not (path / "config.json").exists():
        if any(path.glob("*.gguf")):
            raise CheckpointError(f"{path}: a GGUF model; glm53 reads EXL3 checkpoints only; {GET_ONE}")
        raise CheckpointError(f"{path}: no config.json in this folder; {GET_ONE}")
    config = _read_json(path / "config.json")
    model_type = config.get("model_type")
    if model_type != "glm5_next":
        raise CheckpointError(
            f"{path}/config.json: model_type is {model_type!r}; only glm5_next (GLM-5.3-Flash) is served; {GET_ONE}"
        )
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method != "exl3":
        raise CheckpointError(
            f"{path}/config.json: quant_method is {method!r}, not 'exl3': this is not an EXL3 checkpoint; {GET_ONE}"
        )
    if not any(path.glob("*.safetensors")):
        raise CheckpointError(f"{path}: no *.safetensors file in this folder; {GET_ONE}")
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as e:
        raise CheckpointError(f"{path}: cannot read it ({e.strerror}); check its permissions") from None
    except ValueError as e:
        raise CheckpointError(f"{path}: not valid JSON ({e}); download the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object; download the file again")
    return value
