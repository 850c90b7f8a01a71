"""The training's Triton kernels compile for a GPU that need not be here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.nano import sinkhorn  # noqa: E402

POINTERS = {"_forward_kernel": ("x", "y"), "_backward_kernel": ("x", "dy", "dx")}


@pytest.mark.parametrize("name", POINTERS)
def test_sinkhorn_compiles_for_sm_90(name: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict.fromkeys(POINTERS[name], "*fp32") | {"count": "i32", "steps": "i32", "eps": "fp32"}
    source = ASTSource(getattr(sinkhorn, name), {**signature, "ROWS": "constexpr"}, constexprs={"ROWS": sinkhorn.ROWS})
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
