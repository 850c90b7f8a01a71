"""A four-layer model of the nano shape, as `tools.nano.train` builds it, for tests of its training forward."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tokenizers import Tokenizer, models

from tools.nano import config, corpus, train

TOKENS = 128


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For modules that import it: threads of products so small wait for each other, on busy processors for minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_model(out: Path) -> Any:
    """Four layers of the nano shape with strong decays and uneven stream mixing; leaves its config.json in `out`."""
    tok = Tokenizer(models.WordLevel({s: i for i, s in enumerate(corpus.SPECIALS)}, unk_token="[MASK]"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "LAYERS", 4)
        config.write_side_files(out, tok, "")
    made = train.build_model(out, 0)
    for layer in made.model.language_model.layers:
        for hc in (layer.attn_hc, layer.ffn_hc):
            torch.nn.init.normal_(hc.base, std=0.7)
        if layer.block_type == "linear_attention":
            torch.nn.init.normal_(layer.self_attn.forget_gate.dt_bias, std=4.0)
    return made


def starts(*columns: int) -> torch.Tensor:
    """Document starts of one row."""
    fresh = torch.zeros(1, TOKENS, dtype=torch.bool)
    fresh[:, list(columns)] = True
    return fresh
