"""Token counts of one answer, as every API but Chat Completions words them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """`cached` of the prompt's tokens were not computed again; `reasoning` of the completion's were hidden thoughts."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def anthropic(self) -> dict[str, int]:
        """Usage of the Messages API, whose `input_tokens` leaves cached ones out."""
        return {
            "input_tokens": self.prompt - self.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
            "output_tokens": self.completion,
        }

    def responses(self) -> dict[str, object]:
        """Usage of the Responses API."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0},
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": min(self.reasoning, self.completion)},
            "total_tokens": self.prompt + self.completion,
        }
