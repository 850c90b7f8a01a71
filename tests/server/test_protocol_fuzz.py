"""Whatever JSON a client sends, parsing ends in a call that renders, or in a RequestError; nothing else."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from protocol_helpers import TOOLS1_RAW, tokenizer
from request_helpers import DEFAULTS
from tiny_checkpoint import TINY

from glm53.chat import encode, opens_thinking, render
from glm53.errors import RequestError
from glm53.grammar import Grammars
from glm53.server.protocol.anthropic import parse_messages
from glm53.server.protocol.body import parse_body
from glm53.server.protocol.constraints import chat_constraint
from glm53.server.protocol.requests import (
    ChatCall,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_generate,
    parse_tokenize,
)
from glm53.server.protocol.responses import parse_responses

GRAMMARS = Grammars(TINY, tokenizer())
KEYS = [
    "messages", "role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "id", "tools",
    "input", "parameters", "properties", "tool_choice", "response_format", "json_schema", "schema", "stop",
    "temperature", "n", "max_tokens", "seed", "logit_bias", "thinking", "reasoning", "effort",
    "reasoning_effort", "chat_template_kwargs", "enable_thinking", "budget_tokens", "system", "input_schema",
    "tool_use_id", "source", "data", "stream", "5", "enum", "stream_options", "include_usage",
    "continue_final_message", "prompt", "sampling_params", "input_ids", "tokens", "allowed_tools", "mode",
    "call_id", "output", "summary", "instructions", "anyOf", "$ref", "required", "top_logprobs", "logprobs",
    "format", "reasoning_content", "regex", "stop_token_ids", "output_config", "metadata", "items", "const",
]  # fmt: skip
WORDS = [
    "user", "assistant", "system", "tool", "function", "text", "json_schema", "json_object", "x", "", "auto",
    "required", "none", "any", "named", "high", "object", "string", "integer", "array", "write_file",
    "tool_use", "tool_result", "{}", "message", "function_call", "function_call_output", "custom", "thinking",
    "enabled", "disabled", "#/properties/x", "allowed_tools", "image_url", "<|user|>", "</think>",
    "<think>a</think>b", "[0-9]+", "(", "\ud83d", "\u0000",
]  # fmt: skip
LEAVES = (
    st.none() | st.booleans() | st.integers(-3, 30) | st.sampled_from([1.5, 5.0, -0.5, 1e300, 2.0**70, 10**18])
    | st.sampled_from(WORDS)
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)
BODIES = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"])},
        optional={
            "content": VALUES, "tool_calls": VALUES, "reasoning_content": LEAVES, "tool_call_id": LEAVES,
            "refusal": LEAVES,
        },
    ),
    max_size=4,
)  # fmt: skip
SCHEMAS = st.fixed_dictionaries({}, optional=dict.fromkeys(("type", "properties", "enum", "anyOf", "required"), VALUES))


def check_chat(call: ChatCall) -> None:
    segments = render(call.messages, call.tools, call.chat)
    assert encode(segments, tokenizer())
    with contextlib.suppress(RequestError):
        chat_constraint(GRAMMARS, call, thinking_open=opens_thinking(segments), stop_ids=frozenset({2055}))


PARSERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "chat": lambda b: check_chat(parse_chat(b, DEFAULTS)),
    "messages": lambda b: check_chat(parse_messages(b, DEFAULTS)),
    "responses": lambda b: check_chat(parse_responses(b, DEFAULTS).chat),
    "completion": lambda b: parse_completion(b, DEFAULTS),
    "generate": lambda b: parse_generate(b, DEFAULTS),
    "tokenize": lambda b: parse_tokenize(b, DEFAULTS),
    "detokenize": lambda b: parse_detokenize(b, DEFAULTS),
}
USER = [{"role": "user", "content": "x"}]
VALID = {"messages": USER, "input": "x", "prompt": "x", "text": "x"}


def run(parse: Callable[[dict[str, Any]], object], body: dict[str, Any]) -> None:
    with contextlib.suppress(RequestError):
        parse(parse_body(json.dumps(body).encode()))


@pytest.mark.parametrize("name", PARSERS)
def test_any_body(name: str) -> None:
    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    @given(BODIES)
    @example({"messages": USER, "tools": [], "tool_choice": {"type": "allowed_tools", "tools": [{"name": 3}]}})
    def check(body: dict[str, Any]) -> None:
        run(PARSERS[name], body)
        run(PARSERS[name], VALID | body)

    check()


@pytest.mark.parametrize("name", ["chat", "messages"])
def test_any_turns(name: str) -> None:
    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(TURNS, st.booleans())
    def check(turns: list[Any], continued: bool) -> None:
        run(PARSERS[name], {"messages": turns, "continue_final_message": continued, "tools": TOOLS1_RAW})

    check()


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.booleans())
def test_any_schema(schema: Any, forced: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    fmt = {"type": "json_schema", "json_schema": {"schema": schema}}
    run(PARSERS["chat"], {"messages": USER, "tools": tools, "tool_choice": "required" if forced else "auto"})
    run(PARSERS["chat"], {"messages": USER, "response_format": fmt})


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=60) | st.text(max_size=30).map(lambda t: ('{"a": "' + t + '"}').encode("utf-8", "surrogatepass"))
)
def test_any_bytes(raw: bytes) -> None:
    with contextlib.suppress(RequestError):
        assert isinstance(parse_body(raw), dict)
