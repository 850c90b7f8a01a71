"""What happens around exllamav3's forward passes: which way the experts are read, and who has the VRAM meanwhile.

States: resident (slots hold experts) -> lent (a long prompt took segments for staging and activations) -> refilling
(slots are back and fill with the hottest experts in the background) -> resident. Lent slots whose memory another holds
stay lent and are asked for again every second; a new lending is asked back at the first chance.
With a CPU lane (fast mode) the generator's decode steps leave some of their misses to it; prompts never do, whatever
their length. `lane` is put in by the loader; after a failure it renews itself, and is taken out when it no longer can.
Threads: the engine thread alone. Costs: a decode step adds one call per MoE layer (two with a lane) and no wait; a long
prompt one wait at its start; every round between passes while refilling, two.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch

from ...errors import EngineError
from ...hooks import MAX_DECODE_ROWS, Routed

if TYPE_CHECKING:
    from .lane import CpuTier

GB = 10**9
REFILL_AT_ONCE = 8
_STREAM_PICKS_PER_EXPERT = 32
"""Picks per expert from which staging whole layers ahead wins: 1,152 tokens of GLM-5.3-Flash. Below, reading in place
leaves out what is not picked and overlaps with computing too (PCIe 5: faster at 1,024 tokens, slower at 2,048)."""
_MEASURED_FROM = 512
"""Tokens from which the measured need per token is trusted: smaller passes are mostly fixed costs."""
QUEUED_LAYERS = 21
"""MoE layers of a decode step that may be left to do when the next step is queued: half of GLM-5.3-Flash's. Where more
kernels are queued than the driver takes (1,024, about a step of it), queueing one waits, with Python's lock held."""
_RETRY_S = 1.0
"""Time between attempts to get lent memory back while others hold it."""


class Upkeep(IntEnum):
    """What `Passes.between` has left to do; false when it is nothing."""

    NONE = 0
    LATER = 1
    """Something is lent that cannot be had back yet: call again, but wait before."""
    NOW = 2


@dataclass(frozen=True, slots=True)
class PassSettings:
    """Knobs in bytes and tokens. `stage_from` None: derived from picks per expert; 0 forces staging, for tests."""

    stage_bytes: int
    elastic_bytes: int
    reserve_bytes: int
    stage_from: int | None = None


def stage_threshold(experts: int, top_k: int, stage_from: int | None) -> int:
    """Tokens from which a pass is staged; never a decode step."""
    derived = -(-_STREAM_PICKS_PER_EXPERT * experts // top_k) if stage_from is None else stage_from
    return max(derived, MAX_DECODE_ROWS + 1)


def activation_bytes(tokens: int, hidden: int, top_k: int, streams: int = 4) -> int:
    """VRAM a prefill pass needs beside weights: residual streams, attention inputs and the experts' slot scratch.

    Per token: 2 x `streams` x hidden fp32 residuals, 24 x hidden fp16 of attention, (top_k x 1.1 + 2) x hidden fp32
    of expert outputs; 256 MiB for weights decoded on the fly. A first guess that measurement replaces.
    """
    per_token = hidden * (2 * streams * 4 + 24 * 2 + int((top_k * 1.1 + 2) * 4))
    return tokens * per_token + (256 << 20)


def _plain(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    """Rows that native code may read by address."""
    return tensor.dtype == torch.float16 and tensor.shape == shape and tensor.is_contiguous()


class Passes:
    """The hooks' receiving end. `route` (in fast mode `route_split`, with `combine`) and `bracket` go to `hooks.Patch`;
    `between` is called between passes."""

    def __init__(self, runtime: Any, settings: PassSettings, *, experts: int, top_k: int, hidden: int) -> None:
        self._rt, self._settings = runtime, settings
        self._top_k, self._hidden = top_k, hidden
        self.threshold = stage_threshold(experts, top_k, settings.stage_from)
        self._copy = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._per_token = 0.0
        self._lent = 0
        self._retry_s = 0.0
        self._refilling = False
        self._staging = False
        self.lane: CpuTier | None = None
        self._queued_on = self.stream  # of the pass that is being queued: torch takes some us to tell
        self._splitting = False
        self._split_rows = 0
        self._mark = -1
        self._marked = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # decode_passes: all of at most MAX_DECODE_ROWS tokens, the last piece of a prompt among them
        self.counts = {"decode_passes": 0, "prompt_passes": 0, "staged_passes": 0, "lendings": 0}

    @property
    def stream(self) -> int:
        """The compute stream's handle."""
        return int(torch.cuda.current_stream().cuda_stream)

    def route(self, layer: int, rows: int, routed: Routed, params: dict[str, Any]) -> None:
        """Called by exllamav3 right after a layer's router."""
        if layer == self._mark:
            self._marked.record()
        selected = routed[0]
        picks, n = selected.data_ptr(), selected.numel()
        if self._staging:
            self._rt.enter_layer(layer, picks, n, rows)
        elif rows <= MAX_DECODE_ROWS:
            self._rt.decode(layer, picks, n, rows, self._queued_on)
        else:
            self._rt.prompt(layer, picks, n, rows, self._queued_on)

    def route_split(self, layer: int, rows: int, routed: Routed, params: dict[str, Any]) -> None:
        """`route` in fast mode: a decode step's misses go to both lanes. What the CPU takes loses its weight here."""
        if not self._splitting:
            self.route(layer, rows, routed, params)
            return
        if layer == self._mark:
            self._marked.record()
        selected, weights, x = routed
        if not _plain(x, (rows, self._hidden)) or not _plain(weights, selected.shape):
            raise EngineError(
                f"MoE layer {layer}: the router got x {x.dtype} {tuple(x.shape)} and gave weights {weights.dtype} "
                f"{tuple(weights.shape)}; the CPU lane needs contiguous float16 rows"
            )
        self._rt.decode_split(
            layer, selected.data_ptr(), selected.numel(), rows, x.data_ptr(), weights.data_ptr(), self._queued_on
        )
        self._split_rows = rows

    def combine(self, layer: int, out: torch.Tensor) -> None:
        """Called after a layer's experts in fast mode: adds what the CPU computed for it."""
        rows, self._split_rows = self._split_rows, 0
        if not rows:
            return
        if out.dtype != torch.float32 or not out.is_contiguous() or out.numel() != rows * self._hidden:
            raise EngineError(
                f"MoE layer {layer}: its output is {out.dtype} {tuple(out.shape)}, not {rows} contiguous float32 rows"
            )
        self._rt.add_partial(rows, out.data_ptr(), False, self._queued_on)

    def fault(self) -> str | None:
        """What went wrong with the CPU lane in the steps whose tokens have been read, or in one queued ahead that runs
        already; None: nothing."""
        return None if self.lane is None else self.lane.fault()

    @contextmanager
    def bracket(self, tokens: int, decode: bool = False, layers: int = 0) -> Iterator[None]:
        """Around one forward pass; decode: it is a step of the generator, not a prompt; layers: MoE layers it runs (0:
        all)."""
        self._queued_on = self.stream
        if tokens <= MAX_DECODE_ROWS:
            self.counts["decode_passes"] += 1
            self._mark = max(0, layers - QUEUED_LAYERS) if decode else -1
            if decode and self.lane is not None:
                self.lane.wake()
                self._splitting = True
            try:
                yield
            finally:
                self._splitting, self._split_rows, self._mark = False, 0, -1
            return
        staged = tokens >= self.threshold
        self._make_room(tokens, 2 * self._settings.stage_bytes if staged and not self._rt.has_staging else 0)
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        if staged:
            self._rt.begin_prompt(self._settings.stage_bytes, self.stream, int(self._copy.cuda_stream), layers)
            self._staging = True
        self.counts["staged_passes" if staged else "prompt_passes"] += 1
        try:
            yield
        finally:
            if staged:
                self._staging = False
                self._rt.finish_prompt()
        self._per_token = max(self._per_token, (torch.cuda.max_memory_allocated() - base) / tokens)

    def _need(self, tokens: int) -> int:
        """Activations of a pass: the guess until a pass was measured, then that with a tenth on top."""
        if not self._per_token or tokens < _MEASURED_FROM:
            return activation_bytes(tokens, self._hidden, self._top_k)
        return int(self._per_token * tokens * 1.1) + (256 << 20)

    def _make_room(self, tokens: int, staging: int) -> None:
        """Lend slots until activations and staging fit beside half the reserve, within the elastic limit."""
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        free = torch.cuda.mem_get_info()[0] - self._settings.reserve_bytes // 2
        need = self._need(tokens)
        short = staging + max(need - cached, 0) - free
        if short <= 0:
            return
        if staging:  # the driver must get the allocator's leftovers before it can hand out staging
            torch.cuda.empty_cache()
            short = staging + need - (torch.cuda.mem_get_info()[0] - self._settings.reserve_bytes // 2)
        limit = max(self._settings.elastic_bytes - self._lent, 0)
        lent = self._rt.lend(min(short, limit), self.stream) if limit and short > 0 else 0
        if lent:
            self._lent += lent
            self._retry_s = 0.0
            self.counts["lendings"] += 1

    @property
    def settled(self) -> bool:
        """`between` has nothing to do while no prompt is read: a step may be queued before it is called."""
        return not (self._lent or self._refilling)

    def await_room(self) -> None:
        """Wait until of the decode step that was queued last the GPU has `QUEUED_LAYERS` left to do."""
        self._marked.synchronize()

    def begins(self) -> None:
        """A decode step that was queued some time ago begins on the GPU: the lane's workers may have gone to sleep."""
        if self.lane is not None:
            self.lane.wake()

    def between(self, prompts_left: bool) -> Upkeep:
        """Take lent slots back once no prompt is being read, and refill them; says what is left to do."""
        if prompts_left:
            return Upkeep.LATER if self._lent or self._refilling else Upkeep.NONE
        if self._lent and time.monotonic() >= self._retry_s:
            self._take_back()
        if self._refilling:
            self._refilling = self._rt.refill(REFILL_AT_ONCE, self.stream, int(self._copy.cuda_stream)) > 0
        if self._refilling:
            return Upkeep.NOW
        return Upkeep.LATER if self._lent else Upkeep.NONE

    def _take_back(self) -> None:
        self._rt.free_staging()
        torch.cuda.empty_cache()
        slots = self._rt.take_back(self.stream)
        self._lent = max(0, self._lent - slots * self._rt.slot_bytes)
        self._refilling = self._refilling or slots > 0
        self._retry_s = time.monotonic() + _RETRY_S if self._lent else 0.0

    def refill_all(self) -> None:
        """Fill empty slots with the hottest experts, waiting for the copies (at load)."""
        while self._rt.refill(REFILL_AT_ONCE, self.stream, int(self._copy.cuda_stream)) > 0:
            self._copy.synchronize()
