"""Speculative decoding with the checkpoint's MTP layer: loads it, and drives exllamav3's own drafting step by step.

exllamav3 drafts (`Generator.iterate_draftmodel_mtp_gen`), verifies the drafts in one pass of the model and keeps those
that its sampler draws too. Wrapped here, on the generator's instance: whether and how much a step drafts.
States of Drafting: attached (the generator has the draft model; prompts go through the MTP layer too) -> detached (no
number of streams gained by it: exllamav3 runs as if there were none) -> attached again after a while. Changes happen
while no job is active. Engine thread only.
Costs: the layer's routed experts in page-locked host RAM (3.6 GB of GLM-5.3-Flash at 4 bits), read in place over PCIe
when it drafts; about 0.4 GB of VRAM for the rest of it and its KV cache, and KDA states kept to step back: one state
(143 MB) per stream and drafted token.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...checkpoint import Checkpoint
from ...config import Settings
from ...errors import DeviceError
from ...runtime import PinnedExperts
from .draft_policy import DraftPolicy, draft_length
from .expert_tensors import ExpertTensors
from .scales import ExpertScales

RETRY_S = 1800.0
_HOLES = 128
"""Positions per job, decoded without drafts, that the MTP layer reads before it drafts again; no older ones."""
_SIGNATURES = {
    "iterate_draftmodel_mtp_gen": ["self", "results"],
    "iterate_gen": ["self", "results", "draft_tokens"],
}


class Draft:
    """The MTP layer: exllamav3's model and cache of it, the tokens it drafts at most, and its experts, pinned.

    Made before any weight is loaded (the experts are read beside that); `finish` once they are, `close` in the end.
    Raises DeviceError for another exllamav3, ResourceError, CheckpointError.
    """

    def __init__(self, exllamav3: Any, config: Any, checkpoint: Checkpoint, device: Any, settings: Settings) -> None:
        for name, parameters in _SIGNATURES.items():
            function = getattr(exllamav3.Generator, name, None)
            if function is None or list(inspect.signature(function).parameters) != parameters:
                raise DeviceError(f"exllamav3: Generator.{name} is not the one --mtp is made for; leave --mtp out")
        self.tokens = settings.mtp
        self.model = exllamav3.Model.from_config(config, component="mtp")
        self.cache: Any = None
        self.store = PinnedExperts(checkpoint, device, lambda stage, done: None, checkpoint.config.mtp_layers)
        self._scales = ExpertScales(checkpoint, self.store.layers)
        self.tensors: ExpertTensors | None = ExpertTensors(self.store, self._scales, settings.gpu)

    def finish(self) -> None:
        """Every tensor was handed out: wait for the experts' bytes, let go of what only loading needed."""
        self.store.finish()
        self._scales.abandon()
        self.tensors = None

    def close(self) -> None:
        """Release VRAM and host memory, also after a failed load; the generator must be gone."""
        self.model.unload()
        self._scales.abandon()
        self.store.abandon()


def generator_arguments(draft: Draft | None) -> dict[str, Any]:
    """What the generator is made with besides."""
    if draft is None:
        return {}
    return {"draft_model": draft.model, "draft_cache": draft.cache, "num_draft_tokens": draft.tokens}


@dataclass(slots=True)
class _Step:
    """What one decode step did, all streams together."""

    streams: int
    drafted: int
    accepted: int


class Drafting:
    """Drives the drafts of one generator at a time; `attach` it to the next one when that is replaced."""

    def __init__(
        self, draft: Draft, policy: DraftPolicy | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._draft_model, self._tokens = draft, draft.tokens
        self._policy, self._clock = policy or DraftPolicy(), clock
        self._generator: Any = None
        self._holes: dict[Any, deque[tuple[int, Any, Any]]] = {}
        self._step: _Step | None = None
        self._retry_s = 0.0
        self._counts = {"drafted_tokens": 0, "accepted_tokens": 0, "drafting_steps": 0, "plain_steps": 0}

    def attach(self, generator: Any) -> None:
        """Take over a generator made with `generator_arguments`, before its first step."""
        self._generator = generator
        self._iterate = generator.iterate
        self._make_drafts, self._decode = generator.iterate_draftmodel_mtp_gen, generator.iterate_gen
        generator.iterate = self.iterate
        generator.iterate_draftmodel_mtp_gen, generator.iterate_gen = self._drafts, self._gen
        self._holes.clear()

    def iterate(self) -> list[dict[str, Any]]:
        """One step of the generator, timed if it does nothing but decode."""
        g = self._generator
        if not g.active_jobs:
            self._between()
        before = list(g.active_jobs)
        decoding = bool(before) and all(job.is_prefill_done() for job in before)
        self._step, start = None, self._clock()
        results: list[dict[str, Any]] = self._iterate()
        seconds, step = self._clock() - start, self._step
        if step is not None:
            self._count(step)
            if decoding and step.streams == len(before) and draft_length(step.streams, self._tokens):
                self._policy.observe(step.streams, step.drafted > 0, step.streams + step.accepted, seconds)
        return results

    def stats(self) -> dict[str, Any]:
        """Tokens drafted and accepted, steps with and without drafts, and the policy's state by number of streams."""
        attached = self._generator is not None and self._generator.draft_model is not None
        return {"attached": attached, "draft_length": self._tokens, **self._counts, "streams": self._policy.states()}

    def _count(self, step: _Step) -> None:
        self._counts["drafted_tokens"] += step.drafted
        self._counts["accepted_tokens"] += step.accepted
        self._counts["drafting_steps" if step.drafted else "plain_steps"] += 1

    def _between(self) -> None:
        """Between jobs: drop the draft model where it never pays, try it again after a while."""
        g = self._generator
        self._holes.clear()
        if g.draft_model is not None and self._policy.lost:
            g.draft_model, g.mtp_draft, self._retry_s = None, False, self._clock() + RETRY_S
        elif g.draft_model is None and self._clock() >= self._retry_s:
            self._policy.start_over()
            g.draft_model, g.mtp_draft = self._draft_model.model, True

    def _decoding_jobs(self) -> list[Any]:
        return [job for job in self._generator.active_jobs if job.is_prefill_done()]

    def _drafts(self, results: list[Any]) -> Any:
        """In place of exllamav3's drafting: drafts (streams, length), or None for a plain step."""
        jobs = self._decoding_jobs()
        length = draft_length(len(jobs), self._tokens)
        if not length or not self._policy.want(len(jobs)):
            self._remember(jobs)
            return None
        self._catch_up(jobs)
        g = self._generator
        g.num_draft_tokens = length
        try:
            return self._make_drafts(results)
        finally:
            g.num_draft_tokens = self._tokens

    def _gen(self, results: list[Any], draft_tokens: Any = None) -> None:
        """Around exllamav3's decode step: what it drafted and accepted."""
        jobs = self._decoding_jobs()
        accepted = sum(job.accepted_draft_tokens for job in jobs)
        self._decode(results, draft_tokens)
        drafted = 0 if draft_tokens is None else len(jobs) * int(draft_tokens.shape[-1])
        self._step = _Step(len(jobs), drafted, sum(job.accepted_draft_tokens for job in jobs) - accepted)

    def _remember(self, jobs: list[Any]) -> None:
        """A plain step leaves the MTP layer's cache without this position: keep what it takes to fill that in."""
        self._holes = {job: self._holes.get(job, deque(maxlen=_HOLES)) for job in jobs}
        for job in jobs:
            if job.mtp_last_hidden is not None:
                at = job.sequences[0].kv_position
                self._holes[job].append((at, job.get_input_ids_list()[0], job.mtp_last_hidden))

    @torch.inference_mode()
    def _catch_up(self, jobs: list[Any]) -> None:
        """Let the MTP layer read the positions that plain steps decoded."""
        for job in jobs:
            holes = self._holes.pop(job, None)
            if not holes:
                continue
            positions, ids, hidden = zip(*holes, strict=True)
            params = {
                "target_hidden": torch.cat(hidden, dim=1),
                "attn_mode": "flash_attn",
                "block_table": job.sequences[0].block_index_tensor,
                "cache": self._draft_model.cache,
                "cache_seqlens": torch.tensor([positions[0]], dtype=torch.int32),
            }
            self._draft_model.model.prefill(input_ids=torch.cat(ids, dim=1), params=params)
        self._holes.clear()
