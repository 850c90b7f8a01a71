"""EXL3 linears decoded to dense float32, vectorised; used for everything but the routed experts.

Format: W = diag(suh) . H . W_inner . H . diag(svh), H block diagonal with Sylvester Hadamard(128) / sqrt(128).
A 16x16 tile is a tail-biting ring of 256 positions over 256 K bits, read MSB first from little-endian uint32 words;
the 16 bits ending at a position's last bit are its state, and the codebook maps a state to a float16 value.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
import torch

from ...checkpoint import Exl3Linear

_MCG, _MUL1 = 0xCBAC1FED, 0x83DCD12D
_INST3_MUL, _INST3_ADD = 89226354, 64248484


@functools.cache
def _values(codebook: str) -> torch.Tensor:
    """The 65,536 values of a codebook as float32 (exactly representable in float16)."""
    s = np.arange(65536, dtype=np.uint64)
    if codebook == "mul1":
        x = (s * np.uint64(_MUL1)) & np.uint64(0xFFFFFFFF)
        byte_sum = np.stack([(x >> np.uint64(8 * i)) & np.uint64(255) for i in range(4)]).sum(0).astype(np.float64)
        scale, bias = (float(np.uint16(v).view(np.float16)) for v in (0x1EEE, 0xC931))
        half = ((1024.0 + byte_sum) * scale + bias).astype(np.float16)
    else:
        product = s * np.uint64(_MCG) if codebook == "mcg" else s * np.uint64(_INST3_MUL) + np.uint64(_INST3_ADD)
        x = (product & np.uint64(0x8FFF8FFF)) ^ np.uint64(0x3B603B60)
        low = (x & np.uint64(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32)
        high = ((x >> np.uint64(16)) & np.uint64(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32)
        half = (low + high).astype(np.float16)
    return torch.from_numpy(half.astype(np.float32))


@functools.cache
def _windows(bits: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """For each ROW-MAJOR tile element: the two uint32 words its state spans, and the right shift that aligns it."""
    t = np.arange(256)
    steps = np.full(256, int(bits)) if float(bits).is_integer() else int(bits) + (t & 1)
    ends = np.cumsum(steps)
    total = int(ends[-1])
    start = (ends - 16) % total
    first = start // 32
    second = (first + 1) % (total // 32)
    shift = (64 - 16 - start % 32).astype(np.uint64)
    lane, j = t >> 3, t & 7
    row = (lane & 3) * 2 + (j & 1) + 8 * ((j >> 1) & 1)
    col = (lane >> 2) + 8 * ((j >> 2) & 1)
    order = np.argsort(row * 16 + col)
    return first[order], second[order], shift[order]


@functools.cache
def _hadamard() -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < 128:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return (h / math.sqrt(128)).float()


def _inner(trellis: npt.NDArray[np.int16], bits: float, codebook: str) -> torch.Tensor:
    """Rotated weight (in, out) of a band of tiles (in/16, out/16, 16 K)."""
    words = np.ascontiguousarray(trellis).view(np.uint32).astype(np.uint64)
    first, second, shift = _windows(bits)
    states = (((words[..., first] << np.uint64(32)) | words[..., second]) >> shift).astype(np.uint16)
    values = _values(codebook)[torch.from_numpy(states.astype(np.int32)).long()]
    kt, nt = trellis.shape[:2]
    return values.view(kt, nt, 16, 16).transpose(1, 2).reshape(kt * 16, nt * 16)


def dense(linear: Exl3Linear) -> torch.Tensor:
    """Weight (out_features, in_features) float32 of one linear, padding trimmed.

    Works in bands of 128 input rows, so that the temporaries stay small whatever the linear's size.
    """
    h = _hadamard()
    suh, svh = torch.from_numpy(linear.suh.astype(np.float32)), torch.from_numpy(linear.svh.astype(np.float32))
    k, n = suh.numel(), svh.numel()
    out = torch.empty(k, n)
    for i in range(0, k, 128):
        band = h @ _inner(linear.trellis[i // 16 : i // 16 + 8], linear.bits, linear.codebook)
        band *= suh[i : i + 128, None]
        out[i : i + 128] = (band.view(128, n // 128, 128) @ h).view(128, n) * svh
    return out.T[: linear.out_features, : linear.in_features].contiguous()
