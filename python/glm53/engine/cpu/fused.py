"""Small pieces that prefill and decode share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F


def fuse(modules: Sequence[Any], last: tuple[Any, str] | None = None) -> torch.Tensor:
    """One weight holding the rows of the modules' weights (and of one named parameter); they become views of it."""
    places = [(m, "weight") for m in modules] + ([last] if last else [])
    weight = torch.cat([getattr(m, name) for m, name in places])
    at = 0
    for m, name in places:
        n = getattr(m, name).shape[0]
        setattr(m, name, torch.nn.Parameter(weight[at : at + n], requires_grad=False))
        at += n
    return weight


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)
