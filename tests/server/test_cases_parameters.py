"""Parameters and routes over HTTP: cases B60 to B69 and B80."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import CHAT, JSON, LiveServer, Start, check_chat_stream, refused, user


@pytest.mark.parametrize(
    ("given", "tokens", "finish"),
    [
        (1, 1, "length"),
        (3, 3, "length"),
        (0, 0, "length"),
        (-1, 6, "stop"),
        (5.0, 5, "length"),
        (10**8, 6, "stop"),
        (None, 6, "stop"),
    ],
)
def test_b60_max_tokens(start: Start, given: Any, tokens: int, finish: str) -> None:
    live = start()
    reply = live.chat(max_tokens=given).json
    assert reply["usage"]["completion_tokens"] == tokens
    assert reply["choices"][0]["finish_reason"] == finish
    out = live.chat_stream(max_tokens=given)
    check_chat_stream(out)
    assert out.choice()["finish_reason"] == finish


@pytest.mark.parametrize("given", [-5, "abc", 1.5, True, [1]])
def test_b60_bad_max_tokens(start: Start, given: Any) -> None:
    assert refused(start().chat(max_tokens=given))["param"] == "max_tokens"


def test_b60_the_last_token_of_the_context(start: Start) -> None:
    live = start(context=131072)
    prompt = live.post("/tokenize", {"messages": user("hi")}).json["count"]
    assert refused(start(context=prompt).chat())["code"] == "context_length_exceeded"
    live = start(context=prompt + 1)
    reply = live.chat().json
    assert reply["usage"]["completion_tokens"] == 1
    assert reply["choices"][0]["finish_reason"] == "length"


def test_b60_max_completion_tokens_wins(start: Start) -> None:
    assert start().chat(max_tokens=1, max_completion_tokens=2).json["usage"]["completion_tokens"] == 2


def test_b62_n(start: Start) -> None:
    live = start([{"pieces": ["</think>", c], "end": "user"} for c in "abc"])
    reply = live.chat(n=3).json
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2]
    assert sorted(c["message"]["content"] for c in reply["choices"]) == ["a", "b", "c"]
    assert reply["usage"]["completion_tokens"] == 6
    for bad in (0, -1, 1000, 1.5, "2"):
        assert refused(live.chat(n=bad))["param"] == "n"
    assert refused(start(max_n=2).chat(n=3))["param"] == "n"


def test_b63_logprobs(start: Start) -> None:
    live = start({"pieces": ["think", "</think>", "a", {"hex": "c3"}, {"hex": "a9"}], "end": "user"})
    content = live.chat(logprobs=True).json["choices"][0]["logprobs"]["content"]
    assert [bytes(e["bytes"]) for e in content] == [b"a", b"\xc3", b"\xa9"]
    assert all(e["top_logprobs"] == [] for e in content)
    content = live.chat(logprobs=True, top_logprobs=2).json["choices"][0]["logprobs"]["content"]
    assert [len(e["top_logprobs"]) for e in content] == [2, 2, 2]
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0
    assert refused(live.chat(top_logprobs=5))["param"] == "top_logprobs"
    assert refused(live.chat(logprobs=True, top_logprobs=21))["param"] == "top_logprobs"
    out = live.chat_stream(logprobs=True)
    streamed = [e for c in out.events for e in (c["choices"][0]["logprobs"] or {"content": ()})["content"]]
    assert [bytes(e["bytes"]) for e in streamed] == [b"a", b"\xc3", b"\xa9"]


def test_b63_completions_logprobs(start: Start) -> None:
    live = start({"pieces": ["a", "b"], "end": "user"})
    logprobs = live.post("/v1/completions", {"prompt": "x", "logprobs": 0}).json["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["a", "b"],
        "token_logprobs": [0.0, 0.0],
        "top_logprobs": [{}, {}],
        "text_offset": [0, 1],
    }
    echo = live.post("/v1/completions", {"prompt": "hello you", "logprobs": 1, "echo": True}).json["choices"][0]
    assert echo["text"] == "hello youab"
    assert echo["logprobs"]["token_logprobs"][0] is None
    assert "".join(echo["logprobs"]["tokens"]) == "hello youab"
    assert echo["logprobs"]["text_offset"][-1] == len("hello youa")


@pytest.mark.parametrize("role", ["<|user|>", "<|observation|>", "<|endoftext|>", "<|assistant|>", "<|system|>"])
def test_b65_a_made_up_turn_is_cut_everywhere(start: Start, role: str) -> None:
    live = start({"pieces": ["</think>", "answer", role, "fake user text"], "end": "user"})
    reply = live.chat().json["choices"][0]
    assert (reply["message"]["content"], reply["finish_reason"]) == ("answer", "stop")
    assert live.chat_stream().choice()["content"] == "answer"
    completion = live.post("/v1/completions", {"prompt": "x"}).json["choices"][0]
    assert (completion["text"], completion["finish_reason"]) == ("</think>answer", "stop")
    generated = live.post("/generate", {"text": "x"}).json
    assert generated["text"] == "</think>answer"
    assert generated["meta_info"]["finish_reason"]["type"] == "stop"
    ignoring = live.chat(ignore_eos=True).message["content"]
    assert ignoring == "answerfake user text"


def test_b67_unknown_fields_and_nulls(start: Start) -> None:
    nulls = (
        "model temperature top_p top_k min_p seed stop max_tokens max_completion_tokens n stream stream_options tools "
        "tool_choice response_format logprobs top_logprobs logit_bias presence_penalty frequency_penalty "
        "repetition_penalty reasoning_effort chat_template_kwargs enable_thinking parallel_tool_calls user"
    )
    body: dict[str, Any] = dict.fromkeys(nulls.split())
    body |= {
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "verbosity": "low",
        "web_search_options": {},
        "foo": {"bar": 1},
    }
    assert start().chat(body).message["content"] == "Hello world!"


class TestB69:
    def test_completions_prompts(self, start: Start) -> None:
        live = start({"pieces": ["ok"], "end": "user"})
        ids = live.post("/tokenize", {"prompt": "hello"}).json["tokens"]
        for prompt, count in (("a", 1), (["a"], 1), (["a", "b"], 2), (ids, 1), ([ids, ids], 2)):
            reply = live.post("/v1/completions", {"prompt": prompt}).json
            assert [c["text"] for c in reply["choices"]] == ["ok"] * count
            assert reply["object"] == "text_completion"
        for bad in ("", [], [""], [[]], None, 5, [1.5], [10**9], [{}]):
            assert refused(live.post("/v1/completions", {"prompt": bad}))["param"].startswith("prompt")
        assert refused(live.post("/v1/completions", {"prompt": "a", "suffix": "b"}))["param"] == "suffix"

    def test_completions_stream(self, start: Start) -> None:
        live = start({"pieces": ["one ", "two"], "end": "user", "rate": 100})
        out = live.stream("/v1/completions", {"prompt": "x", "echo": True, "stream_options": {"include_usage": True}})
        assert out.done
        assert "".join(e["choices"][0]["text"] for e in out.events if e["choices"]) == "xone two"
        assert [e["choices"][0]["finish_reason"] for e in out.events if e["choices"]][-1] == "stop"
        assert out.events[-1]["usage"]["completion_tokens"] == 2

    def test_generate(self, start: Start) -> None:
        live = start({"pieces": ["ok", "!"], "end": "user"})
        ids = live.post("/tokenize", {"prompt": "hello"}).json["tokens"]
        one = live.post("/generate", {"text": "hello"}).json
        assert one["text"] == "ok!"
        assert one["meta_info"]["prompt_tokens"] == len(ids)
        assert one["meta_info"]["completion_tokens"] == 2
        assert one["meta_info"]["finish_reason"]["type"] == "stop"
        assert live.post("/generate", {"input_ids": ids, "sampling_params": None}).json["text"] == "ok!"
        assert [r["text"] for r in live.post("/generate", {"text": ["a", "b"]}).json] == ["ok!"] * 2
        for bad in ({}, {"text": "a", "input_ids": ids}, {"text": 5}, {"input_ids": "a"}, {"text": ""}):
            refused(live.post("/generate", bad))

    def test_generate_lengths(self, start: Start) -> None:
        live = start({"pieces": ["ok", "!"], "end": "user"})
        for count in (0, 1):
            reply = live.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": count}}).json
            assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": count}
            assert reply["meta_info"]["completion_tokens"] == count

    def test_generate_stream_is_cumulative(self, start: Start) -> None:
        live = start({"pieces": ["one ", "two"], "end": "user", "rate": 50})
        out = live.stream("/generate", {"text": "x"})
        assert out.done
        assert [e["text"] for e in out.events if e["meta_info"]["finish_reason"] is None] == ["one ", "one two"][:1]
        assert out.events[-1]["text"] == "one two"
        assert out.events[-1]["meta_info"]["finish_reason"]["type"] == "stop"

    def test_generate_scores(self, start: Start) -> None:
        live = start({"pieces": ["ok"], "end": "user"})
        ids = live.post("/tokenize", {"prompt": "hello you"}).json["tokens"]
        body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}
        for count in (0, 1):
            meta = live.post("/generate", {**body, "sampling_params": {"max_new_tokens": count}}).json["meta_info"]
            assert [e[1] for e in meta["input_token_logprobs"]] == ids
            assert meta["input_token_logprobs"][0][0] is None
            assert all(e[0] < 0 for e in meta["input_token_logprobs"][1:])
            assert meta["input_top_logprobs"][0] is None
            assert [len(t) for t in meta["input_top_logprobs"][1:]] == [3] * (len(ids) - 1)
            assert len(meta["output_token_logprobs"]) == count
        default = live.post("/generate", {"input_ids": ids, "return_logprob": True}).json["meta_info"]
        assert default["input_token_logprobs"] == []

    @pytest.mark.parametrize("prompts", [["hello you"], ["hello", "you there"]])
    def test_generate_stream_repeats_all_scores(self, start: Start, prompts: list[str]) -> None:
        live = start({"pieces": ["one ", "two ", "three"], "end": "user", "rate": 50})
        body = {"text": prompts, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
        body["sampling_params"] = {"n": 2, "max_new_tokens": 3}
        whole = live.post("/generate", body).json
        events = live.stream("/generate", body).events
        assert len(whole) == 2 * len(prompts)
        for index, expected in enumerate(whole):
            mine = [e for e in events if e["index"] == index]
            assert len(mine) >= 2
            for key in ("input_token_logprobs", "input_top_logprobs", "output_token_logprobs", "output_top_logprobs"):
                assert mine[-1]["meta_info"][key] == expected["meta_info"][key]
                assert expected["meta_info"][key]
            counts = [len(e["meta_info"]["output_token_logprobs"]) for e in mine]
            assert counts == sorted(counts)
            assert counts == [len(e["output_ids"]) for e in mine]


def test_tokenize_never_makes_special_tokens(start: Start) -> None:
    live = start()
    reply = live.post("/tokenize", {"prompt": "<|user|>"}).json
    assert reply["count"] == len(reply["tokens"]) > 1
    assert live.post("/detokenize", {"tokens": reply["tokens"]}).json["text"] == "<|user|>"
    batch = live.post("/tokenize", {"prompt": ["a", "b c"]}).json
    assert batch["count"] == [len(t) for t in batch["tokens"]]


def test_b80_the_body_decides_about_streaming(start: Start) -> None:
    live = start()
    for accept in ("*/*", "text/event-stream", "application/json"):
        for given in ({}, {"stream": False}, {"stream": None}):
            reply = live.request("POST", CHAT, {"messages": user("x"), **given}, {**JSON, "Accept": accept})
            assert reply.headers["content-type"].startswith("application/json")
    assert refused(live.chat(stream="true"))["param"] == "stream"


def test_404_and_405_are_json(start: Start) -> None:
    live = start()
    assert refused(live.get("/v2/nothing"), 404)["code"] == "not_found"
    assert refused(live.get(CHAT), 405)["code"] == "method_not_allowed"
    assert live.get(CHAT).headers["allow"] == "POST"
    assert refused(live.post("/v1/models", {}), 405)
    assert refused(live.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert live.get("/v1/models/glm-5.3-flash").json["id"] == "glm-5.3-flash"


def test_seeds_differ_between_choices_and_repeat_between_requests(start: Start) -> None:
    live: LiveServer = start()
    seen: list[Any] = []
    engine = live.engine
    assert engine is not None
    submit = engine.submit
    engine.submit = lambda r: (seen.append(r.sampling.seed), submit(r))[1]  # type: ignore[method-assign]
    live.chat(n=2, seed=7)
    live.chat(n=2, seed=7)
    live.chat(n=1)
    assert seen == [7, 8, 7, 8, None]


def test_b79_http_1_0_without_a_host(start: Start) -> None:
    live = start()
    with live.raw(b"GET /health HTTP/1.0\r\n\r\n") as s:
        assert s.recv(100).startswith(b"HTTP/1.0 200")


def test_streams_over_http_1_0(start: Start) -> None:
    live = start()
    data = json.dumps({"messages": user("x"), "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nContent-Length: {len(data)}\r\nContent-Type: application/json\r\n\r\n"
    with live.raw(head.encode() + data) as s:
        raw = b""
        while block := s.recv(65536):
            raw += block
    assert raw.endswith(b"data: [DONE]\n\n")
