"""`glm53 prepare`, `glm53 pin` and `glm53 verify`: work on a GPU host beside serving, by the engine's module."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DeviceError
from . import model_dir
from .common import add_settings, settings_from

WITHOUT = ("model_repo", "model_revision", "download", "chat_template", "device")
"""These commands work on a checkpoint that is there, and on a GPU."""


def add(commands: Any) -> None:
    """Register the subcommands."""
    for name, text in (
        ("prepare", "compile exllamav3's extension and warm the kernels, once per host"),
        ("pin", "fix this GPU architecture's Triton choices in a file"),
        ("verify", "make the GPU's expert cache work and compare every slot with its original"),
    ):
        parser = commands.add_parser(name, help=text, description=text)
        if name == "pin":
            parser.add_argument("--out", type=Path, metavar="FILE", help="default: ARCHITECTURE.json in --state-dir")
        if name == "verify":
            parser.add_argument(
                "--steps", type=int, default=500, metavar="N", help="decode steps before comparing (500)"
            )
        add_settings(parser, "model", "engine", "expert cache", without=WITHOUT)
        parser.set_defaults(run=partial(_run, name))


def _run(name: str, args: argparse.Namespace) -> int:
    from ..host import Host
    from .serve import check_mtp, choose_device

    if getattr(args, "steps", 1) < 1:
        raise ConfigError(f"--steps {args.steps}: must be at least 1")
    settings = settings_from(args, device="cuda")
    choose_device(settings, Host(), hint="")
    check_mtp(settings, "cuda")
    model_dir.check(settings.model_dir)
    try:
        from ..engine.exllama import tools
    except ImportError as e:
        raise DeviceError(f"glm53 {name} needs the GPU engine ({e}); pip install 'glm53[cuda]'") from None
    done: int = {"prepare": tools.prepare, "pin": tools.pin, "verify": tools.verify}[name](settings, args)
    return done
