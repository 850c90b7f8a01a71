"""What the nano run and check measure on float32 weights: loss, drafts, rounding in KDA with fixed picks or not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

from nano_helpers import one_thread, small_model  # noqa: E402, F401

from tools.nano import cpu_check, fastnet, reference, stock  # noqa: E402

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


def test_a_documents_figures_and_their_sum(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is transformers' own, nothing but rounding moves the logits, and documents weigh by their length."""
    ids = torch.randint(0, 2048, (90,), generator=torch.Generator().manual_seed(1)).numpy()
    device = torch.device("cpu")
    long, logits = reference.examine(model, ids, True, device)
    short, _ = reference.examine(model, ids[:30], False, device)
    expected = cpu_check.float32_logits(model, ids)
    assert (logits - expected).abs().max() < 1e-4 * expected.std()
    assert long.loss == pytest.approx(stock.nll(expected, ids)[0], rel=1e-4)
    assert tuple(long.picks.shape) == (90, 3, 8)
    assert (len(long.edges), len(long.clamped)) == (3, 3)
    assert long.moved > 0
    monkeypatch.setattr(reference, "rounding_ops", fastnet.Ops)
    exact, _ = reference.examine(model, ids, True, device)
    assert (exact.moved, exact.unmoved) == (0, 90)
    total = reference.summary([long, short])
    assert total["fp32_nll"] == pytest.approx((long.loss + short.loss) / (89 + 29))
    assert total["rounding"]["text"] == {"positions": 90, "kl": long.moved / 90, "top1": long.unmoved / 90}
    assert total["rounding"]["all"]["kl"] == pytest.approx((long.moved + short.moved) / 120)
    assert total["drafts_as_model"] == pytest.approx((long.drafts_right + short.drafts_right) / 120)
    assert "text" not in reference.summary([short])["rounding"]


def test_rounding_ops_round_what_stock_keeps_in_bfloat16() -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(1, 8, 6), torch.randn(6, 4)
    same = fastnet.same_document(torch.ones(1, 8, dtype=torch.long), 4)
    ops = reference.rounding_ops()
    got = ops.conv_silu(x, weight, same)
    assert torch.equal(got, got.bfloat16().float())
    assert torch.equal(got, ops.conv_silu(x.bfloat16().float(), weight, same))
    assert not torch.equal(got, fastnet.conv_silu(x, weight, same).bfloat16().float())
    gate, scale = torch.randn(1, 8, 6), torch.randn(6)
    normed = ops.gated_norm(x, gate, scale, 1e-5)
    assert torch.equal(normed, fastnet.gated_norm(x.bfloat16().float(), gate, scale, 1e-5))
