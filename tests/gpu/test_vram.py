"""A card's worth of VRAM is enough: long prompts borrow slots, decode gets them back, nothing runs out of memory."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from exact_helpers import greedy, load_ours, make_generator, prompt_ids, settle

from glm53.engine.exllama.loader import LoadOptions

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]
CARD_BYTES = 24 * 10**9


@pytest.mark.skipif(not os.environ.get("GLM53_TEST_FLASH"), reason="GLM53_TEST_FLASH names no checkpoint of real shape")
def test_twenty_long_prefills_and_decodes_on_a_24_gb_card(tmp_path: Path) -> None:
    import exllamav3

    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < CARD_BYTES:
        pytest.skip(f"only {free / 1e9:.0f} GB of VRAM are free")
    ballast = torch.empty(free - CARD_BYTES, dtype=torch.uint8, device="cuda")
    loaded = load_ours(Path(os.environ["GLM53_TEST_FLASH"]), tmp_path, LoadOptions(), cache_tokens=16384)
    try:
        generator = make_generator(exllamav3, loaded.model, loaded.cache, loaded.tokenizer)
        least = free
        for i in range(20):
            prompts = [prompt_ids(4103 + 97 * i, i, loaded.vocab_size)]
            tokens = greedy(exllamav3, generator, prompts, 8)
            assert len(tokens[0]) == 8
            least = min(least, torch.cuda.mem_get_info()[0])
            settle(loaded.passes)
            assert loaded.runtime.stats(0)["lent_slots"] == 0
            few = [prompt_ids(20 + k, 100 + 4 * i + k, loaded.vocab_size) for k in range(4)]
            assert [len(t) for t in greedy(exllamav3, generator, few, 8)] == [8] * 4
        stats = loaded.runtime.stats(0)
        print(f"slots {loaded.slots}, least free {least / 1e9:.2f} GB, {stats}, {loaded.passes.counts}")
        assert loaded.passes.counts["lendings"] >= 20
        assert stats["refills"] > 0
        assert loaded.runtime.verify(0) == []
    finally:
        loaded.close()
        del ballast
        torch.cuda.empty_cache()
