"""The `glm53` command: one parser, one place where errors become one line on stderr and an exit status.

Each subcommand is a module with `add(subparsers)` and a `run(args) -> int`; heavy imports (torch, aiohttp) happen
inside `run`, so that `glm53 --help` and a mistyped option answer at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from ..config import specs
from ..console import put, say
from ..errors import ConfigError, Glm53Error, nearest
from . import doctor, gpu_tools, plan, pull, serve, service


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors (ConfigError) and no abbreviations, so that `-c` never means `-cs`."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Raise `message` with where to read on."""
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """As argparse's, but what is not known is an error, which is told before something that is missing."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            known, extra = super().parse_known_args(words, namespace)
        except ConfigError as e:
            options = [*self._options(), "--"]
            wrong = next((w for w in words if w.startswith("--") and w.partition("=")[0] not in options), None)
            mine = str(e).endswith(f"(see {self.prog} --help)")  # not a subcommand's
            if wrong and mine and "arguments are required" in str(e):
                self._unknown(wrong)
            raise
        if extra:
            self._unknown(extra[0])
        return known, extra

    def _options(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]

    def _unknown(self, argument: str) -> NoReturn:
        word = argument.partition("=")[0]
        if any(word in spec.flags for spec in specs()):
            self.error(f"{self.prog} takes no {word}: that setting changes nothing here")
        self.error(f"unknown argument {argument}{nearest(word, self._options())}")


class _Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        print_version()
        parser.exit()


def print_version() -> None:
    """Version, whether the CUDA objects are in this build, the GPU seen and the instruction set in use."""
    from ..host import version_lines

    put("\n".join(version_lines(__version__)) + "\n")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line, as `--help` shows it."""
    parser = Parser(prog="glm53", description="GLM-5.3-Flash from one 24 GB GPU and host RAM")
    parser.add_argument("--version", action=_Version, nargs=0, help="what this build is and what it finds here")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for module in (serve, doctor, plan, pull, service, gpu_tools):
        module.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 78 for a wrong configuration or model (do not retry), else 1."""
    _open_streams()
    try:
        args = build_parser().parse_args(argv)
        status: int = args.run(args)
        return status
    except Glm53Error as e:
        say(f"glm53: error: {' '.join(str(e).split())}")
        return e.exit_code
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _open_streams() -> None:
    """Started with `>&-`, a command has no stdout at all: what it says goes nowhere then, and nothing that it opens
    later gets that number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (open until the end)
