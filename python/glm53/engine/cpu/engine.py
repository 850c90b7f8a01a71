"""The engine the server sees: submits from the event loop, one worker thread that owns the model.

States: running -> closed (by `close`), or running -> dead (the worker met an error it cannot attribute to a stream;
submit then raises EngineError). Threads: public methods on the event loop; the worker alone touches the model.
Cost of submit: one lock and one wake-up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...checkpoint import Checkpoint, available_ram
from ...errors import CheckpointError, EngineError, PromptTooLong, RequestError, ResourceError
from ...tokenizer import Tokenizer
from ..protocol import EngineInfo, Finish, GenerationRequest, Progress, TokenScore
from ..stream import QueuedStream
from .jobs import Generation, Scoring, bad_id
from .model import CpuModel
from .prefix import PrefixCache
from .scheduler import Scheduler

log = logging.getLogger(__name__)
PREFILL_CHUNK = 128
PREFIX_CACHE_BYTES = 1 << 30
_IDLE_WAIT_S = 0.25
_SHUTTING_DOWN = "the engine is shutting down"


class CpuEngine:
    """Implements `Engine` for a machine without a GPU. Make one with `load`."""

    def __init__(self, model: CpuModel, tokenizer: Tokenizer, info: EngineInfo, scheduler: Scheduler) -> None:
        self.info = info
        self._model, self._tokenizer, self._scheduler = model, tokenizer, scheduler
        self._wake = threading.Event()
        self._closing = False
        self._dead: str | None = None
        self._thread = threading.Thread(target=self._run, name="glm53-cpu-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        threads: int = 0,
        context: int = 0,
        max_streams: int = 4,
        prefill_chunk: int = PREFILL_CHUNK,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
        progress: Progress = lambda stage, fraction: None,
        trace: Path | None = None,
        isa: str = "auto",
    ) -> CpuEngine:
        """Read a checkpoint and start. `threads` 0 = one per usable CPU; `context` 0 = what the model was trained for.
        `isa` names the expert kernels (scalar, avx2, avx512, avx512w, amx; auto = the fastest here).

        `prefix_cache_bytes`: most memory for states kept between turns (an eighth of free RAM at most; 0 = off).
        `trace`: an npz that `close` writes, with every routed pick. Raises CheckpointError, ResourceError, EngineError.
        """
        threads = threads or len(os.sched_getaffinity(0))
        with _memory_errors(model_dir), Checkpoint.open(model_dir) as checkpoint:
            tokenizer = Tokenizer(model_dir)
            _require_rows(tokenizer, checkpoint)
            torch.set_num_threads(threads)
            with torch.inference_mode():
                model = CpuModel(checkpoint, threads, progress, trace, isa)
            limit = checkpoint.config.max_position_embeddings
        info = EngineInfo(
            name=model_dir.resolve().name,
            mode="cpu",
            device=f"cpu, {threads} threads, {model.isa} expert kernels",
            model_path=str(model_dir),
            context=min(context, limit) if context else limit,
            vocab_size=tokenizer.size,
            max_streams=max_streams,
        )
        prefix = PrefixCache(min(prefix_cache_bytes, (available_ram() or prefix_cache_bytes * 8) // 8))
        scheduler = Scheduler(model, prefix, max_streams=max_streams, chunk=prefill_chunk)
        return cls(model, tokenizer, info, scheduler)

    def submit(self, request: GenerationRequest) -> QueuedStream:
        """Queue a stream. Raises PromptTooLong, RequestError or EngineError; never blocks."""
        self._require_alive()
        self._check(request.prompt_ids, len(request.prompt_ids) + 1)
        if request.max_tokens < 1:
            raise RequestError("max_tokens must be at least 1", param="max_tokens")
        stream = QueuedStream(len(request.prompt_ids))
        self._scheduler.add(Generation(request, stream, self._tokenizer, self.info.context))
        self._wake.set()
        return stream

    async def score(self, ids: Sequence[int], top: int) -> list[TokenScore]:
        """Teacher-forced log-probabilities of `ids` with the `top` best alternatives; cancelling the await stops it."""
        self._require_alive()
        self._check(ids, len(ids))
        future: Future[list[TokenScore]] = Future()
        self._scheduler.add(Scoring([int(i) for i in ids], top, self.info.vocab_size, future))
        self._wake.set()
        return await asyncio.wrap_future(future)

    def _check(self, ids: Sequence[int], needed: int) -> None:
        if not ids:
            raise RequestError("the prompt is empty", param="messages")
        if needed > self.info.context:
            raise PromptTooLong(len(ids), self.info.context)
        bad = bad_id(ids, self._model.config.vocab_size)
        if bad is not None:
            raise RequestError(f"token id {bad} is outside the vocabulary (0..{self._model.config.vocab_size - 1})")

    def _require_alive(self) -> None:
        if self._dead:
            raise EngineError(f"the engine has stopped: {self._dead}")
        if self._closing:
            raise EngineError(_SHUTTING_DOWN)

    def stats(self) -> dict[str, Any]:
        """Counters: streams, tokens, prefix cache, and what the native experts served."""
        return {**self._scheduler.counters(), **self._model.stats(), "dead": self._dead is not None}

    def close(self) -> None:
        """End all streams, stop the worker, release memory. Idempotent."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._closing:
                    if not self._scheduler.round():
                        self._wake.wait(_IDLE_WAIT_S)
                        self._wake.clear()
        except BaseException as e:
            self._dead = " ".join(f"{type(e).__name__}: {e}".split())
            log.critical("the engine thread ended", exc_info=e)
        finally:
            if self._dead:
                self._scheduler.end_all(f"the engine has stopped: {self._dead}", Finish("error", error=self._dead))
            else:
                self._scheduler.end_all(_SHUTTING_DOWN, Finish("cancelled"))
            try:
                self._model.close()
            except OSError:
                log.exception("the routing trace could not be written")


@contextmanager
def _memory_errors(model_dir: Path) -> Iterator[None]:
    """Whatever an allocator says when memory is refused, as one ResourceError."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        text = " ".join(str(e).split()) or "an allocation was refused"
        if isinstance(e, MemoryError) or "allocate memory" in text:
            raise ResourceError(
                f"{model_dir}: out of memory while loading ({text}): free memory or raise its limit"
            ) from e
        raise


def _require_rows(tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
    """Refuse a tokenizer whose ids the embedding has no rows for: it belongs to another model."""
    rows = checkpoint.config.vocab_size
    if tokenizer.size > rows:
        raise CheckpointError(
            f"{tokenizer.model_dir / 'tokenizer.json'}: ids up to {tokenizer.size - 1}, the model has {rows} rows: "
            "the tokenizer of another model; download the checkpoint again"
        )
