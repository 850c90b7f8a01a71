"""Sizing: the cost model reproduces the reference host, and moves the right way elsewhere."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from glm53.cli import main
from glm53.sizing import (
    GIB,
    REFERENCE,
    SHAPE,
    Machine,
    Measured,
    decode_tok_s,
    expert_slots,
    implied_hit_rate,
    layer_ms,
    plan,
)

HOST = Machine(gpu_bytes=24 * GIB, ram_bytes=256 * GIB)


def test_expert_bytes_are_those_of_the_checkpoint() -> None:
    assert SHAPE.expert_bytes == 9_437_184
    assert SHAPE.moe_layers * SHAPE.experts * SHAPE.expert_bytes == pytest.approx(114.15e9, rel=1e-4)
    assert SHAPE.routed_bytes == pytest.approx(114.6e9, rel=1e-3)


def test_decode_of_the_reference_host_within_5_percent() -> None:
    assert decode_tok_s(0.3635, REFERENCE, cpu=True) == pytest.approx(28.0, rel=0.05)
    assert plan(HOST, mode="fast").decode_tok_s == pytest.approx(28.15, rel=0.05)


def test_exact_decode_and_prefill_of_the_reference_host() -> None:
    exact, fast = plan(HOST, mode="exact"), plan(HOST, mode="fast")
    assert exact.decode_tok_s == pytest.approx(12.57, rel=0.06)
    assert fast.prefill_8k_tok_s == pytest.approx(710, rel=0.05)
    assert fast.prefill_32k_tok_s == pytest.approx(951, rel=0.05)
    assert fast.slots == pytest.approx(1312, rel=0.02)
    assert fast.ram_needed_bytes == pytest.approx(119e9, rel=0.02)


def test_the_hit_rate_that_the_exact_modes_12_6_tok_s_imply() -> None:
    implied = implied_hit_rate(12.6, REFERENCE, cpu=False)
    assert implied == pytest.approx(0.533, abs=0.002)
    assert decode_tok_s(implied, REFERENCE, cpu=False) == pytest.approx(12.6, rel=1e-4)
    assert implied_hit_rate(28.0, REFERENCE, cpu=True) == pytest.approx(0.3635, abs=0.02)
    with pytest.raises(ValueError, match=r"no hit rate gives 99 tok/s: it is 6\.\d\d without hits, 60\.\d\d at most"):
        implied_hit_rate(99, REFERENCE, cpu=False)


@pytest.mark.parametrize(
    ("known", "gain"),
    [
        (Measured(handoff_ms=0.03), 0.07),
        (Measured(hit_rate=0.45), 0.06),
        (Measured(hit_rate=0.50), 0.11),
        (Measured(kernel_share=98 / 136), 0.03),
        (Measured(kernel_share=111 / 136), 0.08),
        (Measured(fixed_ms=9.0), 0.10),
    ],
)
def test_levers_of_the_reference_host_one_by_one(known: Measured, gain: float) -> None:
    """Published gains on 27-28 tok/s, within 1.5 points."""
    constants = known.apply(REFERENCE)
    hits = 0.3635 if known.hit_rate is None else known.hit_rate
    ratio = decode_tok_s(hits, constants, cpu=True) / decode_tok_s(0.3635, REFERENCE, cpu=True)
    assert ratio - 1 == pytest.approx(gain, abs=0.015)


def test_what_was_measured_replaces_what_is_assumed() -> None:
    known = Measured(handoff_ms=0.03, kernel_share=0.8, hit_rate=0.5, fixed_ms=9.0)
    answer = plan(HOST, mode="fast", measured=known)
    constants = replace(
        REFERENCE, handoff_ms=0.03, cpu_expert_ms=SHAPE.expert_bytes / (0.8 * 136e9) * 1000, fixed_ms=9.0
    )
    assert answer.hit_rate == 0.5
    assert answer.kernel_share == 0.8
    assert answer.decode_tok_s == pytest.approx(decode_tok_s(0.5, constants, cpu=True), abs=0.01)
    assert plan(HOST, mode="fast", measured=Measured()) == plan(HOST, mode="fast")


@pytest.mark.parametrize(
    "wrong", [Measured(handoff_ms=-1.0), Measured(fixed_ms=-1.0), Measured(kernel_share=0.0), Measured(hit_rate=1.1)]
)
def test_measured_values_out_of_range(wrong: Measured) -> None:
    with pytest.raises(ValueError, match="must be"):
        plan(HOST, measured=wrong)


@pytest.mark.parametrize(("misses", "best"), [(0, 0.10), (1, 0.214), (3, 0.422), (4, 0.5), (5, 0.526), (8, 0.838)])
def test_layer_time_by_hand(misses: int, best: float) -> None:
    """min over c of max(0.11 + 0.104 c, 0.10 + 0.40 (n - c)), worked out on paper."""
    assert layer_ms(misses, REFERENCE, cpu=True) == pytest.approx(best)


def test_a_slow_cpu_gets_nothing() -> None:
    assert layer_ms(2, replace(REFERENCE, cpu_expert_ms=5.0), cpu=True) == pytest.approx(0.9)


def test_pcie_alone_without_a_cpu_tier() -> None:
    assert layer_ms(5, REFERENCE, cpu=False) == pytest.approx(0.1 + 5 * 0.4)


@pytest.mark.parametrize(
    "better",
    [
        Machine(gpu_bytes=48 * GIB, ram_bytes=256 * GIB),
        Machine(gpu_bytes=24 * GIB, ram_bytes=256 * GIB, pcie_gb_s=50),
        Machine(gpu_bytes=24 * GIB, ram_bytes=256 * GIB, cores=48, dram_gb_s=400),
    ],
)
def test_a_better_machine_decodes_faster(better: Machine) -> None:
    assert plan(better, mode="fast").decode_tok_s > plan(HOST, mode="fast").decode_tok_s


def test_smaller_kv_cache_leaves_more_slots() -> None:
    assert plan(HOST, cache_tokens=65536).slots > plan(HOST).slots


def test_dram_bounds_the_cpu_lane() -> None:
    many, few = Machine(24 * GIB, 256 * GIB, cores=200), Machine(24 * GIB, 256 * GIB, cores=100)
    assert plan(many, mode="fast").decode_tok_s == plan(few, mode="fast").decode_tok_s


def test_few_cores_get_exact_and_reasons_are_given() -> None:
    assert plan(Machine(24 * GIB, 256 * GIB, cores=8)).mode == "exact"
    assert plan(Machine(24 * GIB, 256 * GIB, avx2=False)).mode == "exact"
    small = plan(Machine(8 * GIB, 64 * GIB, disk_free_bytes=GIB, avx2=False), mode="fast")
    assert not small.fits
    assert [r.split(":")[0].split(" ")[0] for r in small.reasons] == ["VRAM", "RAM", "disk", "fast"]


def test_slots_never_exceed_the_experts() -> None:
    assert expert_slots(1000, 100, 100, 50) == 9
    assert expert_slots(10**13, 0, 100, 50) == 50
    assert expert_slots(10, 100, 100, 50) == 0


def test_the_command_prints_the_same_figures() -> None:
    command = [sys.executable, "-m", "glm53", "plan", "--gpu", "24", "--ram", "256"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    value = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert value["slots"] == plan(HOST).slots
    assert f"about {value['decode_tok_s']:.1f} tok/s" in text
    assert "T 0.400 ms" in text
    small = subprocess.run([*command[:-1], "64"], capture_output=True, text=True, check=False)
    assert small.returncode == 1
    assert "RAM: 111 GiB needed" in small.stdout


def test_streams_are_those_that_decode_together_as_the_loader_counts_them(capsys: pytest.CaptureFixture[str]) -> None:
    """The GPU engine makes `autosplit_max_batch_size` recurrent states at load, 4 by default."""
    slots = {}
    for streams in ("1", "4", "8"):
        assert main(["plan", "--gpu", "24", "--ram", "256", "--json", "-ambs", streams]) == 0
        slots[streams] = json.loads(capsys.readouterr().out)["slots"]
    assert slots["4"] == plan(HOST).slots
    state = SHAPE.stream_state_bytes / SHAPE.slot_bytes
    assert slots["1"] - slots["4"] == pytest.approx(3 * state, abs=1)
    assert slots["4"] - slots["8"] == pytest.approx(4 * state, abs=1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--gpu", "nan"], "--gpu nan: must be above 0"),
        (["--ram", "inf"], "--ram inf: must be above 0"),
        (["--pcie", "nan"], "--pcie nan: must be above 0"),
        (["--cores", "-1"], "--cores -1: must be above 0"),
        (["--disk", "-5"], "--disk -5: must be at least 0"),
        (["--fixed-ms", "nan"], "--fixed-ms nan: must be at least 0"),
        (["--tok-s", "inf"], "--tok-s inf: must be above 0"),
        (["-cs", "1"], "-cs 1: must be at least 256"),
        (["-ambs", "9"], "-ambs 9: must be 1 to 8"),
        (["--ec-reserve-gb", "-5"], "--ec-reserve-gb -5: must be at least 0"),
    ],
)
def test_values_out_of_range_are_named(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "24", "--ram", "256", *options]) == 78
    told = capsys.readouterr().err
    assert told.startswith("glm53: error: ")
    assert says in told.replace("--cache-tokens", "-cs").replace("--autosplit-max-batch-size", "-ambs")


@pytest.mark.parametrize(("ram", "fits"), [("64", False), ("112", False), ("128", True)])
def test_a_plan_fits_where_doctor_would_be_content(ram: str, fits: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 112 GiB of modules the kernel leaves too little for 111 GiB of experts and process."""
    assert main(["plan", "--gpu", "24", "--ram", ram]) == (0 if fits else 1)
    told = capsys.readouterr().out
    assert fits or f"RAM: 111 GiB needed free for the experts and the process, which {ram} GiB" in told


def test_the_command_takes_measured_values_and_names_a_hit_rate() -> None:
    command = [sys.executable, "-m", "glm53", "plan", "--gpu", "24", "--ram", "256"]
    options = ["--handoff-ms", "0.03", "--kernel-share", "0.8", "--hit-rate", "0.5", "--fixed-ms", "9", "--tok-s", "30"]
    text = subprocess.run([*command, *options], capture_output=True, text=True, check=True).stdout
    assert "expected hit rate 0.50" in text
    assert "A 0.03 ms" in text
    assert "0.80 of DRAM's rate" in text
    assert "fixed 9.0 ms a token" in text
    assert "hit rate that gives --tok-s: 0." in text
    wrong = subprocess.run([*command, "--hit-rate", "2"], capture_output=True, text=True, check=False)
    assert wrong.returncode != 0
    assert "--hit-rate 2: must be above 0 and at most 1" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_no_speed_is_told_of_a_machine_that_cannot_run_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "8", "--ram", "64"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("fits: no\n  VRAM: ")
    assert "tok/s" not in text


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_a_plan_says_how_far_fast_mode_was_measured(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "24", "--ram", "256", "--mode", mode]) == 0
    text = capsys.readouterr().out
    assert "an estimate" in text
    assert ("measured on a GPU with 8 of the 42 layers only" in text) == (mode == "fast")
