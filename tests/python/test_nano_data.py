"""The nano model's data: rendered as the server renders, free of every held-out string, packed without loss."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))

from glm53.chat import ChatOptions, JinjaRenderer, encode, parse_messages, parse_tools, render, to_text
from glm53.tokenizer import Tokenizer as ServerTokenizer
from tools.nano import answers, chatfmt, config, corpus, dialogues, heldout, toolbox

NANO = Path(__file__).parents[2] / "tools" / "nano"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("nano")
    tok = corpus.train_tokenizer(out)
    config.write_side_files(out, tok, (NANO / "chat_template.jinja").read_text())
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def as_client(messages: list[chatfmt.Message]) -> list[dict[str, Any]]:
    """The same conversation as an OpenAI client sends it."""
    out = []
    for message in messages:
        sent = {k: v for k, v in message.items() if k != "tool_calls"}
        if calls := message.get("tool_calls"):
            sent["tool_calls"] = [{"id": f"c{i}", "type": "function", "function": c} for i, c in enumerate(calls)]
        sent.setdefault("content", None)
        out.append(sent)
    return out


def conversation(seed: int) -> tuple[list[chatfmt.Message], list[toolbox.Schema]]:
    rng = random.Random(seed)
    case = toolbox.parallel_case(rng) if seed % 2 else toolbox.single_case(rng)
    messages: list[chatfmt.Message] = [
        {"role": "system", "content": "You are terse."},
        *dialogues.exchange(rng, thinking=seed % 3 == 0),
        {"role": "user", "content": case.user},
        {"role": "assistant", "tool_calls": case.calls, "reasoning_content": "I need a tool." if seed % 2 else ""},
        *({"role": "tool", "content": r} for r in case.results),
    ]
    return messages, case.tools


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("thinking", [True, False])
def test_training_text_is_what_the_server_sends(seed: int, thinking: bool, folder: Path, tokenizer: Tokenizer) -> None:
    messages, tools = conversation(seed)
    ours = chatfmt.prompt(messages, tools, thinking=thinking)
    client_tools = [{"type": "function", "function": t} for t in tools]
    segments = render(parse_messages(as_client(messages)), parse_tools(client_tools), ChatOptions(thinking=thinking))
    assert to_text(segments) == ours
    server = encode(segments, ServerTokenizer(folder))
    assert server == tokenizer.encode(ours, add_special_tokens=False).ids


@pytest.mark.parametrize("seed", range(6))
def test_jinja_template_renders_the_same(seed: int, folder: Path) -> None:
    messages, tools = conversation(seed)
    template = (NANO / "chat_template.jinja").read_text()
    parsed = parse_messages(as_client(messages)), parse_tools([{"type": "function", "function": t} for t in tools])
    segments = JinjaRenderer(template).render(*parsed, ChatOptions(thinking=True))
    assert to_text(segments) == chatfmt.prompt(messages, tools)


def test_no_held_out_string_in_the_training_text() -> None:
    banned = heldout.forbidden()
    for seed in range(4):  # the shards of a real run are drawn the same way, from seeds 0, 1, 2, ...
        docs, _ = corpus.clean_documents(random.Random(f"nano-{seed}-False"), 1500)
        text = "\n".join(d.text for d in docs)
        assert [b for b in banned if b in text] == []
    articles = "\n".join(corpus.split_articles(False))
    assert [b for b in banned if b in articles] == []


def test_the_filter_drops_documents_that_hold_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [d.text for d in corpus.clean_documents(random.Random(1), 50)[0]]
    victim = plain[7]
    monkeypatch.setattr(heldout, "forbidden", lambda: (victim[-60:],))
    docs, dropped = corpus.clean_documents(random.Random(1), 50)
    assert dropped >= 1
    assert victim not in [d.text for d in docs]


def test_new_values_are_thirty_and_asked_for() -> None:
    cases = heldout.tool_requests()
    new = [value for _, value in cases if value]
    assert len(cases) == heldout.REQUESTS
    assert len(set(new)) == heldout.NEW_VALUES
    assert len({c.user for c, _ in cases}) == heldout.REQUESTS
    for case, value in cases:
        assert not value or value in case.user


def test_held_out_sums_are_never_taught() -> None:
    rng = random.Random(3)
    asked = {dialogues.addition(rng)[2].partition(" =")[0] for _ in range(60000)}
    assert "17 + 26" in asked
    assert not asked & {f"{a} + {b}" for a, b in dialogues.HELD_OUT_SUMS}


def test_sums_in_the_thinking_are_right() -> None:
    for a, b in ((0, 0), (9, 1), (99, 99), (45, 55), (17, 25)):
        assert dialogues.sum_steps(a, b).endswith(f" = {(a + b) // 10}. So {a} + {b} = {a + b}.")


def test_a_sum_is_worked_out_where_it_is_answered() -> None:
    """Without thinking the answer holds the steps; a turn that lost its thinking teaches nothing."""
    rng = random.Random(2)
    silent = worked = 0
    for _ in range(400):
        document = dialogues.drill(rng)
        text = document.text
        assert text.count("<|user|>") >= 4
        answers_ = [(p, w) for p, w in document.parts if " + " in p and "=" in p and p[:1] not in "<["]
        for piece, weight in answers_:
            steps = "Ones:" in piece
            assert weight in (chatfmt.WRITTEN, chatfmt.NO_LOSS, chatfmt.READ)
            if weight == chatfmt.WRITTEN and "?" not in piece:
                assert steps or " - " in piece
                worked += 1
            silent += weight == chatfmt.NO_LOSS and not steps
    assert worked > 400
    assert silent > 100


def test_encoding_weights_follow_the_pieces(tokenizer: Tokenizer) -> None:
    case = toolbox.single_case(random.Random(5))
    messages: list[chatfmt.Message] = [
        {"role": "user", "content": case.user},
        {"role": "assistant", "tool_calls": case.calls},
        {"role": "tool", "content": case.results[0]},
        {"role": "assistant", "content": case.answer},
    ]
    ids, weights = corpus.encode(tokenizer, chatfmt.pieces(messages, case.tools))
    assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(
        t for t, _ in chatfmt.pieces(messages, case.tools)
    )
    full = [tokenizer.id_to_token(i) for i, w in zip(ids, weights, strict=True) if w == 10]
    assert full[0] == "<tool_call>"
    assert "<|observation|>" in full
    assert "<tool_response>" not in full
    silent = {tokenizer.id_to_token(i) for i, w in zip(ids, weights, strict=True) if w == 0}
    assert silent == {"<|assistant|>", "<think>", "</think>"}


def test_packing_keeps_every_document_once(tokenizer: Tokenizer) -> None:
    rng = random.Random(9)
    docs = [([rng.randrange(2000) for _ in range(n)], [1] * n) for n in rng.choices(range(20, 900), k=60)]
    rows = corpus.pack(docs, tokenizer.token_to_id("<|endoftext|>"), rng)
    starts = np.argwhere(rows.fresh)
    assert len(starts) == len(docs)
    assert int((rows.weight > 0).sum()) == sum(len(i) for i, _ in docs)
    packed = sorted(tuple(rows.ids[r, c : c + 20].tolist()) for r, c in starts)
    assert packed == sorted(tuple(i[:20]) for i, _ in docs)
    assert rows.ids.size < 1.2 * sum(len(i) for i, _ in docs) + corpus.ROW


def test_judges_accept_the_right_replies_and_refuse_wrong_ones() -> None:
    replies = {
        chatfmt.prompt([{"role": "user", "content": c.user}], c.tools, thinking=False): "".join(
            chatfmt.call_text(x["name"], x["arguments"]) for x in c.calls
        )
        for c, _ in heldout.tool_requests()
    }
    assert all(r["right"] for r in answers.judge_tools(lambda prompts: [replies[p] for p in prompts]))
    broken = answers.judge_tools(
        lambda prompts: [replies[p].replace("</arg_value>", "x</arg_value>", 1) for p in prompts]
    )
    assert not any(r["right"] for r in broken)
    assert answers.contains("It is Au.", "Au")
    assert not answers.contains("It is Australia.", "Au")


def test_text_is_free_and_split_for_good() -> None:
    kept, held = corpus.split_articles(False), corpus.split_articles(True)
    assert len(held) > 10
    assert not set(kept) & set(held)


def test_held_out_text_has_the_training_rows_proportion(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """As a whole and up to where stock's logits are kept, which is long enough for the bar and short enough to keep."""
    pytest.importorskip("torch")
    from tools.nano import run_all, stock

    docs = run_all.held_out_documents(tokenizer, tmp_path / "held-out.npz")
    saved = np.load(tmp_path / "held-out.npz")
    running, lengths = saved["text"], saved["lengths"]
    assert lengths.tolist() == [len(d) for d in docs]
    assert saved["ids"].tolist() == np.concatenate(docs).tolist()
    assert lengths[running].sum() / lengths.sum() == pytest.approx(corpus.TEXT_SHARE, rel=0.2)
    assert all((tokenizer.token_to_id("<|system|>") in d) is not r for d, r in zip(docs, running, strict=True))
    kept = int(np.searchsorted(np.cumsum(lengths), stock.LOGIT_POSITIONS)) + 1
    share = lengths[:kept][running[:kept]].sum() / lengths[:kept].sum()
    assert 0.5 * corpus.TEXT_SHARE < share < 2 * corpus.TEXT_SHARE
    assert stock.LOGIT_POSITIONS <= lengths[:kept].sum() <= 4000
