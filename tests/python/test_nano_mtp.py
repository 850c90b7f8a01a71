"""The nano model's MTP layer: logits as transformers' own modules give them, no effect on the trunk, and its names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

from nano_helpers import TOKENS, one_thread, small_model, starts  # noqa: E402, F401

from glm53.checkpoint.layout import Linear, expected_mtp  # noqa: E402
from glm53.checkpoint.model_config import ModelConfig  # noqa: E402
from tools.nano import corpus, fastnet, mtp, train  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nano-mtp")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    made = small_model(folder)
    m = made.mtp
    for norm in (m.enorm, m.hnorm, m.input_layernorm, m.post_attention_layernorm, m.shared_head["norm"]):
        torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    return made


def drafts(model: Any, ids: Any, fresh: Any) -> Any:
    step = fastnet.Step(fastnet.Ops(), torch.float32, fresh)
    fastnet.forward(model, ids, step)
    return mtp.forward(model, ids, step)


@torch.no_grad()
def test_logits_are_those_of_the_modules_one_by_one(model: Any) -> None:
    """At a position: that token's embedding, then the hidden state of the position before, none at the first."""
    torch.manual_seed(1)
    ids, m = torch.randint(0, 2048, (1, TOKENS)), model.mtp
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
    x = m.eh_proj(torch.cat([m.enorm(model.model.language_model.embed_tokens(ids)), m.hnorm(before)], -1))
    x = x + m.self_attn(m.input_layernorm(x), torch.ones(1, TOKENS, dtype=torch.bool))[0]
    x = x + m.mlp(m.post_attention_layernorm(x))
    expected = model.lm_head(m.shared_head["norm"](x))
    assert (drafts(model, ids, starts(0)) - expected).abs().max() < 1e-4 * expected.std()


@torch.no_grad()
def test_a_packed_document_is_as_if_alone(model: Any) -> None:
    ids = torch.randint(0, 2048, (1, TOKENS), generator=torch.Generator().manual_seed(2))
    alone = torch.cat([ids[:, 64:], ids[:, 64:]], 1)  # what comes after is not seen
    packed, expected = drafts(model, ids, starts(0, 64))[:, 64:], drafts(model, alone, starts(0))[:, :64]
    assert (packed - expected).abs().max() < 1e-4 * expected.std()
    assert (drafts(model, ids, starts(0))[:, 64:] - expected).abs().max() > 0.1


def test_the_trunk_does_not_feel_it(model: Any) -> None:
    ids = torch.arange(TOKENS).unsqueeze(0)
    model.zero_grad()
    drafts(model, ids, starts(0)).square().mean().backward()
    moved = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    model.zero_grad()
    assert moved
    assert all(n.startswith("mtp.") for n in moved)
    assert {"mtp.eh_proj.weight", "mtp.hnorm.weight", "mtp.mlp.gate.weight", "mtp.self_attn.kv_b_proj.weight"} <= moved


def one_row(columns: int = TOKENS) -> corpus.Rows:
    import numpy as np

    ids = np.tile(np.random.default_rng(0).integers(0, 2000, columns // 2, dtype=np.int16), (1, 2))
    rows = corpus.Rows(ids, np.full(ids.shape, 10, np.uint8), np.zeros(ids.shape, bool))
    rows.fresh[:, 0] = True
    return rows


def test_it_learns_beside_the_trunk_and_leaves_its_steps_alone(folder: Path) -> None:
    """The same steps with and without it give the same trunk, and its own loss falls."""
    made, losses = [], []
    for draft_from in (2.0, 0.0):
        model = small_model(folder)
        plan = train.Plan(seconds=1e9, batch=1, noise_from=2.0, draft_from=draft_from)
        trainer = train.Trainer(model, one_row(), plan, torch.device("cpu"))
        before = model.mtp.eh_proj.weight.detach().clone()
        for _ in range(6):
            trainer.step(0.05)
            if draft_from == 0.0:
                batch = next(trainer.data)
                with torch.no_grad():
                    logits = drafts(model, batch[0], batch[2])
                losses.append(float(train.weighted_loss(logits, batch[0], batch[1])))
        assert torch.equal(before, model.mtp.eh_proj.weight) is (draft_from == 2.0)
        made.append(model)
    trunks = [{n: p for n, p in m.named_parameters() if not n.startswith("mtp.")} for m in made]
    assert all(torch.equal(p, trunks[1][n]) for n, p in trunks[0].items())
    assert losses[-1] < 0.9 * losses[0]


def test_its_tensors_are_those_that_drafting_asks_for(model: Any, folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    layers = len(model.model.language_model.layers)
    mtp.save(model.mtp, layers, tmp_path)
    stored = load_file(tmp_path / mtp.FILE)
    wanted = expected_mtp(ModelConfig.load(folder))
    shapes = {
        f"{t.key}.weight" if isinstance(t, Linear) else t.name: (t.out_features, t.in_features)
        if isinstance(t, Linear)
        else t.shape
        for t in wanted
    }
    assert {n: tuple(v.shape) for n, v in stored.items()} == shapes
    gate_up, key = model.mtp.mlp.experts.gate_up_proj, f"model.language_model.layers.{layers}.mlp"
    assert torch.equal(stored[f"{key}.experts.3.gate_proj.weight"], gate_up[3, :128].detach().bfloat16())
    assert torch.equal(stored[f"{key}.experts.3.up_proj.weight"], gate_up[3, 128:].detach().bfloat16())
    assert {str(v.dtype) for n, v in stored.items() if n.endswith("correction_bias")} == {"torch.float32"}
