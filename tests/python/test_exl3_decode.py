"""The native EXL3 reference decoder against the Python one (itself bit-equal to exllamav3's CUDA kernels)."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from glm53 import _core

sys.path.insert(0, str(Path(__file__).parents[1] / "oracle"))
import exl3_ref

WHOLE = [(k, codebook) for k in range(1, 9) for codebook in ("3inst", "mcg", "mul1")]
HALF = [(k, "mul1") for k in (1.5, 2.5, 3.5)]


def random_trellis(bits: float, k_tiles: int = 3, n_tiles: int = 5) -> np.ndarray:
    rng = np.random.default_rng(int(bits * 2))
    return rng.integers(0, 65536, (k_tiles, n_tiles, int(16 * bits)), dtype=np.uint16)


@pytest.mark.parametrize(("bits", "codebook"), WHOLE + HALF)
def test_decode_is_bit_equal(bits: float, codebook: str) -> None:
    trellis = random_trellis(bits)
    np.testing.assert_array_equal(_core.exl3_states(trellis), exl3_ref.decode_states(trellis))
    weight = _core.exl3_inner_weight(trellis, codebook)
    assert weight.dtype == np.uint16
    np.testing.assert_array_equal(weight, exl3_ref.inner_weight(trellis, codebook).view(np.uint16))


@pytest.mark.parametrize("codebook", ["3inst", "mcg", "mul1"])
def test_every_state_of_a_codebook(codebook: str) -> None:
    """Random K = 8 tiles, enough of them to meet all 65,536 states."""
    rng = np.random.default_rng(0)
    trellis = rng.integers(0, 65536, (64, 64, 128), dtype=np.uint16)
    states = _core.exl3_states(trellis)
    assert np.unique(states).size == 65536
    weight = _core.exl3_inner_weight(trellis, codebook)
    np.testing.assert_array_equal(weight, exl3_ref.inner_weight(trellis, codebook).view(np.uint16))


def test_torch_int16_is_accepted() -> None:
    trellis = random_trellis(3)
    as_torch = torch.from_numpy(trellis.view(np.int16))
    np.testing.assert_array_equal(_core.exl3_states(as_torch), _core.exl3_states(trellis))


def test_signs() -> None:
    words = np.array([0x0001, 0x8000, 0x1234], dtype=np.uint16)
    expected = exl3_ref.unpack_signs(words).numpy()
    np.testing.assert_array_equal(_core.exl3_signs(words).view(np.float16), expected)


@pytest.mark.parametrize("words", [0, 8, 17, 72, 144])
def test_unknown_rate_is_refused(words: int) -> None:
    with pytest.raises(ValueError, match=f"tile of {words} words"):
        _core.exl3_states(np.zeros((1, 1, words), np.uint16))


def test_half_rate_needs_mul1() -> None:
    with pytest.raises(ValueError, match="mul1"):
        _core.exl3_inner_weight(random_trellis(2.5), "mcg")


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="codebook 'mul2'"):
        _core.exl3_inner_weight(random_trellis(3), "mul2")
    with pytest.raises(ValueError, match="16-bit"):
        _core.exl3_states(np.zeros((1, 1, 48), np.int32))
