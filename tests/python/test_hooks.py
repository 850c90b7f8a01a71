"""The hooks of a loaded exllamav3 model: what they verify, put in and take back, and what a load goes without."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exllama_helpers import use_fakes
from tiny_checkpoint import TINY

from glm53 import hooks
from glm53.errors import DeviceError, EngineError


@pytest.fixture
def exllamav3(monkeypatch: pytest.MonkeyPatch) -> Any:
    use_fakes(monkeypatch)
    return hooks.import_exllamav3()


def make_model(exllamav3: Any) -> Any:
    model = exllamav3.Model.from_config(exllamav3.Config.from_directory(str(TINY)))
    model.load()
    return model


def test_another_version_or_signature_is_refused(exllamav3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["exllamav3.version"], "__version__", "1.6.0")
    with pytest.raises(DeviceError, match=r"exllamav3 1\.6\.0 is installed, glm53 is made for 1\.5\.1"):
        hooks.verify_module(exllamav3)
    monkeypatch.undo()


def test_a_changed_signature_names_the_function(exllamav3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exllamav3.Model, "prefill", lambda self, ids: None)
    with pytest.raises(DeviceError, match=r"Model\.prefill\(self, ids\) is not the one of"):
        hooks.verify_module(exllamav3)


def test_kernels_for_other_numbers_of_rows_or_an_old_extension_are_refused(
    exllamav3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(sys.modules["exllamav3.modules.block_sparse_mlp"], "MAX_BSZN", 16)
        with pytest.raises(DeviceError, match=r"decode kernels take 16 rows, not 8"):
            hooks.verify_module(exllamav3)
    hooks.verify_module(exllamav3)
    monkeypatch.delattr(sys.modules["exllamav3.ext"].exllamav3_ext, "pinned_cuda_view")
    with pytest.raises(DeviceError, match="lacks pinned_cuda_view; rebuild it"):
        hooks.verify_module(exllamav3)


def test_without_exllamav3_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "exllamav3", None)
    with pytest.raises(DeviceError, match=r"pip install 'glm53\[cuda\]'"):
        hooks.import_exllamav3()


def test_patch_calls_the_hooks_and_undo_restores_everything(exllamav3: Any) -> None:
    model = make_model(exllamav3)
    routed, brackets = [], []

    @contextmanager
    def bracket(tokens: int, decode: bool, layers: int) -> Any:
        brackets.append((tokens, decode, layers))
        yield

    originals = [m.routing_fn for m in model.moe]
    patch = hooks.Patch(model, model.moe, lambda layer, rows, routed_, params: routed.append((layer, rows)), bracket)
    patch.install()
    with pytest.raises(EngineError, match="patched already"):
        hooks.Patch(model, model.moe, lambda *a: None, lambda *a: nullcontext()).install()
    model.forward(input_ids=torch.tensor([[1, 2, 3]]), params={})
    model.prefill(torch.tensor([[1, 2]]))
    layers = len(model.moe)
    assert routed == [(i, 3) for i in range(layers)] + [(i, 2) for i in range(layers - 1)]
    assert brackets == [(3, False, layers), (2, False, layers - 1)]  # as many as the passes ran
    assert not any("forward" in vars(m) for m in model.moe)
    patch.undo()
    patch.undo()
    assert [m.routing_fn for m in model.moe] == originals
    assert not {"forward", "prefill"} & set(vars(model))
    model.forward(torch.tensor([[1]]))
    assert len(brackets) == 2


def test_small_buffers_are_remembered_by_what_they_were_asked_for(exllamav3: Any) -> None:
    model, buffers = make_model(exllamav3), hooks.shared_buffers(exllamav3)
    patch = hooks.Patch(model, model.moe, lambda *a: None, lambda *a: nullcontext(), buffers=buffers)
    patch.install()
    cpu, first = torch.device("cpu"), buffers.get_bucketed(torch.device("cpu"), 40, torch.half, "hc_post")
    assert buffers.get_bucketed(cpu, 40, torch.half, "hc_post") is first
    others = [(cpu, 41, torch.half, "hc_post"), (cpu, 40, torch.float, "hc_post"), (cpu, 40, torch.half, "hc_comb"),
              (torch.device("meta"), 40, torch.half, "hc_post"), (cpu, 40, torch.half)]  # fmt: skip
    assert len({id(first), *(id(buffers.get_bucketed(*o)) for o in others)}) == 6
    assert [len(o) for o in buffers.asked] == [4] * 6
    patch.undo()
    assert "get_bucketed" not in vars(buffers)
    assert buffers.get_bucketed(cpu, 40, torch.half, "hc_post") is not first


def test_a_pool_of_keys_that_is_full_makes_the_host_wait_for_nothing(
    exllamav3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.tensor copies to a GPU from pageable memory, which waits for all that is queued there."""
    from exllamav3.modules.mla_attn import MLAttention

    model, attention = make_model(exllamav3), MLAttention()
    monkeypatch.setattr(type(model), "__iter__", lambda self: iter([*self.moe, attention, self.head]))
    patch = hooks.Patch(model, model.moe, lambda *a: None, lambda *a: nullcontext())
    table, stock, ours = torch.zeros(2), [], []  # type: Any, Any, Any
    attention._update_pool_plane(stock, table, [5, 7, 11], 1)
    patch.install()
    with monkeypatch.context() as waits:
        waits.setattr(torch, "tensor", lambda *a, **k: pytest.fail("the host waits"))
        attention._update_pool_plane(ours, table, [5, 7, 11], 1)
    assert [(a, int(n), n.dtype, n.shape, r.tolist()) for a, n, r in ours] == [
        (a, int(n), n.dtype, n.shape, r.tolist()) for a, n, r in stock
    ]
    assert [int(n) for _, n, _ in ours] == [1, 2]
    patch.undo()
    assert not vars(attention)


def test_calls_of_single_experts_are_bracketed_and_the_others_are_not(exllamav3: Any) -> None:
    model, seen = make_model(exllamav3), []
    native = [m.bc for m in model.moe]

    @contextmanager
    def single(layer: int, expert: int) -> Any:
        seen.append((layer, expert))
        yield

    patch = hooks.Patch(model, model.moe, lambda *a: None, lambda *a: nullcontext(), single=single)
    patch.install()
    addresses: list[int] = []
    model.moe[1].bc.run_single_expert_dq(None, 3, None, None, None, addresses)
    assert addresses == [
        x[3].inner.trellis.data_ptr() for x in (model.moe[1].gates, model.moe[1].ups, model.moe[1].downs)
    ]
    with pytest.raises(NotImplementedError):
        model.moe[2].bc.run_single_expert(None, 5)
    assert seen == [(1, 3), (2, 5)]
    assert model.moe[1].bc.run_bszN == native[1].run_bszN
    assert model.moe[1].bc.read is native[1].read
    patch.undo()
    assert [m.bc for m in model.moe] == native


def test_a_patch_that_fails_half_way_is_taken_back(exllamav3: Any) -> None:
    model = make_model(exllamav3)
    original = model.moe[0].routing_fn
    broken = SimpleNamespace()  # has no routing_fn
    with pytest.raises(AttributeError):
        hooks.Patch(model, [model.moe[0], broken], lambda *a: None, lambda *a: nullcontext()).install()
    assert model.moe[0].routing_fn is original


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cpu_split_first": 3}, "through address tables"),
        ({"bc": None}, "through address tables"),
        ({"num_experts_per_tok": 9}, "at most 8"),
    ],
)
def test_layers_that_bypass_the_tables_are_refused(exllamav3: Any, change: dict[str, Any], message: str) -> None:
    model = make_model(exllamav3)
    hooks.verify_layers(model.moe, 16)
    for name, value in change.items():
        setattr(model.moe[1], name, value)
    with pytest.raises(EngineError, match=message):
        hooks.verify_layers(model.moe, 16)


def test_trellis_source_answers_routed_experts_only(exllamav3: Any) -> None:
    stc = exllamav3.Config.from_directory(str(TINY)).stc
    mine = torch.zeros(3, dtype=torch.int16)
    asked = []

    def answer(layer: int, expert: int, part: str, kind: str) -> Any:
        asked.append((layer, expert, part, kind))
        return None if layer == 2 else mine

    base = "model.language_model.layers"
    with hooks.TrellisSource(stc, answer) as source:
        assert stc.get_tensor(f"{base}.1.mlp.experts.7.up_proj.trellis", "cuda:0") is mine
        assert stc.get_tensor(f"{base}.2.mlp.experts.0.gate_proj.trellis") is not mine
        assert stc.get_tensor(f"{base}.1.mlp.experts.7.up_proj.suh") is mine
        assert stc.get_tensor(f"{base}.1.mlp.shared_experts.up_proj.trellis") is not mine
        with pytest.raises(EngineError, match="patched already"), hooks.TrellisSource(stc, answer):
            pass
    assert asked == [(1, 7, "up", "trellis"), (2, 0, "gate", "trellis"), (1, 7, "up", "suh")]
    assert source.answered == 2
    assert "get_tensor" not in vars(stc)


def test_loading_fills_no_embedding_and_puts_torch_back(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.nn.Embedding.reset_parameters, torch.empty_like
    monkeypatch.setattr(torch.nn.init, "normal_", lambda *a, **k: pytest.fail("an embedding was filled"))
    with pytest.raises(RuntimeError, match="load failed"), hooks.plain_meta_tensors():
        torch.nn.Embedding(4, 2, device="meta")
        raise RuntimeError("load failed")
    assert (torch.nn.Embedding.reset_parameters, torch.empty_like) == original


def test_tensors_like_those_on_the_meta_device_are_made_as_torch_makes_them() -> None:
    meta = torch.empty(3, 4, dtype=torch.bfloat16, device="meta")
    swapped = torch.arange(6.0).view(2, 3).t()
    asked: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (meta, {"device": "cpu"}), (meta, {}), (meta, {"dtype": torch.half}), (meta.t(), {"device": "cpu"}),
        (swapped, {}), (swapped, {"memory_format": torch.contiguous_format}),
    ]  # fmt: skip

    def kind(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    usual = [kind(torch.empty_like(t, **k)) for t, k in asked]
    with hooks.plain_meta_tensors():
        assert [kind(torch.empty_like(t, **k)) for t, k in asked] == usual


@pytest.mark.parametrize(
    ("within", "imported"), [("contextlib.nullcontext", True), ("hooks.plain_meta_tensors", False)]
)
def test_what_a_load_does_on_the_meta_device_imports_no_sympy(within: str, imported: bool) -> None:
    """A process of its own: here other tests have imported it."""
    code = f"""
import contextlib, sys, torch
from glm53 import hooks
with {within}():
    torch.empty_like(torch.empty(2, 3, device="meta"), device="cpu")
    torch.nn.Embedding(4, 2, device="meta")
print("sympy" in sys.modules or "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(imported)]
