"""A failed CPU lane over exllamav3's own generator: no token of the bad step is delivered, what it left in the cache is
forgotten. Skipped unless GLM53_EXLLAMAV3 names the unpacked wheel, see `real_generator`."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_cases import golden_dir
from generator_fixtures import exllamav3_folder

from glm53.config import Settings
from glm53.engine.protocol import GenerationRequest, SamplingParams

FOLDER = exllamav3_folder()
PROMPT = [5 + i % 90 for i in range(300)]  # a page and a bit of another


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    pytest.importorskip("transformers")
    from cpu_engine_helpers import cpu_model
    from real_generator import import_generator, make_engine

    settings = Settings(model_dir=golden_dir(), mode="exact", state_dir=tmp_path, cache_tokens=8192)
    with pytest.MonkeyPatch.context() as patch:
        made = make_engine(import_generator(FOLDER, patch), cpu_model(golden_dir()), settings, 2176)
        yield made
        made.close()
        gc.unfreeze()


def ask(
    engine: Any, prompts: list[list[int]], steps: int, stop: frozenset[int] = frozenset()
) -> list[tuple[list[int], Any, int]]:
    """(tokens, finish, cached prompt tokens) of answers that run together."""

    async def one(i: int, prompt: list[int]) -> tuple[list[int], Any, int]:
        request = GenerationRequest(str(i), prompt, steps, stop_ids=stop, sampling=SamplingParams(temperature=0.0))
        stream, ids, finish = engine.submit(request), [], None
        async for delta in stream:
            ids += [t.id for t in delta.tokens]
            finish = delta.finish
        return ids, finish, stream.usage.cached_tokens

    async def run() -> list[tuple[list[int], Any, int]]:
        return list(await asyncio.wait_for(asyncio.gather(*(one(i, p) for i, p in enumerate(prompts))), 60))

    return asyncio.run(run())


@pytest.mark.parametrize("recovers", [True, False])
def test_streams_of_a_bad_step_end_and_its_pages_are_forgotten(engine: Any, recovers: bool) -> None:
    [(expected, _, _)] = ask(engine, [PROMPT], 12)
    [(again, _, cached)] = ask(engine, [PROMPT], 12)
    assert (again, cached) == (expected, 256)
    passes, steps, told = engine._loaded.passes, [0], []

    def fault() -> str | None:
        steps[0] += 1
        return "the CPU lane stalled: worker 1" if steps[0] == 8 else None

    def recover(why: str, stream: int) -> bool:
        told.append(why)
        return recovers

    passes.fault, passes.lane = fault, SimpleNamespace(recover=recover)
    generator = engine._generator
    for ids, finish, _ in ask(engine, [PROMPT, PROMPT[:40], PROMPT[:7]], 200):
        assert (finish.reason, finish.error) == ("error", "the CPU lane stalled: worker 1")
        assert 0 < len(ids) < 8
    passes.fault = lambda: None
    [(after, finish, cached)] = ask(engine, [PROMPT], 12)
    assert (after, finish.reason, cached) == (expected, "length", 0)
    assert told == ["the CPU lane stalled: worker 1"]
    assert engine._generator is not generator
    assert (passes.lane is None) is not recovers
    stats = engine.stats()
    assert (stats["failed"], stats["running"], stats["waiting"]) == (3, 0, 0)


def test_a_lane_that_fails_in_a_step_that_outlived_its_streams_ends_no_stream(engine: Any) -> None:
    """The step behind a stop token is read although nobody waits for it, before a stream that comes next begins."""
    [(expected, _, _)] = ask(engine, [PROMPT], 12)
    at = next(i for i in range(4, 12) if expected[i] not in expected[:i])
    passes, told, failing = engine._loaded.passes, threading.Event(), threading.Event()

    def fault() -> str | None:
        if not engine._streams:
            failing.set()
        return "the CPU lane stalled: worker 1" if failing.is_set() else None

    def recover(why: str, stream: int) -> bool:
        failing.clear()
        passes.fault = lambda: None
        told.set()
        return True

    passes.fault, passes.lane = fault, SimpleNamespace(recover=recover)
    [(ids, finish, _)] = ask(engine, [PROMPT], 12, frozenset({expected[at]}))
    assert (ids, finish.reason, finish.stop_id) == (expected[:at], "stop", expected[at])
    assert told.wait(20), "nobody has looked at the step behind the stop token"
    [(after, finish, _)] = ask(engine, [PROMPT], 12)
    assert (after, finish.reason) == (expected, "length")
    assert engine.stats()["failed"] == 0
