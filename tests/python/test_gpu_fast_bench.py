"""bench/gpu_fast.py without a GPU: its stages, the layer clock on a stand-in, and the report of synthetic figures."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exllama_helpers import make_settings, use_fakes
from fast_figures import synthetic
from tiny_checkpoint import TINY

from glm53.cli.model_dir import BUNDLED

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_fast

    return gpu_fast


def test_bars_follow_from_the_raw_figures(bench: Any) -> None:
    found = bench.fast_bars.bars(synthetic(bench.fast_bars.PREFILL_MUST_HAVE))
    expected = {
        "fast.decode1_vs_stock": (2.5, True),
        "fast.decode1_vs_exact": (2.0, True),
        "fast.decode1_of_floor": (0.8, True),
        "fast.decode4_vs_stock": (4.0, True),
        "fast.decode4_of_floor": ((0.01 + 0.016) / 0.025, True),
        "fast.kl_vs_noise": (0.5, True),
        "fast.ram_over_exact_gb": (1.0, True),
        "fast.cpu_lane_gbs": (60.0, True),
        "fast.cpu_kernel_vs_stock": (1.75, True),
        "fast.prefill_equal": (True, True),
    }
    assert set(found) == set(expected)
    for name, (value, ok) in expected.items():
        assert found[name]["value"] == pytest.approx(value), name
        assert found[name]["ok"] is ok, name


def test_another_checkpoint_is_compared_with_the_same_share_of_its_experts_cached(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = {}
    monkeypatch.setattr(bench.Stages, "process", lambda self, name, command: commands.update({name: command}))
    args = bench.parse_args([str(tmp_path / "flash"), "--out", str(tmp_path), "--also", str(BUNDLED)])
    for name in ("kl", "kl2"):
        bench.Stages(args).stage(name, name)
    slots = {name: int(c[c.index("--slots") + 1]) for name, c in commands.items()}
    assert slots == {"kl": 248, "kl2": 7 * 32 * 31 // 288}


def test_the_share_of_the_floor_is_of_steps_and_the_ratio_to_stock_of_whole_runs(bench: Any) -> None:
    raw = synthetic(bench.fast_bars.PREFILL_MUST_HAVE)
    old = bench.fast_bars.bars(raw)
    raw["fast"]["steps4_tok_s"] = [200.0]  # 20 ms a step; the floor is 16 ms of both lanes and what the floor takes
    assert bench.fast_bars.bars(raw) == old
    raw["floor"]["steps4_tok_s"] = [500.0, 400.0]
    new = bench.fast_bars.bars(raw)
    assert new["fast.decode4_of_floor"]["value"] == pytest.approx((0.008 + 0.016) / 0.02)
    assert {k: v for k, v in new.items() if "decode4_of" not in k} == {
        k: v for k, v in old.items() if "decode4_of" not in k
    }


@pytest.mark.parametrize(
    ("change", "name", "ok"),
    [
        (lambda r: r["fast"].update(decode1_tok_s=[83.0]), "fast.decode1_vs_stock", False),
        (lambda r: r["fast"]["rates"].update(cpu_gb_s=160.0), "fast.decode1_of_floor", False),
        (lambda r: r["exact"].update(decode1_tok_s=[90.0]), "fast.decode1_vs_exact", False),
        (lambda r: r["exact"]["ram"].update(VmHWM=21e9), "fast.ram_over_exact_gb", False),
        (lambda r: r["fast"]["counts1"].update(lane_s=600.0), "fast.cpu_lane_gbs", False),
        (lambda r: r["kernel"]["expert_s"].update(native=[0.0012, 0.0012]), "fast.cpu_kernel_vs_stock", False),
        (lambda r: r["kl"]["raw"]["distances"]["exact | fast"].update(kl_mean=0.0021), "fast.kl_vs_noise", False),
        (lambda r: r["kl"]["raw"]["distances"]["exact | fast"].update(top1=0.99), "fast.kl_vs_noise", False),
        (lambda r: r["equal"]["tests"][0].update(ok=False), "fast.prefill_equal", False),
        (lambda r: r["equal"]["tests"].pop(), "fast.prefill_equal", False),
        (lambda r: r["fast"].update(fault1="the CPU lane stalled"), "fast.decode1_vs_stock", None),
        (lambda r: r["fast"].pop("rates"), "fast.decode4_of_floor", None),
        (lambda r: r["kl"]["raw"]["lanes"]["fast"].update(cpu_picks=0), "fast.kl_vs_noise", None),
        (lambda r: r["kl"]["raw"]["distances"]["exact | fast"].update(positions=999), "fast.kl_vs_noise", None),
        (lambda r: r.update(kl={"timed_out": True}), "fast.kl_vs_noise", None),
        (lambda r: r.pop("floor"), "fast.decode1_of_floor", None),
    ],
)
def test_a_bar_is_missed_or_left_out_where_it_must(bench: Any, change: Any, name: str, ok: bool | None) -> None:
    raw = copy.deepcopy(synthetic(bench.fast_bars.PREFILL_MUST_HAVE))
    change(raw)
    found = bench.fast_bars.bars(raw)
    assert found[name]["ok"] is ok if ok is not None else name not in found


def test_the_worse_of_two_checkpoints_counts(bench: Any) -> None:
    raw = synthetic(bench.fast_bars.PREFILL_MUST_HAVE)
    raw["kl2"] = copy.deepcopy(raw["kl"])
    raw["kl2"]["raw"]["distances"]["exact | fast"]["kl_mean"] = 0.005
    assert bench.fast_bars.bars(raw)["fast.kl_vs_noise"] == {"value": 2.5, "want": 1.0, "ok": False}


@pytest.mark.parametrize(
    ("change", "clean"),
    [
        (lambda r: None, True),
        (lambda r: r["growth"].update(rss=0.02), False),
        (lambda r: r["slices"][1].update(mismatches=1), False),
        (lambda r: r["slices"][1].update(kl_mean=0.5), False),
    ],
)
def test_minutes_of_load_add_up_and_count_as_clean_only_where_nothing_grew_or_went_wrong(
    bench: Any, change: Any, clean: bool
) -> None:
    one = {"mismatches": 0, "kl_mean": 0.1}
    record = {"first": {"kl_mean": 0.2}, "growth": {"rss": 0.001, "vram": 0.0}, "slices": [one, dict(one)]}
    raw = {"soak-1": record, "soak-2": {**json.loads(json.dumps(record)), "slice_s": 585.0}}
    change(raw["soak-2"])
    found = bench.fast_bars.bars(raw)
    assert found["fast.soak_clean"]["ok"] is clean
    assert found["fast.soak_minutes"] == {"value": pytest.approx((2 * 25 + 2 * 585) / 60), "want": 20.0, "ok": True}


def test_the_report_is_written_from_the_folder(bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = synthetic(bench.fast_bars.PREFILL_MUST_HAVE)
    tests = raw.pop("equal")["tests"]
    for name, record in raw.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    cases = "".join(f"<testcase name='{t['name']}' time='1'/>" for t in tests)
    (tmp_path / "equal.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    (tmp_path / "meta.json").write_text('{"machine": {"gpu": "g"}}')
    out = tmp_path / "out" / "r.json"
    out.parent.mkdir()
    bench.main(["--report", str(tmp_path), "--out", str(out)])
    document = json.loads(out.read_text())
    assert document["bars"] == bench.fast_bars.bars(document["raw"])
    assert len(document["bars"]) == 10
    assert capsys.readouterr().out.count("ok   fast.") == 10


def test_every_stage_has_a_limit_and_is_known(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.gpu_exact, "machine", dict)
    monkeypatch.setattr(bench.gpu_exact, "versions", dict)
    started: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(bench.Stages, "process", lambda self, name, command, **k: started.append((name, command)))
    args = bench.parse_args(["/model", "--out", str(tmp_path), "--stages", "speed,quality", "--also", str(BUNDLED)])
    bench.Stages(args).run()
    wanted = [s for group in bench.GROUPS.values() for s in group.split(",")]
    assert [name for name, _ in started] == wanted
    assert all(name.partition("-")[0] in bench.LIMITS for name in wanted)
    commands = dict(started)
    assert commands["kl2"][2] == str(BUNDLED)
    assert commands["stock-12"][-4:] == ["--on-cpu", "257", "--threads", "12"]
    worker = bench.parse_args(commands["fast"][2:])
    assert (worker.worker, worker.checkpoint, worker.slots, worker.brief) == ("fast", "/model", 248, True)


class Clock:
    """Events that count the marks before them: one ms each."""

    def __init__(self) -> None:
        self.now = 0

    def event(self) -> Any:
        made = SimpleNamespace(at=0)

        def record() -> None:
            self.now += 1
            made.at = self.now

        made.record = record
        made.elapsed_time = lambda later: float(later.at - made.at)
        return made


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_step_is_cut_at_the_hooks_and_left_as_it_was(
    bench: Any, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fast_profile import LayerClock, breakdown, table

    from glm53.engine.exllama.loader import LoadOptions, load

    use_fakes(monkeypatch)
    settings = make_settings(tmp_path, mode=mode, ct_threads=1)
    loaded = load(settings, lambda stage, fraction: None, LoadOptions(max_slots=6))
    try:
        own = [dict(vars(m)) for m in loaded.model.moe]
        runtime, clock, left = loaded.passes._rt, Clock(), [4]

        def step() -> bool:
            loaded.model.forward(torch.tensor([[left[0]]]), {"cache": loaded.cache})
            left[0] -= 1
            return left[0] > 0

        with LayerClock(loaded.passes, loaded.patch, loaded.model.moe, clock.event) as layers:
            loaded.model.forward(torch.tensor([[1]]), {"cache": loaded.cache})  # while it is off
            found = breakdown(layers, step, lambda: float(clock.now))
        marks = 5 if mode == "fast" else 4
        assert found["steps"] == 4
        assert clock.now == 4 * marks * len(loaded.model.moe)
        cpu = 1.0 if mode == "fast" else 0.0
        assert found["layers"][1] == {"before": 1.0, "router": 1.0, "decide": 1.0, "experts": 1.0, "cpu": cpu}
        assert "layer" in table(found)
        assert loaded.passes._rt is runtime
        assert [dict(vars(m)) for m in loaded.model.moe] == own
        loaded.model.forward(torch.tensor([[1]]), {"cache": loaded.cache})
        assert clock.now == 4 * marks * len(loaded.model.moe)
    finally:
        loaded.close()


@pytest.fixture
def stand_in(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The worker's surroundings on the host device: rates and device events are made up."""
    import exact_run
    import fast_work

    use_fakes(monkeypatch)
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: clock.event())
    monkeypatch.setattr(bench.gpu_exact, "link_rate", lambda loaded: 25.0)
    monkeypatch.setattr(exact_run, "PROMPT", 20)
    monkeypatch.setattr(fast_work, "both_rates", lambda loaded, cpus: {"cpu_gb_s": 60.0, "copy_gb_s": 40.0})
    return fast_work


def test_both_modes_are_measured_whole_and_make_bars(bench: Any, stand_in: Any, tmp_path: Path) -> None:
    variant = ["--split", '{"cpu_expert_ns": 1, "handoff_ns": 0}']
    argv = [str(TINY), "--out", str(tmp_path), "--slots", "6", "--new", "6", "--runs", "2", "--ct-cpus", "0"]
    raw = {
        "fast": stand_in.work_glm(bench.parse_args([*argv, *variant]), "fast"),
        "exact": stand_in.work_glm(bench.parse_args(argv), "exact"),
        "floor": {"decode1_tok_s": [1e6], "decode4_tok_s": [1e6]},
        "stock-12": {"decode1_tok_s": [1.0], "decode4_tok_s": [1.0]},
    }
    raw = json.loads(json.dumps(raw))
    fast, exact = raw["fast"], raw["exact"]
    assert (fast["mode"], exact["mode"]) == ("fast", "exact")
    assert fast["split"] == {"cpu_expert_ns": 1, "handoff_ns": 0}
    for n in (1, 4):
        assert len(fast[f"decode{n}_tok_s"]) == len(fast[f"steps{n}_tok_s"]) == 2
        assert min(fast[f"steps{n}_tok_s"] + exact[f"steps{n}_tok_s"]) > 0
        assert fast[f"counts{n}"]["cpu_picks"] > 0
        assert fast[f"counts{n}"]["lane_bytes"] == fast[f"counts{n}"]["cpu_bytes"]
        assert exact[f"counts{n}"]["cpu_picks"] == 0
        assert [layer["cpu"] for layer in fast[f"layers{n}"]["layers"]] == [1.0] * fast["moe_layers"]
        assert [layer["cpu"] for layer in exact[f"layers{n}"]["layers"]] == [0.0] * fast["moe_layers"]
    assert fast["mismatches"] == exact["mismatches"] == 0
    assert set(bench.fast_bars.bars(raw)) == {
        "fast.decode1_vs_stock", "fast.decode4_vs_stock", "fast.decode1_of_floor", "fast.decode4_of_floor",
        "fast.decode1_vs_exact", "fast.ram_over_exact_gb", "fast.cpu_lane_gbs",
    }  # fmt: skip


def test_both_lanes_are_timed_at_once(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fast_work

    from glm53.engine.exllama.loader import LoadOptions, load

    use_fakes(monkeypatch)
    monkeypatch.setattr(fast_work, "RATE_SECONDS", 0.1)
    loaded = load(make_settings(tmp_path), lambda stage, fraction: None, LoadOptions(max_slots=6))
    try:
        stride, empty, copied = loaded.store.layout.stride, torch.empty, []
        monkeypatch.setattr(torch, "empty", lambda *a, device, **k: empty(*a, device="cpu", **k))
        monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other, **k: copied.append(other.numel()))
        found = fast_work.both_rates(loaded, tuple(sorted(os.sched_getaffinity(0)))[:1])
    finally:
        loaded.close()
    assert set(copied) == {stride}
    assert found["copy_gb_s"] == pytest.approx(sum(copied) / found["seconds"] / 1e9)
    assert 0 < found["cpu_gb_s"] < 500


def test_swizzled_experts_are_in_stocks_order(bench: Any) -> None:
    """Tile (kt, nt) of exllamav3's band order lies at group nt / 8, then kt, then nt % 8."""
    from fast_work import band_swizzled

    k, n, words = 3, 16, 4
    trellis = torch.arange(k * n * words, dtype=torch.int16).view(k, n, words)
    flat = band_swizzled(trellis).reshape(-1, words)
    for kt in range(k):
        for nt in range(n):
            assert torch.equal(flat[(nt // 8) * k * 8 + kt * 8 + nt % 8], trellis[kt, nt]), (kt, nt)


def test_both_sides_run_the_same_picks_in_turn(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import fast_work

    monkeypatch.setattr(fast_work, "KERNEL_ROUNDS", 2)
    seen: dict[str, list[int]] = {"ours": [], "native": []}

    def side(name: str, scale: float) -> Any:
        def forward(picks: Any, out: Any) -> None:
            seen[name].append(int(picks[0, 0]))
            out += scale

        return forward

    found = fast_work.race({"ours": side("ours", 1.0), "native": side("native", 1.1)}, 20, 8)
    assert seen["ours"] == seen["native"] == [0, 8] * 3
    assert {name: len(times) for name, times in found["expert_s"].items()} == {"ours": 4, "native": 4}
    assert found["relative_difference"]["native"] == pytest.approx(0.1, rel=1e-5)


def test_variants_of_the_split_are_stages_of_their_own(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fast_work import set_split

    from glm53.engine.exllama.lane_costs import Costs

    monkeypatch.setattr(bench.gpu_exact, "machine", dict)
    monkeypatch.setattr(bench.gpu_exact, "versions", dict)
    started: list[list[str]] = []
    monkeypatch.setattr(bench.Stages, "process", lambda self, name, command, **k: started.append(command))
    variants = '{"gpu": {"max_cpu": 0}}'
    argv = ["/model", "--out", str(tmp_path), "--stages", "fast-gpu", "--variants", variants]
    bench.Stages(bench.parse_args(argv)).run()
    worker = bench.parse_args(started[0][2:])
    assert worker.worker == "fast-gpu"
    set_: list[Any] = []
    loaded = SimpleNamespace(
        tier=SimpleNamespace(costs=Costs(1, 2, 3, 4, 5)),
        runtime=SimpleNamespace(set_split=lambda config, stream: set_.append((config.max_cpu, config.handoff_ns))),
        passes=SimpleNamespace(stream=7),
    )
    assert set_split(loaded, json.loads(worker.split)) == {"max_cpu": 0}
    assert set_ == [(0, 1)]
    with pytest.raises(SystemExit, match="the split has no speed"):
        set_split(loaded, {"speed": 1})


def test_the_lane_gets_all_cpus_but_two_unless_told(bench: Any) -> None:
    from fast_work import lane_settings

    assert lane_settings(SimpleNamespace(ct_cpus="4,5,9")) == {"ct_cpus": (4, 5, 9)}
    assert lane_settings(SimpleNamespace(ct_cpus=""))["ct_cpus"]


def test_counters_name_what_the_bars_are_made_of(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fast_work import counters

    from glm53.engine.exllama.loader import LoadOptions, load

    use_fakes(monkeypatch)
    settings = make_settings(tmp_path, mode="fast", ct_threads=1, ct_a=0.0, ct_b=0.001)
    loaded = load(settings, lambda stage, fraction: None, LoadOptions(max_slots=6))
    try:
        before = counters(loaded)
        for token in range(5):
            loaded.model.forward(torch.tensor([[token]]), {"cache": loaded.cache})
        after = counters(loaded)
        moved = {name: after[name] - before[name] for name in after}
        assert moved["steps"] == 5 * len(loaded.model.moe)
        assert moved["lane_bytes"] == moved["cpu_bytes"] > 0
        assert moved["lane_jobs"] == moved["cpu_steps"]
        assert moved["lane_s"] > 0
    finally:
        loaded.close()
