"""What the server asks of an engine, and nothing about how it answers.

Three engines implement `Engine`: `engine.cpu` (transformers + CpuMoe), `engine.exllama` (exllamav3 on CUDA) and
`engine.scripted` (prepared answers, for tests and client authors). Each runs its own worker thread; the server only
touches `TokenStream`, whose loop side is here and in `engine.stream`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length", "cancelled", "error"]
Progress = Callable[[str, float], None]
"""`progress(stage, fraction)` with fraction in 0..1; may be called from any thread."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off.

    Order of application: logit_bias, repetition/presence/frequency penalties, temperature, top_k, top_p, min_p.
    """

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


class Constraint(Protocol):
    """A grammar over token ids, advanced by the engine thread for one stream. Its methods never raise: one stream's
    grammar must not stop the engine. With `failure` set it allows nothing but the end of the answer."""

    @property
    def failure(self) -> Exception | None:
        """Why the grammar gave up, to be raised to the client; None as long as it holds."""
        ...

    def allowed(self, vocab_size: int) -> Any:
        """Bool mask of shape (vocab_size,) as a numpy array, or None while nothing is constrained."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by one sampled token."""
        ...

    def copy(self) -> Constraint:
        """One in the same state for another stream."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One stream to generate. `max_tokens` is already clamped to the context by the caller (>= 1).

    `stop_ids`: generation ends after one of these is drawn; that id is reported in `Finish.stop_id` and is not
    delivered as a token. `top_logprobs`: None = no log-probabilities, n = the drawn token's and the n best.
    """

    request_id: str
    prompt_ids: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_ids: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `data` is its UTF-8 bytes (maybe part of a character); special tokens carry their text.

    `logprob` is the natural log-probability under the unmodified model distribution (before temperature and cuts);
    `top` lists (token id, logprob), best first.
    """

    id: int
    data: bytes
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a stream ended. `error` is one line, set only for reason "error"."""

    reason: FinishReason
    stop_id: int | None = None
    error: str | None = None


@dataclass(slots=True)
class StreamUsage:
    """Counts the engine keeps for one stream; seconds on the monotonic clock, 0.0 = not yet."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    submitted_s: float = 0.0
    prefill_start_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Delta:
    """Everything that arrived since the last one: zero or more tokens, and `finish` on the last delta only."""

    tokens: Sequence[Token]
    finish: Finish | None = None


class TokenStream(Protocol):
    """A running generation as the event loop sees it. Iterate once: `async for delta in stream`."""

    usage: StreamUsage

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def cancel(self) -> None:
        """Stop within one engine step, free everything held. Idempotent, any thread, never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Teacher-forced score of one prompt token: its logprob given all before it (first: None), and the n best."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is loaded; constant after `load`, but for `mode`: fast mode whose CPU lane is off for good becomes exact.
    `context` = most tokens of prompt + answer of one stream."""

    name: str
    mode: str
    device: str
    model_path: str
    context: int
    vocab_size: int
    max_streams: int
    scripted: bool = False


class Engine(Protocol):
    """One loaded model. All methods are called on the event loop; work happens on the engine's own thread."""

    info: EngineInfo

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Queue a stream. Raises PromptTooLong, RequestError or EngineError (engine dead); never blocks."""
        ...

    async def score(self, ids: Sequence[int], top: int) -> list[TokenScore]:
        """Teacher-forced log-probabilities of `ids`, with the `top` best alternatives at each position."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counters for /stats and /metrics: JSON-ready, cheap, thread-safe. Has running, waiting, heartbeat_age_s.

        What the status page and health checks look for where an engine has it: `dead` (true: it will never answer
        again), `lanes` (routed picks by where they were computed), `split` (fast mode: `on`, `off_because`, `workers`,
        `b_ms`), `expert_cache` (`hits`, `misses`), `memory` (bytes by purpose) and `load` (seconds of the start by
        phase).
        """
        ...

    def close(self) -> None:
        """Cancel all streams, stop the thread, release memory. Idempotent; returns when the thread has ended."""
        ...
