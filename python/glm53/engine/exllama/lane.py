"""The CPU tier of the GPU engine: the experts as CPU kernels find them, the lane that runs them, and its failures.

It reads the trellises in the one page-locked copy that the GPU reads too; what it adds is the scale vectors in plain
host memory (0.45 GB for GLM-5.3-Flash).
States of a CpuTier: made -> measured (`measure`) -> serving (`start`) -> failed (a job was not done in time, a worker
died) -> serving again (`recover`) or, when that happens too often, off for good: exact mode; closed (`close`).
Threads: the engine thread, between forward passes; `stats` from any. A lane that failed is closed on a thread of its
own, for that waits for the worker that did not come back, and holds the memory it reads until then.
Costs: workers of the lane spin while tokens are being decoded and sleep otherwise.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any

from ... import _core
from ...config import Settings
from ...errors import CheckpointError, ConfigError, DeviceError, EngineError
from ...host import Workers
from ...runtime import PARTS, PinnedExperts
from .lane_costs import Costs, ExpertCopies, LaneTimer, measure, overridden, race
from .scales import ExpertScales

log = logging.getLogger(__name__)
LANE_LIMIT_MS = 1500
"""A job that takes longer ends the lane: 10^4 times what one takes, short enough to be told within 2 s."""
GPU_LIMIT_MS = 1900
"""The GPU gives up later, so that the lane's own verdict, which has a reason, comes first."""
_MEASURE_LIMIT_MS = 4500
"""Limit of the lane that is only measured: a start on a busy host need not fail, since no answer waits for it."""
REBUILDS, WINDOW_S = 3, 3600.0
"""A lane that fails more often than that within that time is given up: something is wrong with the host."""
_MEASURED_LAYERS = 4


class ExpertMemory:
    """What the CPU kernels read: one native table per MoE layer over the trellises of `store` and the scales. It keeps
    both alive."""

    def __init__(self, store: PinnedExperts, scales: ExpertScales) -> None:
        self.store, self.scales = store, scales
        try:
            self.tables = [self._table(layer) for layer in store.layers]
        finally:
            scales.abandon()

    def _table(self, layer: int) -> Any:
        c, base, layout = self.scales.config, self.store.arena(layer).address, self.store.layout
        table = _core.ExpertTable(c.n_routed_experts, c.hidden_size, c.moe_intermediate_size, c.swiglu_limit)
        for linear, suh, svh in self.scales.layer(layer):
            trellis = base + linear.expert * layout.stride + layout.offsets[PARTS.index(linear.which)]
            places = (trellis, linear.trellis.nbytes, suh, linear.suh.nbytes, svh, linear.svh.nbytes)
            try:
                table.set_address(linear.expert, linear.which, *places, linear.bits)
            except ValueError as e:
                raise CheckpointError(f"{linear.trellis.file}: {linear.trellis.name}: {e}") from None
        return table


def require_kernels(settings: Settings) -> None:
    """Raise DeviceError where this CPU has no vector kernels and none was chosen on purpose."""
    if settings.isa is None and _core.cpu_features()["isa"] == "scalar":
        raise DeviceError("mode fast needs a CPU with AVX2, FMA and F16C; use --mode exact, which has no CPU tier")


def _close_lane(lane: Any, *kept: Any) -> None:
    """`kept`: what its workers may still be reading."""
    lane.close()


class CpuTier:
    """The lane, and what it takes to make another one. limits_ms: of the lane's watchdog and of the waiting GPU."""

    def __init__(
        self,
        memory: ExpertMemory,
        device: Any,
        settings: Settings,
        limits_ms: tuple[int, int] = (LANE_LIMIT_MS, GPU_LIMIT_MS),
    ) -> None:
        self._memory, self._device, self._settings = memory, device, settings
        self._workers, self._hidden, self._limits_ms = Workers.of(settings), int(memory.tables[0].hidden), limits_ms
        self._runtime: Any = None
        self._rebuilds = 0
        self._failed_s: deque[float] = deque(maxlen=REBUILDS + 1)
        self._off: str | None = None
        self._given_up = False
        self.costs: Costs | None = None
        self._isa: str = settings.isa or "auto"
        self._raced_ns: dict[str, int] = {}
        self._arena, self._lane = self._make(_MEASURE_LIMIT_MS)

    def _make(self, limit_ms: int = 0) -> tuple[Any, Any]:
        arena = _core.HostArena(_core.lane_block_bytes(self._hidden), "CPU lane", self._device)
        workers = self._workers
        cpus = None if workers.cpus is None else list(workers.cpus)
        limit_ms = limit_ms or self._limits_ms[0]
        try:
            lane = _core.CpuLane(self._memory.tables, arena, workers.threads, cpus, self._isa, limit_ms=limit_ms)
        except ValueError as e:
            raise ConfigError(f"the CPU lane cannot be made with ct_cpus, ct_threads, isa as they are: {e}") from None
        return arena, lane

    def _timer(self, top_k: int) -> LaneTimer:
        return LaneTimer(self._lane, self._arena, self._memory.tables[:_MEASURED_LAYERS], top_k)

    def _take_kernels(self, isa: str) -> None:
        """A lane with these kernels, to be measured, takes the present one's place."""
        self._lane.close()
        self._isa = isa
        self._arena, self._lane = self._make(_MEASURE_LIMIT_MS)

    def _large_job_ns(self, isa: str, top_k: int) -> float:
        self._take_kernels(isa)
        return self._timer(top_k).large_job_ns()

    def _choose_kernels(self, top_k: int) -> None:
        """Take the kernels that all workers together finish large jobs fastest with; the process's own choice stays
        where none is clearly faster. Only where the setting `isa` leaves it open and this CPU has several AVX-512
        tables, which give the same bits."""
        names = [isa for isa in _core.cpu_features()["isas"] if isa not in ("avx2", "scalar")]
        if self._settings.isa is not None or len(names) < 2:
            return
        chosen, self._raced_ns = race(names, lambda isa: self._large_job_ns(isa, top_k))
        if self._isa != chosen:
            self._take_kernels(chosen)

    def measure(self, top_k: int) -> None:
        """Measure what the split needs on this lane, which then gives way to a fresh one: jobs count from 1."""
        start = time.monotonic()
        self._choose_kernels(top_k)
        measured = measure(self._timer(top_k), ExpertCopies(self._memory.store), top_k)
        self.costs, chosen = overridden(measured, self._settings)
        self._lane.close()
        self._arena, self._lane = self._make()
        log.info(
            "CPU lane: %d workers (%s)%s; split constants, ms: %s; measured in %.2f s%s",
            self._lane.threads, self._lane.isa, "" if self._workers.cpus else ", not pinned",
            " ".join(f"{k.removesuffix('_ms')} {v:g}" for k, v in self.costs.as_ms().items()),
            time.monotonic() - start, f"; set by hand: {', '.join(chosen)}" if chosen else "",
        )  # fmt: skip

    def start(self, runtime: Any) -> None:
        """Let `runtime` use the lane; the compute stream must be idle. Raises DeviceError."""
        if self.costs is None:
            raise EngineError("the CPU lane was not measured before its start")
        try:
            runtime.attach_lane(self._arena, self._hidden, self.costs.split(), self._limits_ms[1])
        except (RuntimeError, ValueError) as e:
            raise DeviceError(f"the CPU lane could not be attached: {e}") from None
        self._runtime = runtime

    def wake(self) -> None:
        """A decode step is about to be queued."""
        self._lane.wake()

    def fault(self) -> str | None:
        """One line about the lane's failure, None while it serves. Right once a step's results have been read."""
        verdict = self._runtime.lane_verdict()
        if verdict == "ok":
            return None
        did = {"bad job": "refused a job", "died": "died"}.get(verdict, "stalled")
        reason = self._lane.health()["reason"] or f"no result within {self._limits_ms[1]} ms"
        return " ".join(f"the CPU lane {did}: {reason}".split()) if did != "refused a job" else f"the CPU lane {did}"

    def recover(self, fault: str, stream: int) -> bool:
        """After `fault`: a fresh lane, or none, which is exact mode; says whether there is one. Never raises."""
        try:
            self._runtime.detach_lane(stream)
            self._give_up_lane()
            self._failed_s.append(time.monotonic())
            if len(self._failed_s) > REBUILDS and self._failed_s[-1] - self._failed_s[0] < WINDOW_S:
                raise EngineError(f"it failed {len(self._failed_s)} times in {WINDOW_S / 60:.0f} minutes")
            self._rebuilds += 1
            self._arena, self._lane = self._make()
            self._given_up = False
            self.start(self._runtime)
        except Exception as e:
            self._off = fault
            self._give_up_lane()
            log.error("decoding goes on without the CPU lane, as in exact mode: %s (%s)", fault, e)
            return False
        log.error("%s; the lane was made anew (%d so far)", fault, self._rebuilds)
        return True

    def _give_up_lane(self) -> None:
        """Close the lane elsewhere; what a worker may still read stays in memory until it is done."""
        if self._given_up:
            return
        self._given_up = True
        old = (self._lane, self._arena, self._memory)
        threading.Thread(target=_close_lane, args=old, name="glm53-old-lane", daemon=True).start()

    @property
    def scale_bytes(self) -> int:
        """Host memory that only this tier needs: the experts' scales, outside of page-locked memory."""
        return self._memory.scales.nbytes

    def stats(self) -> dict[str, Any]:
        """State, workers, a large job's ms by kernels where they were tried, split constants in ms, counters."""
        counters = {k: v for k, v in self._lane.stats().items() if k != "parked"}
        state = {"on": self._off is None, "off_because": self._off, "rebuilds": self._rebuilds}
        raced = {isa: round(ns / 1e6, 4) for isa, ns in self._raced_ns.items()}
        shape = {"workers": int(self._lane.threads), "isa": str(self._lane.isa), "raced_ms": raced}
        return {**state, **shape, **(self.costs.as_ms() if self.costs else {}), **counters}

    def close(self, stream: int) -> None:
        """Detach and end the workers; idempotent. The compute stream must be idle."""
        if self._runtime is not None and self._off is None:
            self._runtime.detach_lane(stream)
        self._runtime = None
        if not self._given_up:
            self._given_up = True
            self._lane.close()
