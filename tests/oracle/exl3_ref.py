"""
Reference (slow, exact) EXL3 decoder in numpy/torch, written from the format, CPU only. Checked bit-equal to exllamav3
1.5.1's own CUDA `reconstruct` for K = 1..8 with all three codebooks and for 1.5/2.5/3.5 with mul1: the oracle of the tests.

  decode_states(trellis)             (KT, NT, W) int16/uint16 -> (KT, NT, 256) uint16 states, tensor-core order
  codebook(states, cb)               uint16 states -> fp16 values; cb in {"3inst", "mcg", "mul1"}
  inner_weight(trellis, cb)          -> (in, out) fp16: what ext.reconstruct() writes ("rotated basis")
  weight(trellis, suh, svh, cb)      -> (in, out): x @ W; HF weight is W.T
  linear(x, ...)                     -> the same product done as had(x * suh) @ W_inner, had, * svh
"""
from __future__ import annotations
import math
import numpy as np
import torch

MUL1 = 0x83DCD12D
MCG = 0xCBAC1FED
CB_STD = {"3inst": 1.24, "mcg": 1.24, "mul1": 1.0003}


# ---------------------------------------------------------------- K
def k_of(trellis) -> float | int:
    w = trellis.shape[-1]
    k = w / 16
    return int(k) if float(k).is_integer() else k


def step_bits(K) -> np.ndarray:
    """New bits contributed by each of the 256 ring positions."""
    if isinstance(K, int) or float(K).is_integer():
        return np.full(256, int(K), np.int64)
    ka = int(K)
    assert abs(K - ka - 0.5) < 1e-9 and 1 <= ka <= 3
    return ka + (np.arange(256) & 1)          # odd positions carry the extra bit (MASK 0xAAAA)


# ---------------------------------------------------------------- tile permutation
def tc_perm() -> np.ndarray:
    """perm[t] = row * 16 + col of ring position t (row: in_features, col: out_features)"""
    t = np.arange(256)
    lane, j = t >> 3, t & 7
    row = (lane & 3) * 2 + (j & 1) + ((j >> 1) & 1) * 8
    col = (lane >> 2) + ((j >> 2) & 1) * 8
    return row * 16 + col


PERM = tc_perm()


# ---------------------------------------------------------------- bits
def _as_u16(trellis) -> np.ndarray:
    if isinstance(trellis, torch.Tensor):
        trellis = trellis.detach().cpu().contiguous().numpy()
    return np.ascontiguousarray(trellis).view(np.uint16)


def ring_bits(trellis) -> np.ndarray:
    """(..., W) uint16 -> (..., 16 W) 0/1, in stream order. The tile is little-endian uint32 words, each holding
    32 stream bits MSB first: equivalently the uint16 words are swapped in pairs, each MSB first."""
    u = _as_u16(trellis)
    sh = u.shape
    assert sh[-1] % 2 == 0
    u = u.reshape(*sh[:-1], sh[-1] // 2, 2)[..., ::-1].reshape(sh)
    bits = (u[..., None] >> np.arange(15, -1, -1, dtype = np.uint16)) & 1
    return bits.reshape(*sh[:-1], sh[-1] * 16).astype(np.uint8)


def decode_states(trellis) -> np.ndarray:
    K = k_of(trellis)
    bits = ring_bits(trellis)
    R = bits.shape[-1]
    d = step_bits(K)
    S = np.cumsum(d)
    assert S[-1] == R, (S[-1], R)
    out = np.zeros(bits.shape[:-1] + (256,), np.uint32)
    for b in range(16):                       # window = stream bits [S - 16, S), first bit is the MSB
        out = (out << 1) | bits[..., (S - 16 + b) % R]
    return out.astype(np.uint16)


def pack_states(states: np.ndarray, K) -> np.ndarray:
    """Inverse: keep each state's low D bits, in order (states need not be consistent; only low bits matter)"""
    d = step_bits(K)
    S = np.cumsum(d)
    R = int(S[-1])
    bits = np.zeros(states.shape[:-1] + (R,), np.uint16)
    for t in range(256):
        for b in range(d[t]):
            bits[..., S[t] - d[t] + b] = (states[..., t] >> (d[t] - 1 - b)) & 1
    w = bits.reshape(*bits.shape[:-1], R // 16, 16)
    u = (w << np.arange(15, -1, -1, dtype = np.uint16)).sum(-1).astype(np.uint16)
    u = u.reshape(*u.shape[:-1], u.shape[-1] // 2, 2)[..., ::-1].reshape(u.shape)
    return np.ascontiguousarray(u).view(np.int16)


# ---------------------------------------------------------------- codebooks
def codebook(states: np.ndarray, cb: str) -> np.ndarray:
    s = states.astype(np.uint64)
    M32 = np.uint64(0xFFFFFFFF)
    if cb in ("3inst", "mcg"):
        x = (s * np.uint64(89226354) + np.uint64(64248484)) & M32 if cb == "3inst" else (s * np.uint64(MCG)) & M32
        x = (x & np.uint64(0x8FFF8FFF)) ^ np.uint64(0x3B603B60)
        lo = (x & np.uint64(0xFFFF)).astype(np.uint16).view(np.float16)
        hi = (x >> np.uint64(16)).astype(np.uint16).view(np.float16)
        return (lo.astype(np.float32) + hi.astype(np.float32)).astype(np.float16)     # one rounding, = __hadd
    if cb == "mul1":
        x = (s * np.uint64(MUL1)) & M32
        sm = sum(((x >> np.uint64(8 * i)) & np.uint64(255)) for i in range(4)).astype(np.float64)
        # fp16 fma of the half 1024 + sm (bits 0x6400 + sm), k = 0x1eee, bias = 0xc931; exact in double, one rounding
        k = np.uint16(0x1EEE).view(np.float16).astype(np.float64)
        b = np.uint16(0xC931).view(np.float16).astype(np.float64)
        return ((1024.0 + sm) * k + b).astype(np.float16)
    raise ValueError(cb)


_LUT: dict[str, np.ndarray] = {}


def lut(cb: str) -> np.ndarray:
    if cb not in _LUT:
        _LUT[cb] = codebook(np.arange(65536, dtype = np.uint16), cb)
    return _LUT[cb]


# ---------------------------------------------------------------- weights
def inner_weight(trellis, cb: str) -> np.ndarray:
    st = decode_states(trellis)
    kt, nt, _ = st.shape
    v = lut(cb)[st]
    tile = np.empty_like(v)
    tile[..., PERM] = v                                     # row-major 16x16
    return tile.reshape(kt, nt, 16, 16).transpose(0, 2, 1, 3).reshape(kt * 16, nt * 16)


def had128() -> torch.Tensor:
    h = torch.ones(1, 1, dtype = torch.float64)
    while h.shape[0] < 128:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h / math.sqrt(128)


def unpack_signs(s) -> torch.Tensor:
    """Legacy su/sv: 16 signs per int16, LSB first; bit set = -1"""
    u = torch.from_numpy(_as_u16(s).astype(np.int32))
    return (1.0 - 2.0 * ((u[:, None] >> torch.arange(16)) & 1).float()).flatten().half()


def weight(trellis, suh, svh, cb: str, dtype = torch.float32) -> torch.Tensor:
    """(in, out) original-basis weight: diag(suh) . H . W_inner . H . diag(svh)"""
    w = torch.from_numpy(inner_weight(trellis, cb).astype(np.float32)).to(dtype)
    k, n = w.shape
    h = had128().to(dtype)
    w = (h @ w.view(k // 128, 128, n)).view(k, n)
    w *= suh.to(dtype).view(k, 1)
    w = (w.view(k, n // 128, 128) @ h).view(k, n)
    w *= svh.to(dtype).view(1, n)
    return w


def linear(x: torch.Tensor, trellis, suh, svh, cb: str, bias = None) -> torch.Tensor:
    w = torch.from_numpy(inner_weight(trellis, cb).astype(np.float32)).to(x.dtype)
    h = had128().to(x.dtype)
    xh = ((x * suh.to(x.dtype)).view(*x.shape[:-1], -1, 128) @ h).view(x.shape)
    y = xh @ w
    y = (y.view(*y.shape[:-1], -1, 128) @ h).view(y.shape) * svh.to(x.dtype)
    return y if bias is None else y + bias.to(x.dtype)


def cb_of(tensors: dict, key: str) -> str:
    return "mul1" if f"{key}.mul1" in tensors else "mcg" if f"{key}.mcg" in tensors else "3inst"


# ---------------------------------------------------------------- random EXL3 tensors
def random_exl3(k: int, n: int, K, cb: str, gen: torch.Generator, std: float | None = None) -> dict:
    """Any bit pattern is a valid (tail-biting) trellis. Scales give W an elementwise std of `std` (1/sqrt(k))."""
    assert k % 128 == 0 and n % 128 == 0
    std = std if std is not None else 1 / math.sqrt(k)
    words = int(16 * K)
    tr = torch.randint(-32768, 32768, (k // 16, n // 16, words), generator = gen, dtype = torch.int32).to(torch.int16)
    def sc(m, a):
        s = torch.randint(0, 2, (m,), generator = gen).float() * 2 - 1
        return (s * a * (0.8 + 0.4 * torch.rand(m, generator = gen))).half()
    r = 1.0 / math.sqrt(1 + 0.4 ** 2 / 12) ** 1                    # jitter rms correction
    out = {"trellis": tr, "suh": sc(k, std * r / CB_STD[cb]), "svh": sc(n, r)}
    if cb == "mul1": out["mul1"] = torch.tensor(np.uint32(MUL1).view(np.int32).item(), dtype = torch.int32)
    if cb == "mcg": out["mcg"] = torch.tensor(np.uint32(MCG).view(np.int32).item(), dtype = torch.int32)
    return out


if __name__ == "__main__":
    g = torch.Generator().manual_seed(0)
    for cb in ("3inst", "mcg", "mul1"):
        t = lut(cb).astype(np.float64)
        print(cb, "lut mean %.6f std %.5f min %.4f max %.4f distinct %d" %
              (t.mean(), t.std(), t.min(), t.max(), len(np.unique(lut(cb).view(np.uint16)))))
    for K in (1, 2, 3, 4, 5, 6, 7, 8, 1.5, 2.5, 3.5):
        e = random_exl3(256, 384, K, "mul1", g)
        st = decode_states(e["trellis"])
        assert np.array_equal(pack_states(st, K), e["trellis"].numpy()), K
        w = weight(e["trellis"], e["suh"], e["svh"], "mul1", torch.float64)
        x = torch.randn(5, 256, dtype = torch.float64)
        y = linear(x, e["trellis"], e["suh"], e["svh"], "mul1")
        print("K", K, "pack/unpack ok; W std * sqrt(k) = %.4f; |x@W - linear| = %.2e" %
              (w.std().item() * 16, (x @ w - y).abs().max().item()))
