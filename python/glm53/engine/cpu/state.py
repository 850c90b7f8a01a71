"""What one stream remembers, outside the model: KDA states, MLA latents and the indexer's planes.

States of a buffer: rows [0, length) are written once and never change, rows beyond are free; so snapshots may share a
buffer with the stream that still appends to it. KDA states are overwritten at every token and are cloned by snapshots.
Threads: the engine thread only. Costs: an MLA layer grows by doubling (one copy each time); a snapshot clones the KDA
states (the real model: 156 MB) and takes references to the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...checkpoint import ModelConfig

_FIRST_ROWS = 256


@dataclass(slots=True)
class KdaState:
    """conv (1, 3 * kda_dim, kernel): the last inputs; recurrent (1, heads, head_dim, head_dim) float32."""

    conv: torch.Tensor
    recurrent: torch.Tensor

    def clone(self) -> KdaState:
        """An independent copy."""
        return KdaState(self.conv.clone(), self.recurrent.clone())

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.conv.nbytes + self.recurrent.nbytes


class MlaState:
    """latent (rows, kv_lora_rank), keys (rows, 2 * index_head_dim + 1), pools (rows / kpool, index_head_dim).

    `keys` packs indexer key, gate score and a flag, as transformers does.
    The last channel of `keys` is transformers' "valid" flag, always 1 here. `pools` holds the compressed key of every
    complete pool; transformers rebuilds them at each step.
    """

    __slots__ = ("keys", "kpool", "latent", "pools", "pools_done")

    def __init__(self, c: ModelConfig, rows: int = _FIRST_ROWS) -> None:
        self.kpool = c.index_kpool
        self.latent = torch.empty(rows, c.kv_lora_rank)
        self.keys = torch.empty(rows, 2 * c.index_head_dim + 1)
        self.pools = torch.empty(-(-rows // c.index_kpool), c.index_head_dim)
        self.pools_done = 0

    def reserve(self, rows: int, used: int) -> None:
        """Make room for `rows` rows, keeping the first `used`; old buffers stay with the snapshots that hold them."""
        if rows <= self.latent.shape[0]:
            return
        size = max(rows, 2 * self.latent.shape[0])
        for name, n, keep in (("latent", size, used), ("keys", size, used),
                              ("pools", -(-size // self.kpool), self.pools_done)):  # fmt: skip
            old = getattr(self, name)
            new = torch.empty(n, old.shape[1])
            new[:keep] = old[:keep]
            setattr(self, name, new)

    def copy_prefix(self, c: ModelConfig, rows: int) -> MlaState:
        """An independent state holding the first `rows` rows."""
        new = MlaState(c, max(_FIRST_ROWS, rows + _FIRST_ROWS))
        new.latent[:rows] = self.latent[:rows]
        new.keys[:rows] = self.keys[:rows]
        new.pools_done = min(self.pools_done, rows // c.index_kpool)
        new.pools[: new.pools_done] = self.pools[: new.pools_done]
        return new

    def share(self) -> MlaState:
        """A second handle on the same buffers (for a snapshot)."""
        new = object.__new__(MlaState)
        for name in self.__slots__:
            setattr(new, name, getattr(self, name))
        return new

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.latent.nbytes + self.keys.nbytes + self.pools.nbytes


class StreamState:
    """All layers' states after `length` tokens."""

    def __init__(self, c: ModelConfig) -> None:
        self.config = c
        self.length = 0
        self.layers: list[KdaState | MlaState] = [
            KdaState(
                torch.zeros(1, 3 * c.kda_dim, c.kda_conv_kernel),
                torch.zeros(1, c.kda_num_heads, c.kda_head_dim, c.kda_head_dim),
            )
            if kind == "linear_attention"
            else MlaState(c)
            for kind in c.layer_types
        ]

    def reserve(self, rows: int) -> None:
        """Make room for `rows` tokens in every layer. Raises RuntimeError (torch) when memory is refused."""
        for x in self.layers:
            if isinstance(x, MlaState):
                x.reserve(rows, self.length)

    def snapshot(self) -> StreamState:
        """The state as it is now; the stream may go on, the snapshot does not change. Never advance a snapshot."""
        new = object.__new__(StreamState)
        new.config, new.length = self.config, self.length
        new.layers = [x.clone() if isinstance(x, KdaState) else x.share() for x in self.layers]
        return new

    def resume(self) -> StreamState:
        """An independent state to go on from, leaving this snapshot as it is."""
        new = object.__new__(StreamState)
        new.config, new.length = self.config, self.length
        new.layers = [
            x.clone() if isinstance(x, KdaState) else x.copy_prefix(self.config, self.length) for x in self.layers
        ]
        return new
