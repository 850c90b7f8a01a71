"""Whether the hooks fit exllamav3's own Python: a program for one test.

usage: python exllamav3_hooked.py WHEEL     (WHEEL: the unpacked wheel; fails where something does not fit)
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from exllamav3_reads import find_python_of

from glm53 import hooks
from glm53.engine.exllama.token_table import TokenTable, plain_rows


def pooled(unwaiting: bool) -> list[tuple[torch.Tensor, ...]]:
    """What the attention writes for two streams of which one completes a pool of keys, the other two."""
    from exllamav3.modules.mla_attn import MLAttention

    random = torch.Generator().manual_seed(1)
    attention: Any = object.__new__(MLAttention)
    attention.index_kpool, attention.index_head_dim = 4, 8
    attention.idx_kpool_ape = torch.randn(4, 8, generator=random)
    plane, written = torch.randn(3, 16, 16, generator=random).half(), []  # type: Any, list[tuple[torch.Tensor, ...]]
    layer = SimpleNamespace(get_idx=lambda: plane, update_pool_direct=lambda *what: written.append(what))
    update = attention._update_pool_plane
    tables = torch.tensor([[2, 0, 1], [1, 2, 0]], dtype=torch.int32)
    (hooks._unwaiting(update) if unwaiting else update)(layer, tables, [3, 18], 6)
    return written


def check_pools() -> None:
    made = torch.tensor

    def on_the_host(data: Any, **more: Any) -> torch.Tensor:
        assert "device" not in more, f"torch.tensor({data}) waits for a GPU"
        return made(data, **more)

    stock = pooled(False)
    with mock.patch.object(torch, "tensor", on_the_host):
        ours = pooled(True)
    assert len(stock) == len(ours) == 2
    for expected, found in zip(stock, ours, strict=True):
        assert [t.dtype for t in found] == [t.dtype for t in expected]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def check_embedding(dtype: torch.dtype) -> None:
    """A table gives what the embedding gives, bit for bit."""
    from exllamav3.modules import Embedding

    rows = torch.randn(50, 16, generator=torch.Generator().manual_seed(2)).mul(1e-5).to(dtype)
    module: Any = Embedding(None, "embedding", 50, 16)
    module.device, module.embedding = torch.device("cpu"), torch.nn.Embedding.from_pretrained(rows)
    found, ids = plain_rows(module), torch.tensor([[3], [49], [0]])
    assert found is not None
    assert found.data_ptr() == rows.data_ptr()
    expected = module.forward(module.prepare_for_device(ids, {}), {})
    assert torch.equal(TokenTable(found, found, module.out_dtype)(ids), expected)
    assert expected.dtype == module.out_dtype


def main() -> None:
    [wheel] = sys.argv[1:]
    find_python_of(wheel)
    import exllamav3

    hooks.verify_module(exllamav3)
    check_pools()
    for dtype in (torch.bfloat16, torch.float16):
        check_embedding(dtype)


if __name__ == "__main__":
    main()
