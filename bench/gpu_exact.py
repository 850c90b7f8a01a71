"""Exact mode on a GPU against stock exllamav3 and against the floor the PCIe link sets; one JSON with raw figures.

usage: python bench/gpu_exact.py CHECKPOINT --out DIR [--stages equal,floor,ours,stock-12,...] [--slots 248] [--new 64]
       python bench/gpu_exact.py --report DIR --out FILE

Stages, each in processes of its own, all on one machine one after the other:
  equal   pytest tests/gpu -m gpu (GLM53_TEST_FLASH names the checkpoint of real shape)
  floor   stock with every expert in VRAM: the time of a step without any transfer
  stock-T stock with its own CPU expert split on T threads (stock-T-brief: decode only)
  ours    glm53 with --slots cache slots: decode, misses, prefill, short prompts, host RAM, link rate
Protocol of every model: 300-token prompts, temperature 1 with fixed seeds, three runs to settle, two to count.
A ratio is only made of figures from one call.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GB = 1e9
PROMPT, LONG, SHORT = 300, 4103, 40
HOT_SHARE = 31


def ids_of(tokens: int, generator: Any) -> Any:
    import torch

    return torch.randint(0, 2000, (1, tokens), generator=generator)


class Runner:
    """Drives an exllamav3 generator; the same for all models."""

    def __init__(self, exllamav3: Any, generator: Any) -> None:
        self.exl, self.generator = exllamav3, generator

    def run(self, prompt: int, new: int, streams: int = 1, seed: int = 0) -> tuple[float, float]:
        """Seconds to the first token, and tok/s of all streams after it."""
        import torch

        random = torch.Generator().manual_seed(seed)
        for s in range(streams):
            sampler = self.exl.ComboSampler(temperature=1.0)
            job = self.exl.Job(input_ids=ids_of(prompt, random), max_new_tokens=new, sampler=sampler, seed=seed + s)
            self.generator.enqueue(job)
        torch.cuda.synchronize()
        start, first, last, n = time.perf_counter(), 0.0, 0.0, 0
        while self.generator.num_remaining_jobs():
            for r in self.generator.iterate():
                if r["stage"] == "error":
                    raise r["error"]
                if r.get("token_ids") is not None:
                    last = time.perf_counter()
                    first = first or last
                    n += r["token_ids"].numel()
        return first - start, (n - streams) / (last - first) if last > first else 0.0

    def decode(self, new: int, streams: int, runs: int) -> list[float]:
        """tok/s of all streams together, after one run of the same shape."""
        self.run(PROMPT, new, streams, 40 + streams)
        return [self.run(PROMPT, new, streams, 50 + i)[1] for i in range(runs)]

    def settle(self, new: int) -> None:
        """Lets kernels and placement settle."""
        self.run(64, 16)
        for i in range(3):
            self.run(PROMPT, new, 1, 10 + i)

    def prefill(self) -> list[float]:
        """Seconds to the first token of the long prompt, after one run."""
        return [self.run(LONG, 2, 1, 89 + i)[0] for i in range(3)][1:]


def peak_ram() -> dict[str, int]:
    """Peak and present resident bytes of this process, by the kernel's own account."""
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")):
            name, value = line.split(":")
            fields[name] = int(value.split()[0]) * 1024
    return fields


def work_stock(args: argparse.Namespace) -> dict[str, Any]:
    import exllamav3 as exl
    import torch

    config = exl.Config.from_directory(args.checkpoint)
    config.infer_params.moe_cpu_split = args.on_cpu
    if args.on_cpu:
        config.infer_params.moe_cpu_threads = args.threads
    model = exl.Model.from_config(config)
    cache = exl.Cache(model, max_num_tokens=16384, max_batch_size=4)
    start = time.perf_counter()
    model.load(progressbar=False)
    load_s = time.perf_counter() - start
    tokenizer = exl.Tokenizer.from_config(config)

    def runner(chunk: int) -> Runner:
        return Runner(exl, exl.Generator(model, cache, tokenizer, max_batch_size=4, max_chunk_size=chunk))

    at_2048 = runner(2048)
    at_2048.settle(args.new)
    out: dict[str, Any] = {f"decode{n}_tok_s": at_2048.decode(args.new, n, args.runs) for n in (1, 4)}
    if not args.brief:
        out["prefill_2048_s"] = at_2048.prefill()
        out["prefill_8192_s"] = runner(8192).prefill()
    return {
        "on_cpu": args.on_cpu, "threads": args.threads, "new": args.new, "load_s": load_s,
        "vram_bytes": torch.cuda.memory_allocated(), **out,
    }  # fmt: skip


class Traced:
    """Records the picks of decode steps while it is entered."""

    def __init__(self, passes: Any, route: Any) -> None:
        self.passes, self.route, self.picks = passes, route, []

    def __call__(self, layer: int, rows: int, selected: Any, params: Any) -> None:
        if rows <= 8 and "recurrent_history" in params:
            self.picks.append((layer, selected.clone()))
        self.route(layer, rows, selected, params)


def fixed_misses(picks: list[tuple[int, Any]], layers: int, per_layer: int) -> tuple[float, float]:
    """Misses per layer and step of the `per_layer` most picked experts held fixed, and unique picks per layer."""
    from collections import Counter

    counts = [Counter() for _ in range(layers)]  # type: list[Counter[int]]
    unique = []
    for layer, selected in picks:
        distinct = set(selected.reshape(-1).tolist())
        unique.append((layer, distinct))
        counts[layer].update(distinct)
    hot = [{e for e, _ in c.most_common(per_layer)} for c in counts]
    missed = [len(distinct - hot[layer]) for layer, distinct in unique]
    return statistics.fmean(missed), statistics.fmean(len(d) for _, d in unique)


def link_rate(loaded: Any, pieces: int = 24) -> float:
    """Copy engine, host to device, GB/s, one expert a copy."""
    import ctypes

    import torch

    arena, stride = loaded.store.arena(loaded.store.layers[0]), loaded.store.layout.stride
    source = torch.frombuffer((ctypes.c_uint8 * arena.bytes).from_address(arena.address), dtype=torch.uint8)
    target = torch.empty(stride, dtype=torch.uint8, device="cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for timed in (False, True):
        events[0].record()
        for i in range(pieces):
            at = (i * 7 % loaded.store.experts) * stride
            target.copy_(source[at : at + stride], non_blocking=True)
        events[1].record()
        events[1].synchronize()
        del timed
    return pieces * stride / events[0].elapsed_time(events[1]) / 1e6


def work_ours(args: argparse.Namespace) -> dict[str, Any]:
    import tempfile

    import exllamav3 as exl
    import torch

    from glm53.config import Settings
    from glm53.engine.exllama.loader import LoadOptions, load

    state = Path(tempfile.mkdtemp())
    settings = Settings(model_dir=Path(args.checkpoint), mode="exact", state_dir=state, cache_tokens=16384)
    knobs = dict(json.loads(args.knobs)) if args.knobs else None
    start = time.perf_counter()
    loaded = load(settings, lambda stage, fraction: None, LoadOptions(max_slots=args.slots, knobs=knobs))
    load_s = time.perf_counter() - start
    generator = exl.Generator(
        loaded.model, loaded.cache, loaded.tokenizer, max_batch_size=4, max_chunk_size=args.chunk,
        recurrent_cache_size=1 << 30,
    )  # fmt: skip
    runner = Runner(exl, generator)
    out: dict[str, Any] = {"slots": loaded.slots, "load_s": load_s, "chunk": args.chunk, "knobs": knobs}
    out["link_gb_s"] = link_rate(loaded)
    out["peak_vram_after_load"] = torch.cuda.memory_allocated()
    out.update(measure_ours(runner, loaded, args))
    out["ram"] = peak_ram()
    out["expert_bytes"] = sum(loaded.store.layout.part_bytes)
    out["experts_bytes"] = loaded.store.bytes
    out["moe_layers"] = len(loaded.store.layers)
    out["mismatches"] = len(loaded.runtime.verify(0))
    out["stats"] = loaded.runtime.stats(0)
    out["passes"] = dict(loaded.passes.counts)
    if args.trace:
        out["host_calls"] = host_calls(runner, args.new)
    return out


def measure_ours(runner: Runner, loaded: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The protocol, then misses against the hottest held fixed, prompts both ways, and a short prompt."""
    out: dict[str, Any] = {}
    runner.settle(args.new)
    for n in (1, 4):
        out[f"decode{n}_tok_s"] = runner.decode(args.new, n, args.runs)
        trace = Traced(loaded.passes, loaded.passes.route)
        out[f"misses{n}"] = [traced_misses(runner, loaded, trace, (args.new, n, 50 + args.runs - 1))]
    out["prefill_8192_s"] = runner.prefill()
    out["prompts"] = prompt_times(runner, loaded)
    before = loaded.runtime.stats(0)
    seconds, _ = runner.run(SHORT, 2, 1, 77)
    after = loaded.runtime.stats(0)
    out["short"] = {
        "tokens": SHORT, "seconds": seconds,
        **{k: after[k] - before[k] for k in ("prompt_distinct", "prompt_missing", "staged_experts", "misses")},
    }  # fmt: skip
    return out


def traced_misses(runner: Runner, loaded: Any, trace: Traced, run: tuple[int, int, int]) -> dict[str, float]:
    """The counted run once more, untimed: our misses per layer and step beside those of the hottest held fixed."""
    patch, layers = loaded.patch, len(loaded.store.layers)
    before = loaded.runtime.stats(0)
    patch.reroute(trace)
    try:
        runner.run(PROMPT, *run)
    finally:
        patch.reroute(trace.route)
    after = loaded.runtime.stats(0)
    decode_steps = len(trace.picks)
    fixed, unique = fixed_misses(trace.picks, layers, HOT_SHARE)
    steps = after["steps"] - before["steps"]
    return {
        "steps": steps, "decode_layer_steps": decode_steps, "fixed": fixed, "unique": unique,
        "ours": (after["misses"] - before["misses"]) / steps, "admissions": after["admissions"] - before["admissions"],
    }  # fmt: skip


def prompt_times(runner: Runner, loaded: Any) -> dict[str, list[float]]:
    """Seconds to the first token of prompts read in place and staged, to choose the threshold by."""
    usual = loaded.passes.threshold
    out: dict[str, list[float]] = {}
    try:
        for name, threshold in (("in_place", 10**9), ("staged", 9)):
            loaded.passes.threshold = threshold
            for n in (513, 1025, 2049, LONG):
                out[f"{name} {n - 1}"] = [runner.run(n, 2, 1, 300 + n + i)[0] for i in range(2)]
    finally:
        loaded.passes.threshold = usual
    return out


def host_calls(runner: Runner, new: int) -> dict[str, float]:
    """CUDA runtime calls that wait, per decode step, from a profiler trace."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    steps = min(new, 24)
    runner.run(40, 4, 1, 60)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        runner.run(40, steps, 1, 61)
        torch.cuda.synchronize()
    names = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
    found = {e.key: e.count / steps for e in p.key_averages() if e.key in names}
    busy = sum(e.self_device_time_total for e in p.key_averages())
    kernels = {
        e.key[:60]: e.self_device_time_total / max(e.count, 1)
        for e in p.key_averages() if any(k in e.key for k in ("decide_kernel", "copy_kernel", "prompt_kernel"))
    }  # fmt: skip
    return {**found, "device_us_per_step": busy / steps, **kernels}


def versions() -> dict[str, str]:
    import exllamav3.version
    import torch
    import triton

    import glm53

    return {
        "glm53": glm53.__version__, "exllamav3": exllamav3.version.__version__, "torch": torch.__version__,
        "triton": triton.__version__, "python": platform.python_version(),
    }  # fmt: skip


def machine() -> dict[str, Any]:
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((x.split(":")[1].strip() for x in cpuinfo if x.startswith("model name")), "")
    driver = Path("/proc/driver/nvidia/version")
    return {
        "gpu": torch.cuda.get_device_name(0), "cpus": os.cpu_count(), "cpu": cpu, "ram_bytes": memory,
        "driver": driver.read_text().split("\n")[0] if driver.exists() else "",
    }  # fmt: skip


def spawn(args: argparse.Namespace, name: str, *extra: str) -> None:
    """Run one worker; its JSON goes to DIR/NAME.json, a failure to DIR/NAME.error."""
    base = [sys.executable, __file__, args.checkpoint, "--out", args.out, "--slots", str(args.slots)]
    base += ["--new", str(args.new), "--runs", str(args.runs), "--worker", name, "--knobs", args.knobs, *extra]
    start = time.perf_counter()
    done = subprocess.run(base, capture_output=True, text=True, timeout=args.limit, check=False)
    print(f"{name}: rc {done.returncode}, {time.perf_counter() - start:.0f} s", flush=True)
    if done.returncode:
        Path(args.out, f"{name}.error").write_text(done.stdout[-4000:] + done.stderr[-8000:])
        print(done.stderr[-3000:], flush=True)


def equality(args: argparse.Namespace) -> None:
    report = Path(args.out, "equal.xml")
    tests = Path(__file__).resolve().parent.parent / "tests" / "gpu"
    command = [sys.executable, "-m", "pytest", str(tests), "-m", "gpu", "-q", "-x", f"--junitxml={report}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    import xml.etree.ElementTree as Tree

    cases = Tree.parse(report).getroot().iter("testcase")
    rows = [{"name": c.get("name"), "ok": not list(c.iter("failure")) and not list(c.iter("error")),
             "skipped": bool(list(c.iter("skipped"))), "seconds": float(c.get("time", 0))} for c in cases]  # fmt: skip
    Path(args.out, "equal.json").write_text(json.dumps({"returncode": done.returncode, "tests": rows}))


def stages(args: argparse.Namespace) -> None:
    Path(args.out).mkdir(parents=True, exist_ok=True)
    meta = {"machine": machine(), "versions": versions(), "command": " ".join(sys.argv)}
    Path(args.out, "meta.json").write_text(json.dumps(meta))
    for stage in args.stages.split(","):
        if stage == "equal":
            equality(args)
        elif stage == "floor":
            spawn(args, "floor", "--on-cpu", "0")
        elif stage.startswith("stock-"):
            _, threads, *brief = stage.split("-")
            extra = ["--brief"] if brief else []
            spawn(args, f"stock-{threads}", "--on-cpu", "257", "--threads", threads, *extra)
        elif stage == "ours":
            spawn(args, "ours", "--chunk", "8192", *(["--trace"] if args.trace else []))


def bars(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each bar from the raw figures alone."""
    ours, floor = raw["ours"], raw["floor"]
    stock = [v for k, v in raw.items() if k.startswith("stock-")]
    out: dict[str, tuple[Any, Any, bool]] = {}
    if "equal" in raw:
        equal = all(t["ok"] for t in raw["equal"]["tests"])
        out["exact.equal"] = (equal, True, equal)
    ratios = []
    for n, wanted in ((1, 1.5), (4, 1.9)):
        best = max(ours[f"decode{n}_tok_s"])
        misses = statistics.fmean(m["ours"] for m in ours[f"misses{n}"])
        transfer = ours["moe_layers"] * misses * ours["expert_bytes"] / (ours["link_gb_s"] * GB)
        limit = n / max(floor[f"decode{n}_tok_s"]) + transfer
        versus, of_floor = best / max(max(s[f"decode{n}_tok_s"]) for s in stock), limit / (n / best)
        out[f"exact.decode{n}_vs_stock"] = (versus, wanted, versus >= wanted)
        out[f"exact.decode{n}_of_floor"] = (of_floor, 0.85, of_floor >= 0.85)
        ratios += [m["ours"] / m["fixed"] for m in ours[f"misses{n}"]]
    out["exact.miss_ratio"] = (max(ratios), 1.15, max(ratios) <= 1.15)
    stock_s = min(min(s[k]) for s in stock for k in ("prefill_2048_s", "prefill_8192_s") if k in s)
    prefill = stock_s / min(ours["prefill_8192_s"])
    out["exact.prefill_vs_stock"] = (prefill, 2.0, prefill >= 2.0)
    over = (ours["ram"]["VmHWM"] - ours["experts_bytes"]) / GB
    out["exact.ram_over_experts_gb"] = (over, 6.0, over <= 6.0)
    return {k: {"value": v, "want": w, "ok": ok} for k, (v, w, ok) in out.items()}


def report(args: argparse.Namespace) -> None:
    folder = Path(args.report)
    meta = json.loads((folder / "meta.json").read_text())
    raw = {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json")) if p.stem != "meta"}
    document = {
        "what": "exact mode against stock exllamav3 and the PCIe floor: 8 sparse layers of real shape, random weights",
        **meta, "settings": {"slots": raw["ours"]["slots"], "chunk": raw["ours"]["chunk"], "prompt_tokens": PROMPT},
        "raw": raw, "bars": bars(raw),
    }  # fmt: skip
    Path(args.out).write_text(json.dumps(document, indent=1) + "\n")
    for name, bar in document["bars"].items():
        print(f"{'ok  ' if bar['ok'] else 'MISS'} {name} {bar['value']} (want {bar['want']})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="")
    parser.add_argument("--out", required=True)
    parser.add_argument("--stages", default="floor,ours,stock-12,stock-14-brief,stock-8-brief")
    parser.add_argument("--slots", type=int, default=248)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--limit", type=int, default=240, help="seconds a worker may take")
    parser.add_argument("--knobs", default="", help="JSON object of cache policy knobs")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--report")
    for name in ("--worker",):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--brief", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--on-cpu", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--chunk", type=int, default=2048, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.report:
        report(args)
    elif args.worker:
        result = work_ours(args) if args.worker == "ours" else work_stock(args)
        Path(args.out, f"{args.worker}.json").write_text(json.dumps(result))
    else:
        stages(args)


if __name__ == "__main__":  # stock's CPU worker is a spawned process
    main()
