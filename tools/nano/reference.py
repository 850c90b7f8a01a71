"""What trained float32 weights do on held-out documents: loss, picks, drafts, and how far stock's rounding moves them.

The rounding is that of stock exllamav3 in KDA (bfloat16 into and out of the convolution and out of the recurrence),
most of its distance from float32: an early view of what the CPU engine and stock will differ by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import fastnet, mtp, stock


@dataclass(frozen=True)
class Document:
    """Figures of one document; per MoE layer where they are lists; counts are positions."""

    text: bool
    positions: int
    loss: float
    picks: Tensor
    clamped: list[float]
    edges: list[float]
    drafts_right: int
    moved: float
    unmoved: int


def _b16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def rounding_ops() -> fastnet.Ops:
    """The plain parts with KDA's convolution and output rounded to bfloat16."""
    return fastnet.Ops(
        conv_silu=lambda x, weight, same: _b16(fastnet.conv_silu(_b16(x), weight, same)),
        gated_norm=lambda x, gate, weight, eps: fastnet.gated_norm(_b16(x), gate, weight, eps),
    )


@torch.no_grad()
def examine(model: Any, ids: np.ndarray, text: bool, device: torch.device) -> tuple[Document, Tensor]:
    """One document, alone, in float32; also its logits [T, V], on the device."""
    count = len(ids)
    tokens = torch.from_numpy(ids.astype(np.int64))[None].to(device)
    padded = torch.nn.functional.pad(tokens, (0, -count % 64))
    fresh = torch.zeros_like(padded, dtype=torch.bool)
    fresh[:, 0] = True
    step = fastnet.Step(fastnet.Ops(), torch.float32, fresh, clamped=[])
    logits = fastnet.forward(model, padded, step)[0, :count].float()
    picks, edges, clamped = list(step.picks), list(step.edges), [float(c) for c in step.clamped or []]
    drafted = mtp.forward(model, padded, step)[0, :count]
    rounded = fastnet.forward(model, padded, fastnet.Step(rounding_ops(), torch.float32, fresh))[0, :count]
    p, q = logits.double().log_softmax(-1), rounded.double().log_softmax(-1)
    found = Document(
        text=text,
        positions=count,
        loss=stock.nll(logits.cpu(), ids)[0],
        picks=torch.stack([x[:count] for x in picks], 1).to(torch.int16).cpu(),
        clamped=clamped,
        edges=[float(e[:count].mean()) for e in edges],
        drafts_right=int((drafted.argmax(-1) == logits.argmax(-1)).sum()),
        moved=float((p.exp() * (p - q)).sum()),
        unmoved=int((p.argmax(-1) == q.argmax(-1)).sum()),
    )
    return found, logits


def _rounding(documents: Sequence[Document]) -> dict[str, float]:
    count = sum(d.positions for d in documents)
    kl, same = sum(d.moved for d in documents) / count, sum(d.unmoved for d in documents) / count
    return {"positions": count, "kl": kl, "top1": same}


def summary(documents: Sequence[Document]) -> dict[str, Any]:
    """The record of all documents together; `rounding` also for dialogues and running text apart."""
    count = sum(d.positions for d in documents)
    nll = sum(d.loss for d in documents) / (count - len(documents))
    clamped = np.mean([d.clamped for d in documents], axis=0)
    kinds = {"all": documents} | {
        name: [d for d in documents if d.text is running] for name, running in (("chat", False), ("text", True))
    }
    return {
        "fp32_nll": nll,
        "fp32_ppl": math.exp(nll),
        "clamp_share_of_active_units": float(clamped.mean()),
        "clamp_share_by_layer": clamped.tolist(),
        "edge_share_by_layer": np.mean([d.edges for d in documents], axis=0).tolist(),
        "drafts_as_model": sum(d.drafts_right for d in documents) / count,
        "rounding": {name: _rounding(part) for name, part in kinds.items() if part},
    }
