"""bench/report.py: every figure of every result is on the page, drawn to scale, and nothing comes from elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPORT = Path(__file__).parents[2] / "bench" / "report.py"
BASE = {"what": "speed & <care>", "machine": "box", "versions": {"python": "3"}, "command": "python3 bench/x.py --a 1"}


def make(folder: Path, *results: Any) -> subprocess.CompletedProcess[str]:
    for i, result in enumerate(results):
        (folder / f"r{i}.json").write_text(result if isinstance(result, str) else json.dumps(result))
    command = [sys.executable, "-S", "-E", str(REPORT), "--results", str(folder), "--out", str(folder / "page.html")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_figures_commands_and_plots_are_on_the_page(tmp_path: Path) -> None:
    sweep = {
        "prefill": [{"tokens": 8192, "tok_s": 700.5}],
        "decode": [{"streams": 1, "tok_s": 28.0}, {"streams": 4, "tok_s": 34.0}],
    }
    stack = {
        "kind": "stack",
        "title": "Time of a token",
        "unit": "ms",
        "x": ["fast"],
        "series": {"copies": [6], "rest": [2]},
    }
    done = make(
        tmp_path, {**BASE, "raw": sweep, "bars": {"a.b": 0.12345, "c.d": 3}}, {**BASE, "raw": [], "plots": [stack]}
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    for wanted in (
        "a.b",
        "0.1235",
        "python3 bench/x.py --a 1",
        "Prefill by prompt length",
        "700.5 tokens/s",
        "Time of a token",
    ):
        assert wanted in page
    assert "Speed &amp; &lt;care&gt;" in page
    assert "<care>" not in page
    assert not re.search(r"src=|href=\"[^#]|https?://|<script|@import|url\(", page)
    heights = {v: float(h) for h, v in re.findall(r'height="([\d.]+)" class="c.">*<title>\w+: (\d+) ms', page)}
    assert heights["6"] == pytest.approx(3 * heights["2"], rel=0.01)
    tops = sorted(float(y) for y in re.findall(r'<rect x="[\d.]+" y="([\d.]+)"[^>]+><title>\w+: \d+ ms', page))
    assert tops[1] - tops[0] == pytest.approx(heights["2"], abs=0.2)  # piled up, not side by side


def test_a_training_curve_is_drawn(tmp_path: Path) -> None:
    curve = [[1, 0.1, 8.0], [10, 1.0, 4.0], [100, 9.0, 2.0]]
    assert make(tmp_path, {**BASE, "raw": {"training": {"curve": curve}}}).returncode == 0
    (points,) = re.findall(r'<polyline points="([^"]+)"', (tmp_path / "page.html").read_text())
    heights = [float(p.split(",")[1]) for p in points.split()]
    assert len(heights) == 3
    assert heights == sorted(heights)  # the loss falls, so y grows downwards


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ("{", "Expecting"),
        ({"what": "x"}, "lacks machine"),
        ({**BASE, "raw": {}, "plots": [{"kind": "bars", "title": "t", "x": [1, 2], "series": {"a": [1]}}]}, "unequal"),
    ],
)
def test_a_bad_result_is_named_in_one_line(bad: Any, word: str, tmp_path: Path) -> None:
    done = make(tmp_path, bad)
    assert done.returncode == 2
    assert word in done.stderr
    assert "r0.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_results_is_an_error(tmp_path: Path) -> None:
    done = make(tmp_path)
    assert done.returncode == 2
    assert "no results" in done.stderr


SIDES = {
    "stock-8": {"decode1_tok_s": [20.0, 40.0], "decode4_tok_s": [50.0], "prefill_2048_s": [2.0]},
    "stock-12": {"decode1_tok_s": [30.0], "decode4_tok_s": [45.0], "prefill_8192_s": [1.0]},
    "floor": {"decode1_tok_s": [200.0], "decode4_tok_s": [400.0], "prefill_8192_s": [0.25]},
    "ours": {
        "decode1_tok_s": [100.0, 90.0], "decode4_tok_s": [160.0], "prefill_8192_s": [0.5], "moe_layers": 4,
        "expert_bytes": 10_000_000, "link_gb_s": 50.0, "misses1": [{"ours": 5.0, "fixed": 4.0, "unique": 8.0}],
        "misses4": [{"ours": 20.0, "fixed": 18.0, "unique": 30.0}],
    },
}  # fmt: skip


def plots(raw: Any) -> dict[str, Any]:
    """Plots by title."""
    sys.path.insert(0, str(REPORT.parent))
    try:
        import report_plots
    finally:
        sys.path.remove(str(REPORT.parent))
    return {p.title: p for p in report_plots.plots_of({"raw": raw}, "r.json")}


def drawing() -> Any:
    """The module that draws."""
    plots({})
    sys.path.insert(0, str(REPORT.parent))
    try:
        import report_draw
    finally:
        sys.path.remove(str(REPORT.parent))
    return report_draw


def words_of(svg: str) -> list[tuple[float, float, str, str]]:
    """(x, y, anchor, words) of all words of a picture."""
    found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)"[^>]*>([^<]+)<', svg)
    return [(float(x), float(y), anchor, words) for x, y, anchor, words in found]


PICTURES = {
    "long labels": ("bars", [f"exllamav3 1.6.5\n257-{i}-mcpa" for i in range(7)], {"greedy": 54.31, "hot": 130.9}),
    "many series": ("bars", ["1 stream", "4 streams"], {f"series {i}": 100.1 + i for i in range(6)}),
    "few bars": ("bars", ["1 stream", "4 streams"], {"stock exllamav3": 35.09, "glm53 exact": 90.87}),
    "a whole model": ("stack", list(range(42)), {"experts, PCIe reads in them": 0.7148, "before": 0.1319}),
    "piles": ("stack", ["exact, 1 stream", "exact, 4 streams"], {"experts": 0.7148, "before": 1234.5}),
    "points": ("lines", [1, 2, 512, 1024, 2048, 4102], {"a": 0.5}),
    "a curve": ("lines", list(range(25, 1501, 25)), {"a": 0.5}),
}


@pytest.mark.parametrize("name", PICTURES)
def test_words_of_a_picture_do_not_overlap_and_do_not_leave_it(name: str) -> None:
    kind, x, values = PICTURES[name]
    drawn = drawing()
    from report_plots import Plot

    plot = Plot(kind, "t", "tokens/s", x, {k: [v] * len(x) for k, v in values.items()}, axis="tokens")
    svg = drawn.draw(plot)
    wide, high = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
    shift = {"middle": 0.5, "end": 1.0, "start": 0.0}
    boxes = []
    for x0, y, anchor, words in words_of(svg):
        long = 6.3 * len(words)  # DejaVu Sans at 12 units, digits and small letters
        boxes.append((x0 - shift[anchor] * long, x0 + (1 - shift[anchor]) * long, y, words))
    assert len(boxes) > 4
    for left, right, y, words in boxes:
        assert left >= -1 and right <= wide + 1 and 0 < y <= high, words
    for i, (left, right, y, words) in enumerate(boxes):
        for other in boxes[i + 1 :]:
            assert abs(y - other[2]) >= 9 or right <= other[0] + 1 or other[1] <= left + 1, (words, other[3])


def test_what_is_compared_has_one_colour_in_every_picture() -> None:
    drawn = drawing()
    from report_plots import Plot

    few = Plot("bars", "t", "s", [1], {"glm53 fast": [1.0], "stock exllamav3": [2.0]})
    more = Plot("bars", "t", "s", [1], {"stock exllamav3": [2.0], "glm53 exact": [3.0], "glm53 fast": [1.0]})
    assert drawn.colour(few, 0) == drawn.colour(more, 2)
    assert drawn.colour(few, 1) == drawn.colour(more, 0)


def test_the_page_shows_what_limits_a_result_and_is_made_for_phones(tmp_path: Path) -> None:
    assert make(tmp_path, {**BASE, "raw": {}, "limits": "half of it ran <before>"}).returncode == 0
    page = (tmp_path / "page.html").read_text()
    assert "half of it ran &lt;before&gt;" in page
    assert '<meta name="viewport" content="width=device-width' in page


def test_results_of_a_gpu_come_first_then_the_latest_then_those_with_limits(tmp_path: Path) -> None:
    gpu, limit = {"gpu": "H"}, {"a": {"value": 1, "want": ">= 1", "ok": True}}
    kinds = {
        "2026-01-02-a": {}, "2026-01-01-b": {"machine": gpu}, "2026-01-02-c": {"machine": gpu, "bars": {"b": 1}},
        "2026-01-02-d": {"machine": gpu, "bars": limit},
    }  # fmt: skip
    for name, more in kinds.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**BASE, "what": name, "raw": {}, **more}))
    assert make(tmp_path).returncode == 0
    order = re.findall(r'<section id="2026-01-\d\d-(\w)', (tmp_path / "page.html").read_text())
    assert order == ["d", "c", "b", "a"]


def test_results_of_one_kind_are_told_apart(tmp_path: Path) -> None:
    alike = [{**BASE, "raw": {}, "settings": {"slots": n, "url": f"http://{n}"}} for n in (24, 56)]
    assert make(tmp_path, *alike, {**BASE, "what": "else", "raw": {}}).returncode == 0
    headings = re.findall(r"<h2>([^<]+)</h2>", (tmp_path / "page.html").read_text())
    assert sorted(h for h in headings if "peed" in h) == [f"Speed &amp; &lt;care&gt; - slots {n}" for n in (24, 56)]
    assert "Else" in headings


def test_limits_are_rounded_as_values_are(tmp_path: Path) -> None:
    bars = {"a.b": {"value": 1.5, "want": "<= 1.3911925440796227", "ok": False}}
    assert make(tmp_path, {**BASE, "raw": {}, "bars": bars}).returncode == 0
    assert "&lt;= 1.391<" in (tmp_path / "page.html").read_text()


def test_a_side_by_side_run_is_drawn_against_stock_and_the_floor() -> None:
    found = plots(SIDES)
    decode = found["Decode against stock, all streams together"]
    assert decode.x == ["1 stream", "4 streams"]
    wanted = {"stock exllamav3": [40.0, 50.0], "glm53 exact": [100.0, 160.0], "every expert in VRAM": [200.0, 400.0]}
    assert {name: values for name, values in decode.series.items() if name != "the floor"} == wanted
    link_s = [4 * missed * 10e6 / 50e9 for missed in (5.0, 20.0)]
    assert decode.series["the floor"] == pytest.approx([1 / (1 / 200 + link_s[0]), 4 / (4 / 400 + link_s[1])])
    prefill = next(p for title, p in found.items() if title.startswith("Prefill against stock"))
    assert prefill.series == {"stock exllamav3": [1.0], "glm53 exact": [0.5], "every expert in VRAM": [0.25]}


def test_steps_of_all_streams_are_drawn_beside_whole_runs_and_make_the_parts_of_a_layer() -> None:
    sides = {name: dict(record) for name, record in SIDES.items()}
    sides["ours"] |= {"steps1_tok_s": [100.0], "steps4_tok_s": [200.0, 180.0]}
    assert (
        plots(sides)["Time per MoE layer of a decode step, by cause"]
        == plots(SIDES)["Time per MoE layer of a decode step, by cause"]
    )
    sides["floor"] |= {"steps1_tok_s": [200.0], "steps4_tok_s": [500.0]}
    found = plots(sides)
    steps = found["Decode against stock, the steps alone that all streams take part in"]
    wanted = {"stock exllamav3": [None, None], "glm53 exact": [100.0, 200.0], "every expert in VRAM": [200.0, 500.0]}
    assert {name: values for name, values in steps.series.items() if name != "the floor"} == wanted
    assert steps.series["the floor"][1] == pytest.approx(4 / (4 / 500 + 4 * 20 * 10e6 / 50e9))
    assert "the floor" not in found["Decode against stock, all streams together"].series  # it is of the other rate
    assert found["Decode against stock, all streams together"].series["glm53 exact"] == [100.0, 160.0]
    compute, _, whole = found["Time per MoE layer of a decode step, by cause"].series.values()
    assert compute[2] == pytest.approx(4e6 / 500 / 4)
    assert whole[3] == pytest.approx(4e6 / 200 / 4)


def test_time_per_layer_is_piled_up_by_cause() -> None:
    pile = plots(SIDES)["Time per MoE layer of a decode step, by cause"]
    assert pile.kind == "stack"
    compute, moved, whole = pile.series.values()
    assert compute[0] == pytest.approx(1e6 / 200 / 4)
    assert moved[0] == pytest.approx(5 * 10e6 / 50e9 * 1e6)
    assert whole == [None, pytest.approx(1e6 / 100 / 4), None, pytest.approx(4e6 / 160 / 4)]


def test_times_that_the_device_gave_are_piled_up_layer_by_layer() -> None:
    """What comes once a step is seen before the first layer, and is no layer's attention."""
    layers = [{"before": 0.3, "experts": 0.2, "cpu": 0.1}, {"before": 0.1, "experts": 0.4, "cpu": 0.3}]
    found = plots({"fast": {"layers1": {"layers": layers}}, "exact": {"layers1": {"layers": layers[:1]}}})
    mean = found["Time per MoE layer of a decode step, by cause (mean)"]
    assert mean.x == ["exact, 1 stream", "fast, 1 stream"]
    assert mean.series["experts, PCIe reads in them"] == [0.2, pytest.approx(0.3)]
    assert mean.series["once a step"] == [0.0, pytest.approx(0.1)]
    each = found["Time per MoE layer of a decode step, by cause: fast, 1 stream"]
    assert (each.kind, each.x) == ("stack", [0, 1])
    assert each.series == {
        "attention and norms": [pytest.approx(0.1), 0.1], "router": [0, 0], "policy, split, admitted copies": [0, 0],
        "experts, PCIe reads in them": [0.2, 0.4], "waiting for the CPU lane": [0.1, 0.3],
        "once a step": [pytest.approx(0.2), 0],
    }  # fmt: skip


def test_a_step_is_piled_up_beside_its_floor() -> None:
    step = {"before": 1.0, "router": 0.5, "decide": 0.25, "experts": 4.0, "cpu": 0.125, "once": 2.0, "floor": 6.0,
            "bytes": 2.5}  # fmt: skip
    pile = plots({"1": step})["A decode step of fast mode by cause, and its floor"]
    assert pile.x == ["1 stream:\nstep", "1 stream:\nfloor"]
    assert [sum(column[i] or 0 for column in pile.series.values()) for i in (0, 1)] == [7.875, 6.0]


def test_the_newest_exllamav3_is_drawn_at_its_best_setting() -> None:
    def run(*rates: float, **more: Any) -> dict[str, Any]:
        return {"greedy_tok_s": list(rates), "sampled_tok_s": [r + 1 for r in rates], "vram_peak": 2e9, **more}

    raw = {
        "fast": run(120, 110, 130), "exact": run(90), "newest-257-12": run(50, exllamav3="1.6.5"),
        "newest-257-15": run(60, 90, 70, exllamav3="1.6.5"), "stock-257-12": run(30, exllamav3="1.5.1"),
        "newest-261-12": {"timed_out": True}, "probe": {"core_order": {}},
    }  # fmt: skip
    found = plots(raw)
    decode = found["Decode of one stream beside exllamav3 with experts on its CPU worker"]
    assert decode.x == ["glm53 fast", "glm53 exact", "exllamav3 1.6.5\nbest of 2 settings", "exllamav3 1.5.1"]
    assert decode.series == {"greedy": [120, 90, 70, 30], "temperature 1": [121, 91, 71, 31]}
    assert found["VRAM that PyTorch held at most in these runs, less is better"].series == {"peak": [2.0] * 4}


def test_hit_rate_and_delivery_are_curves() -> None:
    hits = plots({"hit_rate": {"cold": [[0, 0.0], [64, 0.3]], "warm": [[64, 0.4]]}})
    assert hits["Hit rate of the expert cache over time"].series == {"cold": [0.0, 0.3], "warm": [None, 0.4]}
    half = {"curve": [[0.0, 0.0], [0.5, 0.25], [1.0, 1.0]]}  # half speed, then all the rest
    curve = plots({"streams": [half]})["Delivery: share of the text by share of the time"]
    assert curve.series["steady"] == curve.x
    late = dict(zip(curve.x, curve.series["stream 0"], strict=True))
    assert (late[0.48], late[0.5], late[0.98], late[1.0]) == (0.0, 0.25, 0.25, 1.0)


def test_the_value_axis_is_round_and_covers_the_values() -> None:
    drawn = drawing()
    for top in (0.0, 0.004, 0.7, 1.0, 38.15, 99.0, 440540.3):
        scale = drawn.ticks(top)
        assert scale[0] == 0
        assert top <= scale[-1] <= max(2 * top, 1.0)
        assert 2 <= len(scale) <= 7
    assert drawn.ticks(1500.0, 200.0) == [500.0, 1000.0, 1500.0]


def test_json_lines_are_results_too(tmp_path: Path) -> None:
    lines = [json.dumps({**BASE, "what": f"policy {i}", "raw": {}, "bars": {"hit_rate": 0.25 + i}}) for i in range(2)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines) + "\n")
    assert make(tmp_path).returncode == 0
    page = (tmp_path / "page.html").read_text()
    assert "Policy 0" in page
    assert "1.25" in page


def test_a_raw_figure_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    done = make(tmp_path, {**BASE, "raw": {"hit_rate": {"a": 3}}})
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "r0.json" in done.stderr


def test_a_bar_that_one_result_misses_is_not_hidden_by_another_that_meets_it(tmp_path: Path) -> None:
    missed = {**BASE, "raw": {}, "bars": {"a.b": {"value": 7.75, "want": ">= 9", "ok": False}}}
    met = {**BASE, "raw": {}, "bars": {"a.b": {"value": 9.25, "want": ">= 9", "ok": True}}}
    assert make(tmp_path, missed, met).returncode == 0
    page = (tmp_path / "page.html").read_text()
    failed = page.split("<h2>Not met</h2>")[1].split("</section>")[0]
    assert "7.75" in failed
    assert "1 of 2 recorded limits" in page


@pytest.mark.parametrize("gone", ["link_gb_s", "misses4", "misses1", "decode4_tok_s", "prefill_8192_s", "moe_layers"])
def test_a_run_that_ended_early_is_drawn_as_far_as_it_came(gone: str) -> None:
    ours = {k: v for k, v in SIDES["ours"].items() if k != gone}
    for floor in (SIDES["floor"], {"timed_out": True, "limit_s": 60.0}):
        found = plots({**SIDES, "ours": ours, "floor": floor})
        assert "Decode against stock, all streams together" in found
