"""Who runs next on the engine thread: prefill in chunks, decode of up to `max_streams` streams in one step.

States of a stream: waiting (queue) -> active (prefill, then decode) -> gone. A stream is active while it holds a state;
at most `max_streams` are. Each round computes one prefill chunk, then decodes for as long as that chunk took (at least
one step), so running streams keep half of the machine while prompts are read. A failed stream ends with
Finish("error") and frees its place; the others go on.
Threads: `add` and `counters` from anywhere; everything else is the engine thread's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from typing import Any

import torch

from ...errors import EngineError
from ..protocol import Finish
from .jobs import Generation, Scoring
from .model import CpuModel
from .prefix import PrefixCache

log = logging.getLogger(__name__)


class Scheduler:
    """Runs generations and scorings on one model. Call `round` until it has nothing to do."""

    def __init__(self, model: CpuModel, prefix: PrefixCache, *, max_streams: int, chunk: int) -> None:
        self._model, self._prefix = model, prefix
        self._max_streams, self._chunk = max_streams, chunk
        self._lock = threading.Lock()
        self._waiting: deque[Generation] = deque()
        self._scorings: deque[Scoring] = deque()
        self._active: list[Generation] = []
        self._prefilled = 0
        self._ended = ""
        self.beat_s = time.monotonic()
        self.counts: Counter[str] = Counter()

    def add(self, job: Generation | Scoring) -> None:
        """Queue a job (any thread). Raises EngineError once everything has been ended."""
        with self._lock:
            if self._ended:
                raise EngineError(self._ended)
            if isinstance(job, Generation):
                self._waiting.append(job)
            else:
                self._scorings.append(job)
            self.counts["requests"] += 1

    def counters(self) -> dict[str, Any]:
        """Numbers for /stats (any thread)."""
        with self._lock:
            counts = dict(self.counts)
            running, waiting = len(self._active), len(self._waiting)
        prefix = self._prefix
        names = ("requests", "cancelled", "failed", "prompt_tokens", "cached_tokens", "completion_tokens",
                 "prefill_tokens", "score_tokens", "decode_steps", "decode_rows")  # fmt: skip
        return {
            "running": running,
            "waiting": waiting,
            "heartbeat_age_s": round(time.monotonic() - self.beat_s, 3),
            **{n: counts.get(n, 0) for n in names},
            "prefix_cache": {"entries": len(prefix), "bytes": prefix.nbytes, "hits": prefix.hits,
                             "misses": prefix.misses, "evictions": prefix.evictions},
        }  # fmt: skip

    def round(self) -> bool:
        """Do one round of work; False when there was none."""
        self.beat_s = time.monotonic()
        self._drop_cancelled()
        self._admit()
        started = time.monotonic()
        worked = self._prefill_one() | self._score_one()
        spent = time.monotonic() - started
        decode_started = time.monotonic()
        while self._decode():
            worked = True
            self.beat_s = time.monotonic()
            self._drop_cancelled()
            if time.monotonic() - decode_started >= spent:
                break
        return worked

    def end_all(self, message: str, finish: Finish) -> None:
        """End everything and take nothing more; `message` is what later callers are told."""
        with self._lock:
            self._ended = message
            jobs = [*self._active, *self._waiting]
            scorings = list(self._scorings)
            self._active.clear()
            self._waiting.clear()
            self._scorings.clear()
        for job in jobs:
            job.end(Finish("cancelled") if job.cancelled else finish)
        for scoring in scorings:
            if scoring.future.set_running_or_notify_cancel():
                scoring.future.set_exception(EngineError(message))

    def _drop_cancelled(self) -> None:
        with self._lock:
            gone = [j for j in (*self._active, *self._waiting) if j.cancelled]
            if not gone and not any(s.cancelled for s in self._scorings):
                return
            # Each flag is read once: it may be raised at any time, and a job that leaves the queue must be ended.
            self._waiting = deque(j for j in self._waiting if not any(j is g for g in gone))
            self._scorings = deque(s for s in self._scorings if not s.cancelled)
        for job in gone:
            if job in self._active:
                self._leave(job)
            job.end(Finish("cancelled"))

    def _admit(self) -> None:
        while len(self._active) < self._max_streams:
            with self._lock:
                if not self._waiting:
                    return
                job = self._waiting.popleft()
                self._active.append(job)
            try:
                job.begin(self._prefix.find(job.ids) or self._model.new_state())
            except Exception as e:
                self._fail(job, e)
            self.counts["cached_tokens"] += job.stream.usage.cached_tokens

    def _next_chunk(self, ids: list[int], at: int) -> list[int]:
        """Up to the next multiple of the chunk size: always cut alike, so that a prompt always computes alike."""
        return ids[at : (at // self._chunk + 1) * self._chunk]

    def _prefill_one(self) -> bool:
        prefills = [j for j in self._active if j.prompt_left]
        if not prefills:
            return False
        self._prefilled += 1
        job = prefills[self._prefilled % len(prefills)]
        try:
            self._prefill(job)
        except Exception as e:
            self._fail(job, e)
        return True

    def _prefill(self, job: Generation) -> None:
        state = job.state
        assert state is not None
        ids = self._next_chunk(job.ids[:-1], state.length)
        self._model.prefill(state, ids)
        self.counts["prefill_tokens"] += len(ids)
        if not job.prompt_left or state.length % self._chunk == 0:
            self._prefix.store(job.ids, state)

    def _score_one(self) -> bool:
        with self._lock:
            job = self._scorings[0] if self._scorings else None
        if job is None:
            return False
        try:
            state = job.state = job.state or self._model.new_state()
            ids = self._next_chunk(job.ids, state.length)
            job.add(self._model.logits(self._model.prefill(state, ids)))
            self.counts["score_tokens"] += len(ids)
            if state.length == len(job.ids) and job.future.set_running_or_notify_cancel():
                job.future.set_result(job.scores)
        except Exception as e:
            log.exception("scoring failed")
            self.counts["failed"] += 1
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(e)
        if job.future.done():
            with self._lock:
                self._scorings = deque(s for s in self._scorings if s is not job)
        return True

    def _decode(self) -> bool:
        jobs = [j for j in self._active if not j.prompt_left and self._reserve(j)]
        if not jobs:
            return False
        results = self._model.step([j.state for j in jobs if j.state], [j.ids[-1] for j in jobs])
        self.counts["decode_steps"] += 1
        self.counts["decode_rows"] += len(jobs)
        for job, result in zip(jobs, results, strict=True):
            try:
                if isinstance(result, Exception):
                    raise result
                self._draw(job, result)
            except Exception as e:
                self._fail(job, e)
        return True

    def _reserve(self, job: Generation) -> bool:
        try:
            if job.state:
                job.state.reserve(job.state.length + 1)
        except Exception as e:
            self._fail(job, e)
            return False
        return True

    def _draw(self, job: Generation, logits: torch.Tensor) -> None:
        token, finish = job.draw(logits)
        self.counts["completion_tokens"] += 1
        if finish:
            if job.state:
                self._prefix.store(job.ids, job.state)
            self._leave(job)
            job.end(finish, token)
        elif token:
            job.stream.push([token])

    def _fail(self, job: Generation, error: Exception) -> None:
        log.error("stream %s failed", job.request.request_id, exc_info=error)
        self.counts["failed"] += 1
        self._leave(job)
        job.end(Finish("error", error=" ".join(f"{type(error).__name__}: {error}".split())))

    def _leave(self, job: Generation) -> None:
        with self._lock:
            self._active = [j for j in self._active if j is not job]
        self.counts["cancelled"] += job.cancelled
        self.counts["prompt_tokens"] += len(job.request.prompt_ids)
        job.state = None
