"""The embedding's rows where the GPU reads them: page-locked in the host memory that exllamav3 put them into.

exllamav3 keeps the embedding in host RAM and looks ids up on the CPU, so it has to know a token before it can queue the
next step. A step whose ids are still on the GPU has its rows read by it over PCIe: 8 KB a token, bit for bit the same.
States of a TokenTable: open -> closed (`close`: pageable again; nothing on the GPU may read it any more). One thread.
Costs: no memory beside the table itself, which is page-locked (1.3 GB of GLM-5.3-Flash), some tenths of a second once.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

log = logging.getLogger(__name__)
_PORTABLE_AND_MAPPED = 3


class TokenTable:
    """A `hooks.Lookup`. `host`: (vocabulary, hidden) in host memory; `rows`: the same bytes as the GPU sees them."""

    def __init__(self, host: torch.Tensor, rows: torch.Tensor, out_dtype: torch.dtype) -> None:
        self._host: torch.Tensor | None = host
        self._rows: torch.Tensor | None = rows
        self._out_dtype = out_dtype

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """(..., hidden) rows of ids on the GPU."""
        assert self._rows is not None, "the table is closed"
        return torch.nn.functional.embedding(ids, self._rows).to(self._out_dtype)

    @classmethod
    def open(cls, model: Any, gpu: int) -> TokenTable | None:
        """Page-lock the embedding of a loaded model; None, with a line in the log, where that is not to be had."""
        module = model.modules[0]
        host = plain_rows(module)
        if host is None:
            return None
        status = int(_runtime().cudaHostRegister(host.data_ptr(), host.nbytes, _PORTABLE_AND_MAPPED))
        if status != 0:
            with contextlib.suppress(RuntimeError):  # the next launch reports this error as its own
                torch.ones(1, device=f"cuda:{gpu}")
            _warn(host, f"CUDA error {status}")
            return None
        try:
            from exllamav3.ext import exllamav3_ext

            return cls(host, exllamav3_ext.pinned_cuda_view(host, gpu), module.out_dtype)
        except RuntimeError as e:
            _runtime().cudaHostUnregister(host.data_ptr())
            _warn(host, " ".join(str(e).split())[:200])
            return None

    def close(self) -> None:
        """Let the pages go; idempotent."""
        host, self._host, self._rows = self._host, None, None
        if host is not None:
            _runtime().cudaHostUnregister(host.data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _warn(host: torch.Tensor, why: str) -> None:
    size = host.nbytes / 1e9
    log.warning("decode steps wait for the host: the embedding (%.1f GB) was not page-locked: %s", size, why)


def plain_rows(module: Any) -> torch.Tensor | None:
    """The weight of an exllamav3 embedding that lies in host memory and is used as it is; None for any other module."""
    embedding = getattr(module, "embedding", None)
    weight = getattr(embedding, "weight", None)
    if weight is None or weight.device.type != "cpu" or not weight.is_contiguous():
        return None
    if module.normalize or module.multiplier != 1.0 or module.out_dtype is None:
        return None
    rows: torch.Tensor = weight.detach()
    return rows
