"""What the nano check measures with transformers' model: rounding in KDA, with the routers' picks held fixed or not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

from nano_helpers import small_model  # noqa: E402

from tools.nano import cpu_check  # noqa: E402

TOKENS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return small_model(tmp_path_factory.mktemp("nano-check"))


def logits(model: Any, seed: int = 0) -> Any:
    ids = torch.randint(0, 2048, (TOKENS,), generator=torch.Generator().manual_seed(seed))
    return cpu_check.float32_logits(model, ids.numpy())


def test_replayed_picks_are_taken_and_nothing_else_changes(model: Any) -> None:
    picks: list[Any] = []
    with cpu_check.picks_recorded(model, picks):
        plain = logits(model)
    layers = sum(hasattr(layer.mlp, "gate") for layer in model.model.language_model.layers)
    assert [tuple(p.shape) for p in picks] == [(TOKENS, 8)] * layers
    with cpu_check.picks_replayed(model, picks):
        again = logits(model)
    assert (again - plain).abs().max() < 1e-5 * plain.std()
    with cpu_check.picks_replayed(model, [(p + 1) % 32 for p in picks]):
        other = logits(model)
    assert (other - plain).abs().max() > 0.1
    assert torch.equal(logits(model), plain), "hooks stay"


def test_rounding_moves_the_logits_and_leaves_no_hook(model: Any) -> None:
    plain = logits(model)
    with cpu_check.kda_in_bfloat16(model):
        rounded = logits(model)
    assert (rounded - plain).abs().max() > 0
    assert torch.equal(logits(model), plain)


def test_documents_are_compared_one_by_one() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(3, 5), torch.randn(2, 5)
    moved = second.clone()
    moved[1, moved[1].argmin()] += 20.0
    rows = cpu_check.compare([first, second], [first, moved], [False, True])
    assert [(r["text"], r["positions"], r["same"]) for r in rows] == [(False, 3, 3), (True, 2, 1)]
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-12)
    assert rows[1]["kl_max"] == pytest.approx(2 * rows[1]["kl"])
    assert rows[1]["kl"] > 1
