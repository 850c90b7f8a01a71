"""What an engine must do behind the whole server: the same tests for every engine.

Not collected itself: a test module imports everything from here and from `engine_chat_cases`, and brings module-scoped
fixtures: `live` (a `LiveServer` on the checkpoint that the recorded logits belong to); `forget`, which makes its idle
engine forget what it keeps of former prompts; `rounding`, natural-log units by which decoding one stream, decoding
several and reading a prompt may differ by themselves; `reuse_rounding`, the same for a prompt read from its beginning
and one whose beginning is found in the cache. The checkpoint is random, so tests look at which tokens come and not at
what they mean.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_server import LiveServer, user

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
from cpu_engine_helpers import golden_data, golden_dir  # noqa: F401 - for those who import this

PROMPT = "The quick brown fox"
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
OFF = {"reasoning_effort": "none"}
SCORE_TOLERANCE = {50: 0.06, 90: 0.2}
"""Percentile: natural-log units between an engine's scores and those recorded on one GPU, whose activations are float16
or int8. Logits of this checkpoint have a standard deviation of 4, and a near tie in routing moves a whole row.
Bit for bit is what tests/gpu/test_exact.py shows, inside one process."""


def ids(live: LiveServer, **sampling: Any) -> list[int]:
    """Token ids that /generate answers the prompt with; greedy and eight of them unless told otherwise."""
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, **sampling}
    reply = live.post(GENERATE, {"text": PROMPT, "sampling_params": params})
    assert reply.status == 200, reply.data
    out: list[int] = reply.json["output_ids"]
    return out


def encode(live: LiveServer, **body: Any) -> list[int]:
    """Token ids of a prompt or a conversation."""
    tokens: list[int] = live.post("/tokenize", body).json["tokens"]
    return tokens


def scores(live: LiveServer, tokens: list[int], top: int = 1) -> Any:
    """`meta_info` of teacher-forced scores of all `tokens`."""
    body = {"input_ids": tokens, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top}
    reply = live.post(GENERATE, {**body, "sampling_params": {"max_new_tokens": 0}})
    assert reply.status == 200, reply.data
    return reply.json["meta_info"]


@pytest.fixture(scope="module")
def greedy(live: LiveServer) -> list[int]:
    return ids(live)


# ---- how tokens are drawn ----


def test_greedy_repeats(live: LiveServer, greedy: list[int]) -> None:
    assert len(greedy) == 8
    assert ids(live) == greedy


@pytest.mark.effect("temperature", "seed", "sampling_seed")
def test_temperature_and_seed(live: LiveServer, greedy: list[int]) -> None:
    hot = {"temperature": 2.0, "top_p": 1.0}
    first = ids(live, **hot, seed=1)
    assert ids(live, **hot, seed=1) == first
    assert ids(live, **hot, sampling_seed=1) == first
    assert ids(live, **hot, seed=2) != first
    assert first != greedy
    assert ids(live, temperature=1e-300, seed=3) == greedy


@pytest.mark.effect("top_k", "top_p", "min_p")
@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 0.000001}, {"min_p": 1.0}, {"top_k": 40, "min_p": 1.0}])
def test_a_cut_that_leaves_one_token_is_greedy(live: LiveServer, greedy: list[int], cut: dict[str, float]) -> None:
    assert ids(live, temperature=2.0, seed=3, **{"top_p": 1.0, **cut}) == greedy


@pytest.mark.effect("top_k")
def test_top_k_draws_from_the_best_only(live: LiveServer) -> None:
    best = {i for _, i, _ in first_alternatives(live)}
    drawn = {ids(live, temperature=50.0, top_p=1.0, top_k=3, seed=s, max_new_tokens=1)[0] for s in range(12)}
    assert drawn <= best
    assert len(drawn) > 1


def first_alternatives(live: LiveServer) -> Any:
    """The three best first tokens."""
    params = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    body = {"text": PROMPT, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 3}
    return live.post(GENERATE, body).json["meta_info"]["output_top_logprobs"][0]


@pytest.mark.effect("logit_bias")
def test_logit_bias_bans_and_forces(live: LiveServer, greedy: list[int]) -> None:
    assert ids(live, logit_bias={str(greedy[0]): -100})[0] != greedy[0]
    assert ids(live, logit_bias={"300": 100}) == [300] * 8
    assert ids(live, logit_bias={"300": 100}, temperature=1.0, seed=1) == [300] * 8


@pytest.mark.effect("presence_penalty", "frequency_penalty", "repetition_penalty")
@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 2.0}]
)
def test_penalties(live: LiveServer, penalty: dict[str, float]) -> None:
    """Ten tokens far above all others: a penalty on those that have come makes others win sooner."""
    bias = {"logit_bias": {str(i): 90 for i in range(300, 310)}}
    tokens = ids(live, **bias, max_new_tokens=16)
    punished = ids(live, **bias, **penalty, max_new_tokens=16)
    assert set(tokens) | set(punished) <= set(range(300, 310))
    assert len(set(punished)) > len(set(tokens))


def test_penalties_look_at_the_answer_and_repetition_also_at_the_prompt(live: LiveServer) -> None:
    """Two tokens far above the rest, the better one in the prompt."""
    [inside] = encode(live, prompt="x")
    bias = {"logit_bias": {str(inside): 90, "300": 89}, "max_new_tokens": 1}
    sampling = {"temperature": 0, "ignore_eos": True, **bias}
    first = [
        live.post(GENERATE, {"input_ids": [5, inside], "sampling_params": {**sampling, **more}}).json["output_ids"]
        for more in ({"presence_penalty": 2.0, "frequency_penalty": 2.0}, {"repetition_penalty": 2.0})
    ]
    assert first == [[inside], [300]]


# ---- where an answer ends ----


@pytest.mark.effect("stop", "stop_token_ids", "max_new_tokens")
def test_stop_string_stop_ids_and_length(live: LiveServer, greedy: list[int]) -> None:
    text = live.post("/detokenize", {"tokens": greedy}).json["text"]
    third = text[len(text) // 2]
    params = {"temperature": 0, "max_new_tokens": 8, "stop": [third], "ignore_eos": True}
    reply = live.post(GENERATE, {"text": PROMPT, "sampling_params": params}).json
    assert reply["text"] == text[: text.index(third)]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": third}
    assert len(ids(live, stop_token_ids=[greedy[2]])) == greedy.index(greedy[2])
    assert ids(live, max_new_tokens=3) == greedy[:3]


@pytest.mark.effect("max_tokens", "max_completion_tokens")
def test_the_other_names_of_the_length(live: LiveServer) -> None:
    assert len(ids(live, max_new_tokens=None, max_tokens=3)) == 3
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}
    for name in ("max_tokens", "max_completion_tokens"):
        assert live.post(COMPLETIONS, {**body, name: 2}).json["usage"]["completion_tokens"] == 2
        assert live.chat({name: 2, "ignore_eos": True}).json["usage"]["completion_tokens"] == 2


@pytest.mark.effect("ignore_eos")
@pytest.mark.parametrize("name", ["<|endoftext|>", "<|user|>", "<|observation|>"])
def test_ignore_eos_goes_on_behind_the_tokens_that_end_an_answer(live: LiveServer, name: str) -> None:
    special = {"<|endoftext|>": 2048, "<|user|>": 2055, "<|observation|>": 2057}[name]
    forced = {"logit_bias": {str(special): 100}, "temperature": 0, "max_tokens": 5}
    for path, asked in ((CHAT, {"messages": user("x")}), (COMPLETIONS, {"prompt": "x"})):
        ended = live.post(path, {**asked, **forced}).json
        assert ended["choices"][0]["finish_reason"] == "stop"
        assert ended["usage"]["completion_tokens"] <= 1
        on = live.post(path, {**asked, **forced, "ignore_eos": True}).json
        assert on["choices"][0]["finish_reason"] == "length"
        assert on["usage"]["completion_tokens"] == 5


@pytest.mark.effect("n")
def test_n_choices_differ_and_repeat(live: LiveServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 2.0, "top_p": 1.0, "seed": 5, "n": 2, "ignore_eos": True}
    first = [c["text"] for c in live.post(COMPLETIONS, body).json["choices"]]
    assert first[0] != first[1]
    assert [c["text"] for c in live.post(COMPLETIONS, body).json["choices"]] == first


# ---- what is said about tokens ----


@pytest.mark.effect("logprob_start_len", "input_ids")
@pytest.mark.parametrize("name", ["text", "rand200"])
def test_scores_are_those_of_stock_exllamav3(live: LiveServer, name: str) -> None:
    """Recorded from exllamav3 1.5.1 with every expert in VRAM."""
    data = golden_data()
    tokens, logits = data[f"{name}_ids"].tolist(), data[f"{name}_logits"].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logprobs -= logits.max(-1, keepdims=True)
    meta = scores(live, tokens)
    given = meta["input_token_logprobs"]
    assert [e[1] for e in given] == tokens
    assert given[0][0] is None
    wanted = logprobs[np.arange(len(tokens) - 1), tokens[1:]]
    off = np.abs(np.array([e[0] for e in given[1:]]) - wanted)
    print(f"{name}: scores off by {np.percentile(off, [50, 90, 100])} (50 %, 90 %, largest)")
    for percentile, limit in SCORE_TOLERANCE.items():
        assert np.percentile(off, percentile) <= limit
    best = [t[0][1] for t in meta["input_top_logprobs"][1:]]
    assert np.mean(np.array(best) == logits[:-1].argmax(-1)) >= 0.8


@pytest.mark.effect("return_logprob", "echo", "logprobs", "top_logprobs_num", "prompt", "text")
def test_logprobs_agree_with_scores(live: LiveServer, greedy: list[int], rounding: float) -> None:
    """What decode reports for its tokens is what scoring the same text afterwards says."""
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    body = {"text": PROMPT, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    meta = live.post(GENERATE, body).json["meta_info"]
    drawn = meta["output_token_logprobs"]
    assert [e[1] for e in drawn] == greedy[:4]
    assert [t[0][1] for t in meta["output_top_logprobs"]] == greedy[:4], "greedy draws the best token"
    whole = [*encode(live, prompt=PROMPT), *greedy[:4]]
    scored = scores(live, whole)["input_token_logprobs"]
    assert [e[1] for e in scored] == whole
    off = [abs(a[0] - b[0]) for a, b in zip(scored[-4:], drawn, strict=True)]
    assert np.median(off) <= rounding, off
    echo = {"prompt": whole, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    lists = live.post(COMPLETIONS, echo).json["choices"][0]["logprobs"]
    assert lists["token_logprobs"][1 : len(whole)] == pytest.approx([e[0] for e in scored[1:]], abs=1e-3)


def test_logprobs_are_the_models_own_whatever_is_done_to_the_draw(live: LiveServer, greedy: list[int]) -> None:
    """Bias, penalties, temperature and cuts change which token comes, never what the model thought of it."""
    params = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    body = {"text": PROMPT, "return_logprob": True, "top_logprobs_num": 2}
    plain = live.post(GENERATE, {**body, "sampling_params": params}).json["meta_info"]["output_top_logprobs"][0]
    changed = {**params, "temperature": 1.7, "top_k": 9, "min_p": 0.01, "repetition_penalty": 1.5, "seed": 1}
    changed["logit_bias"] = {str(greedy[0]): -100}
    for sampling in (changed, {**changed, "regex": "[a-z]+"}):
        meta = live.post(GENERATE, {**body, "sampling_params": sampling}).json["meta_info"]
        assert meta["output_token_logprobs"][0][1] != greedy[0]
        top = meta["output_top_logprobs"][0]
        assert [e[1] for e in top] == [e[1] for e in plain]
        assert [e[0] for e in top] == pytest.approx([e[0] for e in plain], abs=1e-3)


@pytest.mark.effect("logprobs", "top_logprobs")
def test_chat_logprobs_cover_the_content(live: LiveServer) -> None:
    body = {**OFF, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": True, "top_logprobs": 3}
    choice = live.chat(body).json["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 4
    assert b"".join(bytes(e["bytes"]) for e in entries).decode("utf-8", "replace") == choice["message"]["content"]
    for entry in entries:
        top = [t["logprob"] for t in entry["top_logprobs"]]
        assert len(top) == 3
        assert top == sorted(top, reverse=True)
        assert entry["logprob"] == top[0] <= 0


@pytest.mark.effect("top_logprobs", "include")
def test_responses_logprobs_are_those_of_the_chat_route(live: LiveServer) -> None:
    sampling = {"temperature": 0, "ignore_eos": True, **OFF}
    chat = live.chat({"max_tokens": 4, "logprobs": True, "top_logprobs": 2, **sampling}).json["choices"][0]
    asked = {"input": "hi", "max_output_tokens": 4, **sampling}
    include = {"include": ["message.output_text.logprobs"]}
    found = []
    for more in ({}, {"top_logprobs": 2}, include):
        [item] = live.post("/v1/responses", {**asked, **more}).json["output"]
        found.append(item["content"][0]["logprobs"])
        events = live.stream("/v1/responses", {**asked, **more}).events
        deltas = [s for e in events if e["type"] == "response.output_text.delta" for s in e["logprobs"]]
        assert deltas == found[-1] == events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert found[0] == []
    assert found[1] == chat["logprobs"]["content"]
    assert found[2] == [{**entry, "top_logprobs": []} for entry in found[1]]


# ---- reuse, life and death of streams ----


def test_the_next_turn_finds_the_last_one_in_the_cache(
    live: LiveServer, forget: Callable[[], None], rounding: float, reuse_rounding: float
) -> None:
    """And greedy answers, log-probabilities with them, are those of a prompt that was read in full."""
    body = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": True, "top_logprobs": 2, **OFF}
    messages = user("Remember these words: " + "apple pear plum " * 200)
    first = live.chat({**body, "messages": messages}).json
    again = live.chat({**body, "messages": messages}).json
    content = first["choices"][0]["message"]["content"]
    assert again["choices"][0]["message"]["content"] == content
    assert cached(again) >= 256
    turn = [*messages, {"role": "assistant", "content": content}, *user("And?")]
    second = live.chat({**body, "messages": turn}).json
    assert cached(second) >= 256
    prompt = encode(live, messages=turn, **OFF)
    assert second["usage"]["prompt_tokens"] == len(prompt)
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    raw = live.post(GENERATE, {"input_ids": prompt, "sampling_params": params}).json
    assert raw["text"] == second["choices"][0]["message"]["content"]
    forget()
    anew = live.chat({**body, "messages": turn}).json
    assert cached(anew) == 0
    check_same_draws(second, anew, reuse_rounding)
    check_draws_by_scores(live, prompt, raw["output_ids"], rounding)


def check_same_draws(reply: Any, other: Any, off: float) -> None:
    """Token for token, up to the first choice that `off` may turn."""
    ours, theirs = (r["choices"][0]["logprobs"]["content"] for r in (reply, other))
    for a, b in zip(ours, theirs, strict=True):
        assert a["logprob"] == pytest.approx(b["logprob"], abs=off)
        if a["bytes"] != b["bytes"]:
            best, next_best = (t["logprob"] for t in b["top_logprobs"])
            assert 0 < best - next_best <= 2 * off
            return
        assert [t["bytes"] for t in a["top_logprobs"]] == [t["bytes"] for t in b["top_logprobs"]] or off


def check_draws_by_scores(live: LiveServer, prompt: list[int], drawn: list[int], rounding: float) -> None:
    """Greedy tokens are the best ones by one pass over everything. Where decoding rounds otherwise than such a pass, a
    near tie in routing moves a row by nats now and then: stock's own recorded answers have one such token in twenty."""
    meta = scores(live, [*prompt, *drawn])
    best, own = meta["input_top_logprobs"][-len(drawn) :], meta["input_token_logprobs"][-len(drawn) :]
    below = [top[0][0] - mine[0] for top, mine in zip(best, own, strict=True)]
    assert np.median(below) <= 3 * rounding, below
    assert max(below) <= 3 * rounding or rounding > 0.1, below


def cached(reply: Any) -> int:
    tokens: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_cached_tokens_are_told_also_by_an_answer_that_a_stop_string_ends(live: LiveServer) -> None:
    messages = user("Remember these numbers: " + "one two three " * 200)
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **OFF}
    content = live.chat(body).message["content"]
    reply = live.chat({**body, "stop": [content[len(content) // 2]]}).json
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert cached(reply) >= 256


def test_streams_side_by_side_draw_what_they_draw_alone(live: LiveServer, rounding: float) -> None:
    """Streams of one request run together. An engine that rounds a batch differently may draw another token rarely."""
    sampling = {"temperature": 1.5, "top_k": 30, "top_p": 1.0, "ignore_eos": True, "max_new_tokens": 6}
    together = live.post(GENERATE, {"text": PROMPT, "sampling_params": {**sampling, "n": 4, "seed": 5}}).json
    alone = [ids(live, **sampling, seed=5 + i) for i in range(4)]
    same = [a["output_ids"][0] == b[0] for a, b in zip(together, alone, strict=True)]
    assert len({tuple(a) for a in alone}) > 1
    assert sum(same) >= (4 if rounding < 0.01 else 2)


def test_disconnect_frees_the_engine(live: LiveServer) -> None:
    for streamed in (True, False):
        body = {"messages": user("x"), "max_tokens": 2000, "ignore_eos": True, "stream": streamed}
        data = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        with live.raw(head + data) as s:
            if streamed:
                s.recv(200)
            live.until(lambda st: st["running"] == 1, 20)
        live.until(lambda st: st["running"] == 0 and not st["requests"], 20)
    assert live.chat(max_tokens=2).status == 200


def test_deep_health_generates_and_stats_count(live: LiveServer) -> None:
    before = live.stats()
    reply = live.get("/health?deep=1", live.key)
    assert reply.status == 200
    assert reply.json["seconds"] >= 0
    live.chat(max_tokens=3, ignore_eos=True)
    live.until(lambda s: s["totals"]["completion_tokens"] >= before["totals"]["completion_tokens"] + 3)
    stats = live.stats()
    assert stats["engine"]["requests"] >= before["engine"]["requests"] + 2
    assert stats["engine"]["heartbeat_age_s"] < 30
    info = live.get("/server_info").json
    assert info["scripted"] is False
    assert not any("scripted" in w for w in info["warnings"])


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_the_other_dialects_answer(live: LiveServer, path: str) -> None:
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    asked = {"input": "hi", "max_output_tokens": 4, **OFF} if "responses" in path else {"messages": user("hi")}
    reply = live.post(path, {**body, **asked})
    assert reply.status == 200
    assert reply.json["usage"]["output_tokens"] == 4
