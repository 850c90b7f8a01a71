"""Parts that several replies share: usage, timings and log-probabilities, as JSON-ready values."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from glm53.engine.protocol import StreamUsage, Token
from glm53.tokenizer import Tokenizer

from .generation import Choice
from .protocol.json_parts import JsonList
from .protocol.usage import TokenCounts

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have


def finite(logprob: float | None) -> float:
    """The log-probability as a number that JSON can carry."""
    return LOWEST if logprob is None or not math.isfinite(logprob) else logprob


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """OpenAI's usage object; the prompt counts once however many choices answer it."""
    prompt = choices[0].stream.usage.prompt_tokens
    completion = sum(c.parser.tokens for c in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": choices[0].stream.usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(c.parser.reasoning_tokens for c in choices)},
    }


def counts(choice: Choice) -> TokenCounts:
    """Token counts of one choice, for the APIs that word them differently."""
    stream, parser = choice.stream.usage, choice.parser
    return TokenCounts(stream.prompt_tokens, stream.cached_tokens, parser.tokens, parser.reasoning_tokens)


def timings(usage_: StreamUsage) -> dict[str, Any]:
    """Where a stream's time went, in ms, with the rates users compare (prompt tokens that were not cached).

    `predicted_n` counts every token the engine made, the one that ended the answer too; `usage` counts the answer's.
    """
    started = usage_.prefill_start_s or usage_.submitted_s
    first = usage_.first_token_s or time.monotonic()
    prompt_s, predicted_s = max(0.0, first - started), max(0.0, usage_.last_token_s - usage_.first_token_s)
    computed, predicted = usage_.prompt_tokens - usage_.cached_tokens, usage_.completion_tokens
    return {
        "queue_ms": round(1000 * max(0.0, started - usage_.submitted_s), 3),
        "cache_n": usage_.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": round(1000 * prompt_s, 3),
        "prompt_per_second": round(computed / prompt_s, 3) if prompt_s else 0.0,
        "predicted_n": predicted,
        "predicted_ms": round(1000 * predicted_s, 3),
        "predicted_per_second": round((predicted - 1) / predicted_s, 3) if predicted_s else 0.0,
    }


def chat_logprobs(tokens: Sequence[Token], tokenizer: Tokenizer) -> JsonList:
    """`logprobs.content` of the Chat Completions API."""
    return JsonList(token_logprobs(tokens, tokenizer))


def token_logprobs(tokens: Iterable[Token], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """OpenAI's entry for each token; `bytes` tells what half a character's token really is."""
    for token in tokens:
        alternatives = [_entry(tokenizer.token_bytes(i), logprob) for i, logprob in token.top]
        yield {**_entry(token.data, token.logprob), "top_logprobs": alternatives}


def _entry(data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}
