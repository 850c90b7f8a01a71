"""What one setting is: its Spec, how its value is read (a parser per kind) and written (TOML). Pure functions.

A parser takes what TOML, the environment or the command line gave and returns the value. It raises ValueError with the
rule that was broken; `config` adds which setting it was and where it came from.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

ENV_PREFIX = "GLM53_"
LAST_CPU = 8191
"""CPUs are numbered below the kernel's CONFIG_NR_CPUS, which is 8192 at most on x86-64."""

Parse = Callable[[object], Any]


@dataclass(frozen=True, slots=True)
class Spec:
    """What is known about one setting besides its value."""

    name: str
    default: Any
    parse: Parse
    group: str
    unit: str
    help: str
    own_flags: tuple[str, ...]
    switch: bool
    secret: bool

    @property
    def env(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.name.upper()

    @property
    def flags(self) -> tuple[str, ...]:
        """All spellings on the command line: those that were given, else -- and the name with dashes."""
        return self.own_flags or ("--" + self.name.replace("_", "-"),)


def setting(
    default: Any,
    parse: Parse,
    group: str,
    help: str,
    *,
    unit: str = "",
    flags: tuple[str, ...] = (),
    switch: bool = False,
    secret: bool = False,
) -> Any:
    """A field of `Settings` that carries its Spec; a callable `default` is called for each object."""
    meta = {"parse": parse, "group": group, "help": help, "unit": unit, "own_flags": flags, "switch": switch}
    make: dict[str, Any] = {"default_factory": default} if callable(default) else {"default": default}
    return field(**make, metadata={**meta, "secret": secret})


def integer(low: int, high: int = 2**31 - 1) -> Parse:
    """A whole number of `low` to `high`."""

    def parse(raw: object) -> int:
        if isinstance(raw, bool) or not isinstance(raw, int | str):
            raise ValueError("a whole number is needed")
        try:
            value = int(raw)
        except ValueError:
            raise ValueError("a whole number is needed") from None
        if not low <= value <= high:
            raise ValueError(f"must be {low} to {high}" if high < 2**31 - 1 else f"must be at least {low}")
        return value

    return parse


def number(low: float, *, above: bool = False) -> Parse:
    """A finite number of at least `low`, or above it."""

    def parse(raw: object) -> float:
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise ValueError("a number is needed")
        try:
            value = float(raw)
        except (ValueError, OverflowError):  # TOML's whole numbers have no limit
            raise ValueError("a number is needed") from None
        if not isfinite(value) or not (value > low if above else value >= low):
            raise ValueError(f"must be {'above' if above else 'at least'} {low:g} and finite")
        return value

    return parse


def choice(*allowed: str) -> Parse:
    """One of the words `allowed`."""

    def parse(raw: object) -> str:
        if raw not in allowed:
            raise ValueError(f"must be {', '.join(allowed[:-1])} or {allowed[-1]}")
        return str(raw)

    return parse


def truth(raw: object) -> bool:
    """true or false, also as 1/0, yes/no, on/off."""
    if isinstance(raw, bool):
        return raw
    word = str(raw).strip().lower()
    if word in {"1", "true", "yes", "on"}:
        return True
    if word in {"0", "false", "no", "off"}:
        return False
    raise ValueError("must be true or false")


def text(raw: object) -> str:
    """A string that has more than white space in it, and no NUL, which neither a path nor a name may have."""
    if not isinstance(raw, str) or not raw.strip() or "\0" in raw:
        raise ValueError("a non-empty string is needed")
    return raw


def path(raw: object) -> Path:
    """A path; ~ is the home folder."""
    try:
        return raw if isinstance(raw, Path) else Path(text(raw)).expanduser()
    except RuntimeError:
        raise ValueError("that home folder is not known here: write the path without ~") from None


def words(raw: object) -> tuple[str, ...]:
    """A list of strings, or one string split at commas."""
    items = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
        raise ValueError("a list of strings is needed")
    return tuple(i.strip() for i in items if i.strip())


def keys(raw: object) -> tuple[str, ...]:
    """`words`; but a text or a list of texts that holds none is refused, since without keys a server is open to
    everybody. An empty list says that it is meant to be."""
    found = words(raw)
    if not found and (isinstance(raw, str) or raw):
        raise ValueError("a key is needed; leave the setting out for a server without keys")
    return found


def auto(inner: Parse) -> Parse:
    """`auto` (or nothing) leaves the value None: measured or derived when it is needed."""

    def parse(raw: object) -> Any:
        if raw is None or (isinstance(raw, str) and raw in {"auto", ""}):
            return None
        try:
            return inner(raw)
        except ValueError as e:
            raise ValueError(f"{e}; or auto") from None

    return parse


def cpu_list(raw: object) -> tuple[int, ...]:
    """ "2-5,8" as (2, 3, 4, 5, 8); the kernel's own notation, see cpuset(7). TOML may give whole numbers instead."""
    parts = raw.split(",") if isinstance(raw, str) else raw if isinstance(raw, list) else [raw]
    cpus: list[int] = []
    for part in parts:
        match = None if isinstance(part, bool) else re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", str(part))
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise ValueError("must be a CPU list like 2-23 or 2-5,8")
        if last > LAST_CPU:
            raise ValueError(f"CPU {last} is beyond {LAST_CPU}, the last that Linux knows")
        cpus.extend(range(first, last + 1))
    return tuple(dict.fromkeys(cpus))


def toml_value(value: object) -> str:
    """The value as TOML text; None stands as "auto"."""
    if value is None:
        return '"auto"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        if value and all(isinstance(v, int) for v in value):
            return '"' + ",".join(str(v) for v in value) + '"'
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
