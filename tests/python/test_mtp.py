"""Drafting with the MTP layer, on the stand-in for exllamav3: same tokens, drafts counted, off where it is slower."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_engine_helpers import checkpoint_dir
from exllama_helpers import make_settings, use_fakes
from tiny_checkpoint import TINY

from glm53.cli.serve import check_mtp
from glm53.engine.exllama import ExllamaEngine, mtp
from glm53.engine.exllama.draft_policy import DraftPolicy, PolicySettings
from glm53.engine.exllama.loader import LoadOptions
from glm53.engine.protocol import GenerationRequest, SamplingParams
from glm53.errors import CheckpointError, ConfigError, DeviceError

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = ([7, 8, 9, 10, 11, 12, 13], list(range(30, 330)), [5, 6], [400, 2, 9, 77])
QUICK = PolicySettings(window=4, skip=1, pairs=1, again=12, again_most=24)
OPTIONS = LoadOptions(max_slots=40)


class Clock:
    """Time that passes only where a test says so: `per_step(rows a stream)` seconds for each step."""

    def __init__(self) -> None:
        self.now, self.per_step = 0.0, lambda rows: 1.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Any:
    use_fakes(monkeypatch)
    import exllamav3

    return exllamav3


@pytest.fixture(scope="module")
def folder() -> Path:
    """A checkpoint with an MTP layer, and the tokenizer files an engine needs."""
    return checkpoint_dir(esb=1.0, mtp=1)


@pytest.fixture
def engines(fakes: Any, folder: Path, tmp_path: Path) -> Iterator[Callable[..., ExllamaEngine]]:
    made: list[ExllamaEngine] = []

    def make(**changes: Any) -> ExllamaEngine:
        settings = make_settings(tmp_path, model_dir=folder, **changes)
        made.append(ExllamaEngine.load(settings, options=OPTIONS))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


async def _collect(stream: Any) -> list[int]:
    return [token.id async for delta in stream for token in delta.tokens]


def ask(engine: ExllamaEngine, prompts: Any, steps: int, **extra: Any) -> list[list[int]]:
    async def all_of_them() -> list[list[int]]:
        requests = [GenerationRequest(str(i), p, steps, sampling=GREEDY, **extra) for i, p in enumerate(prompts)]
        return list(await asyncio.gather(*(_collect(engine.submit(r)) for r in requests)))

    return asyncio.run(all_of_them())


def drafting(engine: ExllamaEngine, policy: DraftPolicy, clock: Any) -> mtp.Drafting:
    """The engine's drafting with a policy and a clock of the test; only before its first request."""
    found = engine._drafting
    assert found is not None
    found._policy, found._clock = policy, clock
    return found


class After(DraftPolicy):
    """Drafts in every step but the first `plain` ones."""

    def __init__(self, plain: int = 0) -> None:
        super().__init__(QUICK)
        self._plain = plain

    def want(self, streams: int) -> bool:
        self._plain -= 1
        return self._plain < 0

    def observe(self, streams: int, drafted: bool, tokens: int, seconds: float) -> None:
        assert streams <= tokens
        assert drafted or streams == tokens


def idle(engine: ExllamaEngine) -> ExllamaEngine:
    """The engine, once its worker has let go of the last stream."""
    end = time.monotonic() + 20
    while engine.stats()["running"] or engine._streams:
        assert time.monotonic() < end
        time.sleep(0.01)
    return engine


@pytest.mark.parametrize("length", [1, 3, 7])
@pytest.mark.parametrize("every_wrong", [0, 1, 3], ids=["all drafts right", "all wrong", "every third wrong"])
def test_tokens_are_those_without_drafts(
    engines: Callable[..., ExllamaEngine], monkeypatch: pytest.MonkeyPatch, length: int, every_wrong: int
) -> None:
    from exllamav3.mtp import MtpModel

    monkeypatch.setattr(MtpModel, "every_wrong", every_wrong)
    plain = ask(engines(), PROMPTS, 30)
    engine = engines(mtp=length)
    drafting(engine, After(), Clock())
    assert ask(engine, PROMPTS, 30) == plain
    stats = idle(engine).stats()["mtp"]
    assert [ask(engine, [p], 30)[0] for p in PROMPTS] == plain
    assert stats["drafted_tokens"] > 0
    if every_wrong == 0:
        cut = len(PROMPTS) * length  # the limit may cut a stream's last draft
        assert stats["accepted_tokens"] >= stats["drafted_tokens"] - cut
    if every_wrong == 1:
        assert stats["accepted_tokens"] == 0
    assert idle(engine).verify() == []


def test_a_verification_shares_its_misses_with_the_cpu_lane(engines: Callable[..., ExllamaEngine]) -> None:
    """Fast mode: the rows of a verification are a decode step's rows (whose sums test_exllama_fast.py compares)."""
    cheap = {"mode": "fast", "ct_threads": 2, "ct_a": 0.001, "ct_b": 0.001, "ct_t": 10.0, "ct_g": 0.0}
    engine = engines(mtp=1, **cheap)
    drafting(engine, After(), Clock())
    answers = ask(engine, PROMPTS[:2], 24)
    assert [len(a) for a in answers] == [24, 24]
    loaded = idle(engine)._loaded
    stats = loaded.runtime.stats(loaded.passes.stream)
    assert stats["cpu_picks"] > 0
    assert engine.stats()["mtp"]["accepted_tokens"] > 0
    assert loaded.passes.fault() is None


def test_a_step_never_has_more_rows_than_the_decode_kernels(engines: Callable[..., ExllamaEngine]) -> None:
    engine = engines(mtp=3)
    drafting(engine, After(), Clock())
    rows: list[int] = []
    runtime_decode = engine._loaded.passes.route

    def route(layer: int, count: int, selected: torch.Tensor, params: dict[str, Any]) -> None:
        if params.get("cache") is not None and count <= 8:
            rows.append(count)
        runtime_decode(layer, count, selected, params)

    engine._loaded.patch.reroute(route)
    ask(engine, PROMPTS[:3], 24)  # 3 streams x (3 + 1) rows would be 12: one token is drafted for each
    ask(engine, PROMPTS[:1], 24)
    assert 6 in rows
    assert 4 in rows
    assert engine._loaded.passes.counts["decode_passes"] > 0
    assert engine.stats()["mtp"]["drafted_tokens"] > 0


def test_positions_decoded_without_drafts_are_filled_in(engines: Callable[..., ExllamaEngine]) -> None:
    """The stand-in drafts right only if its MTP layer has read every position with the right state."""
    engine = engines(mtp=1)
    drafting(engine, After(9), Clock())
    ask(engine, PROMPTS[:1], 40)
    stats = idle(engine).stats()["mtp"]
    assert stats["plain_steps"] == 9
    assert stats["drafted_tokens"] > 10
    assert stats["accepted_tokens"] >= stats["drafted_tokens"] - 1  # the limit may cut the last one


def timed(engine: ExllamaEngine, plain_s: float, drafting_s: float) -> Clock:
    """A clock on which a step takes that long without and with drafts."""
    clock, found = Clock(), engine._drafting
    assert found is not None
    drafting(engine, DraftPolicy(QUICK), clock)
    original = found._gen

    def gen(results: list[Any], draft_tokens: Any = None) -> None:
        clock.now += plain_s if draft_tokens is None else drafting_s
        original(results, draft_tokens)

    engine._generator.iterate_gen = gen
    return clock


def test_it_stays_on_where_it_is_faster(engines: Callable[..., ExllamaEngine]) -> None:
    engine = engines(mtp=1)
    timed(engine, 1.0, 1.2)
    ask(engine, PROMPTS[:1], 60)
    stats = engine.stats()["mtp"]
    assert stats["streams"]["1"]["state"] in {"on", "measuring"}
    assert stats["streams"]["1"]["speedup"] == pytest.approx(2 / 1.2, rel=0.05)
    assert stats["attached"]


def test_where_it_is_slower_it_goes_away_and_is_tried_again_later(engines: Callable[..., ExllamaEngine]) -> None:
    engine = engines(mtp=1)
    clock = timed(engine, 1.0, 5.0)
    plain = ask(engine, PROMPTS[:1], 20)
    assert engine.stats()["mtp"]["streams"]["1"] == {"state": "off", "speedup": pytest.approx(0.4, rel=0.05)}
    assert engine.stats()["mtp"]["attached"]  # the stream had it when it began
    drafted = engine.stats()["mtp"]["drafted_tokens"]
    assert ask(engine, PROMPTS[:1], 20) == plain
    stats = engine.stats()["mtp"]
    assert not stats["attached"]
    assert stats["drafted_tokens"] == drafted
    clock.now += mtp.RETRY_S
    assert ask(engine, PROMPTS[:1], 20) == plain
    assert engine.stats()["mtp"]["attached"]
    assert engine.stats()["mtp"]["drafted_tokens"] > drafted


def test_the_mtp_layers_experts_are_read_where_they_are_pinned(
    engines: Callable[..., ExllamaEngine], folder: Path
) -> None:
    from safetensors.torch import load_file

    engine = engines(mtp=1)
    draft = engine._loaded.draft
    assert draft is not None
    module = draft.model.moe[0]
    tensors = load_file(folder / "model.safetensors")
    (layer,) = draft.store.layers
    arena = draft.store.arena(layer)
    for expert in (0, 5):
        for part in ("gate", "up", "down"):
            address = int(getattr(module, f"multi_{part}").ptrs_trellis[expert])
            assert arena.address <= address < arena.address + arena.bytes
            key = f"model.language_model.layers.{layer}.mlp.experts.{expert}.{part}_proj.trellis"
            kept = next(t for t in module.kept if t.data_ptr() == address)
            assert torch.equal(kept, tensors[key])


def test_drafts_leave_room_at_the_end_of_the_context(engines: Callable[..., ExllamaEngine]) -> None:
    assert engines().info.context - engines(mtp=3).info.context == 3


def test_without_the_setting_nothing_of_it_is_there(engines: Callable[..., ExllamaEngine]) -> None:
    engine = engines()
    assert "mtp" not in engine.stats()
    assert engine._generator.draft_model is None
    assert engine._loaded.cache.max_history == 0


def test_a_checkpoint_without_the_layer_is_refused_in_one_line(fakes: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no MTP layer .*leave --mtp out") as caught:
        ExllamaEngine.load(make_settings(tmp_path, model_dir=TINY, mtp=1), options=OPTIONS)
    assert "\n" not in str(caught.value)


def test_another_generator_is_refused(
    fakes: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(fakes.Generator, "iterate_gen", lambda self, results: None)
    with pytest.raises(DeviceError, match=r"Generator\.iterate_gen is not the one --mtp is made for"):
        ExllamaEngine.load(make_settings(tmp_path, model_dir=folder, mtp=1), options=OPTIONS)


def test_modes_and_devices_that_cannot_draft_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exact mode gives the bits of stock"):
        check_mtp(make_settings(tmp_path, mode="exact", mtp=1), "cuda")
    with pytest.raises(ConfigError, match="the CPU engine does not draft"):
        check_mtp(make_settings(tmp_path, mode="fast", mtp=1), "cpu")
    check_mtp(make_settings(tmp_path, mode="fast", mtp=1), "cuda")
    check_mtp(make_settings(tmp_path, mode="exact", mtp=0), "cpu")
