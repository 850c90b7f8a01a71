"""Fast mode around exllamav3's forward passes: what is hooked and when, which steps are split, what is queued where."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exllama_helpers import use_fakes
from tiny_checkpoint import TINY

from glm53 import hooks
from glm53.engine.exllama.passes import QUEUED_LAYERS, Passes, PassSettings
from glm53.errors import EngineError

HIDDEN = 256


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    return use_fakes(monkeypatch)


def make_model() -> Any:
    exllamav3 = hooks.import_exllamav3()
    model = exllamav3.Model.from_config(exllamav3.Config.from_directory(str(TINY)))
    model.load()
    return model


def test_the_layers_sum_is_completed_before_it_is_cast_and_undo_takes_it_all_back(cuda: Any) -> None:
    model, seen = make_model(), []

    @contextmanager
    def bracket(tokens: int, decode: bool, layers: int) -> Any:
        yield

    def combine(layer: int, out: torch.Tensor) -> None:
        seen.append((layer, out.dtype, tuple(out.shape)))
        out += 1000.0

    patch = hooks.Patch(model, model.moe, lambda *a: None, bracket, combine)
    x = torch.ones(1, 2, HIDDEN, dtype=torch.half)
    plain = model.moe[0].forward(x, {}).clone()
    patch.install()
    assert torch.equal(model.moe[0].forward(x, {}), plain + 1000.0)
    cast = model.moe[0].forward(x, {}, torch.half)
    assert cast.dtype == torch.half
    assert torch.equal(cast, (plain + 1000.0).half())
    model.forward(torch.tensor([[3]]), {})
    assert seen[0] == (0, torch.float32, (1, 2, HIDDEN))
    assert [s[0] for s in seen[2:]] == list(range(len(model.moe)))
    patch.undo()
    assert not any({"forward", "routing_fn"} & set(vars(m)) - {"routing_fn"} for m in model.moe)
    assert torch.equal(model.moe[0].forward(x, {}), plain)


def test_only_the_generators_steps_are_decode(cuda: Any) -> None:
    model, brackets = make_model(), []

    @contextmanager
    def bracket(tokens: int, decode: bool, layers: int) -> Any:
        brackets.append((tokens, decode))
        yield

    hooks.Patch(model, model.moe, lambda *a: None, bracket).install()
    one = torch.tensor([[5]])
    model.forward(one, {"cache": object()})
    model.forward(one, {})
    model.forward(one)
    model.forward(one, {"cache": object(), "last_tokens_only": 1})
    model.prefill(one, {"cache": object()})
    assert brackets == [(1, True), (1, False), (1, False), (1, False), (1, False)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routed_post_norm": object()}, "routed_post_norm is not one that a CPU lane can stand beside"),
        ({"tp_reduce": True}, "the residual path"),
        ({"act_limit": 0.0}, "compute silu clamped at 0, those of the CPU lane silu clamped at 10"),
        ({"activation_fn": "gelu"}, "compute gelu"),
    ],
)
def test_layers_whose_sum_cannot_be_completed_are_refused(cuda: Any, change: dict[str, Any], message: str) -> None:
    model = make_model()
    hooks.verify_split(model.moe, 10.0)
    for name, value in change.items():
        setattr(model.moe[1], name, value)
    with pytest.raises(EngineError, match=message):
        hooks.verify_split(model.moe, 10.0)


class Recorder:
    """A runtime that writes down what it is called with."""

    slot_bytes, has_staging = 1000, False

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


def make_passes(runtime: Any) -> Passes:
    return Passes(runtime, PassSettings(1000, 0, 0), experts=16, top_k=4, hidden=HIDDEN)


def routed(rows: int, dtype: torch.dtype = torch.half) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights = torch.full((rows, 4), 0.25, dtype=torch.half)
    return torch.arange(4).repeat(rows, 1), weights, torch.ones(rows, HIDDEN, dtype=dtype)


def test_a_decode_step_says_when_another_may_be_queued(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    event = SimpleNamespace(record=lambda: done.append("recorded"), synchronize=lambda: done.append("awaited"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    runtime = Recorder()
    passes = make_passes(runtime)

    def layers(route: Any, decode: bool, count: int = 42) -> list[int]:
        at = []
        with passes.bracket(2, decode, count):
            for layer in range(count):
                done.clear()
                route(layer, 2, routed(2), {})
                at += [layer] * len(done)
        return at

    assert layers(passes.route, True) == [42 - QUEUED_LAYERS]
    assert layers(passes.route, True, 6) == [0]
    assert layers(passes.route, False) == []  # the end of a prompt
    passes.lane = SimpleNamespace(wake=lambda: None)  # type: ignore[assignment]
    assert layers(passes.route_split, True) == [42 - QUEUED_LAYERS]
    assert layers(passes.route_split, False) == []
    passes.route(0, 2, routed(2), {})  # outside of every pass
    passes.await_room()
    assert done == ["awaited"]


def test_a_pass_asks_once_which_stream_it_is_queued_on(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes longer to tell than a layer's whole hook does."""
    runtime = Recorder()
    passes = make_passes(runtime)
    passes.lane = SimpleNamespace(wake=lambda: None)  # type: ignore[assignment]
    asked: list[int] = []

    def current_stream(*args: Any) -> Any:
        asked.append(48)
        return SimpleNamespace(cuda_stream=48)

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    with passes.bracket(4, True):
        for layer in range(5):
            passes.route_split(layer, 4, routed(4), {})
            passes.combine(layer, torch.zeros(1, 4, HIDDEN))
    assert asked == [48]
    assert {call[-1] for call in runtime.calls} == {48}
    with passes.bracket(4):
        passes.route(0, 4, routed(4), {})
    assert asked == [48, 48]


def test_decode_steps_are_split_and_completed_and_nothing_else_is(cuda: Any) -> None:
    runtime = Recorder()
    passes = make_passes(runtime)
    woken: list[str] = []
    passes.lane = SimpleNamespace(wake=lambda: woken.append("now"))  # type: ignore[assignment]

    def layer(rows: int) -> list[str]:
        runtime.calls.clear()
        passes.route_split(2, rows, routed(rows), {})
        passes.combine(2, torch.zeros(1, rows, HIDDEN))
        return [call[0] for call in runtime.calls]

    with passes.bracket(4, True):
        assert layer(4) == ["decode_split", "add_partial"]
        _, at, picks, n, rows, x, weights, stream = runtime.calls[0]
        assert (at, n, rows, stream) == (2, 16, 4, passes.stream)
        assert len({picks, x, weights}) == 3
        assert runtime.calls[1][1] == 4
        assert runtime.calls[1][3:] == (False, passes.stream)
    assert woken == ["now"]
    passes.begins()
    assert woken == ["now", "now"]
    with passes.bracket(4, False):  # a short prompt
        assert layer(4) == ["decode"]
    with passes.bracket(20, True):
        assert layer(20) == ["prompt"]
    assert layer(2) == ["decode"]  # outside of every pass
    passes.lane = None
    with passes.bracket(4, True):
        assert layer(4) == ["decode"]
    passes.begins()
    assert woken == ["now", "now"]


def test_a_pass_that_fails_half_way_leaves_nothing_to_the_next(cuda: Any) -> None:
    runtime = Recorder()
    passes = make_passes(runtime)
    passes.lane = SimpleNamespace(wake=lambda: None)  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError), passes.bracket(1, True):
        passes.route_split(0, 1, routed(1), {})
        raise ZeroDivisionError
    runtime.calls.clear()
    passes.combine(0, torch.zeros(1, HIDDEN))
    assert runtime.calls == []


def test_tensors_that_native_code_cannot_read_are_refused(cuda: Any) -> None:
    passes = make_passes(Recorder())
    passes.lane = SimpleNamespace(wake=lambda: None)  # type: ignore[assignment]
    with passes.bracket(2, True):
        with pytest.raises(EngineError, match=r"x torch.float32 \(2, 256\).*needs contiguous float16"):
            passes.route_split(0, 2, routed(2, torch.float32), {})
        picks, weights, x = routed(2)
        with pytest.raises(EngineError, match="needs contiguous float16"):
            passes.route_split(0, 2, (picks, weights.t().contiguous().t(), x), {})
        passes.route_split(0, 2, (picks, weights, x), {})
        with pytest.raises(EngineError, match=r"output is torch.float16 \(2, 256\), not 2 contiguous float32 rows"):
            passes.combine(0, x)
