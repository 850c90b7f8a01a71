"""Saves the first load's minute and a half: one configuration for each Triton kernel that exllamav3 would tune.

Every configuration computes the same function; tuning compiles dozens to time them. The choice is the one glm53 ships
for this GPU architecture, made with another number of heads, else the kernel's first.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

PINS = Path(__file__).parents[2] / "python" / "glm53" / "engine" / "exllama" / "triton_pins"
PACKAGE = "exllamav3.vendor.fla"


def shipped(arch: str) -> dict[str, dict[str, Any]]:
    """Kernel name -> the first shipped pick for `arch`; empty if there is no such file."""
    path = PINS / f"{arch}.json"
    picks = json.loads(path.read_text())["picks"] if path.exists() else {}
    return {name: rows[0] for name, rows in picks.items() if rows}


def tuners() -> dict[str, Any]:
    """Kernel name -> Autotuner of the vendored KDA code."""
    found = {}
    for info in pkgutil.iter_modules(importlib.import_module(PACKAGE).__path__):
        for value in vars(importlib.import_module(f"{PACKAGE}.{info.name}")).values():
            stack = [value]
            while type(stack[-1]).__module__.startswith("triton") and hasattr(stack[-1], "fn"):
                stack.append(stack[-1].fn)
            tuner = next((d for d in stack if hasattr(d, "configs") and hasattr(d, "cache")), None)
            if tuner is not None:
                found[stack[-1].__name__] = tuner
    return found


def fix_choices(arch: str) -> int:
    """Leave every tuned kernel one configuration; returns how many are those glm53 ships."""
    wanted, known = shipped(arch), 0
    for name, tuner in tuners().items():
        row = wanted.get(name)
        match = [
            c
            for c in tuner.configs
            if row and (c.kwargs, c.num_warps, c.num_stages) == (row["kwargs"], row["num_warps"], row["num_stages"])
        ]
        tuner.configs = match[:1] or tuner.configs[:1]
        known += len(match) > 0
    return known


def prepare() -> None:
    """`fix_choices` for the current GPU, said in the log; whatever goes wrong, exllamav3 tunes as it always does."""
    try:
        import torch

        major, minor = torch.cuda.get_device_capability()
        print(f"kernels: {fix_choices(f'sm_{major}{minor}')} shipped choices", flush=True)
    except Exception as error:
        print(f"kernels: not fixed: {type(error).__name__}: {error}", flush=True)
