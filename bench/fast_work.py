"""What the stages of `gpu_fast.py` measure, each in its own process: a mode, both lanes' rates, one core's kernels."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import gpu_exact
from exact_process import peak_ram
from exact_run import SHORT, Runner, drawing, ids_of
from fast_profile import LayerClock, breakdown, table

COUNTED = ("steps", "hits", "misses", "admissions", "cpu_picks", "cpu_steps", "cpu_bytes")
RATE_SECONDS = 0.6
KERNEL_EXPERTS, KERNEL_ROUNDS, KERNEL_PICKS = 48, 9, 8


def lane_settings(args: argparse.Namespace) -> dict[str, Any]:
    """CPUs of the lane: the given ones, else all but the first two that this process may use."""
    allowed = sorted(os.sched_getaffinity(0))
    chosen = [int(c) for c in args.ct_cpus.split(",")] if args.ct_cpus else allowed[2:] or allowed
    return {"ct_cpus": tuple(chosen)}


def counters(loaded: Any) -> dict[str, float]:
    """Counters of the expert cache and, in fast mode, of the lane (lane_bytes, lane_s)."""
    stats = loaded.runtime.stats(loaded.passes.stream)
    found: dict[str, float] = {name: stats[name] for name in COUNTED}
    if loaded.tier is not None:
        lane = loaded.tier.stats()
        found |= {"lane_jobs": lane["jobs"], "lane_bytes": lane["expert_bytes"], "lane_s": lane["seconds"]}
    return found


def set_split(loaded: Any, changes: dict[str, int]) -> dict[str, int]:
    """Replace constants of the split by name, as `_core.SplitConfig` calls them."""
    config = loaded.tier.costs.split()
    for name, value in changes.items():
        if not hasattr(config, name):
            raise SystemExit(f"the split has no {name}")
        setattr(config, name, value)
    loaded.runtime.set_split(config, loaded.passes.stream)
    return changes


def work_glm(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    """Decode of 1 and 4 streams in `mode`, what it read from where, its RAM, and each layer's times."""
    import exllamav3 as exl
    import torch

    from glm53.config import Settings
    from glm53.engine.exllama.ahead import run_ahead
    from glm53.engine.exllama.loader import LoadOptions, load

    lane = lane_settings(args) if mode == "fast" else {}
    state = Path(tempfile.mkdtemp())
    settings = Settings(model_dir=Path(args.checkpoint), mode=mode, state_dir=state, cache_tokens=16384, **lane)
    options = LoadOptions(max_slots=args.slots, **gpu_exact.without(args))
    loaded = load(settings, lambda stage, fraction: None, options)
    changes = set_split(loaded, json.loads(args.split)) if mode == "fast" else {}
    generator = exl.Generator(
        loaded.model,
        loaded.cache,
        loaded.tokenizer,
        max_batch_size=4,
        max_chunk_size=2048,
        recurrent_cache_size=1 << 30,
    )
    ahead = run_ahead(generator, loaded)
    runner = Runner(exl, generator)
    out: dict[str, Any] = {"mode": mode, "slots": loaded.slots, "load": loaded.times, "split": changes, **lane}
    out["without"] = args.without
    runner.settle(args.new)
    for n in (1, 4):
        before, queued = counters(loaded), ahead.steps if ahead else 0
        out |= runner.decode(args.new, n, args.runs)
        after = counters(loaded)
        out[f"steps_ahead{n}"] = ahead.steps - queued if ahead else 0
        out[f"counts{n}"] = {name: after[name] - before[name] for name in after}
        out[f"fault{n}"] = loaded.passes.fault()
    out["ram"] = peak_ram()
    for n in (1, 4):
        out[f"layers{n}"] = profile(loaded, runner, n, args.new)
        print(f"{mode}, {n} streams:\n{table(out[f'layers{n}'])}", flush=True)
    out["moe_layers"], out["expert_bytes"] = len(loaded.store.layers), sum(loaded.store.layout.part_bytes)
    gpu_exact.save(args, out)
    out["link_gb_s"] = gpu_exact.link_rate(loaded)
    if mode == "fast":
        out["lane"] = loaded.tier.stats()
        out["rates"] = both_rates(loaded, lane["ct_cpus"])
    out["mismatches"] = len(loaded.runtime.verify(0))
    torch.cuda.synchronize()
    gpu_exact.save(args, out)
    loaded.close()
    return out


def profile(loaded: Any, runner: Any, streams: int, steps: int) -> dict[str, Any]:
    """Where decode steps of that many streams go; their prompts are read before."""
    import torch

    from glm53.hooks import moe_modules

    random, generator = torch.Generator().manual_seed(61), runner.generator
    for s in range(streams):
        ids, sampler = ids_of(SHORT, random), drawing(runner.exl)
        generator.enqueue(runner.exl.Job(input_ids=ids, max_new_tokens=steps + 2, sampler=sampler, seed=61 + s))
    drawn: set[int] = set()
    while len(drawn) < streams:
        drawn |= {id(r["job"]) for r in generator.iterate() if r["stage"] == "streaming"}

    def step() -> bool:
        generator.iterate()
        more = int(generator.num_remaining_jobs()) == streams
        if not more:  # else it waits for what it needs, and the next step may be queued already
            torch.cuda.synchronize()
        return more

    modules = moe_modules(runner.exl, loaded.model)
    with LayerClock(loaded.passes, loaded.patch, modules, lambda: torch.cuda.Event(enable_timing=True)) as clock:
        found = breakdown(clock, step, time.perf_counter)
    while generator.num_remaining_jobs():
        generator.iterate()
    return found


def both_rates(loaded: Any, cpus: tuple[int, ...]) -> dict[str, float]:
    """Plain reads of the experts by one thread a CPU, and copies of experts to the GPU, at once: GB/s of each."""
    import numpy as np
    import torch

    store, stride = loaded.store, loaded.store.layout.stride
    blocks = [(ctypes.c_int64 * (a.bytes // 8)).from_address(a.address) for a in map(store.arena, store.layers)]
    arrays = [np.frombuffer(b, np.int64) for b in blocks]
    piece, stop, read = 1 << 20, threading.Event(), [0] * len(cpus)

    def reader(index: int, cpu: int) -> None:
        os.sched_setaffinity(threading.get_native_id(), {cpu})
        array = arrays[index % len(arrays)]
        last = max(1, array.size - piece)
        at = index * 7919 * piece % last
        while not stop.is_set():
            part = array[at : at + piece]
            part.sum()
            read[index] += part.nbytes
            at = (at + piece) % last

    threads = [threading.Thread(target=reader, args=(i, c)) for i, c in enumerate(cpus)]
    first = store.arena(store.layers[0])
    source = torch.frombuffer((ctypes.c_uint8 * first.bytes).from_address(first.address), dtype=torch.uint8)
    target, copied = torch.empty(stride, dtype=torch.uint8, device="cuda"), 0
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    before, start = sum(read), time.perf_counter()
    while time.perf_counter() - start < RATE_SECONDS:
        for _ in range(8):
            at = copied // stride * 7 % store.whole_copies * stride
            target.copy_(source[at : at + stride], non_blocking=True)
            copied += stride
        torch.cuda.synchronize()
    seconds, done = time.perf_counter() - start, sum(read) - before
    stop.set()
    for thread in threads:
        thread.join()
    return {"cpu_gb_s": done / seconds / 1e9, "copy_gb_s": copied / seconds / 1e9, "seconds": seconds}


def work_kernel(args: argparse.Namespace) -> dict[str, Any]:
    """One core, one row, whole experts in turn: our kernels and stock's best layout, in one process, interleaved."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-1]})
    os.environ["EXL3_MOE_CPU_PIN"] = "0"  # its pool keeps to the one CPU that this process has
    import torch
    from exllamav3.ext import exllamav3_ext as ext

    from glm53 import _core
    from glm53.checkpoint import Checkpoint

    with Checkpoint.open(Path(args.checkpoint)) as checkpoint:
        c, layer = checkpoint.config, checkpoint.config.moe_layers[0]
        linears = [e for e in checkpoint.experts(layer) if e.expert < KERNEL_EXPERTS]
        tensors = [[torch.from_numpy(checkpoint.read(t.name)) for t in (e.trellis, e.suh, e.svh)] for e in linears]
    table_ = _core.ExpertTable(len(linears) // 3, c.hidden_size, c.moe_intermediate_size, c.swiglu_limit)
    for e, (trellis, suh, svh) in zip(linears, tensors, strict=True):
        table_.set(e.expert, e.which, trellis.numpy(), suh.numpy(), svh.numpy(), e.bits)
    moe = _core.CpuMoe(threads=1)
    x = (torch.randn(1, c.hidden_size, generator=torch.Generator().manual_seed(1)) / 4).half()
    weights = torch.full((1, KERNEL_PICKS), 1 / KERNEL_PICKS).half()
    x32, weights32 = x.float().numpy(), weights.float().numpy()

    def ours(picks: Any, out: Any) -> None:
        moe.forward(table_, x32, picks.numpy(), weights32, out.numpy())

    def stock(swizzled: bool) -> Any:
        handle = _stock_layer(ext, tensors, c.swiglu_limit, swizzled)
        return lambda picks, out: ext.exl3_moe_cpu_forward(handle, x, picks, weights, out, 1)

    sides = {"ours": ours, "native": stock(False), "swizzled": stock(True)}
    found = race(sides, len(linears) // 3, c.hidden_size)
    tiers = ("vbmi", "vnni", "bw")
    tier = next((t for t in tiers if getattr(ext, f"exl3_moe_cpu_has_avx512_{t}")()), "avx2")
    return {"ours_isa": moe.isa, "stock_tier": tier, **found}


def race(sides: dict[str, Any], experts: int, hidden: int) -> dict[str, Any]:
    """Seconds an expert of each side, all sides on the same picks in turn, and how far their sums are from ours."""
    import torch

    times: dict[str, list[float]] = {name: [] for name in sides}
    worst = dict.fromkeys(sides, 0.0)
    for turn in range(KERNEL_ROUNDS + 1):
        for begin in range(0, experts - KERNEL_PICKS + 1, KERNEL_PICKS):
            picks, sums = torch.arange(begin, begin + KERNEL_PICKS).view(1, -1), {}
            for name, forward in sides.items():
                sums[name] = torch.zeros(1, hidden)
                start = time.perf_counter()
                forward(picks, sums[name])
                if turn:  # the first round settles them
                    times[name].append((time.perf_counter() - start) / KERNEL_PICKS)
            for name, total in sums.items():
                worst[name] = max(worst[name], float((total - sums["ours"]).norm() / sums["ours"].norm()))
    return {"expert_s": times, "experts": experts, "relative_difference": worst}


def band_swizzled(trellis: Any) -> Any:
    """exllamav3's band-contiguous order: tiles in groups of 8 columns, each group's k in a row; the shape stays."""
    k, n, words = trellis.shape
    return trellis.view(k, n // 8, 8, words).permute(1, 0, 2, 3).contiguous().view(k, n, words)


def _stock_layer(ext: Any, tensors: list[list[Any]], limit: float, swizzled: bool) -> int:
    """A layer of exllamav3's CPU worker over these experts, in gate, up, down order."""
    lists: list[list[Any]] = []
    for part in range(3):
        of_part = tensors[part::3]
        lists += [
            [band_swizzled(t[0]) if swizzled else t[0] for t in of_part],
            *([t[i] for t in of_part] for i in (1, 2)),
        ]
    return int(ext.exl3_moe_cpu_make_layer(*lists, [], [], [], 0, float(limit), int(swizzled)))
