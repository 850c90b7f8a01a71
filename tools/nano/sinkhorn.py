"""Sinkhorn normalisation of 4x4 matrices as one Triton kernel each way; fifty small kernels otherwise, sixteen
times a step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64


@triton.jit
def _advance(m, steps, eps):  # type: ignore[no-untyped-def]
    # Even steps normalise columns (sum over the row index), odd steps rows
    for s in range(steps):
        if s % 2 == 0:  # noqa: SIM108
            m = m / (tl.sum(m, axis=1)[:, None, :] + eps)
        else:
            m = m / (tl.sum(m, axis=2)[:, :, None] + eps)
    return m


# One function a branch: names of a branch that differ in shape do not compile
@triton.jit
def _columns_back(m, g, eps):  # type: ignore[no-untyped-def]
    total = tl.sum(m, axis=1)[:, None, :] + eps
    return (g - tl.sum(g * m, axis=1)[:, None, :] / total) / total


@triton.jit
def _rows_back(m, g, eps):  # type: ignore[no-untyped-def]
    total = tl.sum(m, axis=2)[:, :, None] + eps
    return (g - tl.sum(g * m, axis=2)[:, :, None] / total) / total


@triton.jit
def _forward_kernel(x, y, count, steps, eps, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i, j = tl.arange(0, 4), tl.arange(0, 4)
    at = rows[:, None, None] * 16 + i[None, :, None] * 4 + j[None, None, :]
    inside = (rows < count)[:, None, None] & (i < 4)[None, :, None] & (j < 4)[None, None, :]
    m = tl.load(x + at, mask=inside, other=0.25)
    tl.store(y + at, _advance(m, steps, eps), mask=inside)


@triton.jit
def _backward_kernel(x, dy, dx, count, steps, eps, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i, j = tl.arange(0, 4), tl.arange(0, 4)
    at = rows[:, None, None] * 16 + i[None, :, None] * 4 + j[None, None, :]
    inside = (rows < count)[:, None, None] & (i < 4)[None, :, None] & (j < 4)[None, None, :]
    m0 = tl.load(x + at, mask=inside, other=0.25)
    g = tl.load(dy + at, mask=inside, other=0.0)
    for back in range(steps):
        s = steps - 1 - back
        m = _advance(m0, s, eps)  # recomputed: cheaper than keeping 40 matrices
        if s % 2 == 0:  # noqa: SIM108
            g = _columns_back(m, g, eps)
        else:
            g = _rows_back(m, g, eps)
    tl.store(dx + at, g, mask=inside)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comb: Tensor, iterations: int, eps: float) -> Tensor:
        x = comb.contiguous()
        y, count, steps = torch.empty_like(x), x.numel() // 16, 2 * iterations - 1
        _forward_kernel[(triton.cdiv(count, ROWS),)](x, y, count, steps, eps, ROWS=ROWS)
        ctx.save_for_backward(x)
        ctx.steps, ctx.eps = steps, eps
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        dx, count = torch.empty_like(x), x.numel() // 16
        _backward_kernel[(triton.cdiv(count, ROWS),)](
            x, grads[0].contiguous(), dx, count, ctx.steps, ctx.eps, ROWS=ROWS
        )
        return dx, None, None


def sinkhorn_cuda(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """Doubly stochastic limit of float32 matrices [..., 4, 4]; the same steps as `fastnet.sinkhorn`."""
    result: Tensor = _Sinkhorn.apply(comb, iterations, eps)
    return result
