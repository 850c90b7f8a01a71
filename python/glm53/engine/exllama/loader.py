"""Loads a checkpoint through exllamav3 with its routed experts in pinned host memory, and sizes the expert cache.

Order: device beside checkpoint headers; page-locking and reading of the experts (worker threads) beside exllamav3's
import and its own load of everything else (with `--mtp` of the draft layer too); in fast mode the CPU lane is measured;
then slots from the VRAM that is left, filled by the heat of the last run; the lane starts last. A failure anywhere
undoes the hooks and frees what was taken.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...checkpoint import Checkpoint
from ...config import Settings
from ...errors import DeviceError, EngineError
from ...hooks import (
    Patch,
    TrellisSource,
    import_exllamav3,
    moe_modules,
    plain_meta_tensors,
    shared_buffers,
    verify_layers,
    verify_split,
)
from ...runtime import PARTS, PinnedExperts, open_cuda
from ...sizing import expert_slots
from ..protocol import Progress
from . import pins, warm
from .expert_tensors import ExpertTensors
from .lane import GPU_LIMIT_MS, LANE_LIMIT_MS, CpuTier, ExpertMemory, require_kernels
from .mtp import Draft
from .passes import GB, Passes, PassSettings
from .scales import ExpertScales
from .single_experts import SingleExperts
from .token_table import TokenTable

log = logging.getLogger(__name__)
PAGE_TOKENS = 256
SEGMENT_SLOTS = 32
POLICY_KNOBS = {"slow_shift": 5}
"""Heat remembered over 512 rows: fewer admissions that routing without locality does not repay."""
RECURRENT_CACHE_BYTES = 1 << 30
"""Host RAM for KDA states kept for prefix reuse."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the settings do not carry: limits for tests and measurements."""

    max_slots: int | None = None
    stage_from: int | None = None
    knobs: dict[str, int] | None = None
    use_heat: bool = True
    single_experts: bool = True
    """Experts that exllamav3 runs alone are read where they lie during a staged prompt; else at home."""
    bulk_scales: bool = True
    """The experts' scales come in one copy a layer; else exllamav3 loads each vector itself."""
    run_ahead: bool = True
    """Decode steps are queued before the tokens of the last one are read; not with an MTP draft. Where no options are
    given at all, the setting of that name says."""
    lane_limits_ms: tuple[int, int] = (LANE_LIMIT_MS, GPU_LIMIT_MS)


class Phases:
    """Seconds of a load by what they went to, one phase after the other on the loading thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start_s = self._last_s = time.monotonic()

    def end(self, name: str) -> None:
        """What happened since the last phase ended was this one."""
        now = time.monotonic()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now - self._last_s, 3)
        self._last_s = now

    @property
    def total(self) -> float:
        """Seconds since the beginning."""
        return round(time.monotonic() - self._start_s, 3)


@dataclass(slots=True)
class Loaded:
    """Everything a running engine holds; `close` releases it in order."""

    exllamav3: Any
    model: Any
    cache: Any
    tokenizer: Any
    store: PinnedExperts
    runtime: Any
    passes: Passes
    patch: Patch
    heat_file: Path
    heat_key: str
    vocab_size: int
    context: int
    slots: int
    times: dict[str, Any]
    tier: CpuTier | None = None
    draft: Draft | None = None
    tokens: TokenTable | None = None

    def close(self) -> None:
        """Unpatch, drop the model, then the slots and arenas its tables point to. Nothing may use this afterwards."""
        torch.cuda.synchronize()
        self.patch.undo()
        if self.tier is not None:
            self.tier.close(self.passes.stream)
        if self.tokens is not None:
            self.tokens.close()
        self.model.unload()
        if self.draft is not None:
            self.draft.close()
        for name in ("patch", "passes", "tier", "draft", "tokens", "runtime", "cache", "model", "tokenizer", "store"):
            setattr(self, name, None)
        gc.unfreeze()
        torch.cuda.empty_cache()


def architecture(gpu: int) -> str:
    """Like "sm_86"."""
    major, minor = torch.cuda.get_device_capability(gpu)
    return f"sm_{major}{minor}"


@contextmanager
def quiet_gc() -> Iterator[None]:
    """No cyclic garbage collection: while 10^5 of exllamav3's objects are built, it would walk them hundreds of times
    and find nothing. What exists at the beginning is left out of explicit collections too."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def _open_device(settings: Settings) -> tuple[Any, Path | None]:
    """The GPU, current for torch too, and the file of Triton picks for it."""
    device = open_cuda(settings.gpu)
    if not torch.cuda.is_available():
        raise DeviceError("this torch was built without CUDA; install the CUDA build of torch")
    torch.cuda.set_device(settings.gpu)
    return device, pins.pin_path(architecture(settings.gpu), settings.triton_pin)


def _close(opened: Future[Checkpoint]) -> None:
    if opened.exception() is None:
        opened.result().close()


def _open_both(settings: Settings, phases: Phases) -> tuple[Any, Path | None, Checkpoint]:
    """The GPU and the checkpoint, side by side: the driver's work needs no Python, the headers little else."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="glm53-headers")
    headers = pool.submit(Checkpoint.open, settings.model_dir, mtp=settings.mtp > 0)
    pool.shutdown(wait=False)
    try:
        device, pinned = _open_device(settings)
        if settings.mode == "fast":
            require_kernels(settings)
        phases.end("device")
    except BaseException:
        headers.add_done_callback(_close)
        raise
    return device, pinned, headers.result()


def load(settings: Settings, progress: Progress, options: LoadOptions | None = None) -> Loaded:
    """Load `settings.model_dir`. Raises DeviceError, CheckpointError, ResourceError, ConfigError, EngineError."""
    with quiet_gc():
        loaded = _load(settings, progress, options or LoadOptions(run_ahead=settings.run_ahead))
    gc.freeze()  # until `close`: a collection would stop all threads for half a second to walk the model's objects
    return loaded


def _load(settings: Settings, progress: Progress, options: LoadOptions) -> Loaded:
    phases = Phases()
    device, pinned, opened = _open_both(settings, phases)
    with opened as checkpoint:
        scales = ExpertScales(checkpoint, checkpoint.config.moe_layers)  # reads on beside all that follows
        store: PinnedExperts | None = None
        try:
            store = PinnedExperts(checkpoint, device, progress)  # so does this
            phases.end("headers")
            progress("exllamav3", 0.0)
            exllamav3 = import_exllamav3()
            if pinned is not None:
                pins.apply_pins(pinned, architecture(settings.gpu))
            phases.end("exllamav3")
            loading = _Loading(settings, options, exllamav3, store, device, phases, scales)
            return loading.run(checkpoint, progress)
        except BaseException:
            if store is not None:
                store.abandon()
            raise
        finally:
            scales.abandon()


def slot_count(free: int, *, reserve: int, slot_bytes: int, entries: int, top_k: int, limit: int | None) -> int:
    """Cache slots in `free` bytes of VRAM. Raises DeviceError when one token's picks of one layer do not fit."""
    slots = expert_slots(free, reserve, slot_bytes, entries)
    if limit is not None:
        slots = min(slots, limit)
    if slots < top_k:
        raise DeviceError(
            f"too little VRAM for the expert cache: {free / GB:.1f} GB free after load, {reserve / GB:.1f} GB "
            f"reserved, {top_k * slot_bytes / GB:.2f} GB needed for one layer's {top_k} picks; lower --cache-tokens"
        )
    return slots


@dataclass(slots=True)
class _Loading:
    """One load in progress."""

    settings: Settings
    options: LoadOptions
    exllamav3: Any
    store: PinnedExperts
    device: Any
    phases: Phases
    scales: ExpertScales
    draft: Draft | None = None
    tokens: TokenTable | None = None
    tokenizer: Any = None
    patch: Patch | None = None

    def run(self, checkpoint: Checkpoint, progress: Progress) -> Loaded:
        settings, store = self.settings, self.store
        config = self.exllamav3.Config.from_directory(str(settings.model_dir))
        model = self.exllamav3.Model.from_config(config)
        tokens = max(PAGE_TOKENS, settings.cache_tokens // PAGE_TOKENS * PAGE_TOKENS)
        cache = self._cache(model, tokens)
        tensors = ExpertTensors(store, self.scales, settings.gpu, bulk_scales=self.options.bulk_scales)
        self.tokenizer = self.exllamav3.Tokenizer.from_config(config)  # here the experts are being read beside it
        self.phases.end("modules")
        try:
            if settings.mtp:
                self.draft = Draft(self.exllamav3, config, checkpoint, self.device, settings)
                self.draft.cache = self.exllamav3.Cache(self.draft.model, max_num_tokens=tokens)
            with plain_meta_tensors():
                _load_from(tensors, config, model, settings.gpu)
                if self.draft is not None and self.draft.tensors is not None:
                    _load_from(self.draft.tensors, config, self.draft.model, settings.gpu)
            self.phases.end("weights")
            self.phases.seconds["weights_waiting_for_arenas"] = round(tensors.waited_s, 3)
            if self.options.run_ahead and self.draft is None:
                self.tokens = TokenTable.open(model, settings.gpu)  # experts are still being read beside this
            store.finish()
            if self.draft is not None:
                self.draft.finish()
            self.phases.end("waiting_for_experts")
            checkpoint.verify_unchanged()
            modules = moe_modules(self.exllamav3, model)
            verify_layers(modules, store.experts)
            tier = self._tier(checkpoint, modules) if settings.mode == "fast" else None
            progress("expert cache", 0.0)
            return self._with_cache(config, model, cache, modules, tier)
        except BaseException:
            if self.patch is not None:
                self.patch.undo()
            if self.tokens is not None:
                self.tokens.close()
            model.unload()
            if self.draft is not None:
                self.draft.close()
            raise

    def _cache(self, model: Any, tokens: int) -> Any:
        """KV pages and KDA states; with drafts, states to step back to when one is refused."""
        streams, history = self.settings.autosplit_max_batch_size, self.settings.mtp
        more = {"max_history": history} if history else {}
        return self.exllamav3.Cache(model, max_num_tokens=tokens, max_batch_size=streams, **more)

    def _tier(self, checkpoint: Checkpoint, modules: list[Any]) -> CpuTier:
        """The CPU lane, measured; it starts once there is a runtime to use it."""
        verify_split(modules, checkpoint.config.swiglu_limit)
        memory = ExpertMemory(self.store, self.scales)
        tier = CpuTier(memory, self.device, self.settings, self.options.lane_limits_ms)
        tier.measure(modules[0].num_experts_per_tok)
        self.phases.end("cpu_lane")
        return tier

    def _with_cache(self, config: Any, model: Any, cache: Any, modules: list[Any], tier: CpuTier | None) -> Loaded:
        settings, store = self.settings, self.store
        torch.cuda.empty_cache()
        entries, reserve = len(modules) * store.experts, int(settings.reserve_gb() * GB)
        slots = slot_count(
            torch.cuda.mem_get_info(settings.gpu)[0],
            reserve=reserve,
            slot_bytes=store.layout.stride,
            entries=entries,
            top_k=modules[0].num_experts_per_tok,
            limit=self.options.max_slots,
        )
        runtime = self._runtime(modules, slots)
        passes = self._passes(runtime, modules[0], reserve)
        loaded = Loaded(
            exllamav3=self.exllamav3,
            model=model,
            cache=cache,
            tokenizer=self.tokenizer,
            store=store,
            runtime=runtime,
            passes=passes,
            patch=self._patched(model, modules, runtime, passes, splits=tier is not None),
            heat_file=settings.state_dir / warm.FILE_NAME,
            heat_key=warm.checkpoint_key(settings.model_dir, len(modules), store.experts),
            vocab_size=config.vocab_size,
            context=cache.max_num_tokens - settings.mtp,
            slots=slots,
            times={},
            draft=self.draft,
            tokens=self.tokens,
        )
        self.phases.end("slots")
        self._warm(loaded, entries)
        self.phases.end("warm")
        if tier is not None:
            torch.cuda.synchronize()
            tier.start(runtime)
            loaded.tier = passes.lane = tier
        loaded.times = {"total": self.phases.total, **self.phases.seconds, "experts": store.times}
        log.info("loaded in %.1f s: %s", self.phases.total, loaded.times)
        return loaded

    def _passes(self, runtime: Any, module: Any, reserve: int) -> Passes:
        settings, store = self.settings, self.store
        stage = min(int(settings.ec_stage_gb * GB), store.experts * store.layout.stride)
        limits = PassSettings(stage, int(settings.ec_elastic_gb * GB), reserve, self.options.stage_from)
        top_k, hidden = module.num_experts_per_tok, module.hidden_size
        return Passes(runtime, limits, experts=store.experts, top_k=top_k, hidden=hidden)

    def _patched(self, model: Any, modules: list[Any], runtime: Any, passes: Passes, *, splits: bool) -> Patch:
        """The model with its hooks in place; `splits`: decode steps may leave experts to the CPU."""
        single = None
        if self.options.single_experts:
            single = SingleExperts(runtime, modules, self.store.layout, passes.counts)
        route, combine = (passes.route_split, passes.combine) if splits else (passes.route, None)
        buffers = shared_buffers(self.exllamav3)
        self.patch = Patch(
            model, modules, route, passes.bracket, combine, single=single, lookup=self.tokens, buffers=buffers
        )
        self.patch.install()
        return self.patch

    def _runtime(self, modules: list[Any], slots: int) -> Any:
        from ... import _core

        store = self.store
        tables = [[getattr(m, f"multi_{p}").ptrs_trellis.data_ptr() for p in PARTS] for m in modules]
        homes = [store.arena(layer).address for layer in store.layers]
        parts, knobs = list(store.layout.part_bytes), {**POLICY_KNOBS, **(self.options.knobs or {})}
        try:
            return _core.ExpertRuntime(self.device, store.experts, slots, SEGMENT_SLOTS, parts, tables, homes, knobs)
        except RuntimeError as e:
            raise DeviceError(f"the expert cache of {slots} slots could not be made: {e}") from None

    def _warm(self, loaded: Loaded, entries: int) -> None:
        heat = warm.load(loaded.heat_file, loaded.heat_key, entries) if self.options.use_heat else None
        if heat is not None:
            loaded.runtime.import_heat(heat, loaded.passes.stream)
            loaded.passes.refill_all()


def _load_from(tensors: ExpertTensors, config: Any, model: Any, gpu: int) -> None:
    """Load a model whose routed experts' tensors are `tensors`. Raises EngineError unless all were asked for."""
    with TrellisSource(config.stc, tensors.tensor) as source:
        _load_weights(model, gpu)
    if source.answered != tensors.expected:
        raise EngineError(f"exllamav3 asked for {source.answered} expert tensors, {tensors.expected} expected")


def _load_weights(model: Any, gpu: int) -> None:
    gc.freeze()  # exllamav3 collects before and after its load: it need not walk its own modules
    try:
        model.load(device=f"cuda:{gpu}", progressbar=False)
    except torch.OutOfMemoryError as e:
        raise DeviceError(
            f"GPU {gpu} has too little VRAM for the model beside its experts: {' '.join(str(e).split())[:300]}; "
            "a smaller --cache-tokens needs less"
        ) from None
