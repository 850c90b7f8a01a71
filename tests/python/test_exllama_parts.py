"""Pieces of the GPU engine: arenas, scales, single experts, budgets, sampling, warm start file, Triton pins."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from exllama_helpers import use_fakes
from tiny_checkpoint import TINY

from glm53 import _core, hooks
from glm53.checkpoint import Checkpoint
from glm53.engine.exllama import pins, warm
from glm53.engine.exllama.expert_tensors import ExpertTensors
from glm53.engine.exllama.jobs import ROUND_TOKENS, score_rows, slices, token_budget
from glm53.engine.exllama.loader import quiet_gc
from glm53.engine.exllama.passes import activation_bytes, stage_threshold
from glm53.engine.exllama.sampling import make_filter, make_sampler, penalise
from glm53.engine.exllama.scales import ExpertScales
from glm53.engine.exllama.single_experts import SingleExperts
from glm53.engine.protocol import SamplingParams
from glm53.errors import CheckpointError, ConfigError, DeviceError
from glm53.runtime import PARTS, PinnedExperts


@pytest.fixture
def exllamav3(monkeypatch: pytest.MonkeyPatch) -> Any:
    use_fakes(monkeypatch)
    return hooks.import_exllamav3()


def test_arenas_hold_every_expert_once_where_the_layout_says() -> None:
    with Checkpoint.open(TINY) as checkpoint:
        seen = []
        store = PinnedExperts(checkpoint, _core.HostDevice(), lambda stage, fraction: seen.append(fraction))
        store.finish()
        for layer in store.layers:
            arena = store.arena(layer)
            assert arena.state == "sealed"
            for linear in checkpoint.experts(layer):
                at = linear.expert * store.layout.stride + store.layout.offsets[PARTS.index(linear.which)]
                stored = arena.view(at, linear.trellis.nbytes)
                assert np.array_equal(stored, checkpoint.read(linear.trellis.name).view(np.uint8).reshape(-1))
    assert sorted(seen) == [i / len(store.layers) for i in range(1, len(store.layers) + 1)]


def test_page_locking_that_fails_says_how_to_allow_it() -> None:
    device = _core.HostDevice()
    device.fail_pin_after(2)
    with Checkpoint.open(TINY) as checkpoint:
        store = PinnedExperts(checkpoint, device, lambda stage, fraction: None)
        with pytest.raises(DeviceError, match=r"page-locking .* failed: .*memlock"):
            store.finish()
    store.abandon()
    del store
    assert device.pinned_bytes == 0


def test_a_file_that_changed_since_its_header_was_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoint.open(TINY) as checkpoint:
        at_open = checkpoint.file_version
        monkeypatch.setattr(checkpoint, "file_version", lambda path: (at_open(path)[0], at_open(path)[1] - 1))
        store = PinnedExperts(checkpoint, _core.HostDevice(), lambda stage, fraction: None)
        with pytest.raises(CheckpointError, match=r"experts of layer .* changed since its header was read"):
            store.finish()
        scales = ExpertScales(checkpoint, store.layers)
        with pytest.raises(CheckpointError, match=r"scales of layer .* changed since its header was read"):
            scales.block(store.layers[0])
        scales.abandon()


def loading_tensors(exllamav3: Any, checkpoint: Checkpoint) -> tuple[PinnedExperts, ExpertTensors]:
    store = PinnedExperts(checkpoint, _core.HostDevice(), lambda stage, fraction: None)
    scales = ExpertScales(checkpoint, store.layers)
    return store, ExpertTensors(store, scales, 0)


@pytest.mark.parametrize("mode", [torch.inference_mode, nullcontext])
def test_tensors_loaded_in_inference_mode_are_led_away_and_back_in_any(exllamav3: Any, mode: Any) -> None:
    elsewhere = torch.arange(1 << 20, dtype=torch.int32)  # memory of another owner
    with Checkpoint.open(TINY) as checkpoint, torch.inference_mode():
        store, made = loading_tensors(exllamav3, checkpoint)
        layer = store.layers[0]
        parts = [[made.tensor(layer, e, part, "trellis") for e in range(store.experts)] for part in PARTS]
        store.finish()
    linears = [[SimpleNamespace(inner=SimpleNamespace(trellis=t)) for t in part] for part in parts]
    module = SimpleNamespace(gates=linears[0], ups=linears[1], downs=linears[2])
    runtime = SimpleNamespace(in_prompt=True, expert_address=lambda layer, expert: elsewhere.data_ptr() + 512)
    counts: dict[str, int] = {}
    single = SingleExperts(runtime, [module], store.layout, counts)
    own = [part[3] for part in parts]
    home, bits = [t.data_ptr() for t in own], [t.clone() for t in own]
    with pytest.raises(ZeroDivisionError), mode(), single(0, 3):
        assert [t.data_ptr() for t in own] == [elsewhere.data_ptr() + 512 + at for at in store.layout.offsets]
        raise ZeroDivisionError
    assert [t.data_ptr() for t in own] == home
    assert all(torch.equal(t, b) for t, b in zip(own, bits, strict=True))
    assert counts == {"single_experts": 1, "single_experts_in_vram": 1}


def test_every_tensor_of_an_expert_has_the_bytes_and_shape_of_the_file(exllamav3: Any) -> None:
    stock = exllamav3.Config.from_directory(str(TINY)).stc
    with Checkpoint.open(TINY) as checkpoint:
        store, tensors = loading_tensors(exllamav3, checkpoint)
        store.finish()
        seen = 0
        for layer in store.layers:
            for e in checkpoint.experts(layer):
                key = e.trellis.name.removesuffix(".trellis")
                for kind in ("trellis", "suh", "svh", "mul1"):
                    made, wanted = tensors.tensor(layer, e.expert, e.which, kind), stock.get_tensor(f"{key}.{kind}")
                    assert made is not None
                    assert (made.dtype, made.shape) == (wanted.dtype, wanted.shape)
                    assert torch.equal(made, wanted)
                    assert made.is_contiguous()
                    assert made.storage_offset() * made.element_size() % 256 == 0  # the block itself is aligned
                    seen += 1
        assert seen == tensors.expected
        assert tensors.tensor(layer, 0, "up", "mcg") is None
        assert tensors.tensor(10**6, 0, "up", "suh") is None


def test_scales_can_be_left_to_exllamav3(exllamav3: Any) -> None:
    with Checkpoint.open(TINY) as checkpoint:
        store = PinnedExperts(checkpoint, _core.HostDevice(), lambda stage, fraction: None)
        scales = ExpertScales(checkpoint, store.layers)
        tensors = ExpertTensors(store, scales, 0, bulk_scales=False)
        kinds = ("trellis", "suh", "svh", "mul1")
        made = [tensors.tensor(layer, 0, "up", kind) for layer in store.layers for kind in kinds]
        assert [t is None for t in made] == [False, True, True, True] * len(store.layers)
        assert tensors.expected == len(store.layers) * store.experts * len(PARTS)
        store.finish()
        scales.abandon()


def test_a_layer_costs_one_copy_and_keeps_no_bytes_of_its_own(exllamav3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    copy = torch.Tensor.copy_

    def counted(self: torch.Tensor, source: torch.Tensor, *args: Any) -> torch.Tensor:
        copies.append(source.numel() * source.element_size())
        return copy(self, source, *args)

    with Checkpoint.open(TINY) as checkpoint:
        store, tensors = loading_tensors(exllamav3, checkpoint)
        monkeypatch.setattr(torch.Tensor, "copy_", counted)
        layer = store.layers[0]
        first = tensors.tensor(layer, 0, "gate", "suh")
        for expert in range(store.experts):
            for kind in ("trellis", "suh", "svh"):
                tensors.tensor(layer, expert, "down", kind)
        assert first is not None
        assert len(copies) == 1
        assert copies[0] == sum(e.suh.nbytes + e.svh.nbytes for e in checkpoint.experts(layer))
        assert tensors.tensor(layer, 0, "gate", "suh") is first
        trellis = tensors.tensor(layer, 1, "gate", "trellis")
        assert trellis is not None
        assert trellis.data_ptr() == store.arena(layer).address + store.layout.stride
        store.finish()


def test_threads_that_started_end_where_no_more_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    submit, started = ThreadPoolExecutor.submit, []

    def few(pool: ThreadPoolExecutor, *args: Any) -> Any:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(submit(pool, *args))
        return started[-1]

    monkeypatch.setattr(ThreadPoolExecutor, "submit", few)
    with Checkpoint.open(TINY) as checkpoint, pytest.raises(RuntimeError, match="new thread"):
        PinnedExperts(checkpoint, _core.HostDevice(), lambda *a: None)
    assert [future.exception(60) for future in started] == [None, None]


def test_garbage_is_collected_again_after_a_load_that_fails() -> None:
    import gc

    with pytest.raises(RuntimeError, match="load failed"), quiet_gc():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        raise RuntimeError("load failed")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_token_budget_fits_the_kv_cache_and_long_answers_come_in_rounds() -> None:
    assert token_budget(10, 100, 8192) == (100, None)
    assert token_budget(8000, 1000, 8192) == (191, None)
    assert token_budget(5, 3000, 4096) == (3000, None)
    most, at_a_time = token_budget(1000, 100_000, 131_072)
    assert (most, at_a_time) == (100_000, ROUND_TOKENS)


def test_long_passes_are_staged_and_decode_never_is() -> None:
    assert stage_threshold(288, 8, None) == 1152
    assert stage_threshold(16, 4, 0) == 9
    assert 4.0e9 < activation_bytes(8192, 4096, 8) < 5.5e9


def test_penalties_count_the_answer_and_repetition_sees_the_prompt() -> None:
    logits = torch.tensor([[1.0, -1.0, 2.0, 0.5]])
    past = torch.tensor([[0, 1, 2, 2]])  # two of prompt, two of answer
    p = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    row = penalise(logits, past, 2, p)
    assert row.tolist() == [[0.5, -2.0, 1.0 - 0.5 - 0.5, 0.5]]
    assert logits[0, 2] == 2.0


def test_sampler_steps_follow_the_documented_order(exllamav3: Any) -> None:
    def names(p: SamplingParams) -> list[str]:
        return [type(s).__name__ for s in make_sampler(exllamav3, p, 3).steps]

    assert names(SamplingParams(temperature=0.0)) == ["SS_Argmax"]
    assert names(SamplingParams(temperature=1e-300)) == ["SS_Argmax"]
    assert names(SamplingParams(top_p=1.0)) == ["SS_Temperature", "SS_Sample"]
    every = SamplingParams(top_k=5, top_p=0.9, min_p=0.1, presence_penalty=1.0, logit_bias={3: -1.0})
    assert names(every) == [
        "SS_LogitBias", "Penalties", "SS_Temperature", "SS_TopK", "SS_TopP", "SS_MinP", "SS_Sample",
    ]  # fmt: skip


def test_constraint_masks_every_step_and_hears_every_token(exllamav3: Any) -> None:
    heard: list[int] = []

    class Even:
        def allowed(self, size: int) -> Any:
            return np.arange(size) % 2 == 0 if not heard else None

        def accept(self, token_id: int) -> None:
            heard.append(token_id)

    grammar = make_filter(exllamav3, None, Even(), 4)
    assert grammar.get_next_logit_mask().tolist() == [[0.0, -np.inf, 0.0, -np.inf]]
    grammar.accept_token(2)
    assert grammar.get_next_logit_mask().tolist() == [[0.0] * 4]
    assert heard == [2]


def test_score_rows_are_log_softmax_with_the_best_of_the_real_vocabulary() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0]])
    score = score_rows(logits, [1], 2, 3)[0]
    wanted = logits.log_softmax(-1)[0]
    assert score.logprob == pytest.approx(float(wanted[1]))
    assert [i for i, _ in score.top] == [2, 1]


def test_heat_file_round_trip_and_refusals(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, heat = tmp_path / "a" / "heat.npz", np.arange(6, dtype=np.uint16)
    assert warm.load(path, "k", 6) is None
    warm.save(path, "k", heat)
    warm.save(path, "k", heat[::-1].copy())
    found = warm.load(path, "k", 6)
    assert found is not None
    assert found.tolist() == [5, 4, 3, 2, 1, 0]
    assert [p.name for p in path.parent.iterdir()] == ["heat.npz"]
    assert not caplog.records
    assert warm.load(path, "other", 6) is None
    assert warm.load(path, "k", 7) is None
    path.write_bytes(b"not a zip")
    assert warm.load(path, "k", 6) is None
    assert len(caplog.records) == 3


def fake_kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package with one autotuned kernel under two decorators, as Triton builds them."""
    choices = [SimpleNamespace(kwargs={"BV": v}, num_warps=4, num_stages=2) for v in (32, 64)]

    def kernel() -> None: ...

    tuner = type("Autotuner", (), {"__module__": "triton.runtime.autotuner"})()
    tuner.configs, tuner.cache = choices, {}
    tuner.fn = type("JITFunction", (), {"__module__": "triton.runtime.jit"})()
    tuner.fn.fn = kernel
    top = type("Heuristics", (), {"__module__": "triton.runtime.autotuner"})()
    top.fn = tuner
    package, module = ModuleType("fakefla"), ModuleType("fakefla.kda")
    package.__path__ = []
    module.kernel = top  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fakefla", package)
    monkeypatch.setitem(sys.modules, "fakefla.kda", module)
    monkeypatch.setattr(pins, "PACKAGE", "fakefla")
    monkeypatch.setattr(pins.pkgutil, "iter_modules", lambda path: [SimpleNamespace(name="kda")])
    return tuner


def test_pins_are_written_from_what_ran_and_applied_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = fake_kernels(monkeypatch)
    key = (64, False, "torch.bfloat16")
    tuner.cache[key] = tuner.configs[1]
    path = tmp_path / "sm_86.json"
    assert pins.write_pins(path, "sm_86", "1.5.1", "3.6.0") == 1
    tuner.cache.clear()
    assert pins.apply_pins(path, "sm_86") == 1
    assert tuner.cache == {key: tuner.configs[1]}


def test_pins_for_another_gpu_or_an_impossible_choice_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_kernels(monkeypatch)
    path = tmp_path / "p.json"
    row = {"key": [1], "kwargs": {"BV": 128}, "num_warps": 4, "num_stages": 2}
    for picks, message in (({"kernel": [row]}, "cannot run with"), ({"gone": [row]}, "no kernel gone")):
        path.write_text(json.dumps({"arch": "sm_90", "picks": picks}))
        with pytest.raises(ConfigError, match=message):
            pins.apply_pins(path, "sm_90")
    with pytest.raises(ConfigError, match="this GPU is sm_86"):
        pins.apply_pins(path, "sm_86")
    path.write_text("{")
    with pytest.raises(ConfigError, match="not a file of Triton picks"):
        pins.apply_pins(path, "sm_90")
    with pytest.raises(ConfigError, match="no file"):
        pins.pin_path("sm_90", tmp_path / "missing.json")
    assert pins.pin_path("sm_00", None) is None


def test_the_shipped_pins_name_their_architecture_and_kernels() -> None:
    for path in pins.PIN_DIR.glob("*.json"):
        document = json.loads(path.read_text())
        assert document["arch"] == path.stem
        assert document["exllamav3"] == hooks.VERSION
        assert {"chunk_gla_fwd_kernel_o", "recompute_w_u_fwd_kda_kernel"} <= set(document["picks"])
        for rows in document["picks"].values():
            assert all({"key", "kwargs", "num_warps", "num_stages"} == set(row) for row in rows)


@pytest.mark.parametrize("count", [1, 2, 191, 192, 193, 252, 383, 384, 1000])
def test_slices_of_a_prompt_have_no_short_remainder(count: int) -> None:
    cuts = slices(count, 192)
    assert [at for at, _ in cuts] + [count] == [0, *(end for _, end in cuts)]
    assert all(192 <= end - at < 384 for at, end in cuts) or cuts == [(0, count)]
