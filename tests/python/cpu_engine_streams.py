"""Engines, requests and answers for the tests of the CPU engine's public interface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from cpu_engine_helpers import golden_dir, random_ids

from glm53.engine.cpu import CpuEngine
from glm53.engine.protocol import Delta, Finish, GenerationRequest, SamplingParams, Token

GREEDY = SamplingParams(temperature=0.0)
PROMPT = random_ids(40, 1)


def load(**kw: Any) -> CpuEngine:
    return CpuEngine.load(golden_dir(), **{"threads": 1, "context": 2048, **kw})


def request(prompt: list[int] | None = None, n: int = 12, **kw: Any) -> GenerationRequest:
    return GenerationRequest("test", prompt or PROMPT, n, **{"sampling": GREEDY, **kw})


class Answer:
    """Everything one stream delivered."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.finish: Finish | None = None
        self.usage: Any = None

    @property
    def ids(self) -> list[int]:
        return [t.id for t in self.tokens]


async def generate(engine: CpuEngine, req: GenerationRequest, on: Callable[[Delta, Any], None] | None = None) -> Answer:
    stream, answer = engine.submit(req), Answer()
    answer.usage = stream.usage
    try:
        async for delta in stream:
            answer.tokens += delta.tokens
            answer.finish = delta.finish
            if on:
                on(delta, stream)
    finally:
        stream.cancel()
    return answer


def run(engine: CpuEngine, req: GenerationRequest) -> Answer:
    return asyncio.run(generate(engine, req))


def gather(*jobs: Coroutine[Any, Any, Any]) -> list[Any]:
    async def all_of() -> list[Any]:
        return await asyncio.gather(*jobs)

    return asyncio.run(all_of())


async def reached(condition: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.003)
    raise AssertionError("condition not met in time")


class Only:
    """A constraint that allows a fixed sequence."""

    def __init__(self, ids: list[int], fail_at: int = -1) -> None:
        self.left, self.seen, self.fail_at = list(ids), [], fail_at

    def allowed(self, vocab_size: int) -> np.ndarray | None:
        if len(self.seen) == self.fail_at:
            raise RuntimeError("grammar broke")
        mask = np.zeros(vocab_size, bool)
        mask[self.left[:1]] = True
        return mask if self.left else None

    def accept(self, token_id: int) -> None:
        self.seen.append(token_id)
        self.left = self.left[1:]
