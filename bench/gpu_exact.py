"""Exact mode on a GPU against stock exllamav3 and against the floor the PCIe link sets; one JSON with raw figures.

usage: python bench/gpu_exact.py CHECKPOINT --out DIR --stages speed --trace
       python bench/gpu_exact.py CHECKPOINT --out DIR --stages tests --flash SMALLER_CHECKPOINT
       python bench/gpu_exact.py --report DIR --out FILE

The two calls together are the whole table, each in less than nine minutes; within a call the stages come in order of
importance, and one that runs into its limit leaves a record of that and lets the next run. Stages, each in a process
of its own, all on one machine one after the other:
  read    the files from page cache, by cat and by one thread
  floor   stock with every expert in VRAM: the time of a step without any transfer
  ours    glm53 with --slots cache slots: load, decode, misses, prefill, short prompts, host RAM, link rate
  stock-T stock with its own CPU expert split on T threads (stock-T-brief: decode only)
  equal   pytest tests/gpu/test_exact.py: logits and tokens against stock, churn, waits
  http, lanes, mtp, steps, vram  its test_http.py, test_bench_lanes.py, test_drafting.py, test_steps_ahead.py and, on
          24 GB of VRAM, test_vram.py
Protocol of every model: 300-token prompts, temperature 1 with fixed seeds, three runs to settle, two or more to count.
  decodeN_tok_s  N streams together: all tokens but N, from the first token of any stream to the last of all. A prompt
                 whose pages are still cached is ready before the others', whose reading is in the time then. The ratios
                 to stock are made of this, on both sides
  stepsN_tok_s   only the steps that all N take part in, from the last stream's first token to the end of the first
                 stream: no reading of prompts. The shares of the floor are made of this, on both sides, for the floor
                 is that of a step (of decodeN_tok_s where a record is older than stepsN_tok_s)
With one stream the two are the same. A ratio is only made of figures from one call. A worker of glm53 that fails where
an optional part of the loader may be the cause is run again without that part; `without` in its JSON names what was
left out, DIR/NAME-whole.error the cause.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import exact_bars
from common import cpu_name
from exact_process import peak_ram, plain_read, run_limited
from exact_run import LONG, PROMPT, SHORT, Runner
from exact_trace import Traced, fixed_misses, layer_times

TESTS = {
    "equal": "exact", "http": "http", "lanes": "bench_lanes", "mtp": "drafting", "steps": "steps_ahead", "vram": "vram",
}  # fmt: skip
"""Stages that are a file of tests/gpu, without the "test_" of its name."""
GROUPS = {"speed": "read,ours,floor,stock-12,stock-14-brief,stock-8-brief", "tests": "equal,http,vram"}
LIMITS = {
    "floor": 75.0, "ours": 150.0, "stock": 130.0,
    "equal": 300.0, "http": 180.0, "lanes": 90.0, "mtp": 200.0, "steps": 200.0, "vram": 180.0,
}  # fmt: skip
"""Seconds a stage may take: about twice what it took on the machine of the recorded results."""
SHORTEST_S = 20.0
OPTIONAL = {
    "single_experts": ("single_experts.py", "CUDA error", "AcceleratorError"),
    "bulk_scales": ("expert_tensors.py", "scales.py", "expert tensors", "CUDA error", "AcceleratorError"),
    "run_ahead": ("ahead.py", "token_table.py", "CUDA error", "AcceleratorError"),
}
"""Parts of the loader that a run can do without (fields of `LoadOptions`), and words of an error that may be theirs."""
HOT_SHARE, SHARE_OF = 31, 288
"""Experts a layer that a 24 GB card's slots hold of the real model's."""


def without(args: argparse.Namespace) -> dict[str, bool]:
    """The parts that --without names, as fields of `LoadOptions`."""
    return dict.fromkeys(filter(None, args.without.split(",")), False)


def save(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """What a worker has found so far is the stage's record: what may fail after it costs nothing of that."""
    if args.worker:
        Path(args.out, f"{args.worker}.json").write_text(json.dumps(result))


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
    out: dict[str, Any] = at_2048.decode(args.new, 1, args.runs) | at_2048.decode(args.new, 4, args.runs)
    if not args.brief:
        out["prefill_2048_s"] = at_2048.prefill()
        at_8192 = runner(8192)
        out["prefill_8192_s"] = at_8192.prefill()
        out["prefill_rounds_s"] = [at_8192.steps(LONG, 95 + i) for i in range(2)]
    return {
        "on_cpu": args.on_cpu, "threads": args.threads, "new": args.new, "load_s": load_s,
        "vram_bytes": torch.cuda.memory_allocated(), **out,
    }  # fmt: skip


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
            at = (i * 7 % loaded.store.whole_copies) * stride
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
    from glm53.engine.exllama.ahead import run_ahead
    from glm53.engine.exllama.loader import LoadOptions, load

    state = Path(tempfile.mkdtemp())
    settings = Settings(model_dir=Path(args.checkpoint), mode="exact", state_dir=state, cache_tokens=16384)
    knobs = dict(json.loads(args.knobs)) if args.knobs else None
    start = time.perf_counter()
    options = LoadOptions(max_slots=args.slots, knobs=knobs, **without(args))
    loaded = load(settings, lambda stage, fraction: None, options)
    load_s = time.perf_counter() - start
    generator = exl.Generator(
        loaded.model, loaded.cache, loaded.tokenizer, max_batch_size=4, max_chunk_size=args.chunk,
        recurrent_cache_size=1 << 30,
    )  # fmt: skip
    ahead = run_ahead(generator, loaded)
    runner = Runner(exl, generator)
    out: dict[str, Any] = {"slots": loaded.slots, "load_s": load_s, "chunk": args.chunk, "knobs": knobs}
    out["without"] = args.without
    out["link_gb_s"] = link_rate(loaded)
    out["peak_vram_after_load"] = torch.cuda.memory_allocated()
    out.update(measure_ours(runner, loaded, args))
    out["steps_ahead"] = ahead.steps if ahead else 0
    out["load"] = loaded.times
    out["ram"] = peak_ram()
    out["expert_bytes"] = sum(loaded.store.layout.part_bytes)
    out["experts_bytes"] = loaded.store.bytes
    out["moe_layers"] = len(loaded.store.layers)
    out["mismatches"] = len(loaded.runtime.verify(0))
    out["stats"] = loaded.runtime.stats(0)
    out["passes"] = dict(loaded.passes.counts)
    save(args, out)
    if args.trace:
        out["moe_trace"] = runner.traced(loaded, min(args.new, 24))
    return out


def measure_ours(runner: Runner, loaded: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The protocol, then misses against the hottest held fixed, prompts both ways, and a short prompt."""
    out: dict[str, Any] = {}
    runner.settle(args.new)
    for n in (1, 4):
        out |= runner.decode(args.new, n, args.runs)
        trace = Traced(loaded.passes, loaded.passes.route)
        out[f"misses{n}"] = [traced_misses(runner, loaded, trace, (args.new, n, 50 + args.runs - 1))]
    out["prefill_8192_s"] = runner.prefill()
    out["prefill_rounds_s"] = [runner.steps(LONG, 95 + i) for i in range(2)]
    out["prefill_layers"] = layer_times(lambda: runner.run(LONG, 1, 1, 98), loaded.patch, loaded.passes.route)
    out["prompts"] = prompt_times(runner, loaded)
    before = loaded.runtime.stats(0)
    seconds = runner.run(SHORT, 2, 1, 77).first_s
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
        for name, threshold, seed in (("in_place", 10**9, 10_000), ("staged", 9, 20_000)):  # no prompt is read twice
            loaded.passes.threshold = threshold
            for n in (513, 1025, 2049, LONG):
                out[f"{name} {n - 1}"] = [runner.run(n, 2, 1, seed + n + i).first_s for i in range(2)]
    finally:
        loaded.passes.threshold = usual
    return out


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
    driver = Path("/proc/driver/nvidia/version")
    return {
        "gpu": torch.cuda.get_device_name(0), "cpus": os.cpu_count(), "cpu": cpu_name(), "ram_bytes": memory,
        "driver": driver.read_text().split("\n")[0] if driver.exists() else "",
    }  # fmt: skip


class Stages:
    """Runs the stages of one call one after the other within its seconds; what each did is in DIR."""

    groups, limits = GROUPS, LIMITS

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder = args, Path(args.out)
        self.end_s = time.monotonic() + args.budget
        self.folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        path, command = self.folder / "meta.json", " ".join(sys.argv)
        if path.exists():  # the other call of the same table
            command = json.loads(path.read_text())["command"] + "; " + command
        path.write_text(json.dumps({"machine": machine(), "versions": versions(), "command": command}))
        wanted = [s for name in self.args.stages.split(",") for s in self.groups.get(name, name).split(",")]
        for stage in wanted:
            self.stage(stage, *stage.split("-"))

    def stage(self, name: str, kind: str, *details: str) -> None:
        if kind == "read":
            (self.folder / "read.json").write_text(json.dumps(plain_read(Path(self.args.checkpoint))))
        elif kind in TESTS:
            self.tests(name, f"test_{TESTS[kind]}.py")
        elif kind == "stock":
            self.worker(f"stock-{details[0]}", "--on-cpu", "257", "--threads", *details[:1],
                        *["--brief"] * (details[1:] == ("brief",)))  # fmt: skip
        elif kind in ("floor", "ours"):
            self.worker(name, "--chunk", "8192", *["--trace"] * self.args.trace)
        else:
            raise SystemExit(f"no stage is called {name}")

    def worker(self, name: str, *extra: str) -> None:
        """A model in a process of its own; its JSON goes to DIR/NAME.json."""
        args = self.args
        command = [sys.executable, __file__, args.checkpoint, "--out", args.out, "--slots", str(args.slots)]
        command += ["--new", str(args.new), "--runs", str(args.runs), "--worker", name, "--knobs", args.knobs, *extra]
        self.robust(name, command)

    def robust(self, name: str, command: list[str]) -> None:
        """The worker; where it fails for what an optional part may have done, once more without that part."""
        left_out = list(filter(None, self.args.without.split(",")))
        while True:
            error = self.process(name, [*command, *(["--without", ",".join(left_out)] if left_out else [])]) or ""
            suspects = [part for part, words in OPTIONAL.items() if any(w in error for w in words)]
            suspects = [part for part in suspects if part not in left_out]
            others = name.startswith(("stock", "floor", "kernel"))
            if others or not suspects or (self.folder / f"{name}.json").exists():
                return
            first = self.folder / f"{name}.error"
            if first.exists():
                first.rename(self.folder / f"{name}-{'-'.join(['whole', *left_out])}.error")
            left_out += suspects
            print(f"{name}: once more without {', '.join(left_out)}", flush=True)

    def tests(self, name: str, file: str) -> None:
        """pytest of one file of tests/gpu; its junit file goes to DIR/NAME.xml."""
        root = Path(__file__).resolve().parent.parent
        report = (self.folder / f"{name}.xml").resolve()
        command = [sys.executable, "-m", "pytest", f"tests/gpu/{file}", "-m", "gpu", "-q", f"--junitxml={report}"]
        command += ["--without", self.args.without] if self.args.without else []
        self.process(
            name, command, cwd=root, env={**os.environ, "GLM53_TEST_FLASH": self.args.flash or self.args.checkpoint}
        )

    def process(self, name: str, command: list[str], **kwargs: Any) -> str:
        """Run to its end or its limit. A limit is a record of its own, an error is kept, and both let the next run.
        Returns the end of what a command that failed by itself has said."""
        limit = min(self.args.limit or self.limits[name.partition("-")[0]], self.end_s - time.monotonic())
        record = self.folder / f"{name}.json"
        if limit < SHORTEST_S:
            if not record.exists():  # what an earlier call found stays
                record.write_text(json.dumps({"skipped": True, "seconds_left": round(max(limit, 0.0), 1)}))
            print(f"{name}: skipped, the call's time is used up", flush=True)
            return ""
        for earlier in (record, self.folder / f"{name}.error"):  # of another call: not this one's figures
            earlier.unlink(missing_ok=True)
        start = time.perf_counter()
        code, output = run_limited(command, limit, **kwargs)
        seconds = round(time.perf_counter() - start, 1)
        print(f"{name}: {'over its limit of' if code is None else f'rc {code},'} {seconds} s", flush=True)
        if code is None and not record.exists():
            record.write_text(json.dumps({"timed_out": True, "limit_s": round(limit, 1)}))
        if code != 0:
            (self.folder / f"{name}.error").write_text(output[-12000:])
            print(output[-3000:], flush=True)
        return output[-12000:] if code else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="")
    parser.add_argument("--out", required=True)
    parser.add_argument("--stages", default="speed")
    parser.add_argument("--budget", type=float, default=530, help="seconds this call may take in all")
    parser.add_argument("--flash", default=os.environ.get("GLM53_TEST_FLASH", ""), help="checkpoint of the GPU tests")
    parser.add_argument("--slots", type=int, default=248)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--limit", type=float, help="seconds a stage may take, instead of its own limit")
    parser.add_argument("--knobs", default="", help="JSON object of cache policy knobs")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--without", default="", help=f"parts of the loader to leave out: {', '.join(OPTIONAL)}")
    parser.add_argument("--report")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--brief", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--on-cpu", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--chunk", type=int, default=2048, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.report:
        exact_bars.report(Path(args.report), Path(args.out), PROMPT)
    elif args.worker:
        result = work_ours(args) if args.worker == "ours" else work_stock(args)
        save(args, result)
    else:
        Stages(args).run()


if __name__ == "__main__":  # stock's CPU worker is a spawned process
    main()
