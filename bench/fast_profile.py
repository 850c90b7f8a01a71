"""Where a decode step goes, layer by layer: CUDA events at the seams of glm53's hooks, for `gpu_fast.py`.

Of each MoE layer the device's time for
  before    what comes before it since the last MoE layer: attention, hyper-connections, norms, dense layers (before the
            first layer also sampling, the head, and what the host does between two steps)
  router    router and top-k
  decide    our step: policy, split, job for the CPU, admitted copies
  experts   exllamav3's kernels: shared expert, cached experts, experts read over PCIe
  cpu       waiting for the CPU's sum and adding it
An event costs about 2 us of host time; the clock is off outside of decode steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

PARTS = ("before", "router", "decide", "experts", "cpu")


class _Runtime:
    """The expert runtime with a mark on each side of add_partial."""

    def __init__(self, runtime: Any, clock: LayerClock) -> None:
        self._runtime, self._clock = runtime, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def add_partial(self, *args: Any) -> None:
        self._clock.mark("experts")
        self._runtime.add_partial(*args)
        self._clock.mark("cpu")


class LayerClock:
    """Marks seams while it is entered and `on`. `make_event`: makes what `torch.cuda.Event` is."""

    def __init__(self, passes: Any, patch: Any, modules: Sequence[Any], make_event: Callable[[], Any]) -> None:
        self._passes, self._patch, self._modules, self._make_event = passes, patch, modules, make_event
        self._marks: list[tuple[int, str, Any]] = []
        self._layer = -1
        self.on = False

    def __enter__(self) -> LayerClock:
        self._runtime, self._own = self._passes._rt, [vars(m).get("forward") for m in self._modules]
        self._route = self._passes.route if self._passes.lane is None else self._passes.route_split
        self._passes._rt = _Runtime(self._runtime, self)
        self._patch.reroute(self._routed)
        for index, module in enumerate(self._modules):
            module.forward = self._around(index, module.forward)
        return self

    def __exit__(self, *_: object) -> None:
        self._passes._rt = self._runtime
        self._patch.reroute(self._route)
        for module, before in zip(self._modules, self._own, strict=True):
            del module.forward
            if before is not None:
                module.forward = before

    def mark(self, part: str) -> None:
        """The part of the present layer that ends here."""
        if self.on:
            event = self._make_event()
            event.record()
            self._marks.append((self._layer, part, event))

    def _routed(self, layer: int, rows: int, routed: Any, params: Any) -> None:
        self.mark("router")
        self._route(layer, rows, routed, params)
        self.mark("decide")

    def _around(self, index: int, forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._layer = index
            self.mark("before")
            out = forward(*args, **kwargs)
            if self.on and self._marks[-1][1] == "decide":  # no lane marked the experts' end
                self.mark("experts")
            return out

        return run

    def layers(self) -> list[dict[str, float]]:
        """Median ms of each part of each layer; waits for nothing, so the marks must have passed."""
        spans: list[dict[str, list[float]]] = [{p: [] for p in PARTS} for _ in self._modules]
        for (_, _, start), (layer, part, end) in zip(self._marks, self._marks[1:], strict=False):
            spans[layer][part].append(start.elapsed_time(end))
        return [{p: round(statistics.median(s[p]), 4) if s[p] else 0.0 for p in PARTS} for s in spans]


def breakdown(clock: LayerClock, step: Callable[[], bool], seconds: Callable[[], float]) -> dict[str, Any]:
    """Run `step` until it says False, with the clock on: ms a step by the host's clock, and each layer's parts."""
    times = []
    clock.on = True
    try:
        while True:
            start = seconds()
            more = step()
            times.append((seconds() - start) * 1000)
            if not more:
                break
    finally:
        clock.on = False
    layers = clock.layers()
    of_layers = sum(sum(layer.values()) for layer in layers)
    return {
        "steps": len(times),
        "step_ms": statistics.median(times),
        "layers_ms": round(of_layers, 3),
        "layers": layers,
    }


def table(found: dict[str, Any]) -> str:
    """A line a layer, the parts' sums, and the step."""
    lines = ["layer " + " ".join(f"{p:>8}" for p in PARTS)]
    lines += [f"{i:>5} " + " ".join(f"{layer[p]:>8.3f}" for p in PARTS) for i, layer in enumerate(found["layers"])]
    sums = (sum(layer[p] for layer in found["layers"]) for p in PARTS)
    return "\n".join([*lines, "  all " + " ".join(f"{s:>8.3f}" for s in sums) + f"   step {found['step_ms']:.3f} ms"])
