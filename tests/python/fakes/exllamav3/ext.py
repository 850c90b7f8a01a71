"""Stand-in for the compiled extension: host memory is the device's memory."""

from __future__ import annotations

from types import SimpleNamespace

import torch


def pinned_cuda_view(tensor: torch.Tensor, device: int) -> torch.Tensor:
    return tensor


exllamav3_ext = SimpleNamespace(pinned_cuda_view=pinned_cuda_view)
