"""What the engine thread works on: generations and scorings, each with its own state and counters.

States of a Generation: waiting -> prefill (all prompt tokens but the last are fed in chunks) -> decode (the last token,
of the prompt or drawn, is fed together with the other streams') -> finished. Only the engine thread moves them;
`cancelled` may be set by anyone and is seen at the next step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from ...tokenizer import Tokenizer
from ..protocol import Finish, GenerationRequest, Token, TokenScore
from ..sampling import Row, Sampler, best_logprobs, log_normaliser
from ..stream import QueuedStream
from .state import StreamState


class Generation:
    """One request being answered."""

    def __init__(self, request: GenerationRequest, stream: QueuedStream, tokenizer: Tokenizer, context: int) -> None:
        self.request, self.stream = request, stream
        self.ids = [int(i) for i in request.prompt_ids]
        self.state: StreamState | None = None
        self._tokenizer, self._context = tokenizer, context
        self._sampler = Sampler(request.sampling, self.ids, tokenizer.size)
        stream.usage.submitted_s = time.monotonic()

    @property
    def cancelled(self) -> bool:
        """The reader has left."""
        return self.stream.cancelled

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that prefill still has to feed."""
        fed = self.state.length if self.state else 0
        return max(0, len(self.request.prompt_ids) - 1 - fed)

    def begin(self, state: StreamState) -> None:
        """Enter prefill with a fresh or a reused state."""
        self.state = state
        self.stream.usage.cached_tokens = state.length
        self.stream.usage.prefill_start_s = time.monotonic()

    def draw(self, logits: torch.Tensor) -> tuple[Token | None, Finish | None]:
        """Draw the next token from logits (vocabulary,): what is to be delivered, and whether the answer ends."""
        row, request = logits.numpy(), self.request
        allowed = request.constraint.allowed(row.size) if request.constraint else None
        token = self._sampler.sample(row, allowed)
        self._count()
        if token in request.stop_ids:
            return None, Finish("stop", stop_id=token)
        if request.constraint:
            request.constraint.accept(token)
        self.ids.append(token)
        full = self.stream.usage.completion_tokens >= request.max_tokens or len(self.ids) >= self._context
        return self._piece(token, row), Finish("length") if full else None

    def _count(self) -> None:
        usage = self.stream.usage
        usage.last_token_s = time.monotonic()
        usage.first_token_s = usage.first_token_s or usage.last_token_s
        usage.completion_tokens += 1

    def _piece(self, token: int, row: Row) -> Token:
        data, n = self._tokenizer.token_bytes(token), self.request.top_logprobs
        if n is None:
            return Token(token, data)
        logprob = float(row[token]) - log_normaliser(row)
        return Token(token, data, logprob, best_logprobs(row, self._tokenizer.size, n))

    def end(self, finish: Finish, token: Token | None = None) -> None:
        """Deliver the end; later calls are ignored."""
        self.stream.finish(finish, [token] if token else [])


@dataclass(slots=True)
class Scoring:
    """Teacher-forced scores of `ids`, computed chunk by chunk; a queued one holds no state yet."""

    ids: list[int]
    top: int
    size: int
    future: Future[list[TokenScore]]
    state: StreamState | None = None
    scores: list[TokenScore] = field(default_factory=list)

    @property
    def cancelled(self) -> bool:
        """Nobody waits for the result any more."""
        return self.future.cancelled()

    def add(self, logits: torch.Tensor) -> None:
        """Logits (rows, vocabulary) of the next rows; row r predicts the token after the r-th."""
        if not self.scores:
            self.scores.append(TokenScore(self.ids[0], None))
        for row in logits.numpy():
            at = len(self.scores)
            if at == len(self.ids):
                break
            token = self.ids[at]
            logprob = float(row[token]) - log_normaliser(row)
            self.scores.append(TokenScore(token, logprob, best_logprobs(row, self.size, self.top)))


def bad_id(ids: Sequence[int], size: int) -> int | None:
    """The first id outside 0..size-1, or None."""
    row = np.asarray(ids, np.int64)
    bad = np.flatnonzero((row < 0) | (row >= size))
    return int(row[bad[0]]) if bad.size else None
