"""What parameters do that change no draw: the shape of replies, what is read, and what is refused. Scripted answers."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import LiveServer, Start, user
from request_helpers import DEFAULTS

from glm53.server.protocol.requests import parse_generate
from glm53.server.protocol.sampling import OTHER_INPUTS, OTHER_WISHES

COMPLETIONS, GENERATE, MESSAGES, RESPONSES = "/v1/completions", "/generate", "/v1/messages", "/v1/responses"
PLAIN = {"pieces": ["one ", "two ", "three"], "end": "user"}


@pytest.mark.effect(
    "best_of",
    "functions",
    "function_call",
    "suffix",
    "background",
    "conversation",
    "previous_response_id",
    "prompt",
)
@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (COMPLETIONS, "best_of", 3),
        ("/v1/chat/completions", "functions", [{"name": "f"}]),
        ("/v1/chat/completions", "function_call", {"name": "f"}),
        (COMPLETIONS, "suffix", "end"),
        (RESPONSES, "background", True),
        (RESPONSES, "conversation", "c"),
        (RESPONSES, "previous_response_id", "r"),
        (RESPONSES, "prompt", {"id": "p"}),
    ],
)
def test_what_is_not_supported_is_refused_by_name_and_its_neutral_value_is_not(
    start: Start, path: str, name: str, value: Any
) -> None:
    live = start(PLAIN)
    body = {COMPLETIONS: {"prompt": "x"}, RESPONSES: {"input": "x"}}.get(path, {"messages": user("x")})
    reply = live.post(path, {**body, name: value})
    assert reply.status == 400
    assert reply.error["param"] == name
    neutral = {"best_of": 1, "background": False, "functions": [], "function_call": "none", "suffix": ""}
    assert live.post(path, {**body, name: neutral.get(name)}).status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", COMPLETIONS])
def test_a_format_in_other_servers_words_is_refused_not_ignored(start: Start, path: str) -> None:
    live = start(PLAIN)
    body = {COMPLETIONS: {"prompt": "x"}}.get(path, {"messages": user("x")})
    for name in ("guided_json", "guided_choice", "structured_outputs", "regex", "ebnf", "grammar", "json_schema"):
        reply = live.post(path, {**body, name: {"type": "object"}})
        assert (reply.status, reply.error["param"], reply.error["code"]) == (400, name, "unsupported_parameter")
        assert "'response_format'" in reply.error["message"]
        assert live.post(path, {**body, name: None}).status == 200
    reply = live.post(GENERATE, {"text": "x", "sampling_params": {"ebnf": 'root ::= "a"'}})
    assert (reply.status, reply.error["param"]) == (400, "sampling_params.ebnf")


@pytest.mark.parametrize("path", ["/v1/chat/completions", COMPLETIONS, GENERATE])
def test_what_other_servers_know_and_would_be_left_out_is_refused(start: Start, path: str) -> None:
    live = start(PLAIN)
    body = {COMPLETIONS: {"prompt": "x"}, GENERATE: {"text": "x"}}.get(path, {"messages": user("x")})
    for name in OTHER_INPUTS:
        reply = live.post(path, {**body, name: ["data:image/png;base64,AAAA"]})
        assert (reply.status, reply.error["param"], reply.error["code"]) == (400, name, "unsupported_content")
        assert "AAAA" not in reply.error["message"]
    for name in OTHER_WISHES:
        reply = live.post(path, {**body, name: 1})
        assert (reply.status, reply.error["param"], reply.error["code"]) == (400, name, "unsupported_parameter")
    for no in (None, False, 0, [], ""):
        assert live.post(path, {**body, **dict.fromkeys((*OTHER_INPUTS, *OTHER_WISHES), no)}).status == 200
    reply = live.post(GENERATE, {"text": "x", "sampling_params": {"min_new_tokens": 5}})
    assert (reply.status, reply.error["param"]) == (400, "sampling_params.min_new_tokens")


def test_a_least_length_is_kept_where_nothing_can_end_the_answer_early(start: Start) -> None:
    live = start({"pieces": ["</think>", *["a "] * 9], "end": "length"})
    long = {"min_tokens": 5, "max_tokens": 5, "ignore_eos": True}
    assert live.post(COMPLETIONS, {"prompt": "x", **long}).json["usage"]["completion_tokens"] == 5
    assert live.chat(**long).json["usage"]["completion_tokens"] == 5
    generate = {"min_new_tokens": 5, "max_new_tokens": 5, "ignore_eos": True}
    reply = live.post(GENERATE, {"text": "x", "sampling_params": generate})
    assert reply.json["meta_info"]["completion_tokens"] == 5


def test_sglangs_name_of_the_seed() -> None:
    def seed(**sampling: Any) -> int | None:
        return parse_generate({"text": "x", "sampling_params": sampling}, DEFAULTS).decoding.sampling.seed

    assert seed(sampling_seed=7) == 7
    assert seed(seed=3, sampling_seed=7) == 3
    assert seed() is None


def test_other_outputs_than_text_are_refused(start: Start) -> None:
    live = start(PLAIN)
    reply = live.chat(modalities=["text", "audio"], audio={"voice": "a", "format": "wav"})
    assert (reply.status, reply.error["param"]) == (400, "modalities")
    assert live.chat(modalities=["text"], audio=None).status == 200


@pytest.mark.effect("stream_options", "stream_options.include_usage")
def test_include_usage_adds_the_last_event(start: Start) -> None:
    live = start(PLAIN)
    for path, body in ((COMPLETIONS, {"prompt": "x"}), ("/v1/chat/completions", {"messages": user("x")})):
        counts = [
            sum("usage" in e and bool(e["usage"]) for e in live.stream(path, {**body, **more}).events)
            for more in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": True}})
        ]
        assert counts == [0, 0, 1]


@pytest.mark.effect("prompt_progress")
def test_prompt_progress_sends_chunks_in_place_of_comments(start: Start) -> None:
    live = start({"pieces": ["x"], "end": "user", "prefill_s": 0.5}, ping_s=0.1)
    assert live.chat_stream().comments
    asked = live.chat_stream(prompt_progress=True)
    assert not asked.comments
    assert sum(not c["delta"] and not c["finish_reason"] for e in asked.events for c in e["choices"]) >= 2


@pytest.mark.effect("return_text_in_logprobs", "rid", "skip_special_tokens")
def test_generate_says_more_when_asked(start: Start) -> None:
    live = start({"pieces": ["a", "<|user|>", "b"], "end": "user"})
    asked: dict[str, Any] = {"text": "x", "return_logprob": True, "sampling_params": {"ignore_eos": True}}
    plain = live.post(GENERATE, asked).json
    assert plain["text"] == "ab"
    assert [e[2] for e in plain["meta_info"]["output_token_logprobs"]] == [None] * len(plain["output_ids"])
    special = {"sampling_params": {"ignore_eos": True, "skip_special_tokens": False}}
    full = live.post(GENERATE, {**asked, **special, "return_text_in_logprobs": True, "rid": "mine"}).json
    assert full["text"] == "a<|user|>b"
    assert [e[2] for e in full["meta_info"]["output_token_logprobs"]][:3] == ["a", "<|user|>", "b"]
    assert full["meta_info"]["id"] == "mine" != plain["meta_info"]["id"]


@pytest.mark.effect("stop_sequences")
def test_stop_sequences_end_a_message_and_are_named(start: Start) -> None:
    body = {"messages": user("x"), "max_tokens": 50, "stop_sequences": ["wo t"]}
    reply = start(PLAIN).post(MESSAGES, body).json
    assert reply["content"] == [{"type": "text", "text": "one t"}]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "wo t")


@pytest.mark.effect("max_output_tokens", "metadata")
def test_responses_end_at_max_output_tokens_and_repeat_the_metadata(start: Start) -> None:
    body = {"input": "x", "max_output_tokens": 2, "metadata": {"a": "b"}, "reasoning": {"effort": "none"}}
    reply = start(PLAIN).post(RESPONSES, body).json
    assert reply["output"][-1]["content"][0]["text"] == "one two "
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (reply["max_output_tokens"], reply["metadata"]) == (2, {"a": "b"})


def read_tokens(live: LiveServer, path: str, body: dict[str, Any]) -> int:
    usage = live.post(path, {"max_tokens": 1, **body}).json["usage"]
    tokens = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert isinstance(tokens, int)
    return tokens


@pytest.mark.effect("system", "instructions", "input")
def test_system_and_instructions_are_read(start: Start) -> None:
    live = start(PLAIN)
    brief = "You answer briefly."
    tokens = len(live.post("/tokenize", {"prompt": brief}).json["tokens"]) + 1  # and <|system|>
    plain = read_tokens(live, MESSAGES, {"messages": user("x")})
    assert read_tokens(live, MESSAGES, {"messages": user("x"), "system": brief}) == plain + tokens
    plain = read_tokens(live, RESPONSES, {"input": "x"})
    assert read_tokens(live, RESPONSES, {"input": "x", "instructions": brief}) == plain + tokens
    assert read_tokens(live, RESPONSES, {"input": "x x x x"}) > plain


@pytest.mark.effect("tokens", "text", "prompt")
def test_tokenize_and_detokenize_read_their_fields(start: Start) -> None:
    live = start(PLAIN)
    lists = [live.post("/tokenize", {name: "hello you"}).json["tokens"] for name in ("text", "prompt")]
    assert lists[0] == lists[1]
    assert live.post("/detokenize", {"tokens": lists[0]}).json["text"] == "hello you"
    assert live.post("/detokenize", {"tokens": []}).json["text"] == ""
    assert live.post("/detokenize", {"tokens": [lists[0], []]}).json["text"] == ["hello you", ""]
    for bad in ([[1], 2], [1, [2]], "x", [[[1]]]):
        assert live.post("/detokenize", {"tokens": bad}).status == 400
