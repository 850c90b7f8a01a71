"""What exllamav3's results become on a stream: tokens, counts and the end (`engine/exllama/jobs.py: Stream.take`)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import torch
from tiny_checkpoint import TINY

from glm53.engine.exllama.jobs import Stream
from glm53.engine.protocol import Finish, GenerationRequest
from glm53.engine.stream import QueuedStream
from glm53.tokenizer import Tokenizer

STOP = 9


def ids(*tokens: int) -> dict[str, Any]:
    return {"token_ids": torch.tensor([tokens])}


def streaming(*tokens: int, **more: Any) -> dict[str, Any]:
    return {"stage": "streaming", "eos": False, **(ids(*tokens) if tokens else {}), **more}


def taken(*results: dict[str, Any], pages: int = 0) -> tuple[list[int], Finish | None, Any, list[bool]]:
    """Token ids, the end, usage, and what `take` said of each result."""

    async def run() -> tuple[list[int], Finish | None, Any, list[bool]]:
        request = GenerationRequest("r", [1, 2, 3], 5, stop_ids=frozenset({STOP}))
        stream = Stream(request, QueuedStream(3), Tokenizer(TINY))
        stream.job = SimpleNamespace(cached_pages=pages, cached_tokens=5)
        said = [stream.take(result) for result in results]
        if not said[-1]:
            stream.stream.finish(Finish("cancelled"))
        deltas = [delta async for delta in stream.stream]
        return [t.id for d in deltas for t in d.tokens], deltas[-1].finish, stream.stream.usage, said

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_tokens_held_back_inside_a_character_follow_those_that_were_not() -> None:
    end = streaming(4, 5, held=ids(6, 7), eos=True, eos_reason="max_new_tokens")
    got, finish, usage, said = taken(streaming(3), streaming(), end)
    assert got == [3, 4, 5, 6, 7]
    assert finish == Finish("length")
    assert usage.completion_tokens == 5
    assert said == [False, False, True]


def test_the_stop_token_is_counted_and_named_but_not_delivered() -> None:
    for last in (streaming(4, STOP), streaming(4, held=ids(STOP))):
        last |= {"eos": True, "eos_reason": "stop_token", "eos_triggering_token_id": STOP}
        got, finish, usage, _ = taken(last)
        assert got == [4]
        assert finish == Finish("stop", stop_id=STOP)
        assert usage.completion_tokens == 2


def test_the_cached_part_of_a_prompt_is_what_it_was_when_the_answer_began() -> None:
    _, _, usage, said = taken({"stage": "started"}, pages=2)
    assert usage.cached_tokens == 2 * 256 + 5
    assert usage.prefill_start_s > 0
    assert said == [False]
    _, _, usage, _ = taken(streaming(4), {"stage": "prefill"}, pages=2)
    assert usage.cached_tokens == 0
    assert usage.first_token_s > 0


def test_an_error_is_one_line_and_the_end() -> None:
    got, finish, _, said = taken(streaming(4), {"stage": "error", "error": "out of\n memory"})
    assert got == [4]
    assert finish == Finish("error", error="out of memory")
    assert said == [False, True]
