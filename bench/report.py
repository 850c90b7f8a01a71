#!/usr/bin/env python3
"""Pages from the results in bench/results: one HTML page with plots, or docs/results.md with every figure's origin.

    python3 bench/report.py [--results bench/results] [--out report.html]
    python3 bench/report.py --markdown docs/results.md

Reads every *.json there, and every line of every *.jsonl; besides them only bench/bars.json (what each bar says, and
the bars that are wanted but not measured yet) and bench/given.json (figures of the documents that are no measurements,
with the file that states them). A result is an object with `what`, `machine`, `versions`, `command`, `settings`, `raw`
and `bars`: {name: {"value", "want", "ok"}} or {name: value} for figures without a limit; a bar that bars.json does not
explain brings its own "says" and "unit". What of its raw figures is drawn: report_plots.py. Standard library only; the
HTML page needs no network and no script.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from report_draw import draw, text
from report_markdown import Results, as_bar, in_order, machine_of, markdown, titles_of, unmeasured, versions_of, wanted
from report_plots import BadResult, Plot, figure, plots_of

HERE = Path(__file__).resolve().parent
LIGHT = ("#2563eb", "#ea580c", "#0f766e", "#c084fc", "#be123c", "#38bdf8", "#a16207", "#94a3b8")
DARK = ("#60a5fa", "#fb923c", "#2dd4bf", "#e9d5ff", "#fb7185", "#0ea5e9", "#facc15", "#94a3b8")
"""Neighbours differ in brightness too, for those who see fewer colours."""
STYLE = """
:root{--ink:#1e293b;--soft:#64748b;--line:#e2e8f0;--paper:#fff;--card:#f8fafc;--ok:#15803d;--bad:#b91c1c;COLOURS}
@media (prefers-color-scheme:dark){:root{--ink:#e2e8f0;--soft:#94a3b8;--line:#334155;--paper:#0f172a;--card:#1e293b;
--ok:#4ade80;--bad:#f87171;DARKS}}
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1.2rem;color:var(--ink);
background:var(--paper);overflow-wrap:break-word}
h1{margin-bottom:.2rem}h2{margin:0 0 .3rem;font-size:1.25rem}h3{margin:.2rem 0 .4rem;font-size:.98rem;font-weight:600}
section{margin-top:2.2rem;border-top:1px solid var(--line);padding-top:1.4rem}
table{border-collapse:collapse;margin:.8rem 0}
td,th{border-bottom:1px solid var(--line);padding:.28rem .9rem .28rem 0;text-align:left;vertical-align:top}
th{color:var(--soft);font-weight:500}.n{text-align:right;font-variant-numeric:tabular-nums}
td.n,td.ok,td.bad,ul .ok,ul .bad{white-space:nowrap}
ul{padding-left:1.2rem}li{margin:.15rem 0}
.ok{color:var(--ok)}.bad{color:var(--bad);font-weight:600}.soft,small,figcaption{color:var(--soft)}
code{background:var(--card);padding:.12rem .35rem;border-radius:4px;font-size:.87em;overflow-wrap:anywhere}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(26rem,100%),1fr));gap:1rem;margin-top:1rem}
figure{margin:0;padding:.9rem 1rem;background:var(--card);border-radius:8px}figcaption{font-size:.82rem}
svg{width:100%;max-width:34rem;height:auto;display:block}svg text{font:12px system-ui,sans-serif;fill:var(--ink)}
svg .unit{fill:var(--soft)}.grid{stroke:var(--line)}
a{color:inherit}polyline{fill:none;stroke-width:2}
@media (max-width:46rem){body{margin:1rem auto;padding:0 .8rem}figure{padding:.7rem .6rem}
table,tbody{display:block}tr{display:flex;flex-wrap:wrap;column-gap:1rem;border-bottom:1px solid var(--line);
padding:.4rem 0}tr:has(th){display:none}td{border:0;padding:.05rem 0}
td.name,td.says{flex:1 0 100%;min-width:0;overflow-wrap:anywhere}td.says:empty{display:none}}
"""


def brightness(shade: str) -> float:
    """Of #rrggbb, from 0 to 1, as people see it."""
    red, green, blue = (int(shade[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return float(0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2)


def style() -> str:
    """The page's style, with the colours of series, and of words upon them, as classes."""

    def named(colours: Sequence[str]) -> str:
        inner = ["#0f172a" if brightness(c) > 0.25 else "#fff" for c in colours]
        return "".join(f"--c{i}:{c};--i{i}:{inner[i]};" for i, c in enumerate(colours))

    classes = "".join(
        f".c{i}{{fill:var(--c{i})}}.l{i}{{stroke:var(--c{i})}}svg .i{i}{{fill:var(--i{i})}}" for i in range(len(LIGHT))
    )
    return STYLE.replace("COLOURS", named(LIGHT)).replace("DARKS", named(DARK)) + classes


def documents(path: Path) -> Iterator[tuple[str, Any]]:
    """(name, content) of a JSON file, or of each line of a JSON lines file."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        yield path.name, json.loads(content)
        return
    for i, line in enumerate(content.splitlines(), 1):
        yield f"{path.name}:{i}", json.loads(line)


def load(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """(file name, result) of every result, by name. Raises BadResult."""
    out = []
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.jsonl")]):
        try:
            for name, result in documents(path):
                missing = [k for k in ("what", "machine", "command", "raw") if k not in result]
                if missing:
                    raise BadResult(f"{name}: lacks {', '.join(missing)}")
                out.append((name, result))
        except (ValueError, TypeError) as e:
            raise BadResult(f"{path.name}: {e}") from None
    if not out:
        raise BadResult(f"{folder}: no results (*.json, *.jsonl) here")
    return out


def bars_table(bars: Iterable[tuple[str, Any]], known: dict[str, Any]) -> str:
    """Figures, with their limits where one of them has any."""
    body, held_bars = [], [(k, as_bar(v)) for k, v in bars]
    limited = any("want" in held for _, held in held_bars)
    for name, held in held_bars:
        verdicts: dict[Any, str] = {True: '<td class="ok">met</td>', False: '<td class="bad">not met</td>'}
        met = f'<td class="n soft">{text(wanted(held))}</td>{verdicts.get(held.get("ok", ""), "<td></td>")}'
        says, unit = (text(known.get(name, held).get(k, "")) for k in ("says", "unit"))
        body += [
            f'<tr><td class="name">{text(name)}</td><td class="n">{text(figure(held["value"]))} {unit}</td>',
            f'{met if limited else ""}<td class="says soft">{says}</td></tr>',
        ]
    limits = '<th class="n">wanted</th><th></th>' if limited else ""
    return (
        f'<table><tr><th>figure</th><th class="n">value</th>{limits}<th>what it says</th></tr>{"".join(body)}</table>'
    )


def picture(plot: Plot) -> str:
    """A plot with its title and note."""
    note = f"<figcaption>{text(plot.note)}</figcaption>" if plot.note else ""
    return f"<figure><h3>{text(plot.title)}</h3>{draw(plot)}{note}</figure>"


def section(name: str, title: str, result: dict[str, Any], known: dict[str, Any]) -> str:
    """One result: where it comes from, what limits it, its plots, its bars."""
    versions = versions_of(result)
    parts = [f'<section id="{text(name)}"><h2>{text(title)}</h2>']
    parts.append(f"<p><code>{text(result['command'])}</code><br>")
    parts.append(
        f"<small>{text(name)} · {text(machine_of(result))}{' · ' + text(versions) if versions else ''}</small></p>"
    )
    parts.append(f"<p><b>Limits:</b> {text(result['limits'])}</p>" if result.get("limits") else "")
    plots = "".join(picture(p) for p in plots_of(result, name))
    parts.append(f'<div class="plots">{plots}</div>' if plots else "")
    parts.append(bars_table(result["bars"].items(), known) if result.get("bars") else "")
    return "".join(parts) + "</section>"


def contents(results: Results, titles: dict[str, str]) -> str:
    """A line for each result, with how many of its limits are met."""
    rows = []
    for name, result in results:
        limits = [b["ok"] for b in map(as_bar, (result.get("bars") or {}).values()) if "ok" in b]
        style = "ok" if all(limits) else "bad"
        count = f'<span class="{style}">{sum(limits)} of {len(limits)} limits met</span>' if limits else ""
        rows.append(f'<li><a href="#{text(name)}">{text(titles[name])}</a> <small>{text(name)}</small> {count}</li>')
    return f"<ul>{''.join(rows)}</ul>"


def page(results: Results, known: dict[str, Any]) -> str:
    """The HTML page: what is not met and not measured, then every result."""
    bars = [(k, as_bar(v)) for _, r in results for k, v in (r.get("bars") or {}).items()]
    limits = [b["ok"] for _, b in bars if "ok" in b]
    failed = [(k, b) for k, b in bars if b.get("ok") is False]
    missing = "".join(
        f'<tr><td class="name">{text(k)}</td><td class="n soft">{text(v["wanted"])}</td>'
        f'<td class="says soft">{text(v["says"])}</td></tr>'
        for k, v in unmeasured(results, known).items()
    )
    ordered, titles = in_order(results), dict(zip((name for name, _ in results), titles_of(results), strict=True))
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>glm53 results</title><style>{style()}</style>"
    ]
    parts.append(f"<h1>glm53 results</h1><p class=soft>{sum(limits)} of {len(limits)} recorded limits are met.</p>")
    parts.append(contents(ordered, titles))
    parts.append(f"<section><h2>Not met</h2>{bars_table(failed, known)}</section>" if failed else "")
    parts.append(f"<section><h2>Not measured yet</h2><table>{missing}</table></section>" if missing else "")
    parts += [section(name, titles[name], result, known) for name, result in ordered]
    return "".join(parts) + "</html>\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the HTML page (default: %(default)s)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the text page here, and no HTML")
    args = parser.parse_args(argv)
    try:
        known, given = (json.loads((HERE / n).read_text(encoding="utf-8")) for n in ("bars.json", "given.json"))
        results = load(args.results)
        made = markdown(results, known, given) if args.markdown else page(results, known)
    except BadResult as e:
        print(f"report: {e}", file=sys.stderr)
        return 2
    out = args.markdown or args.out
    out.write_text(made, encoding="utf-8")
    print(f"{out}: {len(results)} results, {len(made) // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
