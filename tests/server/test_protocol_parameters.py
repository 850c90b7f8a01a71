"""Cases about what clients send: parameters, and the routes beside chat; each test is named after its case."""

from __future__ import annotations

from typing import Any

from request_helpers import DEFAULTS, U, chat, refused

from glm53.chat import ChatOptions
from glm53.engine.protocol import SamplingParams
from glm53.server.protocol.requests import (
    parse_completion,
    parse_detokenize,
    parse_generate,
    parse_tokenize,
)


def test_b60_max_tokens() -> None:
    def limit(**body: Any) -> int | None:
        return chat(**body).decoding.max_tokens

    assert limit() is None
    assert limit(max_tokens=None) is None
    assert limit(max_tokens=-1) is None
    assert limit(max_tokens=0) == 0
    assert limit(max_tokens=1) == 1
    assert limit(max_tokens=5.0) == 5
    assert limit(max_tokens=100_000_000) == 100_000_000
    assert limit(max_tokens=5, max_completion_tokens=7) == 7
    assert limit(max_tokens=5, max_completion_tokens=None) == 5
    for bad in (-5, "abc", 1.5, True, []):
        refused("max_tokens", max_tokens=bad)


def test_b62_n() -> None:
    assert chat().decoding.n == 1
    assert chat(n=2).decoding.n == 2
    for bad in (0, -1, 1000, "2", 1.5):
        refused("n", n=bad)


def test_b63_logprobs() -> None:
    assert chat().decoding.top_logprobs is None
    assert chat(logprobs=False, top_logprobs=0).decoding.top_logprobs is None
    assert chat(logprobs=True).decoding.top_logprobs == 0
    assert chat(logprobs=True, top_logprobs=None).decoding.top_logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).decoding.top_logprobs == 5
    refused("top_logprobs", top_logprobs=5)
    refused("top_logprobs", logprobs=True, top_logprobs=21)
    refused("logprobs", logprobs=1)
    assert parse_completion({"prompt": "a", "logprobs": 0}, DEFAULTS).decoding.top_logprobs == 0


def test_b67_unknown_fields_and_nulls() -> None:
    optional = [
        "temperature", "top_p", "top_k", "min_p", "n", "stop", "stream", "stream_options", "max_tokens", "seed",
        "tools", "max_completion_tokens", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs",
        "top_logprobs",
        "response_format", "tool_choice", "parallel_tool_calls", "reasoning_effort", "reasoning", "thinking",
        "chat_template_kwargs", "enable_thinking", "continue_final_message", "add_generation_prompt", "ignore_eos",
        "functions", "function_call", "thinking_budget", "stop_token_ids", "repetition_penalty", "clear_thinking",
    ]  # fmt: skip
    extra = {
        "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k",
        "safety_identifier": "s",
        "verbosity": "low", "web_search_options": {}, "user": "u", "foo": {"bar": 1}, "model": "anything",
    }  # fmt: skip
    assert chat(**dict.fromkeys(optional), **extra) == chat()
    assert chat(parallel_tool_calls=False).parallel_tool_calls is False


def test_b69_completions() -> None:
    def prompts(raw: Any) -> Any:
        return parse_completion({"prompt": raw}, DEFAULTS).prompts

    assert prompts("a") == ("a",)
    assert prompts(["a"]) == ("a",)
    assert prompts(["a", "b"]) == ("a", "b")
    assert prompts([1, 2]) == ((1, 2),)
    assert prompts([[1], [2, 3]]) == ((1,), (2, 3))
    for bad in ("", [], [[]], [""], None, 3, [1, "a"], ["a", 1], [1.5], [True], [-1], [2084], [None], {}):
        refused(parse=parse_completion, prompt=bad)
    refused("suffix", parse=parse_completion, prompt="a", suffix="b")
    call = parse_completion({"prompt": "a", "echo": True, "suffix": None}, DEFAULTS)
    assert call.echo
    assert call.decoding.max_tokens == 16
    refused("best_of", parse=parse_completion, prompt="a", best_of=3)


def test_b69_generate() -> None:
    def call(**body: Any) -> Any:
        return parse_generate(body, DEFAULTS)

    assert (call(text="a").prompts, call(text="a").batch) == (("a",), False)
    assert (call(text=["a"]).prompts, call(text=["a"]).batch) == (("a",), True)
    assert call(input_ids=[1, 2]).prompts == ((1, 2),)
    assert call(input_ids=[[1], [2]]).batch
    refused(parse=parse_generate, text="a", input_ids=[1])
    refused(parse=parse_generate)
    for bad in (
        {"text": ""},
        {"text": [1]},
        {"text": 3},
        {"input_ids": "a"},
        {"input_ids": []},
        {"input_ids": [99999]},
    ):
        refused(parse=parse_generate, **bad)
    assert call(text="a", sampling_params=None).decoding.max_tokens == 128
    for n in (0, 1):
        assert call(text="a", sampling_params={"max_new_tokens": n}).decoding.max_tokens == n
    scored = call(text="a", return_logprob=True, logprob_start_len=0, top_logprobs_num=3)
    assert (scored.return_logprob, scored.logprob_start, scored.decoding.top_logprobs) == (True, 0, 3)
    schema = call(text="a", sampling_params={"json_schema": '{"type": "object"}'}).decoding.response_format
    assert schema.schema == {"type": "object"}
    assert call(text="a", sampling_params={"regex": "[0-9]+"}).decoding.response_format.kind == "regex"
    refused("sampling_params.temperature", parse=parse_generate, text="a", sampling_params={"temperature": -1})
    refused(parse=parse_generate, text="a", sampling_params={"json_schema": "{"})


def test_tokenize() -> None:
    assert parse_tokenize({"prompt": "a"}, DEFAULTS).texts == ("a",)
    assert parse_tokenize({"text": ["a", ""]}, DEFAULTS).batch
    assert parse_tokenize({"messages": U}, DEFAULTS).chat.messages[0].content == "x"
    for bad in ({}, {"prompt": 3}, {"prompt": ["a", 1]}):
        refused(parse=parse_tokenize, **bad)
    assert parse_detokenize({"tokens": [1, 2]}, DEFAULTS) == ([(1, 2)], False)
    assert parse_detokenize({"tokens": [[1], []]}, DEFAULTS) == ([(1,), ()], True)
    for bad in ({}, {"tokens": "a"}, {"tokens": [-1]}, {"tokens": [10**9]}):
        refused(parse=parse_detokenize, **bad)


def test_b80_stream_must_be_a_boolean() -> None:
    assert chat(stream=None).decoding.stream is False
    for bad in ("true", 1, []):
        refused("stream", stream=bad)


def test_sampling() -> None:
    body = {
        "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.1, "seed": 3, "logit_bias": {"5": -100, "6": 1.5, "7": None},
    }  # fmt: skip
    assert chat(**body).decoding.sampling == SamplingParams(0, 0.5, 7, 0.1, 1, -1, 1.1, 3, {5: -100, 6: 1.5})
    for off in (-1, 0, None):
        assert chat(top_k=off).decoding.sampling.top_k == 0
    assert chat(seed=-1).decoding.sampling.seed == 2**63 - 1
    assert chat(seed=1e20).decoding.sampling.seed == 10**20 % 2**63
    for key, bad in (
        ("temperature", -0.1), ("temperature", "hot"), ("temperature", True), ("top_p", 1.1), ("top_k", -2),
        ("min_p", 2),
        ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0), ("seed", "x"), ("seed", 1.5),
        ("logit_bias", []), ("chat_template_kwargs", 1), ("enable_thinking", "no"), ("thinking", "x"),
    ):  # fmt: skip
        refused(key, **{key: bad})
    refused("logit_bias.abc", logit_bias={"abc": 1})
    refused("logit_bias.5", logit_bias={"5": 101})
    refused("logit_bias.-5", logit_bias={"-5": 1})
    refused("logit_bias.2084", logit_bias={"2084": 1})


def test_stop() -> None:
    assert chat(stop="a").decoding.stop == ("a",)
    assert chat(stop=["a", "", "b"]).decoding.stop == ("a", "b")
    assert chat(stop="").decoding.stop == ()
    assert chat(stop_token_ids=[1, 2]).decoding.stop_ids == (1, 2)
    for bad in (3, ["a", 1], ["a"] * 17, {}, ["x" * 2000]):
        refused(stop=bad)


def test_options_are_passed_on() -> None:
    call = chat(chat_template_kwargs={"clear_thinking": True, "custom": 1})
    assert call.chat == ChatOptions(clear_thinking=True)
    assert call.template_kwargs["custom"] == 1
