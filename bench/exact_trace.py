"""What a decode step does, for `gpu_exact.py`: the picks of its layers, and the host's CUDA calls inside them."""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

WAITS = (
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cuStreamSynchronize",
    "cuCtxSynchronize", "cuEventSynchronize",
)  # fmt: skip
"""CUDA calls that hold the host until the device has done something (a copy to pageable memory ends in one)."""
LABEL = "moe layer "


class Traced:
    """Records the picks of decode steps while it is the receiver of the routers' choices."""

    def __init__(self, passes: Any, route: Any) -> None:
        self.passes, self.route, self.picks = passes, route, []

    def __call__(self, layer: int, rows: int, routed: Any, params: Any) -> None:
        if rows <= 8 and "recurrent_history" in params:
            self.picks.append((layer, routed[0].clone()))
        self.route(layer, rows, routed, params)


def layer_times(run: Callable[[], Any], patch: Any, route: Any) -> list[list[float]]:
    """[rows, layer, seconds from the beginning, seconds in our hook] of every MoE layer that `run` enters, by the
    host's clock. A staged layer whose hook takes long waited for its copies; one whose hook takes nothing was computed
    later than they arrived."""
    marks: list[list[float]] = []
    start = time.perf_counter()

    def timed(layer: int, rows: int, routed: Any, params: Any) -> None:
        entered = time.perf_counter()
        route(layer, rows, routed, params)
        marks.append([rows, layer, entered - start, time.perf_counter() - entered])

    patch.reroute(timed)
    try:
        run()
    finally:
        patch.reroute(route)
    return marks


def fixed_misses(picks: list[tuple[int, Any]], layers: int, per_layer: int) -> tuple[float, float]:
    """Misses per layer and step of the `per_layer` most picked experts held fixed, and unique picks per layer."""
    counts = [Counter() for _ in range(layers)]  # type: list[Counter[int]]
    unique = []
    for layer, selected in picks:
        distinct = set(selected.reshape(-1).tolist())
        unique.append((layer, distinct))
        counts[layer].update(distinct)
    hot = [{e for e, _ in c.most_common(per_layer)} for c in counts]
    missed = [len(distinct - hot[layer]) for layer, distinct in unique]
    return statistics.fmean(missed), statistics.fmean(len(d) for _, d in unique)


def calls_inside(
    ranges: Sequence[tuple[int, float, float]], calls: Sequence[tuple[str, float]], layers: int
) -> list[dict[str, Any]]:
    """Per layer: how often it ran, the CUDA calls the host made inside it by name, and how many of them wait.

    ranges: (layer, start, end) of each run of a layer on the host; calls: (name, time). Same clock.
    """
    rows: list[dict[str, Any]] = [{"layer": i, "runs": 0, "calls": Counter()} for i in range(layers)]
    ordered = sorted(calls, key=lambda call: call[1])
    at = 0
    for layer, start, end in sorted(ranges, key=lambda r: r[1]):
        rows[layer]["runs"] += 1
        while at < len(ordered) and ordered[at][1] < start:
            at += 1
        while at < len(ordered) and ordered[at][1] <= end:
            rows[layer]["calls"][ordered[at][0]] += 1
            at += 1
    for row in rows:
        row["waits"] = sum(n for name, n in row["calls"].items() if name in WAITS)
        row["calls"] = dict(sorted(row["calls"].items()))
    return rows


def moe_trace(decode: Callable[[], Any], modules: Sequence[Any]) -> dict[str, Any]:
    """Run `decode` under the profiler with every MoE layer's forward labelled; the calls inside, and kernel times."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    def labelled(index: int, forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"{LABEL}{index}"):
                return forward(*args, **kwargs)

        return run

    own = [vars(module).get("forward") for module in modules]
    for index, module in enumerate(modules):
        module.forward = labelled(index, module.forward)
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
            decode()
            torch.cuda.synchronize()
    finally:
        for module, before in zip(modules, own, strict=True):
            del module.forward
            if before is not None:  # in fast mode the layers carry a hook there
                module.forward = before
    host = [e for e in p.events() if e.device_type == torch.autograd.DeviceType.CPU]
    ranges = [(int(e.name[len(LABEL) :]), e.time_range.start, e.time_range.end)
              for e in host if e.name.startswith(LABEL)]  # fmt: skip
    calls = [(e.name, e.time_range.start) for e in host if re.match(r"cu(da)?[A-Z]", e.name)]
    kernels = {
        e.key[:60]: e.self_device_time_total / max(e.count, 1)
        for e in p.key_averages() if any(k in e.key for k in ("decide_kernel", "copy_kernel", "prompt_kernel"))
    }  # fmt: skip
    return {
        "layers": calls_inside(ranges, calls, len(modules)), "calls_in_all": dict(Counter(name for name, _ in calls)),
        "device_us": sum(e.self_device_time_total for e in p.key_averages()), "kernel_us": kernels,
    }  # fmt: skip
