"""The GPU engine the server sees: submits from the event loop, one worker thread that owns exllamav3's generator.

States: running -> closed (by `close`), or running -> dead (an error that belongs to no stream; submit then raises
EngineError). A CPU lane that fails (fast mode) ends the streams of that step, whose tokens are not delivered; the
engine goes on with a fresh lane, or without one as in exact mode, and `info.mode` then says so.
Threads: public methods on the event loop; the worker alone touches CUDA and the generator.
Costs: stats() copies the last snapshot; the worker takes one every second, between steps.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from ...config import Settings
from ...errors import EngineError, PromptTooLong, RequestError
from ...tokenizer import Tokenizer
from ..protocol import EngineInfo, Finish, GenerationRequest, Progress, TokenScore
from ..stream import QueuedStream
from . import mtp, warm
from .ahead import RunAhead, run_ahead
from .jobs import Stream, score_rows, slices
from .loader import RECURRENT_CACHE_BYTES, Loaded, LoadOptions, load
from .passes import Upkeep

log = logging.getLogger(__name__)
_IDLE_WAIT_S = 0.25
_SNAPSHOT_S = 1.0
_SAVE_S = 300.0
_SCORE_SLICE = 192


def lanes(cache: Mapping[str, Any]) -> dict[str, int]:
    """Distinct picks by where the expert was when it was computed. Passes of up to 8 rows (decode steps, and the last
    piece of a prompt where it is that short): on the GPU from a slot that had it (`vram`), a slot it was copied into
    first, or host memory in place; or on the CPU. Longer prompts: a slot (`vram`), or host memory, in place or staged
    (`pcie_prompts`)."""
    get = cache.get
    return {
        "vram": get("hits", 0) + get("prompt_distinct", 0) - get("prompt_missing", 0),
        "pcie_admitted": get("admissions", 0),
        "pcie_in_place": get("misses", 0) - get("admissions", 0) - get("cpu_picks", 0),
        "pcie_prompts": get("prompt_missing", 0),
        "cpu": get("cpu_picks", 0),
    }


class ExllamaEngine:
    """Implements `Engine` on one NVIDIA GPU. Make one with `load`."""

    def __init__(self, loaded: Loaded, settings: Settings, tokenizer: Tokenizer) -> None:
        self._loaded, self._tokenizer = loaded, tokenizer
        name = torch.cuda.get_device_name(settings.gpu)
        self.info = EngineInfo(
            name=settings.model_dir.resolve().name,
            mode="exact" if loaded.tier is None else "fast",
            device=f"cuda:{settings.gpu} {name}, {loaded.slots} expert slots",
            model_path=str(settings.model_dir),
            context=loaded.context,
            vocab_size=min(tokenizer.size, loaded.vocab_size),
            max_streams=settings.max_streams(),
        )
        self._gpu, self._settings = settings.gpu, settings
        self._drafting = None if loaded.draft is None else mtp.Drafting(loaded.draft)
        self._ahead: RunAhead | None = None
        self._generator = self._make_generator()
        self._lock = threading.Lock()
        self._submitted: deque[Stream] = deque()
        self._scorings: deque[tuple[list[int], int, Future[list[TokenScore]]]] = deque()
        self._streams: set[Stream] = set()
        self._counts = {"requests": 0, "cancelled": 0, "failed": 0, "completion_tokens": 0, "prompt_tokens": 0}
        self._load_times = loaded.times
        self._slot_bytes = int(loaded.runtime.slot_bytes)
        self._memory = {"pinned_expert_bytes": loaded.store.bytes, "slot_bytes": loaded.slots * self._slot_bytes}
        if loaded.tier is not None:
            self._memory["scale_bytes"] = loaded.tier.scale_bytes
        self._snapshot: dict[str, Any] = {}
        self._beat_s = self._snapshot_s = self._saved_s = time.monotonic()
        self._wake = threading.Event()
        self._closing = self._ended = False
        self._dead: str | None = None
        self._thread = threading.Thread(target=self._run, name="glm53-gpu-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls, settings: Settings, progress: Progress = lambda stage, fraction: None, options: LoadOptions | None = None
    ) -> ExllamaEngine:
        """Load and start. Raises DeviceError, CheckpointError, ResourceError, ConfigError, EngineError."""
        loaded = load(settings, progress, options)
        return cls(loaded, settings, Tokenizer(settings.model_dir))

    def _make_generator(self) -> Any:
        """A generator that owns the cache: no job, no page and no state of a former one is known to it."""
        loaded, settings = self._loaded, self._settings
        generator = loaded.exllamav3.Generator(
            loaded.model,
            loaded.cache,
            loaded.tokenizer,
            max_batch_size=settings.max_streams(),
            max_chunk_size=settings.chunk_size,
            recurrent_cache_size=RECURRENT_CACHE_BYTES,
            **mtp.generator_arguments(loaded.draft),
        )
        if self._drafting is not None:
            self._drafting.attach(generator)
        self._ahead = run_ahead(generator, loaded, lambda: bool(self._submitted or self._scorings))
        return generator

    def submit(self, request: GenerationRequest) -> QueuedStream:
        """Queue a stream. Raises PromptTooLong, RequestError or EngineError; never blocks."""
        self._check(request.prompt_ids)
        if request.max_tokens < 1:
            raise RequestError("max_tokens must be at least 1", param="max_tokens")
        stream = Stream(request, QueuedStream(len(request.prompt_ids)), self._tokenizer)
        self._queue(self._submitted, stream)
        return stream.stream

    async def score(self, ids: Sequence[int], top: int) -> list[TokenScore]:
        """Teacher-forced log-probabilities of `ids` with the `top` best alternatives; cancelling the await stops it."""
        self._check(ids)
        future: Future[list[TokenScore]] = Future()
        self._queue(self._scorings, ([int(i) for i in ids], top, future))
        return await asyncio.wrap_future(future)

    def _queue(self, waiting: deque[Any], what: Any) -> None:
        """Hand something to the worker, unless it has just ended: then nobody would ever answer."""
        with self._lock:
            if self._ended:
                raise EngineError(f"the engine has stopped: {self._dead or 'it is shutting down'}")
            waiting.append(what)
        self._wake.set()

    def _check(self, ids: Sequence[int]) -> None:
        if self._dead:
            raise EngineError(f"the engine has stopped: {self._dead}")
        if self._closing:
            raise EngineError("the engine is shutting down")
        if not ids:
            raise RequestError("the prompt is empty", param="messages")
        if len(ids) + 1 > self.info.context:
            raise PromptTooLong(len(ids), self.info.context)
        bad = next((i for i in ids if not 0 <= i < self._loaded.vocab_size), None)
        if bad is not None:
            raise RequestError(f"token id {bad} is outside the vocabulary (0..{self._loaded.vocab_size - 1})")

    def stats(self) -> dict[str, Any]:
        """Counters: streams, tokens, expert cache, routed picks by lane, the CPU/GPU split (fast mode), bytes by
        purpose, seconds of the load."""
        with self._lock:
            waiting = len(self._submitted)
        active = self._generator.num_active_jobs() if self._dead is None else 0
        pending = self._generator.num_pending_jobs() if self._dead is None else 0
        cache, tier = self._snapshot, self._loaded.tier
        return {
            "running": active,
            "waiting": waiting + pending,
            "heartbeat_age_s": round(time.monotonic() - self._beat_s, 3),
            **self._counts,
            "lanes": lanes(cache),
            "expert_cache": dict(cache),
            **({} if tier is None else {"split": tier.stats()}),
            **({} if self._drafting is None else {"mtp": self._drafting.stats()}),
            "steps_ahead": 0 if self._ahead is None else self._ahead.steps,
            "memory": {**self._memory, "lent_slot_bytes": cache.get("lent_slots", 0) * self._slot_bytes},
            "load": self._load_times,
            "dead": self._dead is not None,
        }

    def close(self) -> None:
        """End all streams, save what was learned, stop the worker, release memory. Idempotent."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def verify(self) -> list[tuple[int, int, int]]:
        """(slot, entry, part) of every cached expert that differs from its home; only while nothing runs."""
        if self._streams or self._submitted:
            raise EngineError("verify needs an idle engine")
        found: list[tuple[int, int, int]] = self._loaded.runtime.verify(0)
        return found

    def _run(self) -> None:
        torch.cuda.set_device(self._gpu)
        try:
            while not self._closing:
                self._beat_s = time.monotonic()
                if not self._round():
                    self._wake.wait(_IDLE_WAIT_S)
                    self._wake.clear()
        except BaseException as e:
            self._dead = " ".join(f"{type(e).__name__}: {e}".split())
            log.critical("the engine thread ended", exc_info=e)
        finally:
            self._fail_all(self._dead or "the engine is shutting down")
            self._shut_down()

    def _round(self) -> bool:
        """One step of everything; False when there is nothing to do for now (slots that are lent wait a while)."""
        if self._ahead is not None and self._ahead.unread and not self._generator.num_remaining_jobs():
            self._step()  # it has outlived its streams: what went wrong in it is not to end those that come next
        self._admit()
        self._drop_cancelled()
        scored = self._score_one()
        worked = self._generator.num_remaining_jobs() > 0
        if worked:
            self._step()
        upkeep = self._loaded.passes.between(prompts_left=any(s.prefilling for s in self._streams))
        self._keep_books()
        return worked or scored or upkeep is Upkeep.NOW

    def _step(self) -> None:
        """One step of the generator, and what it gave to the streams."""
        results = self._generator.iterate()
        fault = self._loaded.passes.fault()
        if fault is None:
            for result in results:
                self._deliver(result)
        else:
            self._lane_failed(fault)

    def _lane_failed(self, fault: str) -> None:
        """The step that was just read, or the one queued behind it, is wrong: end the streams, forget what they left in
        the cache, go on."""
        log.error("%s; %d streams end with this error", fault, len(self._streams))
        for stream in self._streams:
            self._counts["failed"] += 1
            stream.stream.finish(Finish("error", error=fault))
        self._streams.clear()
        self._generator.clear_queue()
        self._generator = self._make_generator()
        torch.cuda.synchronize()
        passes = self._loaded.passes
        if passes.lane is not None and not passes.lane.recover(fault, passes.stream):
            passes.lane = None
            self.info = dataclasses.replace(self.info, mode="exact")

    def _admit(self) -> None:
        while True:
            with self._lock:
                if not self._submitted:
                    return
                stream = self._submitted.popleft()
            self._counts["requests"] += 1
            self._counts["prompt_tokens"] += len(stream.request.prompt_ids)
            if stream.stream.cancelled:
                self._end_cancelled(stream)
                continue
            try:
                self._generator.enqueue(self._job(stream))
            except (AssertionError, ValueError) as e:
                self._counts["failed"] += 1
                stream.stream.finish(Finish("error", error=" ".join(str(e).split())))
            else:
                self._streams.add(stream)

    def _job(self, stream: Stream) -> Any:
        loaded, vocab = self._loaded, int(self._generator.padded_vocab_size)
        return stream.make_job(loaded.exllamav3, loaded.tokenizer, vocab, loaded.context)

    def _drop_cancelled(self) -> None:
        for stream in [s for s in self._streams if s.stream.cancelled]:
            self._generator.cancel(stream.job)
            self._streams.discard(stream)
            self._end_cancelled(stream)

    def _end_cancelled(self, stream: Stream) -> None:
        self._counts["cancelled"] += 1
        stream.stream.finish(Finish("cancelled"))

    def _deliver(self, result: dict[str, Any]) -> None:
        stream: Stream | None = result.get("identifier") or getattr(result.get("job"), "identifier", None)
        if stream is None or stream not in self._streams:
            return
        before = stream.stream.usage.completion_tokens
        ended = stream.take(result)
        self._counts["completion_tokens"] += stream.stream.usage.completion_tokens - before
        if ended:
            self._counts["failed"] += result["stage"] == "error"
            self._streams.discard(stream)

    def _score_one(self) -> bool:
        with self._lock:
            if not self._scorings:
                return False
            ids, top, future = self._scorings.popleft()
        if not future.set_running_or_notify_cancel():
            return True
        try:
            future.set_result(self._score(ids, top))
        except Exception as e:
            future.set_exception(EngineError(" ".join(f"scoring failed: {e}".split())))
        return True

    @torch.inference_mode()
    def _score(self, ids: list[int], top: int) -> list[TokenScore]:
        """One cache-less pass up to the head, then the head in slices: logits of the whole prompt would not fit."""
        model = self._loaded.model
        params: dict[str, Any] = {"attn_mode": "flash_attn_nc"}
        tokens = torch.tensor([ids], dtype=torch.long)
        with self._loaded.passes.bracket(len(ids)):
            x = model.prepare_inputs(tokens, params)
            for module, instance, _ in model.fwd_modules:
                if module.caps.get("logits_output"):
                    head = module
                    break
                params["layer_instance"] = instance
                x = module.forward(module.prepare_for_device(x, params), params)
        scores = [TokenScore(ids[0], None)]
        for at, end in slices(len(ids), _SCORE_SLICE):
            logits, wanted = head.forward(x[:, at:end].contiguous(), params)[0], ids[at + 1 : end + 1]
            scores += score_rows(logits[: len(wanted)], wanted, top, self.info.vocab_size)
        return scores

    def _keep_books(self) -> None:
        now = time.monotonic()
        if now - self._snapshot_s >= _SNAPSHOT_S:
            self._snapshot = {**self._loaded.runtime.stats(self._loaded.passes.stream), **self._loaded.passes.counts}
            self._snapshot_s = time.monotonic()
        if now - self._saved_s >= _SAVE_S:
            self._save_heat()

    def _save_heat(self) -> None:
        self._saved_s = time.monotonic()
        try:
            heat = self._loaded.runtime.export_heat(self._loaded.passes.stream)
            warm.save(self._loaded.heat_file, self._loaded.heat_key, heat)
        except (OSError, RuntimeError) as e:
            log.warning("routing statistics were not saved: %s", e)

    def _fail_all(self, reason: str) -> None:
        finish = Finish("error", error=reason)
        with self._lock:
            self._ended = True
            waiting, self._submitted = list(self._submitted), deque()
            scorings, self._scorings = list(self._scorings), deque()
        for stream in (*self._streams, *waiting):
            stream.stream.finish(finish)
        self._streams.clear()
        for _, _, future in scorings:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError(reason))

    def _shut_down(self) -> None:
        try:
            if self._dead is None:
                self._generator.clear_queue()
                self._save_heat()
            self._loaded.close()
        except Exception as e:
            log.warning("shutting down the GPU engine: %s", " ".join(str(e).split()))
