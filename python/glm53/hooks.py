"""The patch of a loaded exllamav3 model: what is replaced, how it is checked first, and how it is put back. (With
`--mtp`, `engine/exllama/mtp.py` besides wraps three methods of the generator that it is given, with `--run-ahead`
`engine/exllama/ahead.py` two.)

Replaced, on instances only (no class of exllamav3 changes):
  `config.stc.get_tensor`       while a model loads: tensors of routed experts are answered by us (trellises: aliases of
                                our arenas)
  `BlockSparseMLP.routing_fn`   of every MoE layer: after the router, before the experts' kernels
  `BlockSparseMLP.forward`      of every MoE layer, in fast mode only: after the experts' kernels
  `BlockSparseMLP.bc`           of every MoE layer, unless a load leaves that out: its calls that run one expert alone
                                are bracketed
  `Embedding.forward`, `.prepare_for_device`  where a step's ids may come from the GPU: those are looked up there
  `g_tensor_cache.get_bucketed` remembers what it gave for the same arguments: it makes a name of them each time, which
                                is most of what a decode step's Python does around the hyper-connections
  `MLAttention._update_pool_plane`  of layers whose keys are pooled: with several streams it waited for all that was
                                queued on the GPU, to put one number there
  `Model.forward`, `.prefill`   bracketed, so that a long prompt's staging can begin before its first layer
Of torch, while a model loads: `nn.Embedding.reset_parameters` and `empty_like` (`plain_meta_tensors`).
States of a Patch: new -> installed (`install`) -> undone (`undo`). A model carries at most one patch.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType, MethodType
from typing import Any

from .errors import DeviceError, EngineError

VERSION = "1.5.1"
MAX_DECODE_ROWS = 8
EXPERT_KEY = re.compile(r"\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.(trellis|suh|svh|mul1|mcg)$")
_MARK = "_glm53_patch"
_MISSING = object()

Routed = tuple[Any, Any, Any]
"""What a router chose and from what: picks (rows, k) int64, weights (rows, k) float16, x (rows, hidden) float16, which
the experts will read too."""
Route = Callable[[int, int, Routed, dict[str, Any]], None]
"""`route(moe_layer, rows, routed, params)`: moe_layer counts MoE layers from 0."""
Combine = Callable[[int, Any], None]
"""`combine(moe_layer, out)`: out (..., hidden) float32 is the layer's output, to be added to in place."""
Single = Callable[[int, int], AbstractContextManager[None]]
"""`single(moe_layer, expert)` surrounds a call that runs one expert alone, through tensors of its own."""
Lookup = Callable[[Any], Any]
"""`lookup(ids)`: the embedding's rows (..., hidden) of ids on the GPU, there too, in the dtype that it gives out."""
Bracket = Callable[[int, bool, int], AbstractContextManager[None]]
"""`bracket(tokens, decode, layers)` surrounds one forward pass over that many tokens; decode: a step of the generator,
which continues what is in the cache; layers: MoE layers the pass runs."""
Answer = Callable[[int, int, str, str], Any]
"""`answer(model_layer, expert, part, kind)`: the tensor that stands for that one (kind: trellis, suh, svh, or the
codebook's marker), or None for one that exllamav3 shall load itself."""


def import_exllamav3() -> Any:
    """exllamav3, compiled and of the right version. Raises DeviceError with what to do."""
    try:
        import exllamav3
    except ImportError as e:
        raise DeviceError(f"exllamav3 {VERSION} is not installed ({e}); pip install 'glm53[cuda]'") from None
    except Exception as e:
        raise DeviceError(f"exllamav3's extension cannot be built or loaded: {' '.join(str(e).split())[:400]}") from e
    verify_module(exllamav3)
    return exllamav3


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def verify_module(exllamav3: Any) -> None:
    """Check version and the signatures this file relies on. Raises DeviceError naming the first difference."""
    import importlib

    def part(name: str) -> Any:
        return importlib.import_module(f"{exllamav3.__name__}.{name}")

    version = part("version").__version__
    if version != VERSION:
        raise DeviceError(
            f"exllamav3 {version} is installed, glm53 is made for {VERSION}: pip install exllamav3=={VERSION}"
        )
    moe, routing = part("modules.block_sparse_mlp"), part("modules.block_sparse_mlp_routing")
    buffers, stc = part("util.tensor").GTensorCache, part("loader.safetensors")
    pools = part("modules.mla_attn").MLAttention._update_pool_plane
    expected = {
        "routing_dots": (routing.routing_dots, ["bsz", "cfg", "y", "params"]),
        "GTensorCache.get_bucketed": (buffers.get_bucketed, ["self", "device", "numel", "dtype", "x"]),
        "MLAttention._update_pool_plane": (pools, ["self", "idx_layer", "block_table", "host_seqlens", "seqlen"]),
        "BlockSparseMLP.forward": (moe.BlockSparseMLP.forward, ["self", "x", "params", "out_dtype"]),
        "Model.forward": (exllamav3.Model.forward, ["self", "input_ids", "params"]),
        "Model.prefill": (exllamav3.Model.prefill, ["self", "input_ids", "params"]),
        "SafetensorsCollection.get_tensor": (
            stc.SafetensorsCollection.get_tensor,
            [
                "self",
                "key",
                "device",
                "optional",
                "allow_bf16",
                "float2half",
                "no_defer",
                "transpose",
                "pad_to",
                "fidx",
            ],
        ),
    }
    for name, (function, parameters) in expected.items():
        if _parameters(function) != parameters:
            raise DeviceError(f"exllamav3 {version}: {name}{inspect.signature(function)} is not the one of {VERSION}")
    if moe.MAX_BSZN != MAX_DECODE_ROWS:
        raise DeviceError(f"exllamav3 {version}: decode kernels take {moe.MAX_BSZN} rows, not {MAX_DECODE_ROWS}")
    if not hasattr(part("ext").exllamav3_ext, "pinned_cuda_view"):
        raise DeviceError(f"exllamav3 {version}: its extension lacks pinned_cuda_view; rebuild it")


def moe_modules(exllamav3: Any, model: Any) -> list[Any]:
    """The model's MoE layers in order."""
    import importlib

    kind = importlib.import_module(f"{exllamav3.__name__}.modules.block_sparse_mlp").BlockSparseMLP
    return [module for module in model if isinstance(module, kind)]


def shared_buffers(exllamav3: Any) -> Any:
    """The cache of small buffers that the decode steps of all models work in."""
    import importlib

    return importlib.import_module(f"{exllamav3.__name__}.util.tensor").g_tensor_cache


def verify_layers(modules: list[Any], experts: int) -> None:
    """Check that every MoE layer runs through its address tables. Raises EngineError naming the layer."""
    for m in modules:
        whole = m.num_local_experts == m.num_experts == experts and m.cpu_split_first is None and not m.cpu_offload
        tables: list[Any] = [getattr(m, f"multi_{part}", None) for part in ("gate", "up", "down")]
        if not whole or m.bc is None or not m.support_fused or any(t is None for t in tables):
            raise EngineError(f"{m.key}: exllamav3 does not run this layer's experts through address tables")
        if m.num_experts_per_tok * MAX_DECODE_ROWS > 64:
            raise EngineError(f"{m.key}: {m.num_experts_per_tok} picks a token; the expert cache handles at most 8")
        if any(t.ptrs_trellis.numel() != experts or t.ptrs_trellis.element_size() != 8 for t in tables):
            raise EngineError(f"{m.key}: unexpected address tables")


_BETWEEN = (
    "router_pre_norm", "routed_pre_norm", "routed_post_norm", "shared_experts_post_norm", "latent_in", "latent_out",
    "routing_device",
)  # fmt: skip


def verify_split(modules: list[Any], limit: float) -> None:
    """Check that another lane may compute some of a layer's picks: that the experts read what the router read, and that
    nothing but additions follows the routed sum. `limit`: the SwiGLU clamp of the checkpoint. Raises EngineError naming
    the layer. Relied on beside that: the decode kernels of this version (`slot_info` in exl3_moe_coop_kernel.cuh) leave
    out a pick whose weight is 0, read no byte of its expert, and still write a row that has no other pick."""
    for m in modules:
        extra = next((name for name in _BETWEEN if getattr(m, name, None) is not None), None)
        if extra or m.alt_residual_channel or m.tp_reduce:
            raise EngineError(f"{m.key}: {extra or 'the residual path'} is not one that a CPU lane can stand beside")
        if (m.activation_fn, float(m.act_limit)) != ("silu", float(limit)):
            found = f"{m.activation_fn} clamped at {m.act_limit:g}"
            raise EngineError(f"{m.key}: its experts compute {found}, those of the CPU lane silu clamped at {limit:g}")


@contextmanager
def plain_meta_tensors() -> Iterator[None]:
    """What exllamav3 does with tensors on the meta device costs no imports while this is entered: torch would bring in
    torch._dynamo to fill a new `torch.nn.Embedding` with random numbers that nobody reads (the loaded weight replaces
    it), and sympy with some 500 modules to find the strides of `torch.empty_like` (KDA states): a second or two on the
    loading thread, three where Python keeps no compiled modules."""
    import torch

    reset, like = torch.nn.Embedding.reset_parameters, torch.empty_like

    def empty_like(tensor: Any, **kwargs: Any) -> Any:
        if tensor.is_meta and tensor.is_contiguous() and kwargs.keys() <= {"device", "dtype"}:
            return torch.empty(tensor.shape, **{"device": tensor.device, "dtype": tensor.dtype, **kwargs})
        return like(tensor, **kwargs)

    torch.nn.Embedding.reset_parameters = lambda self: None  # type: ignore[method-assign]
    torch.empty_like = empty_like  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.Embedding.reset_parameters = reset  # type: ignore[method-assign]
        torch.empty_like = like


def prefill_layers(model: Any, modules: list[Any]) -> int:
    """MoE layers that `Model.prefill` runs, the first ones of all: nothing reads what follows the attention of the last
    layer that fills a cache, so exllamav3 ends there."""
    before = {id(m) for block in model.modules[: model.last_kv_module_idx] for m in block}
    return sum(id(m) in before for m in modules)


class TrellisSource:
    """Answers exllamav3's loader for routed experts' tensors while it is entered."""

    def __init__(self, stc: Any, answer: Answer) -> None:
        self._stc, self._answer = stc, answer
        self.answered = 0

    def __enter__(self) -> TrellisSource:
        if "get_tensor" in vars(self._stc):
            raise EngineError("exllamav3's loader is patched already")
        original = self._stc.get_tensor

        @functools.wraps(original)
        def get_tensor(key: str, *args: Any, **kwargs: Any) -> Any:
            match = EXPERT_KEY.search(key)
            tensor = self._answer(int(match[1]), int(match[2]), match[3], match[4]) if match else None
            if tensor is None:
                return original(key, *args, **kwargs)
            self.answered += 1
            return tensor

        self._stc.get_tensor = get_tensor
        return self

    def __exit__(self, *_: object) -> None:
        vars(self._stc).pop("get_tensor", None)


class _Native:
    """Stands for a layer's native object."""

    def __init__(self, native: Any, single: Callable[[int], AbstractContextManager[None]]) -> None:
        self._native, self._single = native, single
        self.run_bszN = native.run_bszN  # the decode step's call takes no detour

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def run_single_expert(self, y: Any, expert: int) -> Any:
        with self._single(expert):
            return self._native.run_single_expert(y, expert)

    def run_single_expert_dq(self, y: Any, expert: int, *buffers: Any) -> Any:
        with self._single(expert):
            return self._native.run_single_expert_dq(y, expert, *buffers)


def _looked_up(embedding: Any, lookup: Lookup) -> tuple[Any, Any]:
    """`prepare_for_device` and `forward` of an embedding in host memory, to which ids on the GPU are not copied."""
    prepare, forward = embedding.prepare_for_device, embedding.forward

    @functools.wraps(prepare)
    def prepare_for_device(x: Any, params: dict[str, Any]) -> Any:
        return prepare(x, params) if x.device.type == "cpu" else x

    @functools.wraps(forward)
    def looked_up(x: Any, params: dict[str, Any], out_dtype: Any = None) -> Any:
        return forward(x, params, out_dtype) if x.device.type == "cpu" else lookup(x)

    return prepare_for_device, looked_up


def _remembered(get_bucketed: Any) -> Any:
    """The buffers are static: the same arguments give the same memory until another model is loaded, and these need not
    be that one's."""
    given: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(get_bucketed)
    def remembered(device: Any, numel: int, dtype: Any, x: str = "") -> Any:
        key = device, numel, dtype, x
        found = given.get(key)
        if found is None:
            found = given[key] = get_bucketed(device, numel, dtype, x)
        return found

    return remembered


class _Torch:
    """torch as code of exllamav3's sees it that puts a single number on the GPU: by a kernel instead of a copy from
    pageable memory, which waits for all that is queued."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)

    def tensor(self, data: list[int], dtype: Any, device: Any) -> Any:
        [number] = data
        return self.full((1,), number, dtype=dtype, device=device)


def _unwaiting(method: Any) -> Any:
    """The same code over that torch."""
    function = method.__func__
    names = {**function.__globals__, "torch": _Torch()}
    return MethodType(FunctionType(function.__code__, names, function.__name__), method.__self__)


class Patch:
    """The hooks of one loaded model. Use `install` and `undo`."""

    def __init__(
        self,
        model: Any,
        modules: list[Any],
        route: Route,
        bracket: Bracket,
        combine: Combine | None = None,
        *,
        single: Single | None = None,
        lookup: Lookup | None = None,
        buffers: Any = None,
    ) -> None:
        self._model, self._modules, self._route, self._bracket = model, modules, route, bracket
        self._combine, self._single, self._lookup, self._buffers = combine, single, lookup, buffers
        self._saved: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Put the hooks in; all or none. Raises EngineError if the model is patched already."""
        if getattr(self._model, _MARK, None) is not None:
            raise EngineError("this model is patched already; undo that first")
        try:
            for index, module in enumerate(self._modules):
                self._replace(module, "routing_fn", self._routed(index, module.routing_fn))
                if self._combine is not None:
                    self._replace(module, "forward", self._combined(index, module.forward, self._combine))
                if self._single is not None:
                    self._replace(module, "bc", _Native(module.bc, functools.partial(self._single, index)))
            if self._lookup is not None:
                embedding = self._model.modules[0]
                prepare, forward = _looked_up(embedding, self._lookup)
                self._replace(embedding, "prepare_for_device", prepare)
                self._replace(embedding, "forward", forward)
            for module in self._model:
                if getattr(module, "index_kpool", 0):
                    self._replace(module, "_update_pool_plane", _unwaiting(module._update_pool_plane))
            if self._buffers is not None:
                self._replace(self._buffers, "get_bucketed", _remembered(self._buffers.get_bucketed))
            for name, layers in (
                ("forward", len(self._modules)),
                ("prefill", prefill_layers(self._model, self._modules)),
            ):
                self._replace(self._model, name, self._bracketed(getattr(self._model, name), name == "forward", layers))
            self._replace(self._model, _MARK, self)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Put everything back, newest first; idempotent."""
        while self._saved:
            target, name, value = self._saved.pop()
            if value is _MISSING:
                vars(target).pop(name, None)
            else:
                setattr(target, name, value)

    def reroute(self, route: Route) -> None:
        """Send what the routers chose to another receiver from now on (measurements)."""
        self._route = route

    def _replace(self, target: Any, name: str, value: Any) -> None:
        self._saved.append((target, name, vars(target).get(name, _MISSING)))
        setattr(target, name, value)

    def _routed(self, index: int, original: Any) -> Any:
        @functools.wraps(original)
        def routing_fn(bsz: int, cfg: Any, y: Any, params: dict[str, Any]) -> Any:
            selected, weights = original(bsz, cfg, y, params)
            self._route(index, bsz, (selected, weights, y), params)
            return selected, weights

        return routing_fn

    @staticmethod
    def _combined(index: int, original: Any, combine: Combine) -> Any:
        """The layer's float32 sum is completed before it takes the dtype that the caller asks for."""

        @functools.wraps(original)
        def forward(x: Any, params: dict[str, Any], out_dtype: Any = None) -> Any:
            out = original(x, params)
            combine(index, out)
            return out if out_dtype is None else out.to(out_dtype)

        return forward

    def _bracketed(self, original: Any, may_decode: bool, layers: int) -> Any:
        """The generator decodes through `forward` with a cache; it reads prompts through `prefill`, and passes without
        a cache are measurements. A draft model has prompts read through `forward` too, for their last tokens."""
        bracket = self._bracket

        @functools.wraps(original)
        def forward(input_ids: Any, params: dict[str, Any] | None = None) -> Any:
            known = params or {}
            decode = may_decode and known.get("cache") is not None and "last_tokens_only" not in known
            with bracket(input_ids.numel(), decode, layers):
                return original(input_ids, params)

        return forward
