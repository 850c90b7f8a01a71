"""The nano model's fast training forward against transformers' own: logits, gradients, documents kept apart."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

from nano_helpers import TOKENS, one_thread, small_model, starts  # noqa: E402, F401

from tools.nano import config, corpus, fastnet, kda, train  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return small_model(tmp_path_factory.mktemp("nano-model"))


def gradients(model: Any, logits: Any, target: Any) -> dict[str, Any]:
    model.zero_grad()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}


def test_logits_and_gradients_are_transformers_own(model: Any) -> None:
    torch.manual_seed(1)
    ids, target = torch.randint(0, 2048, (2, 1, TOKENS))
    theirs = model(input_ids=ids, use_cache=False).logits
    expected = gradients(model, theirs, target)
    ours = fastnet.forward(model, ids, fastnet.Step(fastnet.Ops(), torch.float32, starts(0)))
    got = gradients(model, ours, target)
    assert (ours - theirs).abs().max() < 1e-4 * theirs.std()
    assert expected.keys() == got.keys()
    for name, grad in expected.items():
        assert (grad - got[name]).norm() < 1e-3 * grad.norm(), name


def test_a_packed_document_is_as_if_alone(model: Any) -> None:
    torch.manual_seed(2)
    ids = torch.randint(0, 2048, (1, TOKENS))
    with torch.no_grad():
        packed = fastnet.forward(model, ids, fastnet.Step(fastnet.Ops(), torch.float32, starts(0, 50)))[:, 50:]
        alone = model(input_ids=ids[:, 50:], use_cache=False).logits
        mixed = fastnet.forward(model, ids, fastnet.Step(fastnet.Ops(), torch.float32, starts(0)))[:, 50:]
    assert (packed - alone).abs().max() < 1e-4 * alone.std()
    assert (mixed - alone).abs().max() > 0.1


@pytest.mark.parametrize("strongest", [0.05, 1.0, 5.0])
def test_chunked_kda_is_the_recurrence(strongest: float) -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 1, TOKENS, 2, 32)
    g, beta = -strongest * torch.rand(1, TOKENS, 2, 32), torch.rand(1, TOKENS, 2)
    state, expected = torch.zeros(2, 32, 32), []
    norm = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)  # noqa: E731
    for t in range(TOKENS):
        state = state * g[0, t].exp().unsqueeze(-1)
        key, query = norm(k[0, t]), norm(q[0, t]) * 32**-0.5
        delta = beta[0, t].unsqueeze(-1) * (v[0, t] - torch.einsum("hkv,hk->hv", state, key))
        state = state + key.unsqueeze(-1) * delta.unsqueeze(-2)
        expected.append(torch.einsum("hkv,hk->hv", state, query))
    assert (kda.kda(q, k, v, g, beta)[0] - torch.stack(expected)).abs().max() < 1e-5


def test_noise_changes_a_step_and_only_then(model: Any) -> None:
    ids = torch.arange(TOKENS).unsqueeze(0)
    with torch.no_grad():
        a, b = (fastnet.forward(model, ids, fastnet.Step(fastnet.Ops(), torch.float32, starts(0))) for _ in range(2))
        noisy = fastnet.Step(fastnet.Ops(), torch.float32, starts(0), fastnet.Noise(0.1, 0.01))
        c = fastnet.forward(model, ids, noisy)
    assert torch.equal(a, b)
    assert not torch.allclose(a, c, atol=1e-3)


def test_training_lowers_the_loss_and_a_saved_model_is_the_rounded_one(model: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids = np.tile(rng.integers(0, 2000, 64, dtype=np.int16), (1, 2))
    rows = corpus.Rows(ids, np.full(ids.shape, 10, np.uint8), np.zeros(ids.shape, bool))
    rows.fresh[:, 0] = True
    trainer = train.Trainer(model, rows, train.Plan(seconds=1e9, batch=1, noise_from=2.0), torch.device("cpu"))
    losses = [float(trainer.step(0.05)) for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]
    train.round_weights(model)
    train.save(model, tmp_path)
    from safetensors import safe_open

    stored: dict[str, Any] = {}
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            stored |= {k: shard.get_tensor(k) for k in shard.keys()}  # noqa: SIM118
    first = model.model.language_model.layers[1]
    assert torch.equal(
        stored["model.language_model.layers.1.mlp.experts.3.up_proj.weight"].float(),
        first.mlp.experts.gate_up_proj[3, config.EXPERT_DIM :].detach(),
    )
    bias = stored["model.language_model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    assert torch.equal(bias, first.mlp.gate.e_score_correction_bias)


def one_row(columns: int = TOKENS) -> corpus.Rows:
    ids = np.random.default_rng(0).integers(0, 2000, (1, columns), dtype=np.int16)
    rows = corpus.Rows(ids, np.full(ids.shape, 10, np.uint8), np.zeros(ids.shape, bool))
    rows.fresh[:, 0] = True
    return rows


def test_a_loss_that_is_no_number_goes_back_and_trains_on(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = train.Plan(seconds=1e9, batch=1, noise_from=2.0, max_steps=12)
    trainer = train.Trainer(model, one_row(), plan, torch.device("cpu"))
    calls, real = iter(range(100)), trainer.step

    def step(progress: float) -> Any:
        loss = real(progress)
        if next(calls) == 6:
            with torch.no_grad():
                model.lm_head.weight.fill_(float("nan"))
        return loss

    monkeypatch.setattr(trainer, "step", step)
    report = trainer.run()
    assert (report["steps"], report["returns"]) == (12, 1)
    assert trainer.scale == 0.5
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert np.isfinite(report["curve"][-1][2])


def test_a_loss_that_never_recovers_stops_the_run(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = train.Trainer(model, one_row(), train.Plan(seconds=1e9, batch=1, max_steps=99), torch.device("cpu"))
    monkeypatch.setattr(trainer, "step", lambda progress: torch.tensor(float("nan")))
    with pytest.raises(FloatingPointError, match=f"{train.MOST_RETURNS + 1} times"):
        trainer.run()


def test_load_is_balanced_by_what_was_picked(model: Any) -> None:
    gates = [layer.mlp.gate for layer in model.model.language_model.layers if hasattr(layer.mlp, "gate")]
    before = [g.e_score_correction_bias.clone() for g in gates]
    train.balance(model, [torch.zeros(5, 8, dtype=torch.long)] * len(gates), 0.01)
    for gate, old in zip(gates, before, strict=True):
        moved = gate.e_score_correction_bias - old
        assert moved[0] < 0
        assert (moved[1:] > 0).all()


def test_edges_are_the_shares_of_the_last_pick_and_the_first_left_out(model: Any) -> None:
    gate = model.model.language_model.layers[1].mlp.gate
    torch.manual_seed(4)
    x = torch.randn(5, config.HIDDEN)
    step = fastnet.Step(fastnet.Ops(), torch.float32, starts(0))
    weights = fastnet.route(gate, x, step)
    scores = (x @ gate.weight.T).sigmoid()
    for row, (score, weight) in enumerate(zip(scores, weights, strict=True)):
        order = (score + gate.e_score_correction_bias).argsort(descending=True).tolist()
        assert set(weight.nonzero().flatten().tolist()) == set(order[:8])
        share = (score[order[7]] + score[order[8]]) / score[order[:8]].sum()
        assert step.edges[0][row].item() == pytest.approx(share.item(), rel=1e-5)


def test_training_makes_the_edges_small_where_they_cost(tmp_path: Path) -> None:
    """The same steps without their cost leave them as they were."""
    shares = []
    for cost in (0.0, 20.0):
        model = small_model(tmp_path)
        plan = train.Plan(seconds=1e9, batch=1, noise_from=2.0, draft_from=2.0, edge=cost)
        trainer = train.Trainer(model, one_row(), plan, torch.device("cpu"))
        for _ in range(12):
            trainer.step(0.3)
        step = fastnet.Step(fastnet.Ops(), torch.float32, starts(0))
        with torch.no_grad():
            fastnet.forward(model, torch.from_numpy(one_row().ids).long(), step)
        shares.append(float(torch.stack([e.mean() for e in step.edges]).mean()))
    assert shares[0] > 0.15
    assert shares[1] < 0.8 * shares[0]
