"""The whole stack: HTTP in front of the CPU engine on the bundled checkpoint. What each parameter of a request changes.

The bundled model says nothing sensible; tests look at which tokens come, not at what they mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import MODEL_DIR, LiveServer, check_chat_stream, start_server, user

from glm53.server.app import ServerOptions
from glm53.tokenizer import Tokenizer

pytest.importorskip("transformers")
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    from glm53.engine.cpu import CpuEngine

    def load(progress: Any) -> Any:
        return CpuEngine.load(MODEL_DIR, progress=progress)

    server = start_server(ServerOptions(port=0), load, Tokenizer(MODEL_DIR))
    server.until(lambda s: s["status"] == "ready", 180)
    yield server
    server.stop(30)


def ids(live: LiveServer, **sampling: Any) -> list[int]:
    """Token ids that /generate answers the prompt with; greedy and eight of them unless told otherwise."""
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, **sampling}
    reply = live.post("/generate", {"text": PROMPT, "sampling_params": params})
    assert reply.status == 200, reply.data
    out: list[int] = reply.json["output_ids"]
    return out


@pytest.fixture(scope="module")
def greedy(live: LiveServer) -> list[int]:
    return ids(live)


def test_greedy_repeats(live: LiveServer, greedy: list[int]) -> None:
    assert len(greedy) == 8
    assert ids(live) == greedy


def test_temperature_and_seed(live: LiveServer, greedy: list[int]) -> None:
    hot = {"temperature": 2.0, "top_p": 1.0}
    first = ids(live, **hot, seed=1)
    assert ids(live, **hot, seed=1) == first
    assert ids(live, **hot, seed=2) != first
    assert first != greedy


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 0.000001}, {"min_p": 1.0}])
def test_a_cut_that_leaves_one_token_is_greedy(live: LiveServer, greedy: list[int], cut: dict[str, float]) -> None:
    assert ids(live, temperature=2.0, seed=3, **{"top_p": 1.0, **cut}) == greedy


def test_logit_bias(live: LiveServer, greedy: list[int]) -> None:
    assert ids(live, logit_bias={str(greedy[0]): -100})[0] != greedy[0]
    assert ids(live, logit_bias={"300": 100}) == [300] * 8


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


def test_stop_string_stop_ids_and_length(live: LiveServer, greedy: list[int], tokenizer: Tokenizer) -> None:
    third = tokenizer.token_bytes(greedy[2]).decode("utf-8", "ignore").strip()
    if third:
        params = {"temperature": 0, "max_new_tokens": 8, "stop": [third], "ignore_eos": True}
        reply = live.post("/generate", {"text": PROMPT, "sampling_params": params}).json
        assert third not in reply["text"]
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": third}
    assert len(ids(live, stop_token_ids=[greedy[2]])) == greedy.index(greedy[2])
    assert ids(live, max_new_tokens=3) == greedy[:3]


def test_n_choices_differ_and_repeat(live: LiveServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 2.0, "top_p": 1.0, "seed": 5, "n": 2, "ignore_eos": True}
    first = [c["text"] for c in live.post("/v1/completions", body).json["choices"]]
    assert first[0] != first[1]
    assert [c["text"] for c in live.post("/v1/completions", body).json["choices"]] == first


def test_logprobs_agree_with_scores(live: LiveServer, greedy: list[int], tokenizer: Tokenizer) -> None:
    """What decode reports for its tokens is what scoring the same text afterwards says."""
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    body = {"text": PROMPT, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    meta = live.post("/generate", body).json["meta_info"]
    drawn = meta["output_token_logprobs"]
    assert [e[1] for e in drawn] == greedy[:4]
    assert [t[0][1] for t in meta["output_top_logprobs"]] == greedy[:4], "greedy draws the best token"
    whole = [*tokenizer.encode(PROMPT), *greedy[:4]]
    body = {
        "input_ids": whole,
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 0},
    }
    scored = live.post("/generate", body).json["meta_info"]["input_token_logprobs"]
    assert [e[1] for e in scored] == whole
    assert [e[0] for e in scored[-4:]] == pytest.approx([e[0] for e in drawn], abs=1e-3)
    echo = {"prompt": whole, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    lists = live.post("/v1/completions", echo).json["choices"][0]["logprobs"]
    assert lists["token_logprobs"][1 : len(whole)] == pytest.approx([e[0] for e in scored[1:]], abs=1e-3)


def test_chat_streams_what_it_answers_whole(live: LiveServer) -> None:
    body = {"messages": user("Hello"), "max_tokens": 12, "temperature": 0}
    whole = live.chat(body).json["choices"][0]
    out = live.chat_stream(body)
    check_chat_stream(out)
    assert out.choice()["reasoning_content"] == whole["message"].get("reasoning_content", "")
    assert out.choice()["finish_reason"] == whole["finish_reason"]


def test_b10_effort_none_gives_no_reasoning(live: LiveServer) -> None:
    message = live.chat(max_tokens=6, temperature=0, reasoning_effort="none").message
    assert "reasoning_content" not in message


def test_effort_changes_the_prompt(live: LiveServer) -> None:
    prompts = [
        live.post("/tokenize", {"messages": user("x"), "reasoning_effort": e}).json["tokens"] for e in ("low", "max")
    ]
    assert prompts[0] != prompts[1]


def test_thinking_budget_closes_the_reasoning(live: LiveServer) -> None:
    usage = live.chat(max_tokens=14, temperature=0, thinking_budget=5).json["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= 6
    assert usage["completion_tokens"] > 6


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("effort", ["none", "max"])
def test_b09_json_schema_is_kept_after_the_reasoning(live: LiveServer, effort: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    body = {"response_format": form, "max_tokens": 200, "reasoning_effort": effort, "thinking_budget": 4, "seed": 1}
    choice = live.chat(body).json["choices"][0]
    assert choice["finish_reason"] == "stop"
    value = json.loads(choice["message"]["content"])
    assert set(value) == {"ok", "kind"}
    assert value["kind"] in ("a", "b")


def test_regex(live: LiveServer) -> None:
    reply = live.post(
        "/generate", {"text": "x", "sampling_params": {"regex": "[ab]{3}", "max_new_tokens": 20, "seed": 1}}
    )
    assert len(reply.json["text"]) == 3
    assert set(reply.json["text"]) <= {"a", "b"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_gives_up_is_the_clients_error_and_harms_nobody(live: LiveServer, stream: bool) -> None:
    sampling = {"regex": "(?:(?:a{100}){100}){100}", "max_new_tokens": 200}
    if stream:
        error = live.stream("/generate", {"text": "x", "sampling_params": sampling}).events[-1]["error"]
    else:
        reply = live.post("/generate", {"text": "x", "sampling_params": sampling})
        assert reply.status == 400
        error = reply.error
    assert error["code"] == "unsupported_grammar"
    assert error["param"] == "regex"
    assert live.get("/health", live.key).status == 200
    assert live.chat(max_tokens=2).status == 200


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}])
def test_a_forced_tool_call(live: LiveServer, choice: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    tools = [{"type": "function", "function": {"name": "pick", "parameters": schema}}]
    body = {"tools": tools, "tool_choice": choice, "max_tokens": 100, "reasoning_effort": "none", "seed": 1}
    reply = live.chat({**body, "parallel_tool_calls": False}).json["choices"][0]
    assert reply["finish_reason"] == "tool_calls"
    [call] = reply["message"]["tool_calls"]
    assert call["function"]["name"] == "pick"
    assert json.loads(call["function"]["arguments"])["n"] in (1, 2)


def test_the_next_turn_finds_the_last_one_in_the_cache(live: LiveServer) -> None:
    messages = user("Remember these words: " + "apple pear plum " * 30)
    first = live.chat(messages=messages, max_tokens=4, temperature=0, reasoning_effort="none").json
    turn = [*messages, {"role": "assistant", "content": first["choices"][0]["message"]["content"]}, *user("And?")]
    second = live.chat(messages=turn, max_tokens=4, temperature=0, reasoning_effort="none").json
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 64


def test_every_pick_was_served_by_the_native_experts(live: LiveServer, greedy: list[int]) -> None:
    engine = live.stats()["engine"]
    assert engine["routed_picks_served"] == engine["routed_picks_expected"] > 0
    info = live.get("/server_info").json
    assert info["scripted"] is False
    assert not any("scripted" in w for w in info["warnings"])


def test_disconnect_frees_the_engine(live: LiveServer) -> None:
    data = json.dumps({"messages": user("x"), "max_tokens": 2000, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    with live.raw(head + data) as s:
        s.recv(200)
        live.until(lambda st: st["running"] == 1, 20)
    live.until(lambda st: st["running"] == 0 and not st["requests"], 20)
