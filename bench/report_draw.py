"""The drawing of `report.py`'s plots, as SVG. Standard library only; colours are classes of the page's style.

Every plot is as wide as a phone shows and has its values written at its bars, so that nothing needs to be pointed at.
A letter is taken as LETTER units wide: what would not fit beside its neighbour is drawn in rows, wrapped or left out.
"""

from __future__ import annotations

import html
import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from report_plots import Plot, figure

WIDTH, HIGH, LEFT, RIGHT, TOP = 420, 190, 48, 14, 24
WIDE = WIDTH - LEFT - RIGHT
LETTER = 6.9
LINE, ROW, BAR = 14, 20, 15
ROOMY = 55
"""Width of a pile from which on its parts have their values written in them; in narrower ones only some would fit."""
COLOURS = 8
REFERENCE = 7
"""Grey: what the others are compared with."""
FIXED = {
    "stock exllamav3": REFERENCE, "steady": REFERENCE, "glm53 exact": 0, "glm53 fast": 1, "the floor": 2,
    "every expert in VRAM": 3,
}  # fmt: skip
"""Series that have the same colour in every plot; others take theirs by order."""


def text(value: Any) -> str:
    """Anything as words of the page."""
    return html.escape(str(value))


def unit_of(unit: str) -> str:
    """A unit as it is printed."""
    return {"us": "µs"}.get(unit, unit)


def ticks(top: float, low: float = 0.0) -> list[float]:
    """Round values: from 0 to at least `top`, three to six of them; with `low`, those from there to `top` alone."""
    if top <= low:
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(top - low))
    step = next(s for s in (step / 5, step / 2, step, step * 2) if (top - low) / s <= 5)
    if low:
        return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(top / step + 1e-9) + 1)]
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


def colour(plot: Plot, j: int) -> int:
    """Which colour the j-th series has."""
    return FIXED.get(list(plot.series)[j], j % COLOURS)


def said(x: float, y: float, words: Any, anchor: str = "middle", style: str = "") -> str:
    """Words at a place."""
    named = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{text(words)}</text>'


def wrapped(words: Any, width: float) -> list[str]:
    """A label in lines that are at most so wide, if its words are."""
    least = max(1, int(width / LETTER))
    return [line for part in str(words).split("\n") for line in textwrap.wrap(part, least, break_long_words=False)]


def draw(plot: Plot) -> str:
    """The plot as SVG, with a title that screen readers speak."""
    if plot.kind == "lines":
        parts, height = lines(plot)
    elif plot.kind == "stack" or fits_in_columns(plot):
        parts, height = columns(plot)
    else:
        parts, height = rows(plot)
    parts.append(said(2, 10, unit_of(plot.unit), "start", "unit"))
    legend = [] if len(plot.series) == 1 else legend_rows(plot.series)
    for i, row in enumerate(legend):
        y = height + 6 + ROW * i
        for j, name, x in row:
            parts.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="11" height="11" rx="2" class="c{colour(plot, j)}"/>')
            parts.append(said(x + 16, y + 10, name, "start"))
    size = f"{WIDTH} {height + ROW * len(legend) + 4:.0f}"
    return f'<svg viewBox="0 0 {size}" role="img"><title>{text(plot.title)}</title>{"".join(parts)}</svg>'


def legend_rows(names: Sequence[str] | dict[str, Any]) -> list[list[tuple[int, str, float]]]:
    """(index, name, x) of each entry, in rows that fit the width."""
    found: list[list[tuple[int, str, float]]] = [[]]
    x = 4.0
    for j, name in enumerate(names):
        wide = 30 + LETTER * len(name)
        if found[-1] and x + wide > WIDTH:
            found.append([])
            x = 4.0
        found[-1].append((j, name, x))
        x += wide
    return found


def scale(plot: Plot) -> tuple[list[str], float]:
    """Lines and figures of the value axis, and its top."""
    marks, parts = ticks(plot.top), []
    for value in marks:
        y = TOP + HIGH - HIGH * value / marks[-1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(said(LEFT - 6, y + 4, figure(value), "end"))
    return parts, marks[-1]


def box(plot: Plot, j: int, value: float, place: tuple[float, float, float, float]) -> str:
    """The bar of a value at (x, y, width, height), which says what it is when it is pointed at."""
    x, y, wide, high = place
    told = f"<title>{text(list(plot.series)[j])}: {figure(value)} {text(unit_of(plot.unit))}</title>"
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" class="c{colour(plot, j)}">'
    return f"{shape}{told}</rect>"


def fits_in_columns(plot: Plot) -> bool:
    """Whether bars side by side leave room for their values and for the words below them."""
    slot = WIDE / max(1, len(plot.x))
    values = (v for column in plot.series.values() for v in column if v is not None)
    longest = max((len(figure(v)) for v in values), default=0)
    words = max((len(w) for x in plot.x for w in str(x).split()), default=0)
    return longest * LETTER <= slot * 0.82 / len(plot.series) and words * LETTER <= slot


def columns(plot: Plot) -> tuple[list[str], float]:
    """Bars side by side with their values, or piled up for "stack"; and where they end. Of very many columns some are
    named, and none has its value written."""
    (parts, top), piled = scale(plot), plot.kind == "stack"
    slot = WIDE / max(1, len(plot.x))
    width = slot * (0.66 if piled else 0.82 / len(plot.series))
    names = [wrapped(x, slot) for x in plot.x]
    every = max(1, math.ceil(max((len(n) for name in names for n in name), default=0) * LETTER / slot))
    for i, name in enumerate(names):
        middle, base = LEFT + slot * (i + 0.5), float(TOP + HIGH)
        left = middle - (width / 2 if piled else width * len(plot.series) / 2)
        for j, value in enumerate(column[i] for column in plot.series.values()):
            if value is None:
                continue
            x, tall = left if piled else left + width * j, HIGH * value / top
            y = (base if piled else TOP + HIGH) - tall
            parts.append(box(plot, j, value, (x, y, width if piled else width * 0.94, tall)))
            words, wide = figure(value), len(figure(value)) * LETTER
            if not piled:
                parts.append(said(x + width * 0.47, y - 4, words))
            elif tall > LINE and wide <= width and slot > ROOMY:
                parts.append(said(middle, y + tall / 2 + 4, words, style=f"i{colour(plot, j)}"))
            base = y
        total = sum(column[i] or 0 for column in plot.series.values())
        if piled and total and len(figure(total)) * LETTER <= slot:
            parts.append(said(middle, base - 5, figure(total)))
        if i % every == 0:
            parts += [said(middle, TOP + HIGH + 16 + LINE * k, line) for k, line in enumerate(name)]
    end = TOP + HIGH + 8 + LINE * max(map(len, names), default=0)
    if plot.axis:
        end += LINE
        parts.append(said(LEFT + WIDE / 2, end - 2, plot.axis, style="unit"))
    return parts, end + 6


def rows(plot: Plot) -> tuple[list[str], float]:
    """Bars lying below each other, each with its value behind it, in groups with a heading; and where they end."""
    most = max((len(figure(v)) for column in plot.series.values() for v in column if v is not None), default=0)
    wide = WIDTH - 8 - (most + 1) * LETTER
    parts, y = [], float(TOP - 6)
    for i, name in enumerate(plot.x):
        if str(name):
            parts.append(said(4, y + 11, " ".join(str(name).split("\n")), "start"))
            y += LINE + 3
        for j, value in enumerate(column[i] for column in plot.series.values()):
            if value is None:
                continue
            long = wide * value / (plot.top or 1)
            parts.append(box(plot, j, value, (4, y, long, BAR - 2)))
            parts.append(said(4 + long + 5, y + 11, figure(value), "start"))
            y += BAR
        y += 7
    return parts, y


def lines(plot: Plot) -> tuple[list[str], float]:
    """Lines over numeric x, with a dot at each point where there are few; and where they end."""
    parts, top = scale(plot)
    numbers = [float(x) for x in plot.x]
    low, end = min(numbers, default=0.0), max(numbers, default=1.0)
    low = 0.0 if 0 < low < end / 10 else low
    span = (end - low) or 1.0

    def across(x: float) -> float:
        return LEFT + WIDE * (x - low) / span

    for j, values in enumerate(plot.series.values()):
        at = [(across(x), TOP + HIGH - HIGH * v / top) for x, v in zip(numbers, values, strict=True) if v is not None]
        joined, shade = " ".join(f"{x:.1f},{y:.1f}" for x, y in at), colour(plot, j)
        dashes = ' stroke-dasharray="6 5"' if shade == REFERENCE else ""
        parts.append(f'<polyline points="{joined}" class="l{shade}"{dashes}/>')
        if len(at) <= 12:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="c{shade}"/>' for x, y in at]
    apart = min((b - a for a, b in itertools.pairwise(numbers)), default=span) * WIDE / span
    marks = numbers if apart >= LETTER * max(len(figure(x)) for x in [*numbers, 0]) else ticks(end, low)
    inside = [x for x in marks if low - 1e-9 <= x <= end + 1e-9]
    for x in inside:
        half = len(figure(round(x, 6))) * LETTER / 2
        parts.append(said(min(across(x), WIDTH - half), TOP + HIGH + 17, figure(round(x, 6))))
    if plot.axis:
        parts.append(said(LEFT + WIDE / 2, TOP + HIGH + 33, plot.axis, style="unit"))
    return parts, float(TOP + HIGH + (40 if plot.axis else 24))
