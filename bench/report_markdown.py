"""docs/results.md from the results: what is not met, what is not measured, and each figure with its origin.

`quotable` is every figure that the documents may state, with its unit: the bars and the values of the plots.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from report_plots import figure, plots_of

Results = Sequence[tuple[str, dict[str, Any]]]

HEAD = """# Results

<!-- Made by `python3 bench/report.py --markdown docs/results.md` from bench/results; a test compares. -->

Every figure that the documents of this repository state is here, with the command that made it, the machine, the day
and the versions; the raw figures are in the file of [bench/results](../bench/results) named beside it. A bar is a
figure with a limit that was set before it was measured. `python3 bench/report.py` draws the same files as plots.

To run a command again, be in the repository, in the environment that `scripts/test` makes (`.venv/bin` first on PATH;
the clients that take `--url` and `bench/report.py` need no package).

* CHECKPOINT is a folder that `python bench/make_flash.py CHECKPOINT` fills, for gpu_panel.py with `--layers 4 --clamp
  5`.
* DIR is any folder: each stage leaves a record in it, and the same script with `--report DIR --out FILE` makes the
  result of them. SITE is in the help of bench/gpu_peer.py.
* A command with `--url` asks a server that is running: `glm53 serve --demo --device cpu --port PORT`, and for delivery
  at a known rate `glm53 serve --scripted bench/steady.jsonl --port PORT`.
* Simulations whose host is "measured" take their times from the newest result of fast mode.
"""
TELLING = ("trace", "slots", "rows", "tokens", "streams", "rate")
"""Settings by which results of one kind are told apart."""
NAMES = {"tok/s": "tokens/s", "times": "x", "×": "x", "seconds": "s", "µs": "us"}


def markdown(results: Results, known: dict[str, Any], given: Sequence[dict[str, str]]) -> str:
    """The page."""
    bars = [(k, as_bar(v), name) for name, r in results for k, v in (r.get("bars") or {}).items()]
    limits = [b for _, b, _ in bars if "ok" in b]
    parts = [HEAD, f"{sum(b['ok'] for b in limits)} of {len(limits)} recorded bars are met.\n"]
    parts.append("## Not met\n\n" + (not_met(bars, known) or "Nothing that was measured.\n"))
    parts.append("## Not measured yet\n\n" + (not_measured(unmeasured(results, known)) or "Nothing that is wanted.\n"))
    results = in_order(results)
    titles = titles_of(results)
    parts += [section(name, title, r, known) for (name, r), title in zip(results, titles, strict=True)]
    rows = [[g["figure"], g["is"], f"`{g['source']}`"] for g in given]
    parts.append("## Figures that are no measurements\n\nSizes, requirements and settings.\n")
    parts.append(table(["figure", "what it is", "stated in"], rows))
    return "\n".join(parts)


def as_bar(value: Any) -> dict[str, Any]:
    """A bar, also where only a figure was recorded."""
    return value if isinstance(value, dict) and "value" in value else {"value": value}


def wanted(bar: dict[str, Any]) -> str:
    """The limit with its direction, which a bare number leaves to the verdict beside it."""
    want, value = bar.get("want", ""), bar["value"]
    if isinstance(want, str):
        sign, _, number = want.partition(" ")
        return f"{sign} {figure(float(number))}" if sign in ("<=", ">=") else want
    if isinstance(want, bool) or value == want:
        return figure(want)
    below = bar.get("less_is_better", (value < want) == bar["ok"])
    return f"{'<=' if below else '>='} {figure(want)}"


def unmeasured(results: Results, known: dict[str, Any]) -> dict[str, Any]:
    """Bars that are wanted and in no result."""
    recorded = {k for _, r in results for k in r.get("bars") or {}}
    return {k: v for k, v in known.items() if v.get("wanted") and k not in recorded}


def in_order(results: Results) -> Results:
    """The results of a GPU first, of these the latest day's, and of these the ones with limits."""
    limited = sorted(results, key=lambda r: not any("want" in as_bar(b) for b in (r[1].get("bars") or {}).values()))
    latest = sorted(limited, key=lambda r: r[0][:10], reverse=True)
    return sorted(latest, key=lambda r: not (isinstance(r[1]["machine"], dict) and r[1]["machine"].get("gpu")))


def titles_of(results: Results) -> list[str]:
    """A heading for each result; those of one kind are told apart by the settings that differ, or by their file."""
    headings = []
    for name, result in results:
        alike = [r.get("settings") or {} for _, r in results if r["what"] == result["what"]]
        held = result.get("settings") or {}
        keys = [k for k in TELLING if len({str(s.get(k)) for s in alike}) > 1 and held.get(k)]
        apart = [", ".join(f"{k} {figure(held[k])}" for k in keys)] if keys else [name] if len(alike) > 1 else []
        headings.append(" - ".join([str(result["what"][:1].upper() + result["what"][1:]), *apart]))
    return [h if headings.count(h) == 1 else f"{h} - {name}" for h, (name, _) in zip(headings, results, strict=True)]


def versions_of(result: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in (result.get("versions") or {}).items())


def cell(words: Any) -> str:
    return str(words).replace("|", "\\|").replace("\n", " ")


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join(lines + [f"| {' | '.join(cell(c) for c in row)} |" for row in rows]) + "\n"


def bar_row(name: str, bar: dict[str, Any], known: dict[str, Any]) -> list[str]:
    """Name, value, limit, what it says."""
    told = known.get(name, bar)
    value = f"{figure(bar['value'])} {told.get('unit', '')}".strip()
    return [name, value, wanted(bar) if "want" in bar else "", told.get("says", "")]


def not_met(bars: Sequence[tuple[str, dict[str, Any], str]], known: dict[str, Any]) -> str:
    rows = [[*bar_row(key, bar, known), f"`{name}`"] for key, bar, name in bars if bar.get("ok") is False]
    return table(["bar", "value", "wanted", "what it says", "from"], rows) if rows else ""


def not_measured(missing: dict[str, Any]) -> str:
    rows = [[k, v["wanted"], v["says"], f"`{v['command']}`" if v["command"] else "-"] for k, v in missing.items()]
    return table(["bar", "wanted", "what it says", "command"], rows) if rows else ""


def machine_of(result: dict[str, Any]) -> str:
    """The machine in words, and the server where one was asked; what it was doing besides is in the file."""
    machine = result["machine"]
    if not isinstance(machine, dict):
        return str(machine)
    server = result.get("server") or {}
    parts = [f"server: {server['device']}"] if server.get("device") else []
    for key, value in machine.items():
        number = re.search(r"\d+\.\d+\.\d+", str(value))
        parts += {
            "gpu": [str(value) if value else "no GPU"],
            "cpu": [str(value)],
            "driver": [f"driver {number.group()}"] if number else [],
            "cpus": [f"{value} logical CPUs"],
            "logical_cpus": [f"{value} logical CPUs"],
            "load_average": [],
        }.get(key, [f"{value / 1e9:.0f} GB of RAM" if key.endswith("_bytes") else f"{key.replace('_', ' ')} {value}"])
    return ", ".join(parts)


def section(name: str, title: str, result: dict[str, Any], known: dict[str, Any]) -> str:
    """One result: its origin, its bars, the figures of its plots."""
    day = re.match(r"\d{4}-\d\d-\d\d", name)
    origin = [("command", f"`{result['command']}`"), ("file", f"`{name}`"), ("day", day.group() if day else "-"),
              ("machine", machine_of(result)), ("versions", versions_of(result)),
              ("limits", result.get("limits", ""))]  # fmt: skip
    parts = [f"## {title}\n", table(["", ""], [[k, v] for k, v in origin if v])]
    rows = []
    for key, bar in ((k, as_bar(v)) for k, v in (result.get("bars") or {}).items()):
        *figures, says = bar_row(key, bar, known)
        rows.append([*figures, {True: "yes", False: "**no**"}.get(bar.get("ok"), ""), says])
    if rows:
        parts.append(table(["bar", "value", "wanted", "met", "what it says"], rows))
    for plot in plots_of(result, name):
        if len(plot.x) > 12:  # a curve: the HTML page shows it
            continue
        heads = [f"{plot.title}, {plot.unit}" if plot.unit else plot.title, *plot.series]
        body = [[str(x).replace("\n", " ") or "all"] for x in plot.x]
        for values in plot.series.values():
            for row, value in zip(body, values, strict=True):
                row.append("" if value is None else figure(value))
        parts.append(table(heads, body))
    return "\n".join(parts)


def quotable(results: Results, known: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """(value, unit) of every figure on the page; shares also as %."""
    for name, result in results:
        for key, value in (result.get("bars") or {}).items():
            held = as_bar(value)
            yield from spoken(held["value"], known.get(key, held).get("unit", ""))
        for plot in plots_of(result, name):
            for values in plot.series.values():
                for value in values:
                    yield from spoken(value, plot.unit)


def spoken(value: Any, unit: str) -> Iterator[tuple[float, str]]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value), unit
        if unit in ("", "share", "x"):
            yield 100 * value, "%"


FIGURE = re.compile(
    r"(?<![\w.,/-])(\d[\d,]*(?:\.\d+)?)\s?"
    r"(GB/s|GiB|GB|MiB|MB|kB|KiB|TB|ms|us|µs|tokens/s|tok/s|bpw|nats|seconds|minutes|hours|times|percent|%|×|x|s|h)(?![\w/])"
)


def figures_in(words: str) -> list[tuple[str, str, str]]:
    """(as written, number, unit) of every number with a unit or ratio in a text."""
    return [(" ".join(m.group().split()), m.group(1).replace(",", ""), NAMES.get(m.group(2), m.group(2)))
            for m in FIGURE.finditer(words)]  # fmt: skip


def is_measured(number: str, unit: str, known: Sequence[tuple[float, str]]) -> bool:
    """Whether a recorded figure of that unit rounds to the number as it is written."""
    decimals = len(number.partition(".")[2])
    return any(u == unit and round(v, decimals) == float(number) for v, u in known)
