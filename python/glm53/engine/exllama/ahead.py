"""Decode steps queued ahead: the GPU begins the next step while the host still reads and hands out this one's tokens.

exllamav3 waits for a step's tokens, hands them out, prepares the next step and only then queues it; the GPU has nothing
to do meanwhile. Here the ids that a step draws stay on the GPU and are the next step's input (`token_table.py`), so
that it is queued before they are read, once few enough layers of this step are left. What is drawn is the same: the
same passes, samplers and random numbers in the same order. Where a token may change what comes next, nothing is queued
ahead of it: at the end of a page (its hash, a kept KDA state), before a limit, while a prompt could start or is read,
while expert slots are lent. For streams with grammars, penalties or log-probabilities exllamav3's own step runs. A stop
token is seen one step late: the row that this step has too many is dropped, and what it wrote lies behind the tokens
that its page is known to hold. The other rows of that step were computed beside it, which stock's are not, and the last
bits of a row may depend on how many there are. So in exact mode several streams wait for their tokens, and if none is a
stop token the next step is queued before these are handed out.

Replaced, on the generator's instance: `iterate` and `iterate_gen`.
States of a RunAhead: level (every queued step has been read; exllamav3's `iterate` runs) -> ahead (one has not). Only
`iterate` and `iterate_gen` change it, on the engine's thread. Jobs may be cancelled in either. While `unread`,
`iterate` is to be called also when no job is left: what went wrong in that step is not to be found in the next job's.
Costs: two sets of small page-locked buffers; a stream that stops costs a row of one step, and a prompt that comes
after the next step was queued waits for that one too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .loader import PAGE_TOKENS

if TYPE_CHECKING:
    from .loader import Loaded
    from .passes import Passes

_TABLE_PAGES = 16
"""exllamav3 makes its block tables a multiple of this wide."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A queued decode step. ids: what it draws, (streams, 1) on the GPU; drawn: the same in host memory, once `read`
    has passed."""

    jobs: list[Any]
    ids: torch.Tensor
    drawn: torch.Tensor
    read: Any


class _Buffers:
    """Page-locked host memory of one step in flight, for up to `rows` streams."""

    def __init__(self, rows: int) -> None:
        self.lengths = torch.zeros((rows,), dtype=torch.int32, pin_memory=True)
        self.fed = torch.zeros((rows, 1), dtype=torch.long, pin_memory=True)
        self.drawn = torch.zeros((rows, 1), dtype=torch.long, pin_memory=True)
        self._tables: dict[int, torch.Tensor] = {}

    def table(self, rows: int, pages: int) -> torch.Tensor:
        """(rows, width) zeros for block tables of that many pages."""
        width = -(-pages // _TABLE_PAGES) * _TABLE_PAGES
        table = self._tables.get(width)
        if table is None:
            shape = (self.lengths.shape[0], width)
            table = self._tables[width] = torch.zeros(shape, dtype=torch.int32, pin_memory=True)
        return table[:rows].zero_()


def _plain(job: Any) -> bool:
    """Its next token depends on nothing that the host has to know first."""
    return (
        len(job.sequences) == 1
        and job.new_tokens > 0
        and not job.filters
        and not job.embeddings
        and not job.sampler.reqs_past_ids
        and not (job.return_logits or job.return_probs or job.return_top_tokens)
        and job.forced_ids is None
        and job.banned_strings_utf32_offsets is None
    )


def _in_round(job: Any, tokens: int) -> bool:
    """That many more tokens do not end its round of pages, after which exllamav3 queues it again."""
    return bool(job.new_tokens + tokens <= job.max_rq_tokens)


class RunAhead:
    """Takes over a generator before its first step. `passes` says whether anything is to be done between two steps and
    how far one is, and hears when one begins that was queued before; `together`: several streams may be ahead now;
    `waiting`: nothing is to follow this one."""

    def __init__(
        self, generator: Any, passes: Passes, together: Callable[[], bool], waiting: Callable[[], bool] = lambda: False
    ) -> None:
        self._generator, self._passes, self._together, self._waiting = generator, passes, together, waiting
        self._iterate, self._decode = generator.iterate, generator.iterate_gen
        self._buffers = [_Buffers(generator.max_batch_size) for _ in range(2)]
        self._queued: _Step | None = None
        self.on = True
        """False: exllamav3's own step, whatever the streams are; for comparing both."""
        self.steps = 0
        """Steps that were queued ahead so far."""
        generator.iterate, generator.iterate_gen = self.iterate, self._gen

    @property
    def unread(self) -> bool:
        """A step is queued whose tokens nobody has read."""
        return self._queued is not None

    def iterate(self) -> list[dict[str, Any]]:
        """One token of every stream, as exllamav3's."""
        results: list[dict[str, Any]] = []
        if self._queued is None:
            results = self._iterate()
        else:
            self._advance(self._queued, results)
        return results

    def _gen(self, results: list[dict[str, Any]], draft_tokens: Any = None) -> None:
        """In place of exllamav3's decode step, while every step has been read."""
        jobs = self._generator.active_jobs
        if draft_tokens is not None or not self._steady() or not all(_in_round(job, 1) for job in jobs):
            self._decode(results, draft_tokens)
            return
        fed = [job.get_input_ids_list(add_to_cache=True)[0] for job in jobs]
        ids = torch.cat(fed, out=self._buffers[0].fed[: len(jobs)])
        self._advance(self._queue(list(jobs), ids, self._params(jobs, 0)), results)

    def _advance(self, step: _Step, results: list[dict[str, Any]]) -> None:
        """Queue what follows `step` if that may be done before its tokens are told, then read them."""
        self._queued = following = None
        if self._may_follow(step):
            params = self._params(step.jobs, 1)
            if self._awaited(step) and not self._waiting():
                following = self._queue(step.jobs, step.ids, params)
                self.steps += 1
        self._read(step, results, following is not None)
        self._queued = following

    def _steady(self) -> bool:
        """Every active stream decodes, and none can join them."""
        g = self._generator
        full = sum(len(job.sequences) for job in g.active_jobs) >= g.max_batch_size
        return (
            self.on
            and bool(g.active_jobs)
            and (full or not g.pending_jobs)
            and all(_plain(job) and job.is_prefill_done() for job in g.active_jobs)
            and self._passes.settled
        )

    def _may_follow(self, step: _Step) -> bool:
        """The step behind `step` has the same streams, in the pages they are in, whatever they draw but stop tokens."""
        return (
            step.jobs == self._generator.active_jobs
            and self._steady()
            and all(
                job.new_tokens + 1 < job.max_new_tokens
                and _in_round(job, 2)
                and (job.sequences[0].kv_position + 1) % PAGE_TOKENS
                for job in step.jobs
            )
        )

    def _awaited(self, step: _Step) -> bool:
        """Wait until there is room behind `step` or, where a row too many may change the others, until its tokens are
        there; whether the next step may be queued then."""
        if len(step.jobs) == 1 or self._together():
            self._passes.await_room()
            return True
        step.read.synchronize()
        return not any(
            token in job.stop_tokens or job.stop_strings or job.loop_detector
            for job, token in zip(step.jobs, step.drawn[:, 0].tolist(), strict=True)
        )

    @torch.inference_mode()
    def _queue(self, jobs: list[Any], ids: torch.Tensor, params: dict[str, Any]) -> _Step:
        """Queue a step of `jobs`; ids: what they are fed, (streams, 1); params: `_params`, made since the last step."""
        g, buffers = self._generator, self._buffers[0]
        self._buffers.reverse()
        logits = g.model.forward(input_ids=ids, params=params)
        drawn = [job.receive_logits(logits[row : row + 1])[0].view(1, 1) for row, job in enumerate(jobs)]
        found, host = torch.cat(drawn), buffers.drawn[: len(jobs)]
        host.copy_(found, non_blocking=True)
        read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        read.record()
        return _Step(jobs, found, host, read)

    @torch.inference_mode()
    def _params(self, jobs: list[Any], unread: int) -> dict[str, Any]:
        """What exllamav3's generator gives to a decode step; unread: tokens of each stream it does not know yet. In
        buffers that are free, for the last step but one has been read."""
        g, buffers = self._generator, self._buffers[0]
        lengths = [job.sequences[0].kv_position + unread for job in jobs]
        seqlens = buffers.lengths[: len(jobs)]
        seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        table = buffers.table(len(jobs), max(lengths) // PAGE_TOKENS + 1)
        for row, job in zip(table, jobs, strict=True):
            pages = job.sequences[0].block_index_tensor[0, : table.shape[1]]
            row[: pages.shape[0]].copy_(pages)
        return {
            "attn_mode": "flash_attn",
            "block_table": table,
            "cache": g.cache,
            "cache_seqlens": seqlens,
            "recurrent_states": None if g.recurrent_cache is None else [job.recurrent_state for job in jobs],
            "indexed_embeddings": [],
            "positions": None,
            "recurrent_history": False,
            "pinned_staging": True,
        }

    @torch.inference_mode()
    def _read(self, step: _Step, results: list[dict[str, Any]], followed: bool) -> None:
        """Wait for a step's tokens, give them to its streams; followed: the next step, which feeds them, is queued."""
        g = self._generator
        step.read.synchronize()
        if followed:
            self._passes.begins()
        ended = []
        for row, job in enumerate(step.jobs):
            if job not in g.active_jobs:  # it stopped or was cancelled after this step had been queued
                continue
            eos, _, _ = job.receive_sample(None, step.drawn[row : row + 1], None, None, None, results)
            if eos:
                ended.append(job)
            elif followed:
                job.get_input_ids_list(add_to_cache=True)
        for job in ended:
            job.deallocate_pages()
            g.active_jobs.remove(job)
        if ended and not g.num_remaining_jobs():
            g.on_queue_drained()


def run_ahead(generator: Any, loaded: Loaded, waiting: Callable[[], bool] = lambda: False) -> RunAhead | None:
    """Let a new generator of a loaded model run ahead, if what was loaded lets it: not with an MTP draft. A lane that
    was given up leaves exact mode, where several streams go on once their tokens are there."""
    if loaded.tokens is None or loaded.draft is not None:
        return None
    return RunAhead(generator, loaded.passes, lambda: loaded.passes.lane is not None, waiting)
