"""One request as an exllamav3 job: made from our parameters, and its results turned into tokens.

States of a Stream: waiting (queued in exllamav3) -> prefill -> decode -> finished. Engine thread only, but `cancelled`.
exllamav3 holds tokens back while their text ends inside a character; they arrive together with the next ones.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ...tokenizer import Tokenizer
from ..protocol import Finish, GenerationRequest, Token, TokenScore
from ..stream import QueuedStream
from .loader import PAGE_TOKENS
from .sampling import make_filter, make_sampler

ROUND_TOKENS = 4096
"""Answer tokens whose KV pages a stream takes at a time, so that a long limit does not keep others from starting."""
CHECKPOINT_TOKENS = 2048
"""exllamav3's distance between KDA checkpoints for this architecture."""


def token_budget(prompt: int, wanted: int, cache_tokens: int) -> tuple[int, int | None]:
    """Answer tokens that fit behind the prompt, and how many to take KV pages for at a time (None: all at once).

    exllamav3 rounds a round up to a checkpoint boundary and needs one token beyond the answer.
    """
    most = max(1, min(wanted, cache_tokens - prompt - 1))
    rounded = -(-(prompt + ROUND_TOKENS) // CHECKPOINT_TOKENS) * CHECKPOINT_TOKENS
    return most, ROUND_TOKENS if most > ROUND_TOKENS and rounded <= cache_tokens else None


class Stream:
    """A running request."""

    def __init__(self, request: GenerationRequest, stream: QueuedStream, tokenizer: Tokenizer) -> None:
        self.request, self.stream, self._tokenizer = request, stream, tokenizer
        self.job: Any = None
        self.prefill_done = False
        stream.usage.submitted_s = time.monotonic()

    @property
    def prefilling(self) -> bool:
        """Its prompt is being read; a stream that waits for its turn is not."""
        return bool(self.stream.usage.prefill_start_s) and not self.prefill_done

    def make_job(self, exllamav3: Any, tokenizer: Any, vocab_size: int, cache_tokens: int) -> Any:
        """The exllamav3 job; its identifier is this object."""
        r = self.request
        most, at_a_time = token_budget(len(r.prompt_ids), r.max_tokens, cache_tokens)
        filters = [make_filter(exllamav3, tokenizer, r.constraint, vocab_size)] if r.constraint else None
        self.job = exllamav3.Job(
            input_ids=torch.tensor([list(r.prompt_ids)], dtype=torch.long),
            max_new_tokens=most,
            max_rq_tokens=at_a_time,
            sampler=make_sampler(exllamav3, r.sampling, len(r.prompt_ids), keep_logits=r.top_logprobs is not None),
            seed=None if r.sampling.seed is None else r.sampling.seed & (2**63 - 1),
            stop_conditions=sorted(r.stop_ids) or None,
            decode_special_tokens=True,
            return_logits=r.top_logprobs is not None,
            filters=filters,
            identifier=self,
        )
        return self.job

    def take(self, result: dict[str, Any]) -> bool:
        """Deliver one of exllamav3's results; True when it was the last."""
        stage = result["stage"]
        usage = self.stream.usage
        if stage == "error":
            self.stream.finish(Finish("error", error=" ".join(str(result["error"]).split())))
            return True
        if stage in ("started", "prefill"):
            usage.prefill_start_s = usage.prefill_start_s or time.monotonic()
            if not self.prefill_done:  # a stream that is cancelled later has no last result to tell it
                usage.cached_tokens = self.job.cached_pages * PAGE_TOKENS + self.job.cached_tokens
            return False
        held = result.get("held") or {}
        stop_id = result.get("eos_triggering_token_id")
        tokens = [*self._tokens(result), *self._tokens(held)]
        drawn = len(tokens)
        if stop_id is not None and tokens and tokens[-1].id == stop_id:
            tokens.pop()
        if drawn:
            usage.last_token_s = time.monotonic()
            usage.first_token_s = usage.first_token_s or usage.last_token_s
            usage.completion_tokens += drawn
        self.prefill_done = True
        if not result["eos"]:
            if tokens:
                self.stream.push(tokens)
            return False
        reason = result.get("eos_reason")
        finish = Finish("length") if reason == "max_new_tokens" else Finish("stop", stop_id=stop_id)
        self.stream.finish(finish, tokens)
        return True

    def _tokens(self, part: dict[str, Any]) -> list[Token]:
        ids = part.get("token_ids")
        if ids is None:
            return []
        ids = ids.reshape(-1).tolist()
        logits = part.get("logits")
        if self.request.top_logprobs is None or logits is None:
            return [Token(i, self._tokenizer.token_bytes(i)) for i in ids]
        scores = score_rows(logits.reshape(-1, logits.shape[-1]), ids, self.request.top_logprobs, self._tokenizer.size)
        return [Token(i, self._tokenizer.token_bytes(i), s.logprob, s.top) for i, s in zip(ids, scores, strict=True)]


def slices(count: int, size: int) -> list[tuple[int, int]]:
    """Cuts 0..count into pieces of `size` and more, the last one below twice that: exllamav3 multiplies few rows with
    another kernel than many, so a short remainder would not get the head's logits of one whole pass."""
    starts = list(range(0, max(1, count - size + 1), size))
    return list(zip(starts, [*starts[1:], count], strict=True))


def score_rows(logits: torch.Tensor, ids: list[int], top: int, size: int) -> list[TokenScore]:
    """Log-probabilities of `ids` under logits (rows, vocabulary), with the `top` best of the first `size` ids."""
    logits = logits.float()
    norm = torch.logsumexp(logits, dim=-1)
    wanted = torch.tensor(ids, dtype=torch.long, device=logits.device)
    own = (logits.gather(1, wanted[:, None]).squeeze(1) - norm).tolist()
    if top <= 0:
        return [TokenScore(i, v) for i, v in zip(ids, own, strict=True)]
    values, indices = torch.topk(logits[:, :size], min(top, size), dim=-1)
    best = (values - norm[:, None]).tolist()
    return [
        TokenScore(i, v, tuple(zip(row_ids, row, strict=True)))
        for i, v, row_ids, row in zip(ids, own, indices.tolist(), best, strict=True)
    ]
