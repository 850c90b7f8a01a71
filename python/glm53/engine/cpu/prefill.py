"""Many tokens of one stream through transformers' own decoder layers, on our state (KDA is ours, see kda.py).

`StateCache` answers the few calls glm5_next makes to its cache; rows are written into the stream's preallocated
buffers instead of being concatenated.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .state import KdaState, MlaState, StreamState


class _LayerView:
    """What glm5_next's indexer asks of `cache.layers[i]`."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys

    def get_seq_length(self) -> int:
        return int(self.keys.shape[-2])


class StateCache:
    """A transformers cache over one StreamState, for one call that appends `rows` tokens."""

    def __init__(self, state: StreamState, rows: int) -> None:
        self._state, self._start, self._end = state, state.length, state.length + rows
        self.layers: list[Any] = [None] * len(state.layers)

    def kda(self, layer: int) -> KdaState:
        """State of a KDA layer."""
        x = self._state.layers[layer]
        assert isinstance(x, KdaState)
        return x

    def _mla(self, layer: int) -> MlaState:
        x = self._state.layers[layer]
        assert isinstance(x, MlaState)
        return x

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append latents (1, 1, rows, kv_lora); returns all of them and the empty rotary part."""
        x = self._mla(layer_idx)
        x.reserve(self._end, self._start)
        x.latent[self._start : self._end] = key_states[0, 0]
        full = x.latent[: self._end][None, None]
        self.layers[layer_idx] = _LayerView(full)
        return full, full[..., :0]

    def update_indexer(self, packed: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Append packed indexer rows (1, rows, 2 * index_head_dim + 1); returns all of them."""
        x = self._mla(layer_idx)
        x.keys[self._start : self._end] = packed[0]
        return x.keys[: self._end][None]


def extend_pools(x: MlaState, rows: int, ape: torch.Tensor) -> None:
    """Compress the pools that are complete after `rows` tokens: softmax(gate + ape)-weighted mean of their keys.

    Source: glm5_next `get_pooled_states`; `ape` (kpool, index_head_dim).
    """
    kpool, dim = ape.shape
    first, last = x.pools_done, rows // kpool
    if last <= first:
        return
    packed = x.keys[first * kpool : last * kpool].view(last - first, kpool, -1)
    weights = (packed[..., dim : 2 * dim] + ape).softmax(dim=1)
    torch.sum(weights * packed[..., :dim], dim=1, out=x.pools[first:last])
    x.pools_done = last


def run(text_model: Any, state: StreamState, ids: torch.Tensor) -> torch.Tensor:
    """Feed ids (rows,) to a stream and advance its state. Returns the final hidden rows (rows, hidden), normed."""
    rows = ids.numel()
    cache = StateCache(state, rows)
    mask = torch.ones(1, rows, dtype=torch.bool)
    hidden = F.embedding(ids, text_model.embed_tokens.weight)[None]
    hidden = hidden.unsqueeze(2).expand(-1, -1, state.config.hc_mult, -1).contiguous()
    for i, layer in enumerate(text_model.layers):
        hidden, _ = layer(hidden, attention_mask=mask, cache=cache)
        x = state.layers[i]
        if isinstance(x, MlaState):
            extend_pools(x, state.length + rows, layer.self_attn.indexer.index_kpool_compress_ape)
    state.length += rows
    final: torch.Tensor = text_model.norm(text_model.hc_head(hidden))
    return final[0]
