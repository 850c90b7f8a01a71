"""The loaded model of the CPU engine: transformers modules, native experts, and the two ways through them.

States: constant after `load`, but for counters and the optional routing trace (engine thread only), which `close`
writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from ... import _core
from ...checkpoint import Checkpoint, ModelConfig, require_ram
from ...checkpoint.layout import Plain, expected
from ..protocol import Progress
from . import glm5_next, prefill
from .decode import Decoder
from .experts import ExpertStore, RoutedExperts, layer_bytes
from .state import StreamState

_DENSE_BYTES_PER_THREAD = 512 << 20
"""Dense weights for which one more torch thread pays; below, its spinning barriers cost more than it gains, and on a
busy machine ten times more. The expert kernels have their own threads."""


def ram_needed(checkpoint: Checkpoint) -> int:
    """Bytes the loaded model will hold: float32 dense weights and the routed experts as stored."""
    dense = 0
    for item in expected(checkpoint.config):
        if isinstance(item, Plain):
            dense += 4 * int(np.prod(item.shape))
        elif not item.expert:
            dense += 4 * item.in_features * item.out_features
    return dense + sum(layer_bytes(checkpoint.experts(i)) for i in checkpoint.config.moe_layers)


class CpuModel:
    """Prefill and decode over StreamStates. One thread at a time."""

    def __init__(
        self, checkpoint: Checkpoint, threads: int, progress: Progress, trace: Path | None = None, isa: str = "auto"
    ) -> None:
        self.config: ModelConfig = checkpoint.config
        require_ram(ram_needed(checkpoint), f"loading {checkpoint.path}")
        self._store = ExpertStore(checkpoint, progress)
        model = glm5_next.build(checkpoint, progress)
        checkpoint.verify_unchanged()
        self._moe = _core.CpuMoe(threads, isa=isa)
        self._text, self._head = model.model.language_model, model.lm_head.weight
        self._experts = []
        for i, table in self._store.tables.items():
            experts = RoutedExperts(self._moe, table)
            self._text.layers[i].mlp.experts = experts
            self._experts.append(experts)
        dense = sum(p.nbytes for p in model.parameters())
        self._torch_threads = max(1, min(threads, dense // _DENSE_BYTES_PER_THREAD))
        self._decoder = Decoder(model, self.config)
        self.rows = 0
        self._trace = _Trace(trace, self._experts, self.config) if trace and self._experts else None

    @property
    def isa(self) -> str:
        """Instruction set of the expert kernels in use."""
        return str(self._moe.isa)

    def new_state(self) -> StreamState:
        """State of a stream before its first token."""
        return StreamState(self.config)

    def prefill(self, state: StreamState, ids: Sequence[int]) -> torch.Tensor:
        """Feed tokens to one stream. Returns hidden rows (tokens, hidden) for `logits`."""
        torch.set_num_threads(self._torch_threads)
        with self._counted(len(ids)):
            hidden = prefill.run(self._text, state, torch.tensor(ids))
        if self._trace:
            self._trace.add(is_prefill=True)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (rows, hidden) -> logits (rows, vocabulary) float32."""
        return F.linear(hidden, self._head)

    def step(self, states: Sequence[StreamState], ids: Sequence[int]) -> list[torch.Tensor | Exception]:
        """Feed one token to each stream. Returns each one's logits (vocabulary,) float32, or what stopped it: its state
        is then lost, and the others are none the worse."""
        torch.set_num_threads(self._torch_threads)
        results: list[torch.Tensor | Exception] = []
        for state, token in zip(states, ids, strict=True):
            try:
                with self._counted(1):
                    results.append(self._decoder.step(state, token))
            except Exception as e:
                results.append(e)
        if self._trace and any(isinstance(r, torch.Tensor) for r in results):
            self._trace.add(is_prefill=False)
        return results

    @contextmanager
    def _counted(self, rows: int) -> Iterator[None]:
        """Count a pass over `rows` rows if it reaches its end."""
        marks = [e.mark() for e in self._experts]
        try:
            yield
        except BaseException:
            for e, mark in zip(self._experts, marks, strict=True):
                e.rewind(mark)
            raise
        self.rows += rows

    def stats(self) -> dict[str, Any]:
        """What the native experts did, and whether that is every pick the router made."""
        c = self.config
        return {
            "routed_picks_expected": self.rows * len(c.moe_layers) * c.num_experts_per_tok,
            "routed_picks_served": sum(e.picks for e in self._experts),
            "expert_bytes": self._store.nbytes,
            "cpu_moe": dict(self._moe.stats()),
        }

    def close(self) -> None:
        """Write the routing trace, if one was asked for."""
        if self._trace:
            self._trace.save()


class _Trace:
    """npz of routed picks as bench/trace_replay.py reads them, one row a step.

    `picks` (decode rows, moe_layers, k) and `prefill_picks` (prompt rows, moe_layers, k) int16; `step` (decode rows,)
    int32 says which rows were decoded in one step; `experts` and `rows` (= 1) scalars.
    """

    def __init__(self, path: Path, experts: list[RoutedExperts], config: ModelConfig) -> None:
        self._path, self._experts, self._steps, self._config = path, experts, 0, config
        self._decode: list[npt.NDArray[np.int16]] = []
        self._prefill: list[npt.NDArray[np.int16]] = []
        self._step: list[int] = []
        for e in experts:
            e.trace = []

    def add(self, is_prefill: bool) -> None:
        picks = np.stack([np.concatenate(e.trace or []) for e in self._experts], axis=1).astype(np.int16)
        for e in self._experts:
            e.trace = []
        if is_prefill:
            self._prefill.append(picks)
        else:
            self._decode.append(picks)
            self._step += [self._steps] * picks.shape[0]
            self._steps += 1

    def save(self) -> None:
        none = np.zeros((0, len(self._experts), self._config.num_experts_per_tok), np.int16)
        np.savez_compressed(
            self._path,
            picks=np.concatenate([none, *self._decode]),
            prefill_picks=np.concatenate([none, *self._prefill]),
            step=np.array(self._step, np.int32),
            experts=self._config.n_routed_experts,
            rows=1,
        )
