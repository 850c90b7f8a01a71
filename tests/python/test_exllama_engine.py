"""The GPU engine's own logic, end to end on the host device: equal to the unpatched model whatever the cache does."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exllama_helpers import GREEDY, PROMPTS, answers, collect, make_settings, stock_answer, use_fakes
from tiny_checkpoint import TINY

from glm53 import hooks
from glm53.engine.exllama import ExllamaEngine, tools, warm
from glm53.engine.exllama.loader import LoadOptions, load
from glm53.engine.protocol import GenerationRequest
from glm53.errors import DeviceError, EngineError, PromptTooLong, RequestError


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    return use_fakes(monkeypatch)


@pytest.fixture
def engines(cuda: Any, tmp_path: Path) -> Iterator[Any]:
    made: list[ExllamaEngine] = []

    def make(options: LoadOptions | None = None, **changes: Any) -> ExllamaEngine:
        made.append(ExllamaEngine.load(make_settings(tmp_path, **changes), options=options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("stage_from", [None, 9, 100_000], ids=["default", "always staged", "never staged"])
def test_answers_equal_the_unpatched_model_with_few_slots(engines: Any, stage_from: int | None) -> None:
    engine = engines(LoadOptions(max_slots=5, stage_from=stage_from))
    for prompt, (ids, finish) in zip(PROMPTS, asyncio.run(answers(engine, PROMPTS, 12)), strict=True):
        assert ids == stock_answer(prompt, 12)
        assert finish.reason == "length"
    assert engine.verify() == []


def test_answers_are_the_same_without_the_optional_parts_of_the_loader(engines: Any) -> None:
    engine = engines(LoadOptions(max_slots=5, stage_from=9, single_experts=False, bulk_scales=False))
    for prompt, (ids, _) in zip(PROMPTS, asyncio.run(answers(engine, PROMPTS, 12)), strict=True):
        assert ids == stock_answer(prompt, 12)
    assert "single_experts" not in engine._loaded.passes.counts


def test_a_prompt_brings_only_the_layers_it_runs_and_its_last_two_stay(engines: Any) -> None:
    engine = engines(LoadOptions(max_slots=5, stage_from=9))
    ((ids, _),) = asyncio.run(answers(engine, PROMPTS[2:], 1))
    assert ids == stock_answer(PROMPTS[2], 1)
    loaded = engine._loaded
    layers, experts = len(loaded.store.layers), loaded.store.experts
    assert loaded.runtime.stats(0)["staged_experts"] == (layers - 1) * experts
    slots = loaded.runtime.residency(0).reshape(layers, experts)
    modules = hooks.moe_modules(loaded.exllamav3, loaded.model)
    for layer, module in enumerate(modules):
        home = loaded.store.arena(loaded.store.layers[layer])
        table = module.multi_gate.ptrs_trellis.tolist()
        staged = sum(
            s < 0 and not home.address <= at < home.address + home.bytes
            for s, at in zip(slots[layer], table, strict=True)
        )
        assert staged == (sum(slots[layer] < 0) if layer in (layers - 3, layers - 2) else 0)


def test_experts_that_run_alone_are_read_where_they_are_in_vram_and_lead_home_again(engines: Any) -> None:
    engine = engines(LoadOptions(max_slots=5, stage_from=9))
    ((ids, _),) = asyncio.run(answers(engine, PROMPTS[2:], 1))
    assert ids == stock_answer(PROMPTS[2], 1)
    loaded = engine._loaded
    counts = loaded.passes.counts
    assert counts["single_experts_in_vram"] == counts["single_experts"] > 0  # every layer was staged
    for layer, module in zip(loaded.store.layers, hooks.moe_modules(loaded.exllamav3, loaded.model), strict=True):
        arena, layout = loaded.store.arena(layer), loaded.store.layout
        at_home = range(arena.address, arena.address + arena.bytes)
        assert all(address not in at_home for _, address in module.bc.read)
        for linears, offset in zip((module.gates, module.ups, module.downs), layout.offsets, strict=True):
            found = [linear.inner.trellis.data_ptr() for linear in linears]
            assert found == [arena.address + e * layout.stride + offset for e in range(loaded.store.experts)]


def test_experts_that_run_alone_are_read_at_home_where_nothing_is_staged(engines: Any) -> None:
    engine = engines(LoadOptions(max_slots=5, stage_from=100_000))
    ((ids, _),) = asyncio.run(answers(engine, PROMPTS[2:], 1))
    assert ids == stock_answer(PROMPTS[2], 1)
    counts = engine._loaded.passes.counts
    assert counts["single_experts"] > counts["single_experts_in_vram"] == 0


def test_the_models_objects_are_left_out_of_collections_until_it_is_closed(cuda: Any, tmp_path: Path) -> None:
    gc.unfreeze()
    made = load(make_settings(tmp_path), lambda stage, fraction: None, LoadOptions(max_slots=8))
    try:
        assert gc.isenabled()
        assert gc.get_freeze_count() > 1000
        assert not any(x is made.model.moe[0] for x in gc.get_objects())
    finally:
        made.close()
    assert gc.get_freeze_count() == 0


def test_a_cancelled_prompt_is_read_no_further_than_its_chunk(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines(LoadOptions(max_slots=8))
    engine._generator.chunk = 16
    prefill, read = engine._generator.model.prefill, []

    async def run() -> Any:
        stream = engine.submit(GenerationRequest("c", PROMPTS[2], 5, sampling=GREEDY))

        def cancelling(ids: torch.Tensor, params: Any = None) -> Any:
            read.append(ids.numel())
            if len(read) == 3:
                stream.cancel()
            return prefill(ids, params)

        monkeypatch.setattr(engine._generator.model, "prefill", cancelling)
        return await asyncio.wait_for(collect(stream), 20)

    ids, finish = asyncio.run(run())
    assert (ids, finish.reason) == ([], "cancelled")
    assert read == [16, 16, 16]


def test_streams_cancelled_at_any_moment_all_get_their_finish(engines: Any) -> None:
    engine = engines(LoadOptions(max_slots=8))

    async def run() -> list[Any]:
        streams = [engine.submit(GenerationRequest(str(i), PROMPTS[i % 2], 40, sampling=GREEDY)) for i in range(24)]
        readers = [asyncio.create_task(collect(s)) for s in streams]
        for i, stream in enumerate(streams):
            if i % 5:
                threading.Timer(0.004 * i, stream.cancel).start()
        return await asyncio.wait_for(asyncio.gather(*readers), 60)

    reasons = [finish.reason for _, finish in asyncio.run(run())]
    assert set(reasons) <= {"cancelled", "length"}
    assert [reasons[i] for i in range(0, 24, 5)] == ["length"] * 5
    assert engine.stats()["running"] == 0


def test_what_is_submitted_as_the_worker_ends_is_refused_not_forgotten(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(LoadOptions(max_slots=8))

    def end_first(ids: Any) -> None:  # the worker ends between the check and the hand-over
        engine._closing = True
        engine._wake.set()
        engine._thread.join()

    async def run() -> None:
        monkeypatch.setattr(engine, "_check", end_first)
        with pytest.raises(EngineError, match="the engine has stopped"):
            engine.submit(GenerationRequest("late", [1], 1))
        with pytest.raises(EngineError, match="the engine has stopped"):
            await asyncio.wait_for(engine.score([1, 2], 0), 5)

    asyncio.run(run())


def test_stats_have_what_the_status_page_shows(engines: Any) -> None:
    from glm53.server.metrics import flat_numbers

    engine = engines(LoadOptions(max_slots=8))
    asyncio.run(answers(engine, PROMPTS, 6))

    def settled(stats: dict[str, Any]) -> bool:  # a snapshot from the middle of the answers still has slots lent
        return bool(stats["expert_cache"].get("admissions")) and not stats["memory"].get("lent_slot_bytes")

    deadline = time.monotonic() + 20
    while not settled(stats := engine.stats()) and time.monotonic() < deadline:
        engine._snapshot_s = 0.0
        engine._wake.set()
        time.sleep(0.02)
    cache, lanes_, memory = stats["expert_cache"], stats["lanes"], stats["memory"]
    assert cache["hits"] + cache["misses"] > 0
    assert sum(lanes_.values()) == cache["hits"] + cache["misses"] + cache["prompt_distinct"]
    assert lanes_["pcie_admitted"] == cache["admissions"] > 0
    assert memory["slot_bytes"] == 8 * cache["slot_bytes"]
    assert memory["lent_slot_bytes"] == 0
    assert memory["pinned_expert_bytes"] > memory["slot_bytes"]
    load_times = stats["load"]
    assert {"weights", "waiting_for_experts", "slots", "exllamav3"} <= set(load_times)
    parts = sum(v for k, v in load_times.items() if k not in ("total", "experts", "weights_waiting_for_arenas"))
    assert parts == pytest.approx(load_times["total"], abs=0.05)
    assert load_times["experts"]["read_s"] > 0
    assert load_times["experts"]["arenas_wall_s"] <= load_times["experts"]["wall_s"] <= load_times["total"]
    assert "load_experts_pin_s" in dict(flat_numbers(stats))


def test_the_verify_command_moves_experts_and_finds_a_damaged_one(
    cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, args = make_settings(tmp_path), argparse.Namespace(steps=80)
    monkeypatch.setattr(tools, "load", lambda *_: load(settings, lambda s, f: None, LoadOptions(max_slots=8)))
    assert tools.verify(settings, args) == 0
    good = capsys.readouterr()
    assert re.search(
        r"verified: all 8 cached experts equal .* \(\d+ copied in, [1-9]\d* replaced\)", good.out + good.err
    )

    churn = tools.churn

    def damaging(loaded: Any, *rest: Any) -> None:
        churn(loaded, *rest)
        arenas = [loaded.store.arena(layer) for layer in loaded.store.layers]
        homes = [(a.address, a.address + a.bytes) for a in arenas]
        entries = [int(a) for m in loaded.model.moe for a in m.multi_up.ptrs_trellis]
        inside = [a for a in entries if not any(first <= a < last for first, last in homes)]
        ctypes.memset(inside[0] + 5, ctypes.string_at(inside[0] + 5, 1)[0] ^ 1, 1)

    monkeypatch.setattr(tools, "churn", damaging)
    assert tools.verify(settings, args) == 1
    bad = capsys.readouterr()
    assert re.search(r"DAMAGED: 1 parts .* first slot \d, MoE layer \d, expert \d+, up ", bad.out + bad.err)


def test_the_smaller_of_both_limits_is_how_many_streams_run(engines: Any) -> None:
    assert engines(max_batch_size=2).info.max_streams == 2
    assert engines(autosplit_max_batch_size=3).info.max_streams == 3


def test_stop_ids_logprobs_and_cancel(engines: Any) -> None:
    engine = engines(LoadOptions(max_slots=8))
    expected = stock_answer([3], 6)

    async def run() -> None:
        stop = frozenset({expected[3]})
        ids, finish = (await answers(engine, [[3]], 6, stop_ids=stop, top_logprobs=2))[0]
        assert ids == expected[: expected.index(expected[3])]
        assert (finish.reason, finish.stop_id) == ("stop", expected[3])
        request = GenerationRequest("l", [3], 1, sampling=GREEDY, top_logprobs=3)
        async for delta in engine.submit(request):
            for token in delta.tokens:
                assert token.top[0][1] == token.logprob
                assert len(token.top) == 3
        stream = engine.submit(GenerationRequest("c", [3], 4000, sampling=GREEDY))
        async for delta in stream:
            stream.cancel()
            if delta.finish:
                assert delta.finish.reason == "cancelled"

    asyncio.run(run())
    assert engine.stats()["running"] == 0


def test_cached_tokens_are_known_from_the_start_also_to_a_stream_that_is_cancelled(engines: Any) -> None:
    engine = engines(LoadOptions(max_slots=8))
    prompt = [5 + i % 200 for i in range(600)]

    async def run() -> list[int]:
        cached = []
        for ends_early in (False, False, True):
            stream = engine.submit(GenerationRequest("c", prompt, 4, sampling=GREEDY))
            async for _ in stream:
                if ends_early:
                    stream.cancel()
            cached.append(stream.usage.cached_tokens)
        return cached

    assert asyncio.run(run()) == [0, 512, 512]


def test_log_probabilities_count_the_paddings_logits_too(engines: Any) -> None:
    """exllamav3 masks the padding in place before it hands the logits out; scoring does not, and both must agree."""
    engine = engines(LoadOptions(max_slots=8))

    async def run() -> None:
        request = GenerationRequest("l", [3, 4], 1, sampling=GREEDY, top_logprobs=0)
        [token] = [t async for d in engine.submit(request) for t in d.tokens]
        [_, _, score] = await engine.score([3, 4, token.id], 0)
        assert token.logprob == pytest.approx(score.logprob, abs=2e-5)

    asyncio.run(run())


def test_score_is_the_log_softmax_of_the_model(engines: Any) -> None:
    engine = engines(LoadOptions(max_slots=8))
    ids = list(range(10, 30))
    scores = asyncio.run(engine.score(ids, 2))
    assert [s.id for s in scores] == ids
    assert scores[0].logprob is None
    import exllamav3

    model = exllamav3.Model.from_config(exllamav3.Config.from_directory(str(TINY)))
    model.load()
    wanted = model.forward(torch.tensor([ids]))[0].float().log_softmax(-1)
    for at in range(1, len(ids)):
        assert scores[at].logprob == pytest.approx(float(wanted[at - 1, ids[at]]), abs=1e-4)


def test_what_was_learned_survives_a_restart(engines: Any, tmp_path: Path) -> None:
    first = engines(LoadOptions(max_slots=10))
    asyncio.run(answers(first, [[3]], 40))
    first.close()
    second = engines(LoadOptions(max_slots=10))
    assert second._loaded.runtime.stats(0)["refills"] == 10
    assert second.verify() == []


def test_bad_requests_are_refused_and_a_closed_engine_says_so(engines: Any) -> None:
    engine = engines(LoadOptions(max_slots=8), cache_tokens=256)

    async def run() -> None:
        with pytest.raises(PromptTooLong):
            engine.submit(GenerationRequest("a", [1] * 256, 1))
        with pytest.raises(RequestError, match="empty"):
            engine.submit(GenerationRequest("b", [], 1))
        with pytest.raises(RequestError, match="outside the vocabulary"):
            engine.submit(GenerationRequest("c", [10**6], 1))
        engine.close()
        with pytest.raises(EngineError, match="shutting down"):
            engine.submit(GenerationRequest("d", [1], 1))

    asyncio.run(run())


def test_an_error_of_the_worker_ends_all_streams_with_one_line(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines(LoadOptions(max_slots=8))

    def broken(*_: Any) -> Any:
        raise RuntimeError("CUDA error:\n an illegal access")

    async def run() -> None:
        monkeypatch.setattr(engine._generator, "iterate", broken)
        _, finish = (await answers(engine, [[3]], 4))[0]
        assert finish.reason == "error"
        assert finish.error == "RuntimeError: CUDA error: an illegal access"
        with pytest.raises(EngineError, match="illegal access"):
            engine.submit(GenerationRequest("d", [1], 1))

    asyncio.run(run())


def test_without_exllamav3_the_experts_that_were_being_read_are_let_go(
    engines: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "exllamav3", None)
    with pytest.raises(DeviceError, match=r"pip install 'glm53\[cuda\]'"):
        engines()
    gc.collect()
    assert cuda.device.pinned_bytes == 0


def test_a_load_that_fails_behind_its_hooks_undoes_them(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is not on the model but on what all models of the process share."""
    import exllamav3

    buffers = hooks.shared_buffers(exllamav3)
    with monkeypatch.context() as failing:
        failing.setattr(warm, "load", lambda *a: pytest.fail(f"hooked: {'get_bucketed' in vars(buffers)}"))
        with pytest.raises(pytest.fail.Exception, match="hooked: True"):
            engines()
    assert "get_bucketed" not in vars(buffers)


def test_a_failed_load_leaves_nothing_patched(engines: Any) -> None:
    import exllamav3

    exllamav3.Model.fail_load = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    try:
        with pytest.raises(DeviceError, match="too little VRAM for the model"):
            engines()
    finally:
        exllamav3.Model.fail_load = None
    engine = engines(LoadOptions(max_slots=8))
    assert asyncio.run(answers(engine, [[3]], 3))[0][0] == stock_answer([3], 3)
