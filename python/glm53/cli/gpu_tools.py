"""`glm53 prepare`, `glm53 pin` and `glm53 verify`: work on a GPU host beside serving, by the engine's module."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import DeviceError
from . import model_dir
from .common import add_settings, settings_from


def add(commands: Any) -> None:
    """Register the subcommands."""
    prepare = commands.add_parser("prepare", help="compile exllamav3's extension and warm the kernels, once per host")
    add_settings(prepare, "model", "engine", "expert cache")
    prepare.set_defaults(run=lambda args: _run("prepare", args))
    pin = commands.add_parser("pin", help="fix this GPU architecture's Triton choices in a file")
    pin.add_argument("--out", type=Path, metavar="FILE", help="where to write the picks")
    add_settings(pin, "model", "engine", "expert cache")
    pin.set_defaults(run=lambda args: _run("pin", args))
    verify = commands.add_parser(
        "verify", help="make the GPU's expert cache work and compare every slot with its original"
    )
    verify.add_argument("--steps", type=int, default=500, metavar="N", help="decode steps before comparing (500)")
    add_settings(verify, "model", "engine", "expert cache")
    verify.set_defaults(run=lambda args: _run("verify", args))


def _run(name: str, args: argparse.Namespace) -> int:
    from ..host import Host
    from .serve import choose_device

    settings = settings_from(args, device="cuda")
    choose_device(settings, Host(), hint="")
    model_dir.check(settings.model_dir)
    try:
        from ..engine.exllama import tools
    except ImportError as e:
        raise DeviceError(f"glm53 {name} needs the GPU engine ({e}); pip install 'glm53[cuda]'") from None
    done: int = {"prepare": tools.prepare, "pin": tools.pin, "verify": tools.verify}[name](settings, args)
    return done
