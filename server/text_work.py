"""Plain prompts (text or token ids) as work for the engine, and their teacher-forced scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glm53.engine.protocol import Engine, TokenScore
from glm53.errors import RequestError

from .chat_work import check_choices
from .generation import Work, give_each, stop_ids
from .jobs import Job
from .prompt import fit
from .protocol.constraints import text_constraint
from .protocol.output import OutputParser
from .protocol.requests import Decoding, Prompt
from .state import ServerState


@dataclass(frozen=True, slots=True)
class TextWork:
    """Prompts ready for `generation.submit`: `n` works for each prompt, in order."""

    prompts: list[list[int]]
    works: list[Work]


def text_work(
    state: ServerState,
    engine: Engine,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    *,
    show_special: bool = False,
    keep_tokens: bool = False,
) -> TextWork:
    """Encode and fit. Raises RequestError or PromptTooLong. May run on any thread."""
    check_choices(state, decoding.n)
    context = engine.info.context
    ids = [state.prompts.text(p, context) if isinstance(p, str) else list(p) for p in prompts]
    works = []
    for prompt in ids:
        max_tokens = fit(len(prompt), decoding.max_tokens, context)
        for index in range(decoding.n):
            parser = OutputParser(
                state.tokenizer,
                thinking_open=False,
                raw=True,
                stop=decoding.stop,
                show_special=show_special,
                keep_tokens=keep_tokens or decoding.top_logprobs is not None,
            )
            works.append(Work(prompt, max_tokens, parser, seed_offset=index))
    return TextWork(ids, works)


async def constrain(job: Job, work: TextWork, decoding: Decoding) -> None:
    """Compile the format of the answer, if one was asked for, for each stream. Raises RequestError."""
    if decoding.response_format is None:
        return
    state = job.state
    stops = stop_ids(decoding, state)

    def compile_all() -> None:
        give_each(work.works, text_constraint(state.grammars, decoding.response_format, stops))

    await state.run_compiling(compile_all)


MOST_SCORES = 1 << 22
"""Scores and alternatives of one request: some 200 MB of JSON, and ten times that in Python's objects."""


async def scores(job: Job, prompts: Sequence[Sequence[int]], top: int) -> list[list[TokenScore]]:
    """Scores of each prompt's tokens, one prompt after another. Raises RequestError if they are too many, EngineError,
    or the error of a time limit."""
    wanted = sum(map(len, prompts)) * (1 + top)
    if wanted > MOST_SCORES:
        message = f"the scores of all prompts, with {top} alternatives each, are {wanted:,}; at most {MOST_SCORES:,}"
        raise RequestError(f"{message} are given at once: ask for fewer", param="logprobs", code="too_many_scores")
    try:
        async with job.deadline():
            scored = [await job.engine.score(prompt, top) for prompt in prompts]
    except TimeoutError as e:
        raise job.explain(e) from None
    for items in scored:
        job.owns(items, wanted)
    return scored
