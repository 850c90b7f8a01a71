"""bench/gpu_exact.py without a GPU: stages that end in time, over time or badly, and the report made of them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_exact

    return gpu_exact


def stages(bench: Any, folder: Path, **changes: Any) -> Any:
    values = {"out": str(folder), "budget": 60.0, "limit": None, "checkpoint": "", "stages": "", **changes}
    return bench.Stages(argparse.Namespace(**values))


def test_a_stage_over_its_limit_is_a_record_and_the_next_one_runs(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "SHORTEST_S", 0.0)
    slow = "import subprocess, sys, time; print('at work', flush=True); c = subprocess.Popen(['sleep', '60']); c.wait()"
    made = stages(bench, tmp_path, limit=1.5)
    bare = [sys.executable, "-I", "-S", "-c"]  # starts in far less than the limit
    start = time.monotonic()
    made.process("stock-14", [*bare, slow])
    assert time.monotonic() - start < 50  # its child was ended too
    assert json.loads((tmp_path / "stock-14.json").read_text()) == {"timed_out": True, "limit_s": 1.5}
    assert "at work" in (tmp_path / "stock-14.error").read_text()
    made.process("stock-8", [*bare, f"open({str(tmp_path / 'stock-8.json')!r}, 'w').write('[1]')"])
    assert json.loads((tmp_path / "stock-8.json").read_text()) == [1]
    made.process("floor", [*bare, "raise SystemExit('no such file')"])
    assert not (tmp_path / "floor.json").exists()
    assert "no such file" in (tmp_path / "floor.error").read_text()


def test_a_stage_that_does_not_fit_the_call_says_so(bench: Any, tmp_path: Path) -> None:
    stages(bench, tmp_path, budget=1.0).process("stock-8", ["false"])
    assert json.loads((tmp_path / "stock-8.json").read_text())["skipped"] is True


def test_every_stage_of_a_group_has_a_limit(bench: Any) -> None:
    for group in bench.GROUPS.values():
        for stage in group.split(","):
            assert stage == "read" or stage.partition("-")[0] in bench.LIMITS


def test_every_file_of_gpu_tests_has_a_stage(bench: Any) -> None:
    files = {path.stem.removeprefix("test_") for path in (BENCH.parent / "tests" / "gpu").glob("test_*.py")}
    assert set(bench.TESTS.values()) | {"fast"} == files  # that one is a stage of gpu_fast.py


def test_the_report_takes_the_tests_from_their_xml_and_leaves_out_what_is_missing(bench: Any, tmp_path: Path) -> None:
    cases = "".join(
        f"<testcase name='{name}' time='1.5'>{'<failure>x</failure>' if 'staged' in name else ''}</testcase>"
        for name in bench.exact_bars.EQUAL_MUST_HAVE
    )
    (tmp_path / "equal.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    (tmp_path / "stock-14.json").write_text('{"timed_out": true, "limit_s": 60.0}')
    (tmp_path / "meta.json").write_text('{"machine": "m"}')
    out = tmp_path / "out" / "r.json"
    out.parent.mkdir()
    bench.exact_bars.report(tmp_path, out, 300)
    document = json.loads(out.read_text())
    assert document["bars"] == {"exact.equal": {"value": False, "want": True, "ok": False}}
    assert len(document["raw"]["equal"]["tests"]) == len(bench.exact_bars.EQUAL_MUST_HAVE)


def test_equality_is_not_claimed_without_the_tests_of_the_real_shape(bench: Any) -> None:
    tests = [{"name": n, "ok": True} for n in bench.exact_bars.EQUAL_MUST_HAVE]
    assert bench.exact_bars.bars({"equal": {"tests": tests}})["exact.equal"]["ok"]
    assert not bench.exact_bars.bars({"equal": {"tests": tests[1:]}})["exact.equal"]["ok"]
    skipped = [{**tests[0], "skipped": True}, *tests[1:]]
    assert not bench.exact_bars.bars({"equal": {"tests": skipped}})["exact.equal"]["ok"]


def test_host_calls_are_counted_in_the_layer_they_fall_into(bench: Any) -> None:
    from exact_trace import calls_inside

    ranges = [(0, 10.0, 20.0), (1, 30.0, 40.0), (0, 50.0, 60.0)]
    calls = [("cudaLaunchKernel", 12.0), ("cudaLaunchKernel", 25.0), ("cudaStreamSynchronize", 35.0),
             ("cudaLaunchKernel", 55.0), ("cudaStreamSynchronize", 70.0)]  # fmt: skip
    rows = calls_inside(ranges, list(reversed(calls)), 2)
    assert rows[0] == {"layer": 0, "runs": 2, "calls": {"cudaLaunchKernel": 2}, "waits": 0}
    assert rows[1] == {"layer": 1, "runs": 1, "calls": {"cudaStreamSynchronize": 1}, "waits": 1}


@pytest.mark.filterwarnings("ignore")
def test_layers_are_labelled_during_a_trace_and_left_as_they_were(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from exact_trace import moe_trace

    class Layer:
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return x * scale

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    layers = [Layer(), Layer()]

    def decode() -> None:
        for _ in range(3):
            assert layers[1].forward(layers[0].forward(torch.ones(2), scale=2.0)).tolist() == [2.0, 2.0]

    found = moe_trace(decode, layers)
    assert [(row["layer"], row["runs"], row["waits"]) for row in found["layers"]] == [(0, 3, 0), (1, 3, 0)]
    assert found["calls_in_all"] == {}
    assert all("forward" not in vars(layer) for layer in layers)


def test_a_trace_without_cuda_calls_proves_nothing(bench: Any) -> None:
    def bars(*layers: dict[str, Any]) -> Any:
        return bench.exact_bars.bars({"ours": {"moe_trace": {"layers": list(layers)}}})

    good = {"runs": 5, "calls": {"cudaLaunchKernel": 40}, "waits": 0}
    assert bars(good, good)["exact.moe_host_waits"] == {"value": 0, "want": 0, "ok": True}
    assert (
        bars(good, {"runs": 5, "calls": {"cudaStreamSynchronize": 1}, "waits": 1})["exact.moe_host_waits"]["ok"]
        is False
    )
    assert bars(good, {"runs": 5, "calls": {}, "waits": 0}) == {}


def test_two_calls_into_one_folder_name_both_commands(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "machine", dict)
    monkeypatch.setattr(bench, "versions", dict)
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "a.safetensors").write_bytes(b"x" * 100_000)
    for name in ("one", "two"):
        monkeypatch.setattr(sys, "argv", [name])
        stages(bench, tmp_path / "out", checkpoint=str(checkpoint), stages="read").run()
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["command"] == "one; two"
    read = json.loads((tmp_path / "out" / "read.json").read_text())
    assert read["bytes"] == 100_000
    assert len(read["cat_s"]) == len(read["readinto_s"]) == 2


def test_the_layers_of_a_prompt_are_timed_and_the_route_is_put_back(bench: Any) -> None:
    routes: list[Any] = []
    patch, seen = argparse.Namespace(reroute=routes.append), []

    def route(layer: int, rows: int, routed: Any, params: Any) -> None:
        seen.append((layer, rows))
        if layer == 1:
            time.sleep(0.02)

    def run() -> None:
        for layer in range(3):
            routes[-1](layer, 4096, None, {})

    marks = bench.layer_times(run, patch, route)
    assert [(rows, layer) for rows, layer, *_ in marks] == [(4096, 0), (4096, 1), (4096, 2)]
    assert seen == [(0, 4096), (1, 4096), (2, 4096)]
    assert marks[1][3] >= 0.02 > marks[0][3]
    assert marks[2][2] >= marks[1][2] + marks[1][3]
    assert routes[-1] is route


def test_no_prompt_is_read_both_ways(bench: Any) -> None:
    """The second reading would find the first one's pages in the cache."""
    read = []

    class Runner:
        def run(self, prompt: int, new: int, streams: int, seed: int) -> Any:
            read.append((prompt, seed))
            return argparse.Namespace(first_s=0.5)

    loaded = argparse.Namespace(passes=argparse.Namespace(threshold=1152))
    times = bench.prompt_times(Runner(), loaded)
    assert len(set(read)) == len(read) == 16
    assert set(times) == {f"{way} {n}" for way in ("in_place", "staged") for n in (512, 1024, 2048, 4102)}
    assert loaded.passes.threshold == 1152


def test_a_worker_that_fails_in_an_optional_part_runs_again_without_it(bench: Any, tmp_path: Path) -> None:
    made = stages(bench, tmp_path, without="")
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, sys\n"
        "left_out = sys.argv[sys.argv.index('--without') + 1] if '--without' in sys.argv else ''\n"
        "if 'single_experts' not in left_out: raise SystemExit('File single_experts.py, line 1: refused')\n"
        "if 'bulk' not in left_out: raise SystemExit('exllamav3 asked for 3 expert tensors')\n"
        f"open({str(tmp_path / 'ours.json')!r}, 'w').write(json.dumps({{'without': left_out}}))\n"
    )
    made.robust("ours", [sys.executable, str(script)])
    assert json.loads((tmp_path / "ours.json").read_text()) == {"without": "single_experts,bulk_scales"}
    assert "single_experts.py" in (tmp_path / "ours-whole.error").read_text()
    assert "expert tensors" in (tmp_path / "ours-whole-single_experts.error").read_text()
    assert not (tmp_path / "ours.error").exists()


def test_a_worker_whose_figures_are_there_is_not_run_again_and_earlier_ones_do_not_count(
    bench: Any, tmp_path: Path
) -> None:
    record, count = tmp_path / "ours.json", tmp_path / "count"
    fails = f"open({str(count)!r}, 'a').write('x'); raise SystemExit('CUDA error: at the end')"
    made = stages(bench, tmp_path, without=",".join(bench.OPTIONAL))
    record.write_text('{"of": "another call"}')
    made.robust("ours", [sys.executable, "-c", fails])
    assert not record.exists()
    made.args.without = ""
    made.robust("ours", [sys.executable, "-c", f"open({str(record)!r}, 'w').write('[1]'); {fails}"])
    assert count.read_text() == "xx"
    assert json.loads(record.read_text()) == [1]


@pytest.mark.parametrize("name, said", [("ours", "no such checkpoint"), ("stock-8", "CUDA error: out of sorts")])
def test_another_failure_is_not_tried_again(bench: Any, tmp_path: Path, name: str, said: str) -> None:
    count = tmp_path / "count"
    code = f"open({str(count)!r}, 'a').write('x'); raise SystemExit({said!r})"
    stages(bench, tmp_path, without="").robust(name, [sys.executable, "-c", code])
    assert count.read_text() == "x"
    assert said in (tmp_path / f"{name}.error").read_text()


def test_the_parts_that_can_be_left_out_are_options_of_a_load(bench: Any) -> None:
    from glm53.engine.exllama.loader import LoadOptions

    left_out = bench.without(argparse.Namespace(without=",".join(bench.OPTIONAL)))
    assert LoadOptions(**left_out) == LoadOptions(single_experts=False, bulk_scales=False, run_ahead=False)
    assert LoadOptions(**bench.without(argparse.Namespace(without=""))) == LoadOptions()


def test_bars_against_stock_are_left_out_where_stock_did_not_run(bench: Any) -> None:
    ours = {"moe_layers": 8, "expert_bytes": 9_000_000, "link_gb_s": 50.0, "prefill_8192_s": [0.4]}
    for n in (1, 4):
        ours |= {f"decode{n}_tok_s": [50.0], f"misses{n}": [{"ours": 4.0, "fixed": 4.0}]}
    raw = {"ours": ours, "floor": {"decode1_tok_s": [80.0], "decode4_tok_s": [150.0]}}
    wanted = {"exact.decode1_of_floor", "exact.decode4_of_floor", "exact.miss_ratio"}
    assert set(bench.exact_bars.bars(raw)) == wanted
    stock = {"decode1_tok_s": [25.0], "decode4_tok_s": [30.0], "prefill_8192_s": [0.9]}
    against = {"exact.decode1_vs_stock", "exact.decode4_vs_stock", "exact.prefill_vs_stock"}
    assert set(bench.exact_bars.bars({**raw, "stock-12": stock})) == wanted | against


def test_shares_of_the_floor_are_of_steps_where_both_sides_have_them(bench: Any) -> None:
    """4 layers of 5 misses of 10 MB at 50 GB/s are 4 ms; with every expert in VRAM a step takes 6 ms, of 4 streams."""
    ours = {"moe_layers": 4, "expert_bytes": 10_000_000, "link_gb_s": 50.0, "prefill_8192_s": [0.4]}
    floor: dict[str, Any] = {}
    for n in (1, 4):
        ours |= {f"decode{n}_tok_s": [n / 0.02], f"misses{n}": [{"ours": 5.0, "fixed": 5.0}]}
        floor[f"decode{n}_tok_s"] = [n / 0.008]
    stock = {"decode1_tok_s": [25.0], "decode4_tok_s": [50.0], "steps4_tok_s": [80.0]}
    old = bench.exact_bars.bars({"ours": ours, "floor": floor, "stock-12": stock})
    assert old["exact.decode4_of_floor"]["value"] == pytest.approx(12 / 20)
    one_side = {**ours, "steps4_tok_s": [4 / 0.0125]}
    assert bench.exact_bars.bars({"ours": one_side, "floor": floor, "stock-12": stock}) == old
    assert bench.exact_bars.floor_rates(one_side, floor) == {"of_floor_from": ["decode1_tok_s", "decode4_tok_s"]}
    steps = {**floor, "steps4_tok_s": [4 / 0.006, 4 / 0.007]}
    new = bench.exact_bars.bars({"ours": one_side, "floor": steps, "stock-12": stock})
    assert new["exact.decode4_of_floor"]["value"] == pytest.approx(10 / 12.5)
    assert bench.exact_bars.floor_rates(one_side, steps) == {"of_floor_from": ["decode1_tok_s", "steps4_tok_s"]}
    del old["exact.decode4_of_floor"], new["exact.decode4_of_floor"]
    assert new == old
    none = {**steps, "steps4_tok_s": [0.0]}  # streams that never drew at once
    assert bench.exact_bars.step_key(4, one_side, none) == "decode4_tok_s"


def test_what_a_worker_found_is_kept_while_it_goes_on(bench: Any, tmp_path: Path) -> None:
    args = argparse.Namespace(out=str(tmp_path), worker="ours")
    bench.save(args, {"a": 1})
    bench.save(args, {"a": 1, "b": 2})
    assert json.loads((tmp_path / "ours.json").read_text()) == {"a": 1, "b": 2}
    bench.save(argparse.Namespace(out=str(tmp_path / "nowhere"), worker=None), {})
