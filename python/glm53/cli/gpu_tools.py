"""`glm53 prepare` and `glm53 pin`: one-time work on a GPU host, done by the GPU engine's own module."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import DeviceError
from . import model_dir
from .common import add_settings, settings_from


def add(commands: Any) -> None:
    """Register both subcommands."""
    prepare = commands.add_parser("prepare", help="compile exllamav3's extension and warm the kernels, once per host")
    add_settings(prepare, "model", "engine", "expert cache")
    prepare.set_defaults(run=lambda args: _run("prepare", args))
    pin = commands.add_parser("pin", help="fix this GPU architecture's Triton choices in a file")
    pin.add_argument("--out", type=Path, metavar="FILE", help="where to write the picks")
    add_settings(pin, "model", "engine", "expert cache")
    pin.set_defaults(run=lambda args: _run("pin", args))


def _run(name: str, args: argparse.Namespace) -> int:
    from ..host import Host
    from .serve import choose_device

    settings = settings_from(args, device="cuda")
    choose_device(settings, Host())
    model_dir.check(settings.model_dir)
    try:
        from ..engine.exllama import tools
    except ImportError as e:
        raise DeviceError(f"glm53 {name} needs the GPU engine ({e}); pip install 'glm53[cuda]'") from None
    return tools.prepare(settings, args) if name == "prepare" else tools.pin(settings, args)
