"""Plots of `report.py`: what is drawn of a result, and the drawing, as SVG. Standard library only.

A result may bring `plots`, a list of {"kind": "bars" | "lines" | "stack", "title", "unit", "x": [labels or numbers],
"series": {name: [numbers or null]}, "note"}; "stack" piles the series up, for time by cause. Results whose raw figures
have a known shape are drawn without being asked: `known_plots`.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from exact_bars import step_key

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 620, 300, 58, 24, 40, 22
LEGEND_ROW = 20
GB = 1e9
FLOOR_PARTS = (
    "link_gb_s", "moe_layers", "expert_bytes", "misses1", "misses4", "decode1_tok_s", "decode4_tok_s",
)  # fmt: skip
"""What a step is made of by `gpu_exact.py`; a run that ended early lacks some of it."""
KINDS = ("bars", "lines", "stack")


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
    note: str = ""
    axis: str = ""
    """What x counts, for lines."""

    @classmethod
    def read(cls, given: dict[str, Any], where: str) -> Plot:
        """A plot that a result brings. Raises BadResult."""
        try:
            plot = cls(given["kind"], given["title"], given.get("unit", ""), list(given["x"]), dict(given["series"]),
                       given.get("note", ""), given.get("axis", ""))  # fmt: skip
        except (KeyError, TypeError) as e:
            raise BadResult(f"{where}: a plot lacks {e}") from None
        if plot.kind not in KINDS or any(len(v) != len(plot.x) for v in plot.series.values()):
            raise BadResult(f"{where}: plot {plot.title!r} has an unknown kind or series of unequal length")
        return plot

    @property
    def top(self) -> float:
        """Largest value, of piles where they are piled up."""
        columns = zip(*self.series.values(), strict=True)
        if self.kind == "stack":
            return max((sum(v or 0 for v in column) for column in columns), default=0)
        return max((v for column in columns for v in column if v is not None), default=0)


def text(value: Any) -> str:
    """Anything as words of the page."""
    return html.escape(str(value))


def figure(value: Any) -> str:
    """A number as people read it: four significant digits, whole numbers whole."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
    if not math.isfinite(value) or isinstance(value, int) or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.1f}"


def ticks(top: float) -> list[float]:
    """Round values from 0 to at least `top`, three to six of them."""
    if top <= 0:
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(top))
    step = next(s for s in (step / 5, step / 2, step, step * 2) if top / s <= 5)
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


def draw(plot: Plot) -> str:
    """The plot as SVG, with a title that screen readers speak. Colours are classes of the page's style."""
    scale = ticks(plot.top)
    high, wide = HEIGHT - BOTTOM - TOP, WIDTH - LEFT - RIGHT
    rows = legend_rows(plot.series)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT + LEGEND_ROW * len(rows)}" role="img">']
    parts.append(f"<title>{text(plot.title)}</title>")
    for value in scale:
        y = TOP + high - high * value / scale[-1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{figure(value)}</text>')
    parts.append(f'<text x="4" y="{TOP - 10}" class="unit">{text(plot.unit)}</text>')
    parts += lines(plot, high, wide, scale[-1]) if plot.kind == "lines" else columns(plot, high, wide, scale[-1])
    for i, row in enumerate(rows):
        for j, name, x in row:
            y = HEIGHT + 4 + LEGEND_ROW * i
            parts.append(f'<rect x="{x:.0f}" y="{y}" width="11" height="11" rx="2" class="c{j % 8}"/>')
            parts.append(f'<text x="{x + 16:.0f}" y="{y + 10}">{text(name)}</text>')
    return "".join(parts) + "</svg>"


def legend_rows(names: Sequence[str] | dict[str, Any]) -> list[list[tuple[int, str, float]]]:
    """(index, name, x) of each entry, in rows that fit the width; a letter is taken as 7 units wide."""
    rows: list[list[tuple[int, str, float]]] = [[]]
    x = float(LEFT)
    for j, name in enumerate(names):
        wide = 34 + 7 * len(name)
        if rows[-1] and x + wide > WIDTH:
            rows.append([])
            x = LEFT
        rows[-1].append((j, name, x))
        x += wide
    return rows


def words_at(x: float, y: float, words: str, style: str = "") -> str:
    """Words centred at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" class="{style}">{words}</text>'


def label(x: float, words: Any, row: int = 0) -> str:
    """Words below the axis."""
    y = HEIGHT - BOTTOM + 17 + 14 * row
    return f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{text(words)}</text>'


def columns(plot: Plot, high: float, wide: float, top: float) -> list[str]:
    """Bars side by side with their values, or piled up for "stack"."""
    parts, piled = [], plot.kind == "stack"
    slot = wide / max(1, len(plot.x))
    width = min(slot * 0.8 / (1 if piled else max(1, len(plot.series))), 76)
    for i, words in enumerate(plot.x):
        middle = LEFT + slot * (i + 0.5)
        left = middle - width * (1 if piled else len(plot.series)) / 2
        height = 0.0
        for j, (name, values) in enumerate(plot.series.items()):
            value = values[i]
            if value is None:
                continue
            tall = high * value / top
            x, y = left if piled else left + width * j, TOP + high - tall - height
            told = f"<title>{text(name)}: {figure(value)} {text(plot.unit)}</title>"
            box = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width * 0.94:.1f}" height="{tall:.1f}" class="c{j % 8}">'
            parts.append(f"{box}{told}</rect>")
            if (piled and tall > 15) or (not piled and width > 24):
                at = y + tall / 2 + 4 if piled else y - 4
                parts.append(words_at(x + width * 0.47, at, figure(value), "in" if piled else ""))
            height += tall if piled else 0
        if piled and height:
            total = sum(v[i] or 0 for v in plot.series.values())
            parts.append(words_at(middle, TOP + high - height - 5, figure(total)))
        parts += [label(middle, line, row) for row, line in enumerate(str(words).split("\n"))]
    return parts


def lines(plot: Plot, high: float, wide: float, top: float) -> list[str]:
    """Lines over numeric x, with a dot at each point where there are few."""
    numbers = [float(x) for x in plot.x]
    low, end = min(numbers, default=0.0), max(numbers, default=1.0)
    span, parts = (end - low) or 1.0, []
    for j, values in enumerate(plot.series.values()):
        points = [
            (LEFT + wide * (x - low) / span, TOP + high - high * v / top)
            for x, v in zip(numbers, values, strict=True)
            if v is not None
        ]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{joined}" class="l{j % 8}"/>')
        if len(points) <= 12:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="c{j % 8}"/>' for x, y in points]
    marks = numbers if len(numbers) <= 6 else [low + span * i / 4 for i in range(5)]
    parts += [label(LEFT + wide * (x - low) / span, figure(round(x, 3))) for x in marks]
    return [*parts, label(LEFT + wide / 2, plot.axis, 1)] if plot.axis else parts


def known_plots(raw: Any) -> Iterator[Plot]:
    """Plots of raw figures whose shape is known."""
    if not isinstance(raw, dict):
        return
    for draws in (sweep_plots, against_stock, prompt_plots, layer_plot, misses_plot, hit_plot, arrival_plot,
                  training_plot, expert_plot, engine_plot):  # fmt: skip
        yield from draws(raw)


def sweep_plots(raw: dict[str, Any]) -> Iterator[Plot]:
    """`sweep.py`."""
    for key, axis, title in (("prefill", "tokens", "Prefill by prompt length"),
                             ("decode", "streams", "Decode, all streams together")):  # fmt: skip
        cells = raw.get(key)
        if isinstance(cells, list) and cells and "tok_s" in cells[0]:
            names = [f"{c[axis]} {axis[:-1] if c[axis] == 1 else axis}" for c in cells]
            yield Plot("bars", title, "tokens/s", names, {"median": [c["tok_s"] for c in cells]})


def sides(raw: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The models of a side-by-side run by the name they are shown under: stock's runs, ours by mode, and the floor."""
    found = {"stock exllamav3": [v for k, v in raw.items() if k.startswith("stock-")]}
    for key, name in (("exact", "glm53 exact"), ("ours", "glm53 exact"), ("fast", "glm53 fast"),
                      ("floor", "every expert in VRAM")):  # fmt: skip
        found.setdefault(name, []).extend([raw[key]] if isinstance(raw.get(key), dict) else [])
    return {name: [r for r in runs if "decode1_tok_s" in r] for name, runs in found.items()}


def best_rates(runs: list[dict[str, Any]], kind: str) -> dict[int, float]:
    """Best rate by number of streams."""
    found: dict[int, float] = {}
    for name, rates in (item for run in runs for item in run.items()):
        key = re.fullmatch(rf"{kind}(\d+)_tok_s", name)
        if key and rates:
            found[int(key[1])] = max([*rates, found.get(int(key[1]), 0.0)])
    return found


def against_stock(raw: dict[str, Any]) -> Iterator[Plot]:
    """Decode and prefill of `gpu_exact.py` and `gpu_fast.py`: the best run of each side."""
    models = {name: runs for name, runs in sides(raw).items() if runs}
    if len(models) < 2:
        return
    for kind, title in (("decode", "Decode against stock, all streams together"),
                        ("steps", "The same of the steps alone that all streams take part in")):  # fmt: skip
        found = {name: best_rates(runs, kind) for name, runs in models.items()}
        streams = sorted({n for rates in found.values() for n in rates})
        labels = [f"{n} stream{'s'[: n - 1]}" for n in streams]
        series = {name: [rates.get(n) for n in streams] for name, rates in found.items()}
        if streams:
            yield Plot("bars", title, "tokens/s", labels, series)
    chunks = ("prefill_2048_s", "prefill_8192_s")
    shortest = {name: min((min(r[k]) for r in runs for k in chunks if k in r), default=None)
                for name, runs in models.items()}  # fmt: skip
    if sum(v is not None for v in shortest.values()) > 1:
        yield Plot("bars", "Prefill against stock: time to the first token of the long prompt, less is better", "s",
                   [""], {name: [v] for name, v in shortest.items()})  # fmt: skip


def prompt_plots(raw: dict[str, Any]) -> Iterator[Plot]:
    """Prompts by length, read in place and staged."""
    prompts = (raw.get("ours") or {}).get("prompts") if isinstance(raw.get("ours"), dict) else None
    if isinstance(prompts, dict):
        times = {tuple(name.rsplit(" ", 1)): min(found) for name, found in prompts.items()}
        lengths = sorted({int(n) for _, n in times})
        series = {kind.replace("_", " "): [times.get((kind, str(n))) for n in lengths]
                  for kind in dict.fromkeys(kind for kind, _ in times)}  # fmt: skip
        yield Plot("lines", "Time to the first token, experts read in place or staged", "s", lengths, series,
                   axis="prompt tokens")  # fmt: skip


def layer_plot(raw: dict[str, Any]) -> Iterator[Plot]:
    """Time of a decode step per MoE layer by cause: as `gpu_fast.py` timed it on the device, layer by layer, or as the
    floor's parts beside what was measured."""
    timed = {f"{mode}, {n} stream{'s'[: n - 1]}": raw[mode][f"layers{n}"]["layers"]
             for mode in ("exact", "fast") for n in (1, 4) if f"layers{n}" in (raw.get(mode) or {})}  # fmt: skip
    if timed:
        parts = list(next(iter(timed.values()))[0])
        means = {p: [statistics.fmean(layer[p] for layer in layers) for layers in timed.values()] for p in parts}
        yield Plot("stack", "Time per MoE layer of a decode step, by cause (mean)", "ms", list(timed), means)
        for name, layers in timed.items():
            series = {p: [layer[p] for layer in layers] for p in parts}
            yield Plot("stack", f"The same, layer by layer: {name}", "ms", list(range(len(layers))), series)
        return
    ours, floor = raw.get("ours"), raw.get("floor")
    if not (isinstance(ours, dict) and isinstance(floor, dict) and set(FLOOR_PARTS) <= set(ours)
            and {"decode1_tok_s", "decode4_tok_s"} <= set(floor)):  # fmt: skip
        return
    labels, compute, moved, whole = [], [], [], []
    for n in (1, 4):
        layers, missed = ours["moe_layers"], statistics.fmean(m["ours"] for m in ours[f"misses{n}"])
        key = step_key(n, ours, floor)
        labels += [f"{n} stream{'s'[: n - 1]}:\nparts", f"{n} stream{'s'[: n - 1]}:\nmeasured"]
        compute += [1e6 * n / max(floor[key]) / layers, None]
        moved += [1e-3 * missed * ours["expert_bytes"] / ours["link_gb_s"], None]
        whole += [None, 1e6 * n / max(ours[key]) / layers]
    series = {"all else, every expert in VRAM": compute, "misses over PCIe at its measured rate": moved,
              "glm53, whole step": whole}  # fmt: skip
    note = "A step divided by its MoE layers. Parts that add up to more than the whole overlap in time."
    yield Plot("stack", "Time per MoE layer of a decode step, by cause", "us", labels, series, note)


def misses_plot(raw: dict[str, Any]) -> Iterator[Plot]:
    """Misses beside the hottest experts held fixed in hindsight."""
    ours = raw.get("ours")
    if isinstance(ours, dict) and isinstance(ours.get("misses1"), list):
        rows = [(n, ours[f"misses{n}"]) for n in (1, 4) if f"misses{n}" in ours]
        names = {"ours": "expert cache", "fixed": "hottest held fixed", "unique": "distinct picks"}
        series = {name: [statistics.fmean(m[key] for m in row) for _, row in rows] for key, name in names.items()}
        labels = [f"{n} stream{'s'[: n - 1]}" for n, _ in rows]
        yield Plot("bars", "Misses per MoE layer and decode step", "experts", labels, series)


def hit_plot(raw: dict[str, Any]) -> Iterator[Plot]:
    """Hit rate over time, as `decode.py` samples it: [[tokens, share of picks that were cached], ...]."""
    curves = raw.get("hit_rate")
    if isinstance(curves, list) and curves:
        curves = {"hit rate": curves}
    if isinstance(curves, dict) and curves:
        x = sorted({p[0] for curve in curves.values() for p in curve})
        held = {name: dict(map(tuple, curve)) for name, curve in curves.items()}
        series = {name: [curve.get(at) for at in x] for name, curve in held.items()}
        yield Plot("lines", "Hit rate of the expert cache over time", "share", x, series, axis="tokens decoded")


def arrival_plot(raw: dict[str, Any]) -> Iterator[Plot]:
    """Delivery evenness of `stream_rate.py`: share of the text against share of the time."""
    streams = raw.get("streams")
    if isinstance(streams, list) and streams and isinstance(streams[0], dict) and "curve" in streams[0]:
        x = [round(i / 50, 2) for i in range(51)]
        series: dict[str, list[float | None]] = {"steady": list(x)}
        for i, stream in enumerate(streams):
            series[f"stream {i}"] = [reached(stream["curve"], at) for at in x]
        yield Plot("lines", "Delivery: share of the text by share of the time", "share of text", x, series,
                   axis="share of the time")  # fmt: skip


def reached(curve: list[list[float]], at: float) -> float:
    """Share of the text that had arrived at a share of the time."""
    return max((share for when, share in curve if when <= at + 1e-9), default=0.0)


def training_plot(raw: dict[str, Any]) -> Iterator[Plot]:
    """The bundled model's training."""
    training = raw.get("training")
    curve = training.get("curve") if isinstance(training, dict) else None
    if curve:
        yield Plot("lines", "Training loss by step", "nats", [c[0] for c in curve], {"loss": [c[2] for c in curve]},
                   axis="step")  # fmt: skip


def expert_plot(raw: dict[str, Any]) -> Iterator[Plot]:
    """`cpu_moe.py`."""
    variants = raw.get("variants")
    if isinstance(variants, list) and variants and "bytes_per_second" in variants[0]:
        one = [v for v in variants if v["threads"] == 1]
        rates = {(v["isa"], v["rows"]): statistics.median(v["bytes_per_second"]) / GB for v in one}
        rows = sorted({n for _, n in rates})
        series = {isa: [rates.get((isa, n)) for n in rows] for isa in dict.fromkeys(isa for isa, _ in rates)}
        labels = [f"{n} row{'s'[: n - 1]}" for n in rows]
        yield Plot("bars", "Routed experts on one core, bytes of trellis", "GB/s", labels, series)


def engine_plot(raw: dict[str, Any]) -> Iterator[Plot]:
    """`cpu_engine.py`."""
    for key, title in (("decode_tokens_per_s", "Decode of one stream"), ("prefill_tokens_per_s", "Prefill")):
        rates = raw.get(key)
        if isinstance(rates, dict) and rates:
            names = [name.replace("oracle", "transformers").replace(", ", "\n") for name in rates]
            yield Plot("bars", f"{title} on the CPU", "tokens/s", names, {"median": list(rates.values())})


def plots_of(result: dict[str, Any], where: str) -> list[Plot]:
    """The plots a result brings and those of its known figures. Raises BadResult."""
    given = [Plot.read(p, where) for p in result.get("plots", ())]
    try:
        return list(itertools.chain(given, known_plots(result["raw"])))
    except (KeyError, TypeError, ValueError, IndexError) as e:
        raise BadResult(f"{where}: a plot cannot be drawn from `raw`: {type(e).__name__}: {e}") from None
