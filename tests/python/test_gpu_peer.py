"""bench/gpu_peer.py without a GPU: the stand-in for the topology, the stages, and the bars of made-up figures."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
ABORTS = "import os\ndef exl3_moe_cpu_core_order():\n    os.abort()\n"
WORKS = "def exl3_moe_cpu_core_order():\n    return [0, 1], 2\n"
POOL = "def exl3_moe_cpu_pool_stress(threads, iters, small, spin):\n    return 0\n"
SPAWNS = """
import multiprocessing
import gpu_peer

def ask(pipe):
    import exllamav3_ext
    pipe.send(exllamav3_ext.exl3_moe_cpu_core_order())

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=ask, args=(there,))
    child.start()
    child.join(60)
    print(here.recv() if here.poll() else f"child ended with {child.exitcode}")
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_peer

    return gpu_peer


def stages(bench: Any, folder: Path, **changes: Any) -> Any:
    values = {"out": str(folder / "out"), "budget": 300.0, "newest": str(folder), "checkpoint": "c", "stages": "",
              "slots": 248, "vram_gb": 12.0, "new": 96, "runs": 3, **changes}  # fmt: skip
    return bench.Stages(argparse.Namespace(**values))


@pytest.mark.parametrize(("extension", "replaced"), [(ABORTS, True), (WORKS, False)])
def test_a_topology_call_that_ends_the_process_is_replaced_in_the_worker_too(
    bench: Any, tmp_path: Path, extension: str, replaced: bool
) -> None:
    (tmp_path / "exllamav3_ext.py").write_text(extension + POOL)
    made = stages(bench, tmp_path)
    made.probe()
    env = made.environment()
    assert (bench.TOPOLOGY in env) == replaced
    assert "EXL3_MOE_CPU_PIN" not in env
    assert bench.TOPOLOGY not in made.environment(newest=False)
    (tmp_path / "main.py").write_text(SPAWNS)
    env["PYTHONPATH"] += os.pathsep + str(BENCH)
    done = subprocess.run([sys.executable, tmp_path / "main.py"], env=env, capture_output=True, text=True, check=False)
    count = os.cpu_count() or 1
    assert done.stdout.strip() == str((list(range(count)), count) if replaced else ([0, 1], 2)), done.stderr


def test_pinned_workers_that_end_the_process_are_not_pinned(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "exllamav3_ext.py").write_text(WORKS + POOL.replace("return 0", "import os; os.abort()"))
    made = stages(bench, tmp_path)
    made.probe()
    assert made.environment()["EXL3_MOE_CPU_PIN"] == "0"
    assert bench.TOPOLOGY not in made.environment()


def test_the_newest_comes_first_on_the_path_and_only_for_its_own_stages(bench: Any, tmp_path: Path) -> None:
    made = stages(bench, tmp_path)
    assert made.environment()["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
    assert made.environment(newest=False).get("PYTHONPATH") == os.environ.get("PYTHONPATH")


def test_every_stage_has_a_limit_and_a_stage_without_time_says_so(bench: Any, tmp_path: Path) -> None:
    assert all(stage.partition("-")[0] in bench.LIMITS for stage in bench.STAGES.split(","))
    made = stages(bench, tmp_path, budget=1.0)
    made.worker("fast", "fast")
    assert json.loads((tmp_path / "out/fast.json").read_text())["skipped"] is True
    with pytest.raises(SystemExit, match="no stage is called nonsense"):
        made.worker("nonsense", "nonsense")


def test_a_stage_that_fails_leaves_its_error_and_the_next_one_runs(bench: Any, tmp_path: Path) -> None:
    made = stages(bench, tmp_path)
    made.worker("stock-257-12", "stock-257-12", "--new", "4", "--runs", "1")  # no GPU here, or no exllamav3
    assert not (tmp_path / "out/stock-257-12.json").exists()
    assert "Error" in (tmp_path / "out/stock-257-12.error").read_text()


class Generator:
    """Two results an answer, tokens in the second half of one."""

    def __init__(self) -> None:
        self.left: list[dict[str, Any]] = []

    def enqueue(self, job: dict[str, Any]) -> None:
        import torch

        tokens = [torch.tensor([[3]]), torch.tensor([[4, 3]])]
        self.left = [{"stage": "prefill"}, *({"stage": "streaming", "token_ids": t} for t in tokens)]
        self.job = job

    def num_remaining_jobs(self) -> int:
        return len(self.left)

    def iterate(self) -> list[dict[str, Any]]:
        return [self.left.pop(0)]


def test_an_answer_is_timed_from_its_first_token_and_all_of_it_is_kept(bench: Any) -> None:
    names = ("GreedySampler", "CustomSampler", "SS_Temperature", "SS_Sample")
    made = bench.Decoder(argparse.Namespace(Job=lambda **k: k, **{n: lambda *_: None for n in names}), Generator())
    rate, tokens = made.answer(5, 3, greedy=True)
    assert tokens == [3, 4, 3]
    assert rate > 0
    assert made.generator.job["max_new_tokens"] == 3
    assert made.generator.job["input_ids"].shape == (1, bench.PROMPT)
    figures = made.measure(3, 2)
    assert [len(figures[k]) for k in ("greedy_tok_s", "sampled_tok_s")] == [2, 2]
    assert figures["greedy_distinct"] == [2, 2]


def runs(greedy: list[float], sampled: list[float], **more: Any) -> dict[str, Any]:
    return {"greedy_tok_s": greedy, "sampled_tok_s": sampled, **more}


RAW = {
    "probe": {"core_order": {"rc": -6, "output": ""}},
    "fast": runs([120.0, 121.0, 119.0], [100.0, 90.0, 110.0], slots=248, new=96, ballast=1),
    "exact": runs([80.0], [70.0]),
    "newest-257-12": runs([50.0, 51.0], [40.0, 41.0], exllamav3="1.6.5"),
    "newest-257-12-mcpa": runs([60.0], [39.0], exllamav3="1.6.5"),
    "newest-257-15": {"timed_out": True, "limit_s": 140.0},
    "warm-newest-257-12": runs([500.0], [500.0], exllamav3="1.6.5"),
    "stock-257-12": runs([30.0], [31.0], exllamav3="1.5.1"),
}


def test_the_bar_is_the_smaller_ratio_to_the_best_of_the_newest(bench: Any, tmp_path: Path) -> None:
    found = bench.bars(RAW)
    bar = found["peer.fast_vs_newest_exllamav3"]
    assert (bar["value"], bar["want"], bar["ok"]) == (2.0, ">= 1.5", True)  # of 120 / 60 and 100 / 40.5
    assert found["peer.exact_vs_newest_exllamav3"]["value"] == pytest.approx(80 / 60)
    assert "ok" not in found["peer.exact_vs_newest_exllamav3"]
    assert found["peer.newest_sampled_tok_s"]["value"] == 40.5
    slower = {**RAW, "fast": runs([80.0], [100.0])}
    assert bench.bars(slower)["peer.fast_vs_newest_exllamav3"]["ok"] is False
    missing = {k: v for k, v in RAW.items() if not k.startswith("newest")}
    assert "peer.fast_vs_newest_exllamav3" not in bench.bars(missing)


def test_the_report_is_a_result_that_can_be_drawn(bench: Any, tmp_path: Path) -> None:
    meta = {"machine": {"gpu": "g", "cpu": "c"}, "versions": {"glm53": "0"}, "command": "x"}
    for name, content in {**RAW, "meta": meta}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    out = tmp_path / "made" / "r.json"
    out.parent.mkdir()
    bench.report(tmp_path, out)
    document = json.loads(out.read_text())
    assert document["versions"]["newest exllamav3"] == "1.6.5"
    assert document["raw"] == RAW
    import report_plots

    best, *_, plot = report_plots.plots_of(document, "r.json")
    assert best.x == ["glm53 fast", "glm53 exact", "exllamav3 1.6.5\nbest of 2 settings", "exllamav3 1.5.1"]
    assert best.series["greedy"] == [120.0, 80.0, 60.0, 30.0]
    assert plot.x == ["glm53 exact", "glm53 fast", "1.6.5\n257-12", "1.6.5\n257-12-mcpa", "1.5.1\n257-12"]
    assert plot.series["greedy"] == [80.0, 120.0, 50.5, 60.0, 30.0]
