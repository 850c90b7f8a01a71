"""Command-line options made from the settings, and a parsed command line turned back into Settings."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path

from ..config import Settings, load_settings, specs
from ..config_values import Spec
from ..console import say
from ..errors import ConfigError
from ..host import Workers


def add_settings(parser: argparse.ArgumentParser, *groups: str, without: Collection[str] = ()) -> None:
    """Add `--config` and the options of every setting in `groups` (all, if none is named) but those in `without`, which
    mean nothing to this command."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file (default: $GLM53_CONFIG or /etc/glm53/config.toml)"
    )
    for group in dict.fromkeys(s.group for s in specs()):
        if groups and group not in groups:
            continue
        box = parser.add_argument_group(group)
        for spec in (s for s in specs() if s.group == group and s.name not in without):
            unit = f" [{spec.unit}]" if spec.unit else ""
            text = f"{spec.help}{unit} ({_default(spec)}{spec.env})".replace("%", "%%")
            common = {"dest": f"set_{spec.name}", "default": argparse.SUPPRESS, "help": text}
            if spec.switch:
                box.add_argument(*spec.flags, action=argparse.BooleanOptionalAction, **common)  # type: ignore[arg-type]
            else:
                box.add_argument(*spec.flags, metavar=spec.name.rsplit("_", 1)[-1].upper(), **common)  # type: ignore[arg-type]


def _default(spec: Spec) -> str:
    """The setting's default for --help; nothing where the help text itself says what `auto` or an empty list does."""
    value = spec.default() if callable(spec.default) else spec.default
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return f"default {'on' if value else 'off'}, "
    return f"default {','.join(value) if isinstance(value, tuple) else value}, "


def settings_from(args: argparse.Namespace, **forced: object) -> Settings:
    """Settings of this command line (the last value of a repeated option wins); warnings go to stderr."""
    overrides = {name[4:]: value for name, value in vars(args).items() if name.startswith("set_")}
    settings = load_settings({**overrides, **forced}, config=args.config)
    for warning in settings.warnings:
        say(f"glm53: warning: {warning}")
    return settings


def check_cpu_tier(settings: Settings) -> None:
    """Raise ConfigError for CPUs or kernels that this machine does not have; the latter the native module knows."""
    Workers.of(settings).require_cpus()
    try:
        from .. import _core
    except ImportError:
        return
    here = _core.cpu_features()["isas"]
    if settings.isa is not None and settings.isa not in here:
        raise ConfigError(
            f"isa = {settings.isa}: this processor runs {', '.join(here)}; name one of these, or leave isa out"
        )
