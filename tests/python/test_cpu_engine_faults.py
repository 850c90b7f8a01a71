"""Faults, cancellation and endings of the CPU engine: what stops, what is told, and what goes on."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpu_engine_helpers import golden_dir, random_ids
from cpu_engine_streams import PROMPT, Answer, Only, gather, generate, load, reached, request, run

from glm53 import _core
from glm53.checkpoint import Checkpoint
from glm53.engine.cpu import CpuEngine
from glm53.engine.cpu.experts import ExpertStore
from glm53.engine.protocol import Finish
from glm53.errors import CheckpointError, EngineError, ResourceError


@pytest.fixture(scope="module")
def engine() -> Iterator[CpuEngine]:
    e = load()
    yield e
    e.close()


def test_an_error_in_one_stream_ends_only_that_stream(engine: CpuEngine) -> None:
    bad, good = gather(
        generate(engine, request(n=20, constraint=Only([4] * 20, fail_at=3))),
        generate(engine, request(random_ids(25, 6), 20)),
    )
    assert bad.finish is not None and bad.finish.reason == "error"
    assert bad.finish.error == "RuntimeError: grammar broke" and bad.ids == [4, 4, 4]
    assert good.finish == Finish("length") and len(good.ids) == 20


def test_an_error_in_prefill_ends_only_that_stream(engine: CpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine._model.prefill

    def prefill(state: Any, ids: list[int]) -> torch.Tensor:
        if ids[0] == 1999:
            raise MemoryError("no room")
        return real(state, ids)

    monkeypatch.setattr(engine._model, "prefill", prefill)
    bad, good = gather(generate(engine, request([1999, *PROMPT], 5)), generate(engine, request(random_ids(30, 77), 5)))
    assert bad.finish == Finish("error", error="MemoryError: no room")
    assert good.finish == Finish("length")


def break_stream(
    engine: CpuEngine, monkeypatch: pytest.MonkeyPatch, first: int, how: Callable[[], torch.Tensor]
) -> None:
    """From its fourth decode step on, the stream whose prompt begins with `first` meets `how()` half way through."""
    real, seen = engine._model._decoder.step, []
    states: dict[int, int] = {}
    prefill = engine._model.prefill

    def note(state: Any, ids: list[int]) -> torch.Tensor:
        if state.length == 0:
            states[id(state)] = ids[0]
        return prefill(state, ids)

    def step(state: Any, token: int) -> torch.Tensor:
        if states.get(id(state)) == first:
            seen.append(token)
            if len(seen) > 3:
                return how(engine._model)
        return real(state, token)

    monkeypatch.setattr(engine._model, "prefill", note)
    monkeypatch.setattr(engine._model._decoder, "step", step)


def refused_memory(model: Any) -> torch.Tensor:
    """Fails after the first layer's experts."""
    model._experts[0](torch.zeros(1, 256), torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4))
    raise MemoryError("no room")


@pytest.mark.parametrize(
    ("how", "error"),
    [
        (refused_memory, "MemoryError: no room"),
        (lambda model: torch.full((2176,), torch.nan), "ValueError: no token may be drawn"),
    ],
)
def test_an_error_in_decode_ends_only_that_stream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: Callable[[Any], torch.Tensor], error: str
) -> None:
    e = load(trace=tmp_path / "trace.npz", prefix_cache_bytes=0)
    prompts = [random_ids(30, 7), [1999, *PROMPT], random_ids(20, 8)]
    try:
        alone = run(e, request(prompts[2], 20)).ids
        break_stream(e, monkeypatch, 1999, how)
        one, bad, two = gather(*(generate(e, request(p, 20)) for p in prompts))
        assert bad.finish.reason == "error" and bad.finish.error.startswith(error) and len(bad.ids) == 3
        assert one.finish == two.finish == Finish("length") and two.ids == alone
        if how is refused_memory:  # a row that did not reach its end is neither counted nor traced
            stats = e.stats()
            assert stats["routed_picks_served"] == stats["routed_picks_expected"]
    finally:
        e.close()
    if how is refused_memory:
        with np.load(tmp_path / "trace.npz") as data:
            assert len(data["picks"]) == 20 * 3 + 3


def test_a_trace_that_cannot_be_written_is_said_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    e = load(trace=tmp_path / "missing" / "trace.npz")
    assert len(run(e, request(n=2)).ids) == 2
    e.close()
    assert "the routing trace could not be written" in caplog.text and "missing/trace.npz" in caplog.text


def test_a_fatal_error_ends_everything_and_refuses_more(monkeypatch: pytest.MonkeyPatch) -> None:
    e = load()

    def broken() -> None:
        raise RuntimeError("lost the plot")

    async def scenario() -> Answer:
        task = asyncio.create_task(generate(e, request(n=1000)))
        await asyncio.sleep(0.05)
        monkeypatch.setattr(e._scheduler, "_admit", broken)
        return await task

    answer = asyncio.run(scenario())
    assert answer.finish == Finish("error", error="RuntimeError: lost the plot")
    assert e.stats()["dead"] is True
    with pytest.raises(EngineError, match="lost the plot"):
        run(e, request())
    e.close()


def test_close_ends_streams_and_is_idempotent() -> None:
    e = load()

    async def scenario() -> Answer:
        task = asyncio.create_task(generate(e, request(n=1500)))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(e.close)
        return await task

    answer = asyncio.run(scenario())
    assert answer.finish == Finish("cancelled")
    e.close()
    with pytest.raises(EngineError, match="shutting down"):
        run(e, request())
    with pytest.raises(EngineError, match="shutting down"):
        e._scheduler.add(None)  # a submit that passed its check just before the end


def test_scores_end_with_the_engine() -> None:
    e = load(prefill_chunk=32)

    async def scenario() -> None:
        task = asyncio.create_task(e.score(random_ids(1800, 1), 0))
        await reached(lambda: e.stats()["score_tokens"] > 0)
        await asyncio.to_thread(e.close)
        with pytest.raises(EngineError, match="shutting down"):
            await task

    asyncio.run(scenario())
    assert e.stats()["score_tokens"] < 1800


def test_queued_scores_hold_no_state(engine: CpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    real, alive = engine._model.new_state, []

    def counted() -> Any:
        alive.append(threading.current_thread().name)
        return real()

    monkeypatch.setattr(engine._model, "new_state", counted)

    async def scenario() -> None:
        tasks = [asyncio.create_task(engine.score(random_ids(600, i), 0)) for i in range(6)]
        await reached(lambda: len(alive) > 0)
        for task in tasks[1:]:
            task.cancel()
        assert len(await tasks[0]) == 600

    asyncio.run(scenario())
    assert set(alive) == {"glm53-cpu-engine"} and len(alive) < 6


def test_a_cancelled_score_stops(engine: CpuEngine) -> None:
    before = engine.stats()["score_tokens"]

    async def scenario() -> None:
        task = asyncio.create_task(engine.score(random_ids(1900, 2), 0))
        await reached(lambda: engine.stats()["score_tokens"] > before)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    run(engine, request(n=3))
    assert engine.stats()["score_tokens"] - before < 1900


def test_no_room_for_a_state_ends_only_that_stream(engine: CpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room() -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(engine._model, "new_state", no_room)
    assert run(engine, request(random_ids(9, 99))).finish == Finish("error", error="MemoryError: no room")
    monkeypatch.undo()
    assert len(run(engine, request(n=3)).ids) == 3


def test_load_refuses_a_bad_folder_and_too_little_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="empty directory"):
        CpuEngine.load(tmp_path)
    monkeypatch.setattr("glm53.checkpoint.memory.available_ram", lambda: 1 << 20)
    with pytest.raises(ResourceError, match=r"needs 0\.0 GiB of RAM, 0\.0 GiB are available"):
        load()


def test_a_file_that_changes_while_experts_are_read(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(golden_dir(), tmp_path / "model"))
    with Checkpoint.open(folder) as checkpoint:
        os.utime(folder / "model.safetensors", ns=(1, 1))
        with pytest.raises(CheckpointError, match=r"model\.safetensors: model\..*experts\.\d+\..*_proj\.") as caught:
            ExpertStore(checkpoint, lambda stage, fraction: None)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- loading, and many at once


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(golden_dir(), tmp_path / "model"))
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["added_tokens"][-1]["id"] = 150_000
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: ids up to 150000, the model has 2176 rows"):
        CpuEngine.load(folder)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 3 GiB"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nto allocate 3 bytes"),
        _core.ArenaError("arena 'experts of layer 3': mapping 2.1 MB failed: Cannot allocate memory"),
    ],
)
def test_memory_refused_while_loading_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refused(*_: Any) -> None:
        raise error

    monkeypatch.setattr(ExpertStore, "_load", refused)
    with pytest.raises(ResourceError, match=r"out of memory while loading .*lloca") as caught:
        load()
    assert "\n" not in str(caught.value)


def test_a_storm_of_requests_scores_and_cancels_leaves_nothing_behind() -> None:
    e = load(context=256, prefill_chunk=32, prefix_cache_bytes=8 << 20)
    lengths = [1, 2, 31, 32, 33, 64, 200, 255]

    async def one(i: int) -> Finish | None:
        stream, finish = e.submit(request(random_ids(lengths[i % 8], i), [1, 2, 12, 10_000][i // 8 % 4])), None
        if i % 3 == 0:
            asyncio.get_running_loop().call_later(0.02 * i, stream.cancel)
        async for delta in stream:
            if i % 5 == 0 and delta.tokens:
                stream.cancel()
            finish = delta.finish
        return finish

    async def score(i: int) -> None:
        task = asyncio.create_task(e.score(random_ids(100, i), 1))
        await asyncio.sleep(0.1 * i)
        if i % 2:
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or len(task.result()) == 100

    try:
        ends = gather(*(one(i) for i in range(40)), *(score(i) for i in range(4)))[:40]
        assert {f.reason for f in ends} == {"length", "cancelled"}
        stats = e.stats()
        assert stats["running"] == stats["waiting"] == stats["failed"] == 0
        assert stats["routed_picks_served"] == stats["routed_picks_expected"] == stats["cpu_moe"]["picks"]
        assert stats["prefix_cache"]["bytes"] <= 8 << 20
    finally:
        e.close()


def test_two_engines_in_one_process_answer_alike_and_end_apart(engine: CpuEngine) -> None:
    other = load()
    try:
        one, two = gather(generate(engine, request(n=10)), generate(other, request(n=10)))
        assert one.ids == two.ids
    finally:
        other.close()
    assert run(engine, request(n=10)).ids == one.ids
