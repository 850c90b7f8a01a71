"""Stand-in for the cache of small buffers that exllamav3's modules share."""

from __future__ import annotations

import torch


class GTensorCache:
    def __init__(self) -> None:
        self.asked: list[tuple] = []

    def get_bucketed(self, device, numel, dtype, x=""):
        self.asked.append((device, numel, dtype, x))
        return torch.zeros(numel, dtype=dtype, device=device)


g_tensor_cache = GTensorCache()
