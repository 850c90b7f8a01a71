"""What the benchmarks share: the machine, the versions, the JSON line, and the rate of steps of several streams."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def cpu_name() -> str:
    """The processor's model, or its architecture where Linux does not say."""
    name = platform.processor() or platform.machine()
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return name
    return next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), name)


def machine(gpu: str | None = None) -> dict[str, Any]:
    """This host; `gpu` is its name where the tool used one."""
    load = [round(x, 2) for x in os.getloadavg()]
    return {"gpu": gpu, "cpu": cpu_name(), "cpus": os.cpu_count(), "load_average": load}


def versions(*names: str) -> dict[str, str]:
    """Python's and those of the packages that are here."""
    out = {"python": platform.python_version()}
    for name in names:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out


def steps_rate(drawn: Sequence[Sequence[float]]) -> float:
    """tok/s of the steps that all streams take part in: from the moment on when each has drawn its first token, until
    the first one ends. No other stream's prompt is read meanwhile. drawn: seconds at which each stream's tokens were
    drawn, ascending. 0.0 where there is no such step."""
    begin, end = max(times[0] for times in drawn), min(times[-1] for times in drawn)
    tokens = sum(begin < at <= end for times in drawn for at in times)
    return tokens / (end - begin) if tokens else 0.0


def command(script: str, argv: list[str]) -> str:
    """As a person would type it."""
    return shlex.join(["python", f"bench/{script}", *argv])


def save(result: dict[str, Any], out: Path) -> None:
    """The result, indented, in a file whose folder need not exist."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def save_or_print(result: dict[str, Any], out: Path | None) -> None:
    """The same, or on standard output where no file is named."""
    if out is not None:
        save(result, out)
    else:
        print(json.dumps(result, indent=1))


def emit(result: dict[str, Any], out: Path | None) -> None:
    """One JSON line on standard output, and the same, indented, in a file."""
    print(json.dumps(result), flush=True)
    if out is not None:
        save(result, out)


def print_bars(bars: dict[str, Any]) -> None:
    """A line each, with what is wanted of it and whether it holds, if that is known; a bar may be its mere value."""
    for name, bar in bars.items():
        held = bar if isinstance(bar, dict) else {"value": bar}
        verdict = {True: "ok  ", False: "MISS", None: "    "}[held.get("ok")]
        print(f"{verdict} {name} {held['value']}{' (want ' + str(held['want']) + ')' if 'want' in held else ''}")


def say(text: str) -> None:
    """A line for people, beside the JSON."""
    print(text, file=sys.stderr, flush=True)
