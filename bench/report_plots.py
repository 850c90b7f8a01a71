"""Plots of `report.py`: what is drawn of a result; how: report_draw.py. Standard library only.

A result may bring `plots`, a list of {"kind": "bars" | "lines" | "stack", "title", "unit", "x": [labels or numbers],
"series": {name: [numbers or null]}, "note"}; "stack" piles the series up, for time by cause. Results whose raw figures
have a known shape are drawn without being asked: `known_plots`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from exact_bars import step_key
from fast_bars import floor_s

GB = 1e9
FLOOR_PARTS = (
    "link_gb_s", "moe_layers", "expert_bytes", "misses1", "misses4", "decode1_tok_s", "decode4_tok_s",
)  # fmt: skip
"""What a step is made of by `gpu_exact.py`; a run that ended early lacks some of it."""
KINDS = ("bars", "lines", "stack")
FLOOR_NOTE = (
    "The floor: what a step takes with every expert in VRAM, and then the bytes that are missing, at the rate that was "
    "measured for the link (exact), or for the link and the CPU's memory together (fast)."
)
LAYER_PARTS = {
    "before": "attention and norms", "router": "router", "decide": "policy, split, admitted copies",
    "experts": "experts, PCIe reads in them", "cpu": "waiting for the CPU lane", "once": "once a step",
}  # fmt: skip
LAYER_NOTE = "Once a step: sampling, head, embedding, the host between two steps; it is seen before the first layer."


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
    """What x counts."""

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


def figure(value: Any) -> str:
    """A number as people read it: four significant digits, whole numbers whole."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
    if not math.isfinite(value) or isinstance(value, int) or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.1f}"


def known_plots(raw: Any) -> Iterator[Plot]:
    """Plots of raw figures whose shape is known."""
    if not isinstance(raw, dict):
        return
    for draws in (sweep_plots, against_stock, peer_plots, prompt_plots, layer_plot, step_plot, misses_plot, hit_plot,
                  arrival_plot, training_plot, expert_plot, engine_plot):  # fmt: skip
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
                        ("steps", "Decode against stock, the steps alone that all streams take part in")):  # fmt: skip
        found = {name: best_rates(runs, kind) for name, runs in models.items()}
        streams = sorted({n for rates in found.values() for n in rates})
        labels = [f"{n} stream{'s'[: n - 1]}" for n in streams]
        series = {name: [rates.get(n) for n in streams] for name, rates in found.items()}
        limits = [floor_of(raw, n, f"{kind}{n}_tok_s") for n in streams]
        note = FLOOR_NOTE if any(limits) else ""
        if note:
            resident = series.pop("every expert in VRAM")
            series |= {"the floor": limits, "every expert in VRAM": resident}
        if streams:
            yield Plot("bars", title, "tokens/s", labels, series, note)
    chunks = ("prefill_2048_s", "prefill_8192_s")
    shortest = {name: min((min(r[k]) for r in runs for k in chunks if k in r), default=None)
                for name, runs in models.items()}  # fmt: skip
    if sum(v is not None for v in shortest.values()) > 1:
        yield Plot("bars", "Prefill against stock: time to the first token of the long prompt, less is better", "s",
                   [""], {name: [v] for name, v in shortest.items()})  # fmt: skip


def floor_of(raw: dict[str, Any], streams: int, key: str) -> float | None:
    """tok/s of the floor that a result's shares are of, where `key` is the rate that they are made of."""
    model, floor = raw.get("fast", raw.get("ours")), raw.get("floor")
    if not (isinstance(model, dict) and isinstance(floor, dict) and model.get(key) and floor.get(key)):
        return None
    if step_key(streams, model, floor) != key:
        return None
    if {f"counts{streams}", "rates", "moe_layers", "expert_bytes"} <= set(model):
        return streams / floor_s(raw, streams)
    if not {f"misses{streams}", "link_gb_s", "moe_layers", "expert_bytes"} <= set(model):
        return None
    missed = model["moe_layers"] * statistics.fmean(m["ours"] for m in model[f"misses{streams}"])
    return float(streams / (streams / max(floor[key]) + missed * model["expert_bytes"] / (model["link_gb_s"] * GB)))


def peer_plots(raw: dict[str, Any]) -> Iterator[Plot]:
    """`gpu_peer.py`: each side's best setting, and the VRAM it took."""
    found: dict[str, dict[str, Any]] = {}
    for start, name in (("fast", "glm53 fast"), ("exact", "glm53 exact"), ("newest-", ""), ("stock-", "")):
        runs = [r for key, r in raw.items() if key.startswith(start) and isinstance(r, dict) and r.get("greedy_tok_s")]
        if runs:
            best = max(runs, key=lambda r: statistics.median(r["greedy_tok_s"]))
            settings = f"\nbest of {len(runs)} settings" if len(runs) > 1 else ""
            found[name or f"exllamav3 {best['exllamav3']}{settings}"] = best
    if not any(key.startswith("newest-") for key in raw) or len(found) < 2:
        return
    series = {words: [statistics.median(r[f"{kind}_tok_s"]) if r.get(f"{kind}_tok_s") else None for r in found.values()]
              for kind, words in (("greedy", "greedy"), ("sampled", "temperature 1"))}  # fmt: skip
    yield Plot("bars", "Decode of one stream beside exllamav3 with experts on its CPU worker", "tokens/s", list(found),
               series)  # fmt: skip
    taken = [r["vram_peak"] / GB if "vram_peak" in r else None for r in found.values()]
    if any(taken):
        yield Plot("bars", "VRAM that PyTorch held at most in these runs, less is better", "GB", list(found),
                   {"peak": taken})  # fmt: skip


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


def by_cause(layers: list[dict[str, float]]) -> dict[str, list[float]]:
    """Each part of each layer. What the first one has before it and the others have not comes once a step."""
    found = {part: [layer.get(part, 0.0) for layer in layers] for part in LAYER_PARTS}
    if len(layers) > 1:
        found["once"][0] = max(0.0, found["before"][0] - statistics.fmean(found["before"][1:]))
        found["before"][0] -= found["once"][0]
    return found


def layer_plot(raw: dict[str, Any]) -> Iterator[Plot]:
    """Time of a decode step per MoE layer by cause: as `gpu_fast.py` timed it on the device, layer by layer, or as the
    floor's parts beside what was measured."""
    timed = {f"{mode}, {n} stream{'s'[: n - 1]}": by_cause(raw[mode][f"layers{n}"]["layers"])
             for mode in ("exact", "fast") for n in (1, 4) if f"layers{n}" in (raw.get(mode) or {})}  # fmt: skip
    if timed:
        title, count = "Time per MoE layer of a decode step, by cause", len(next(iter(timed.values()))["router"])
        means = {LAYER_PARTS[p]: [statistics.fmean(parts[p]) for parts in timed.values()] for p in LAYER_PARTS}
        spread = f" Here it is spread over {count} layers; a whole model has more of them."
        yield Plot("stack", f"{title} (mean)", "ms", list(timed), means, LAYER_NOTE + spread)
        for name, parts in timed.items():
            series: dict[str, list[float | None]] = {LAYER_PARTS[p]: [*values] for p, values in parts.items()}
            yield Plot(
                "stack", f"{title}: {name}", "ms", list(range(len(parts["router"]))), series, LAYER_NOTE, "MoE layer"
            )
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


def step_plot(raw: dict[str, Any]) -> Iterator[Plot]:
    """`step_parts.py`: a step by cause, and its floor beside it."""
    steps = {n: raw[str(n)] for n in (1, 4) if isinstance(raw.get(str(n)), dict) and "once" in raw[str(n)]}
    if not steps:
        return
    labels = [f"{n} stream{'s'[: n - 1]}:\n{side}" for n in steps for side in ("step", "floor")]
    series = {name: [v for s in steps.values() for v in (s[part], None)] for part, name in LAYER_PARTS.items()}
    series["floor: every expert in VRAM"] = [v for s in steps.values() for v in (None, s["floor"] - s["bytes"])]
    series["floor: missing bytes"] = [v for s in steps.values() for v in (None, s["bytes"])]
    yield Plot("stack", "A decode step of fast mode by cause, and its floor", "ms", labels, series)


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
    """The plots of its known figures, and those that a result brings. Raises BadResult."""
    given = [Plot.read(p, where) for p in result.get("plots", ())]
    try:
        return list(itertools.chain(known_plots(result["raw"]), given))
    except (KeyError, TypeError, ValueError, IndexError) as e:
        raise BadResult(f"{where}: a plot cannot be drawn from `raw`: {type(e).__name__}: {e}") from None
