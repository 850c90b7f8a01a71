"""What an engine must do behind the whole server, second part: conversations, and answers that a grammar shapes.

Imported whole beside `engine_cases`, which says how.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine_cases import GENERATE, OFF, encode
from live_server import LiveServer, check_chat_stream, user

# ---- conversations ----


@pytest.mark.effect("stream", "messages")
def test_chat_streams_what_it_answers_whole(live: LiveServer) -> None:
    body = {"messages": user("Hello"), "max_tokens": 12, "temperature": 0}
    whole = live.chat(body).json["choices"][0]
    out = live.chat_stream(body)
    check_chat_stream(out)
    assert out.choice()["reasoning_content"] == whole["message"].get("reasoning_content", "")
    assert out.choice()["finish_reason"] == whole["finish_reason"]


@pytest.mark.effect(
    "reasoning_effort",
    "enable_thinking",
    "thinking",
    "reasoning",
    "reasoning.effort",
    "reasoning.enabled",
    "chat_template_kwargs",
    "chat_template_kwargs.enable_thinking",
    "chat_template_kwargs.thinking",
    "chat_template_kwargs.reasoning_effort",
)
@pytest.mark.parametrize(
    "switch",
    [
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}},
        {"chat_template_kwargs": {"reasoning_effort": "none"}},
    ],
)
def test_b10_switched_off_there_is_no_reasoning(live: LiveServer, switch: dict[str, Any]) -> None:
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    assert "reasoning_content" in live.chat(body).message
    assert "reasoning_content" not in live.chat(body, **switch).message


@pytest.mark.effect("reasoning_effort", "output_config.effort")
def test_effort_changes_the_prompt(live: LiveServer) -> None:
    low, high = (encode(live, messages=user("x"), reasoning_effort=e) for e in ("low", "max"))
    assert low != high
    sampling = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "thinking": {"type": "enabled"}}
    texts = [
        live.post("/v1/messages", {"messages": user("x"), **sampling, "output_config": {"effort": e}}).json["content"]
        for e in ("low", "max")
    ]
    assert texts[0] != texts[1]


@pytest.mark.effect("clear_thinking", "chat_template_kwargs.clear_thinking")
@pytest.mark.parametrize("more", [{"clear_thinking": True}, {"chat_template_kwargs": {"clear_thinking": True}}])
def test_clear_thinking_leaves_old_reasoning_out(live: LiveServer, more: dict[str, Any]) -> None:
    """The prompt loses exactly the reasoning's tokens, and so the answer's scores change."""
    thought = "Let me think about that for a while."
    turn = {"role": "assistant", "content": "4", "reasoning_content": thought}
    messages = [*user("2+2?"), turn, *user("And 3+3?")]
    kept, cleared = encode(live, messages=messages), encode(live, messages=messages, **more)
    assert len(kept) - len(cleared) == len(encode(live, prompt=thought))
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    body |= {**OFF, "logprobs": True}
    replies = [live.chat({**body, **extra}).json for extra in ({}, more)]
    assert replies[0]["usage"]["prompt_tokens"] - replies[1]["usage"]["prompt_tokens"] == len(kept) - len(cleared)
    first = [r["choices"][0]["logprobs"]["content"][0]["logprob"] for r in replies]
    assert first[0] != first[1]


@pytest.mark.effect(
    "thinking_budget",
    "thinking.budget_tokens",
    "reasoning.max_tokens",
    "chat_template_kwargs.thinking_budget",
)
@pytest.mark.parametrize(
    "budget",
    [
        {"thinking_budget": 5},
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
        {"reasoning": {"max_tokens": 5}},
        {"chat_template_kwargs": {"thinking_budget": 5}},
    ],
)
def test_thinking_budget_closes_the_reasoning(live: LiveServer, budget: dict[str, Any]) -> None:
    usage = live.chat(max_tokens=14, temperature=0, ignore_eos=True, **budget).json["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= 6
    assert usage["completion_tokens"] == 14


@pytest.mark.effect("continue_final_message", "add_generation_prompt")
def test_a_prefill_is_continued(live: LiveServer) -> None:
    messages = [*user("json"), {"role": "assistant", "content": '{"a":'}]
    asked = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    prompt = encode(live, **asked)
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    content = live.chat({**asked, **body}).message["content"]
    raw = live.post(GENERATE, {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, **body}}).json["text"]
    assert content == raw
    bare = encode(live, messages=user("x"), add_generation_prompt=False)
    assert bare == encode(live, messages=user("x"))[: len(bare)]


# ---- grammars ----

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@pytest.mark.effect(
    "response_format", "response_format.type", "response_format.json_schema", "response_format.json_schema.schema"
)
@pytest.mark.parametrize("effort", ["none", "max"])
def test_b09_json_schema_is_kept_after_the_reasoning(live: LiveServer, effort: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    body = {"response_format": form, "max_tokens": 400, "reasoning_effort": effort, "thinking_budget": 4, "seed": 1}
    choice = live.chat(body).json["choices"][0]
    assert choice["finish_reason"] == "stop"
    value = json.loads(choice["message"]["content"])
    assert set(value) == {"ok", "kind"}
    assert value["kind"] in ("a", "b")


@pytest.mark.effect("json_schema")
@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
def test_json_schema_of_generate(live: LiveServer, schema: Any) -> None:
    sampling = {"json_schema": schema, "max_new_tokens": 400, "seed": 2}
    value = json.loads(live.post(GENERATE, {"text": "x", "sampling_params": sampling}).json["text"])
    assert set(value) == {"ok", "kind"}


@pytest.mark.effect(
    "text", "text.format", "text.format.type", "text.format.schema", "text.format.json_schema",
    "output_config", "output_config.format", "output_config.format.type", "output_config.format.schema",
    "output_format", "output_format.type", "output_format.schema",
)  # fmt: skip
@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
    ],
)
def test_formats_of_the_other_dialects(live: LiveServer, path: str, form: dict[str, Any]) -> None:
    body = {"messages": user("x"), "max_tokens": 400, "input": "x", "max_output_tokens": 400, "seed": 1, **OFF}
    reply = live.post(path, {**body, **form}).json
    blocks = reply["content"] if "messages" in path else reply["output"][-1]["content"]
    assert set(json.loads(blocks[-1]["text"])) == {"ok", "kind"}


@pytest.mark.effect("regex")
def test_regex(live: LiveServer) -> None:
    reply = live.post(GENERATE, {"text": "x", "sampling_params": {"regex": "[ab]{3}", "max_new_tokens": 20, "seed": 1}})
    assert len(reply.json["text"]) == 3
    assert set(reply.json["text"]) <= {"a", "b"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_gives_up_is_the_clients_error_and_harms_nobody(live: LiveServer, stream: bool) -> None:
    sampling = {"regex": "(?:(?:a{100}){100}){100}", "max_new_tokens": 200}
    if stream:
        error = live.stream(GENERATE, {"text": "x", "sampling_params": sampling}).events[-1]["error"]
    else:
        reply = live.post(GENERATE, {"text": "x", "sampling_params": sampling})
        assert reply.status == 400
        error = reply.error
    assert error["code"] == "unsupported_grammar"
    assert error["param"] == "regex"
    assert live.get("/health", live.key).status == 200
    assert live.chat(max_tokens=2).status == 200


PICK = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
PICK_TOOLS = [{"type": "function", "function": {"name": "pick", "parameters": PICK}}]


@pytest.mark.effect("tools", "tool_choice")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}])
def test_a_forced_tool_call(live: LiveServer, choice: Any) -> None:
    body = {"tools": PICK_TOOLS, "tool_choice": choice, "max_tokens": 100, **OFF, "seed": 1}
    reply = live.chat({**body, "parallel_tool_calls": False}).json["choices"][0]
    assert reply["finish_reason"] == "tool_calls"
    [call] = reply["message"]["tool_calls"]
    assert call["function"]["name"] == "pick"
    assert json.loads(call["function"]["arguments"])["n"] in (1, 2)


@pytest.mark.effect("parallel_tool_calls")
def test_parallel_tool_calls_off_ends_after_one(live: LiveServer) -> None:
    """Every token that may follow is pushed towards another call; only the grammar can end it."""
    call_token = {str(encode_special(live, "<tool_call>")): 100}
    body = {"tools": PICK_TOOLS, "tool_choice": "required", "max_tokens": 60, **OFF, "seed": 1}
    calls = [
        len(live.chat({**body, "logit_bias": call_token, "parallel_tool_calls": p}).message.get("tool_calls", ()))
        for p in (True, False)
    ]
    assert calls[0] > 1
    assert calls[1] == 1


@pytest.mark.effect("tool_choice.disable_parallel_tool_use")
def test_parallel_calls_off_in_messages(live: LiveServer) -> None:
    """As above."""
    body = {
        "messages": user("x"), "max_tokens": 60, "seed": 1, "tools": [{"name": "pick", "input_schema": PICK}],
        "logit_bias": {str(encode_special(live, "<tool_call>")): 100},
    }  # fmt: skip
    calls = []
    for off in (False, True):
        choice = {"type": "any", "disable_parallel_tool_use": off}
        content = live.post("/v1/messages", {**body, "tool_choice": choice}).json["content"]
        calls.append(sum(b["type"] == "tool_use" for b in content))
    assert calls[0] > 1
    assert calls[1] == 1


def encode_special(live: LiveServer, name: str) -> int:
    """The id of a special token, found by what it is shown as."""
    for token in range(2048, 2084):
        if live.post("/detokenize", {"tokens": [token]}).json["text"] == name:
            return token
    raise AssertionError(name)
