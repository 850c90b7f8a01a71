#!/usr/bin/env python3
"""One self-contained HTML page from the results in bench/results: tables, plots, and the command behind each figure.

    python3 bench/report.py [--results bench/results] [--out report.html]

Reads every *.json there; nothing else goes in. A result is an object with `what`, `machine`, `versions`, `command`,
`settings`, `raw` and `bars` (named figures). It may hold `plots`, a list of
{"kind": "bars" | "lines" | "stack", "title": text, "unit": text, "x": [labels or numbers], "series": {name: [numbers]}}
("stack" piles the series up, for time by cause); sweeps and training curves are drawn without being asked. Standard
library only; the page needs no network and no script.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 260, 64, 42, 16
COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#a16207", "#475569")
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1e293b}"
    "table{border-collapse:collapse;margin:.5rem 0}"
    "td,th{border:1px solid #cbd5e1;padding:.2rem .6rem;text-align:left}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}"
    "code{background:#f1f5f9;padding:.1rem .3rem;overflow-wrap:anywhere}"
    "svg{max-width:100%;height:auto}section{margin-top:2.5rem}h2{border-bottom:1px solid #cbd5e1}small{color:#64748b}"
)


class BadResult(Exception):
    """A file is no result; the text names it."""


@dataclass
class Plot:
    """One picture; every series has as many values as x, None where there is none."""

    kind: str
    title: str
    unit: str
    x: list[Any]
    series: dict[str, list[float | None]]

    @classmethod
    def read(cls, given: dict[str, Any], where: str) -> Plot:
        try:
            plot = cls(given["kind"], given["title"], given.get("unit", ""), list(given["x"]), dict(given["series"]))
        except (KeyError, TypeError) as e:
            raise BadResult(f"{where}: a plot lacks {e}") from None
        if plot.kind not in ("bars", "lines", "stack") or any(len(v) != len(plot.x) for v in plot.series.values()):
            raise BadResult(f"{where}: plot {plot.title!r} has an unknown kind or series of unequal length")
        return plot


def text(value: Any) -> str:
    return html.escape(str(value))


def figure(value: Any) -> str:
    """A number as people read it: four significant digits, whole numbers whole."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text(json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value)
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.1f}"


def top_of(plot: Plot) -> float:
    """Upper end of the value axis."""
    if plot.kind == "stack":
        return max((sum(v[i] or 0 for v in plot.series.values()) for i in range(len(plot.x))), default=1) or 1
    return max((v for values in plot.series.values() for v in values if v is not None), default=1) or 1


def draw(plot: Plot) -> str:
    """The plot as SVG, with a title that screen readers speak."""
    high, wide = HEIGHT - BOTTOM - TOP, WIDTH - LEFT - 12
    top = top_of(plot) * 1.05
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 20 * ((len(plot.series) + 2) // 3)}" role="img">']
    parts.append(f"<title>{text(plot.title)}</title>")
    for i in range(5):
        y = TOP + high - high * i / 4
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e8f0"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" font-size="11">{figure(top * i / 4)}</text>'
        )
    parts += lines(plot, high, wide, top) if plot.kind == "lines" else columns(plot, high, wide, top)
    for i, name in enumerate(plot.series):
        x, y = LEFT + (i % 3) * 190, HEIGHT + 14 + 20 * (i // 3)
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 15}" y="{y}" font-size="12">{text(name)}</text>')
    return "".join(parts) + "</svg>"


def label(x: float, words: Any) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" font-size="11">{text(words)}</text>'


def columns(plot: Plot, high: float, wide: float, top: float) -> list[str]:
    """Bars side by side, or piled up for "stack"."""
    parts, count = [], len(plot.series)
    slot = wide / max(1, len(plot.x))
    width = slot * 0.8 / (1 if plot.kind == "stack" else max(1, count))
    for i, words in enumerate(plot.x):
        base, parts_y = LEFT + slot * i + slot * 0.1, 0.0
        for j, values in enumerate(plot.series.values()):
            value = values[i]
            if value is None:
                continue
            tall = high * value / top
            x = base if plot.kind == "stack" else base + width * j
            y = TOP + high - tall - parts_y
            colour = COLOURS[j % len(COLOURS)]
            shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width * 0.94:.1f}" height="{tall:.1f}" fill="{colour}">'
            parts.append(f"{shape}<title>{figure(value)} {text(plot.unit)}</title></rect>")
            parts_y += tall if plot.kind == "stack" else 0
        parts.append(label(base + slot * 0.4, words))
    return parts


def lines(plot: Plot, high: float, wide: float, top: float) -> list[str]:
    """Lines over numeric x."""
    numbers = [float(x) for x in plot.x]
    low, span = min(numbers, default=0), (max(numbers, default=1) - min(numbers, default=0)) or 1
    parts = []
    for j, values in enumerate(plot.series.values()):
        points = [
            f"{LEFT + wide * (x - low) / span:.1f},{TOP + high - high * v / top:.1f}"
            for x, v in zip(numbers, values, strict=True)
            if v is not None
        ]
        colour = COLOURS[j % len(COLOURS)]
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return parts + [label(LEFT + wide * i / 4, figure(low + span * i / 4)) for i in range(5)]


def own_plots(result: dict[str, Any]) -> list[Plot]:
    """Plots of results whose shape is known: sweeps and training curves."""
    raw, out = result["raw"], []
    if not isinstance(raw, dict):
        return out
    for key, axis, title in (
        ("prefill", "tokens", "Prefill by prompt length"),
        ("decode", "streams", "Decode by streams"),
    ):
        cells = raw.get(key)
        if isinstance(cells, list) and cells and "tok_s" in cells[0]:
            out.append(Plot("bars", title, "tok/s", [c[axis] for c in cells], {"tok/s": [c["tok_s"] for c in cells]}))
    curve = (raw.get("training") or {}).get("curve") if isinstance(raw.get("training"), dict) else None
    if curve:
        out.append(
            Plot("lines", "Training loss by step", "nats", [c[0] for c in curve], {"loss": [c[2] for c in curve]})
        )
    return out


def load(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """(file name, result) of every JSON file, by name. Raises BadResult."""
    out = []
    for path in sorted(folder.glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            missing = [k for k in ("what", "machine", "command", "raw") if k not in result]
        except (ValueError, TypeError) as e:
            raise BadResult(f"{path}: {e}") from None
        if missing:
            raise BadResult(f"{path}: lacks {', '.join(missing)}")
        out.append((path.name, result))
    return out


def bars_table(rows: Sequence[tuple[str, Any, str]]) -> str:
    body = "".join(f'<tr><td>{text(n)}</td><td class="n">{figure(v)}</td><td>{text(f)}</td></tr>' for n, v, f in rows)
    return f"<table><tr><th>figure</th><th>value</th><th>from</th></tr>{body}</table>"


def section(name: str, result: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in (result.get("versions") or {}).items())
    parts = [f"<section><h2>{text(result['what'])}</h2><p><small>{text(name)} · {text(result['machine'])}"]
    parts.append(
        f"{' · ' + text(versions) if versions else ''}</small></p><p><code>{text(result['command'])}</code></p>"
    )
    if result.get("bars"):
        parts.append(bars_table([(k, v, name) for k, v in result["bars"].items()]))
    plots = [Plot.read(p, name) for p in result.get("plots", ())] + own_plots(result)
    for plot in plots:
        unit = f" ({text(plot.unit)})" if plot.unit else ""
        parts.append(f"<h3>{text(plot.title)}{unit}</h3>{draw(plot)}")
    return "".join(parts) + "</section>"


def page(results: Sequence[tuple[str, dict[str, Any]]]) -> str:
    every = [(k, v, name) for name, r in results for k, v in (r.get("bars") or {}).items()]
    sections = "".join(section(name, r) for name, r in results)
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>glm53 results</title><style>{STYLE}</style>'
    return f"{head}<h1>glm53 results</h1>{bars_table(every) if every else ''}{sections}</html>\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--out", type=Path, default=Path("report.html"))
    args = parser.parse_args(argv)
    try:
        results = load(args.results)
        if not results:
            raise BadResult(f"{args.results}: no results (*.json) here")
        made = page(results)
    except BadResult as e:
        print(f"report: {e}", file=sys.stderr)
        return 2
    args.out.write_text(made, encoding="utf-8")
    print(f"{args.out}: {len(results)} results, {len(made) // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
