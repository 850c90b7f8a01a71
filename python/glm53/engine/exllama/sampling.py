"""Our sampling parameters as exllamav3 sampler steps, and grammars as exllamav3 filters.

Order: constraint mask, logit_bias, repetition / presence / frequency penalties, temperature, top_k, top_p, min_p, draw.
top_p is exllamav3's: the token that crosses the limit is cut, the best token never. A seed gives the same draws
whatever streams run beside it; the logits of a batch may still differ from those of one stream in their last bits.
Built by functions that take the loaded exllamav3, so that importing this file needs none.
"""

from __future__ import annotations

from typing import Any

import torch

from ..protocol import Constraint, SamplingParams

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing float16 logits by less overflows exllamav3's float32."""


def make_sampler(exllamav3: Any, params: SamplingParams, prompt_tokens: int, keep_logits: bool = False) -> Any:
    """A `CustomSampler` for one stream; common stacks collapse into exllamav3's fused kernel. `keep_logits`: sampling
    leaves the logits as the model made them (one copy a step), for log-probabilities."""
    return _sampler_class(exllamav3, keep_logits)(_steps(exllamav3, params, prompt_tokens))


def _sampler_class(exllamav3: Any, keep_logits: bool) -> Any:
    if not keep_logits:
        return exllamav3.CustomSampler

    class KeepsLogits(exllamav3.CustomSampler):  # type: ignore[misc]
        def forward(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            """exllamav3 writes -inf into the vocabulary's padding in place, before it returns the logits."""
            return super().forward(logits.clone(), *args, **kwargs)

    return KeepsLogits


def _steps(exllamav3: Any, params: SamplingParams, prompt_tokens: int) -> list[Any]:
    steps: list[Any] = []
    if params.logit_bias:
        steps.append(exllamav3.SS_LogitBias({int(i): float(b) for i, b in params.logit_bias.items()}))
    if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
        steps.append(_penalties(exllamav3, params, prompt_tokens))
    if params.temperature < GREEDY_BELOW:
        return [*steps, exllamav3.SS_Argmax()]
    steps.append(exllamav3.SS_Temperature(params.temperature))
    if params.top_k > 0:
        steps.append(exllamav3.SS_TopK(params.top_k))
    if params.top_p < 1.0:
        steps.append(exllamav3.SS_TopP(params.top_p))
    if params.min_p > 0.0:
        steps.append(exllamav3.SS_MinP(params.min_p))
    return [*steps, exllamav3.SS_Sample()]


def penalise(logits: torch.Tensor, past: torch.Tensor, prompt_tokens: int, p: SamplingParams) -> torch.Tensor:
    """Penalised copy of logits (rows, vocabulary); past (rows or 1, n) ids, the first `prompt_tokens` of them prompt.

    Repetition looks at prompt and answer, presence and frequency at the answer (as in vLLM).
    """
    row, ids = logits.float().clone(), past.reshape(-1)
    if p.repetition_penalty != 1.0:
        seen = torch.zeros(row.shape[-1], dtype=torch.bool, device=row.device)
        seen[ids] = True
        row = torch.where(seen, torch.where(row > 0, row / p.repetition_penalty, row * p.repetition_penalty), row)
    answer = ids[prompt_tokens:]
    times = torch.zeros(row.shape[-1], dtype=torch.float, device=row.device)
    times.index_add_(0, answer, torch.ones(answer.shape, dtype=torch.float, device=row.device))
    return row - p.presence_penalty * (times > 0).float() - p.frequency_penalty * times


def _penalties(exllamav3: Any, params: SamplingParams, prompt_tokens: int) -> Any:
    from exllamav3.generator.sampler.custom import SS, SS_Base

    class Penalties(SS_Base):  # type: ignore[misc]
        def run(self, state: Any) -> None:
            logits = state.in_logits if state.state == SS.INIT else state.logits
            state.logits = penalise(logits, state.past_ids, prompt_tokens, params)
            state.state = SS.LOGITS

        def reqs_past_ids(self) -> bool:
            return True

    return Penalties()


def make_filter(exllamav3: Any, tokenizer: Any, constraint: Constraint, vocab_size: int) -> Any:
    """An exllamav3 filter that asks `constraint` for the allowed ids of every step."""

    class ConstraintFilter(exllamav3.Filter):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(tokenizer, None, None, False)

        def reset(self) -> None:
            pass

        def accept_token(self, token: int) -> None:
            constraint.accept(token)

        def is_completed(self) -> bool:
            return False

        def use_background_worker(self) -> bool:
            return False

        def get_next_logit_mask(self) -> torch.Tensor:
            mask = torch.zeros((1, vocab_size), dtype=torch.half)
            allowed = constraint.allowed(vocab_size)
            if allowed is not None:
                mask.masked_fill_(~torch.from_numpy(allowed).view(1, -1), float("-inf"))
            return mask

    return ConstraintFilter()
