"""exllamav3's own generator, jobs, page table and samplers, unchanged, over the CPU engine's model, without a GPU.

The folder GLM53_EXLLAMAV3 holds the unpacked wheel (`pip download --no-deps exllamav3==1.5.1`). What is stood in for:
the model and its states, the compiled extension (three functions of it; sampling takes the path without the fused
kernel), pinned memory, and torch.cuda. Everything that `glm53.engine.exllama` asks of a generator is the real thing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from glm53.config import Settings
from glm53.engine.exllama import engine as exllama
from glm53.engine.exllama.jobs import score_rows
from glm53.engine.protocol import TokenScore
from glm53.tokenizer import Tokenizer

ABSENT = ("model", "cache", "tokenizer", "modules", "generator.visualizer", "generator.cpu_cache",
          "generator.filter.formatron")  # fmt: skip
"""Modules of exllamav3 that need the extension or other packages; any name may be imported from them."""


class _AbsentModule(ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return 1 << 30 if name.isupper() else type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        inner = name.removeprefix("exllamav3.")
        if inner != name and any(inner == a or inner.startswith(a + ".") for a in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _gumbel(logits: torch.Tensor, out: torch.Tensor, seed: int) -> None:
    uniform = torch.rand(logits.shape, generator=torch.Generator().manual_seed(int(seed))).clamp_min(1e-9)
    out.copy_(logits.float() - torch.log(-torch.log(uniform)))


EXTENSION = SimpleNamespace(
    gumbel_noise_f16=_gumbel,
    gumbel_noise_f32=_gumbel,
    gumbel_noise_log=lambda p, out, seed: _gumbel(torch.log(p), out, seed),
)


def unpinned(make: Any) -> Any:
    """torch.empty or torch.zeros where no memory can be pinned."""
    return lambda *args, **kwargs: make(*args, **{k: v for k, v in kwargs.items() if k != "pin_memory"})


def import_generator(folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """A namespace with what `glm53.engine.exllama` takes from exllamav3."""
    for name in [n for n in sys.modules if n == "exllamav3" or n.startswith("exllamav3.")]:
        patch.delitem(sys.modules, name)
    package, ext = ModuleType("exllamav3"), ModuleType("exllamav3.ext")
    package.__path__ = [str(folder / "exllamav3")]
    ext.exllamav3_ext = EXTENSION  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "exllamav3", package)
    patch.setitem(sys.modules, "exllamav3.ext", ext)
    patch.setattr(sys, "meta_path", [_Finder(), *sys.meta_path])
    patch.setenv("EXL3_FUSED_SAMPLER", "0")
    patch.setattr(torch, "empty", unpinned(torch.empty))
    patch.setattr(torch, "zeros", unpinned(torch.zeros))
    for name in ("synchronize", "set_device", "get_device_name"):
        patch.setattr(torch.cuda, name, lambda *args: "none")
    patch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None))
    generator = importlib.import_module("exllamav3.generator.generator")
    custom = importlib.import_module("exllamav3.generator.sampler.custom")
    patch.setattr(generator, "RecurrentCache", States)
    patch.setattr(generator, "malloc_trim", lambda: None)
    experts = importlib.import_module("exllamav3.modules.block_sparse_mlp_cpu")
    experts.run_pending_swap_sweeps = lambda params: None  # type: ignore[attr-defined]
    samplers = {n: getattr(custom, n) for n in dir(custom) if n.startswith("SS_") or n == "CustomSampler"}
    job = importlib.import_module("exllamav3.generator.job").Job
    filter_ = importlib.import_module("exllamav3.generator.filter.filter").Filter
    return SimpleNamespace(Generator=generator.Generator, Job=job, Filter=filter_, **samplers)


class State:
    """The CPU engine's state of a stream in the place of a slot of recurrent states."""

    def __init__(self, state: Any, position: int = 0) -> None:
        self.state, self.position = state, position

    def stash(self) -> dict[str, Any]:
        return {"checkpoint_size": 1, "position": self.position, "state": self.state.snapshot()}

    def free(self) -> None:
        pass


class States(dict[Any, Any]):
    """Stashed states by the hash of the page they end at; never full."""

    def __init__(self, model: Any, size: int) -> None:
        super().__init__()

    def put(self, key: Any, state: State) -> None:
        self.setdefault(key, state.stash())

    def get_stashed(self, key: Any, default: Any = None) -> Any:
        return self.get(key, default)

    def prune_stranded(self) -> None:
        pass


class BaseCache:
    """What a generator asks of a cache beside its states, which `get_new_state` and `resumed` make."""

    initialized = True
    recurrent_state_cls: Any

    def __init__(self, tokens: int, slots: int) -> None:
        self.max_num_tokens, self.num_slots = tokens, slots

    def new_from_stashed(self, stashed: dict[str, Any], position: int) -> Any:
        assert stashed["position"] == position
        return self.resumed(stashed)

    def resumed(self, stashed: dict[str, Any]) -> Any:
        raise NotImplementedError

    def reset_states(self) -> None:
        pass


class Cache(BaseCache):
    recurrent_state_cls = State

    def __init__(self, model: Any, tokens: int, slots: int) -> None:
        super().__init__(tokens, slots)
        self._model = model

    def get_new_state(self) -> State:
        return State(self._model.new_state())

    def resumed(self, stashed: dict[str, Any]) -> State:
        return State(stashed["state"].resume(), stashed["position"])


class BaseModel:
    """What a generator asks of a model beside its passes."""

    caps = {"recurrent_states": True}  # noqa: RUF012
    loaded_tp = False
    output_device = "cpu"

    def __init__(self, vocab_size: int) -> None:
        self.config = SimpleNamespace(vocab_size=vocab_size, infer_params=None)


class Model(BaseModel):
    """The forward passes of a generator, in float16 logits as on a GPU."""

    def __init__(self, model: Any, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.cpu = model

    def forward(self, input_ids: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        states: list[State] = params["recurrent_states"]
        rows = self.cpu.step([s.state for s in states], [int(i) for i in input_ids[:, 0]])
        for state in states:
            state.position += 1
        return torch.stack(rows).half()[:, None, :]

    def prefill(self, input_ids: torch.Tensor, params: dict[str, Any]) -> None:
        [state] = params["recurrent_states"]
        self.cpu.prefill(state.state, input_ids[0].tolist())
        state.position += input_ids.shape[-1]


class ExllamaTokenizer:
    """What a job asks of exllamav3's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.actual_vocab_size = tokenizer, tokenizer.size
        self._pieces = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in range(tokenizer.size)]

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        return self._pieces

    def decode(self, ids: torch.Tensor, decode_special_tokens: bool = False) -> list[str]:
        return [self._tokenizer.decode(ids[0].tolist()).decode("utf-8", "replace")]


class Engine(exllama.ExllamaEngine):
    """The GPU engine, but for scoring, which goes through a model's modules."""

    def _score(self, ids: list[int], top: int) -> list[TokenScore]:
        cpu = self._loaded.model.cpu
        logits = cpu.logits(cpu.prefill(cpu.new_state(), ids)).half()
        return [TokenScore(ids[0], None), *score_rows(logits[:-1], ids[1:], top, self.info.vocab_size)]


class Loaded(SimpleNamespace):
    """What the engine holds; whatever is not named here is None."""

    def __getattr__(self, name: str) -> None:
        return None


def make_engine(exllamav3: Any, model: Any, settings: Settings, vocab_size: int) -> Engine:
    """An engine whose worker thread runs exllamav3's generator."""
    tokenizer = Tokenizer(settings.model_dir)
    passes = SimpleNamespace(
        stream=0,
        counts={},
        lane=None,
        settled=True,
        begins=lambda: None,
        await_room=lambda: None,
        fault=lambda: None,
        between=lambda prompts_left: exllama.Upkeep.NONE,
        bracket=lambda tokens: nullcontext(),
    )
    runtime = SimpleNamespace(slot_bytes=1, stats=lambda s: {}, export_heat=lambda s: np.zeros(1, np.uint16))
    loaded = Loaded(
        exllamav3=exllamav3,
        model=Model(model, vocab_size),
        cache=Cache(model, settings.cache_tokens, 8),
        tokenizer=ExllamaTokenizer(tokenizer),
        tokens=SimpleNamespace(),
        store=SimpleNamespace(bytes=1),
        runtime=runtime,
        passes=passes,
        times={},
        slots=1,
        vocab_size=vocab_size,
        context=settings.cache_tokens,
        heat_file=settings.state_dir / "heat.npz",
        heat_key="none",
        close=lambda: None,
    )
    return Engine(loaded, settings, tokenizer)  # type: ignore[arg-type]
