"""Triton's autotune picks of exllamav3's KDA kernels, fixed by a file per GPU architecture.

Which configuration a kernel runs with changes the order of its sums; two hosts that tune by themselves answer slightly
differently. File: JSON {"arch": "sm_90", "exllamav3": "1.5.1", "triton": ..., "picks": {kernel: [{key, kwargs,
num_warps, num_stages}]}}; `key` is the autotuner's own (shape values and dtypes).
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

from ...errors import ConfigError

PIN_DIR = Path(__file__).parent / "triton_pins"
PACKAGE = "exllamav3.vendor.fla"


def pin_path(arch: str, chosen: Path | None) -> Path | None:
    """The file to use: the chosen one, else the shipped one, else None. Raises ConfigError if the chosen is missing."""
    if chosen is not None:
        if not chosen.is_file():
            raise ConfigError(f"triton_pin: no file {chosen}; name one that `glm53 pin` wrote, or leave it out")
        return chosen
    shipped = PIN_DIR / f"{arch}.json"
    return shipped if shipped.is_file() else None


def autotuners() -> dict[str, Any]:
    """Kernel name -> Autotuner of every autotuned kernel of the vendored KDA code."""
    package = importlib.import_module(PACKAGE)
    found: dict[str, Any] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{PACKAGE}.{info.name}")
        for value in vars(module).values():
            tuner = _tuner_in(value)
            if tuner is not None:
                found[_kernel_name(tuner)] = tuner
    return found


def _tuner_in(value: Any) -> Any:
    """The Autotuner in a stack of Triton decorators, or None."""
    while value is not None and type(value).__module__.startswith("triton"):
        if hasattr(value, "configs") and hasattr(value, "cache"):
            return value
        value = getattr(value, "fn", None)
    return None


def _kernel_name(tuner: Any) -> str:
    """Name of the Python function under the decorators."""
    function = tuner
    while hasattr(function, "fn"):
        function = function.fn
    return str(function.__name__)


def _config(config: Any) -> dict[str, Any]:
    return {"kwargs": dict(config.kwargs), "num_warps": config.num_warps, "num_stages": config.num_stages}


def read_picks() -> dict[str, list[dict[str, Any]]]:
    """What the kernels run with now, for those that ran."""
    picks: dict[str, list[dict[str, Any]]] = {}
    for name, tuner in autotuners().items():
        rows = [{"key": list(key), **_config(config)} for key, config in tuner.cache.items()]
        if rows:
            picks[name] = sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))
    return picks


def write_pins(path: Path, arch: str, exllamav3: str, triton: str) -> int:
    """Write the picks in use; returns how many there are."""
    picks = read_picks()
    document = {"arch": arch, "exllamav3": exllamav3, "triton": triton, "picks": picks}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return sum(len(rows) for rows in picks.values())


def apply_pins(path: Path, arch: str) -> int:
    """Make the kernels use the file's picks; returns how many. Raises ConfigError if one is not a legal choice here."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        picks = document["picks"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path}: not a file of Triton picks ({e})") from None
    if document.get("arch") != arch:
        raise ConfigError(f"{path}: picks for {document.get('arch')}, this GPU is {arch}; make one with 'glm53 pin'")
    tuners = autotuners()
    count = 0
    for name, rows in picks.items():
        if name not in tuners:
            raise ConfigError(f"{path}: no kernel {name} in this exllamav3")
        for row in rows:
            wanted = {k: row[k] for k in ("kwargs", "num_warps", "num_stages")}
            config = next((c for c in tuners[name].configs if _config(c) == wanted), None)
            if config is None:
                raise ConfigError(f"{path}: {name} cannot run with {wanted} here; make a file with 'glm53 pin'")
            tuners[name].cache[tuple(row["key"])] = config
            count += 1
    return count
