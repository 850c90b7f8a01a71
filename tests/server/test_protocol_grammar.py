"""Grammars as a sampler meets them: what they allow token by token, after the reasoning, and how answers may end."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from grammar_helpers import FORMAT, STOP, VOCAB, allows, can_stop, constraint, grammars, ids
from protocol_helpers import TOOLS1, TOOLS1_RAW, ends, parser, special_names, tokenizer

from glm53.chat import parse_tools
from glm53.engine.protocol import Constraint, Token
from glm53.errors import RequestError
from glm53.server.protocol.constraints import text_constraint
from glm53.server.protocol.events import Answer, collect
from glm53.server.protocol.requests import RequestDefaults, parse_completion, parse_generate


def walk(c: Constraint, seed: int, steps: int = 1500) -> tuple[list[int], Answer]:
    """Draw uniformly from what is allowed, leaving strings and the answer as soon as that is possible."""
    draw = random.Random(seed)
    drawn: list[int] = []
    closing = ids('"') + ids("}", "]", "</arg_value>", "</tool_call>", "</think>")
    p = parser(tools=TOOLS1)
    events: list[Any] = []
    for _ in range(steps):
        mask = c.allowed(VOCAB)
        options = list(range(tokenizer().size)) if mask is None else mask.nonzero()[0].tolist()
        stops = [i for i in options if i in STOP]
        closers = [i for i in options if i in closing]
        token = draw.choice(stops or (closers if closers and draw.random() < 0.3 else options))
        c.accept(token)
        if token in STOP:
            return drawn, collect(events + p.finish(ends()["user"]))
        drawn.append(token)
        events += p.feed([Token(token, tokenizer().token_bytes(token))])
    return drawn, collect(events + p.finish(ends()["length"]))


def test_b09_schema_starts_after_the_reasoning() -> None:
    c = constraint(response_format=FORMAT)
    assert c is not None
    assert allows(c, ids("some { thought", "<think>", "\n"))
    assert not can_stop(c)
    assert allows(c, ids("</think>"))
    assert not allows(c, ids("Sure"))
    c = constraint(response_format=FORMAT)
    assert allows(c, ids("t", "</think>", '{"answer": "yes", "n": 3'))
    assert not can_stop(c)
    assert allows(c, ids("}"))
    assert can_stop(c) == set(STOP)
    assert allows(c, [min(STOP)])
    assert c.allowed(VOCAB) is None


def test_reasoning_closed_by_spelled_tag() -> None:
    c = constraint(response_format=FORMAT)
    tag = [i for ch in "</think>" for i in tokenizer().encode(ch)]
    assert allows(c, [*ids("t"), *tag])
    assert not allows(c, ids("Sure"))


@pytest.mark.parametrize("seed", range(12))
def test_b09_random_answers_validate(seed: int) -> None:
    c = constraint(thinking=False, response_format=FORMAT)
    drawn, _ = walk(c, seed)
    value = json.loads(tokenizer().decode(drawn))
    assert isinstance(value["answer"], str)
    assert isinstance(value.get("n", 0), int)
    assert special_names().keys().isdisjoint(drawn)


def test_json_object() -> None:
    fmt = {"type": "json_object"}
    assert allows(constraint(False, response_format=fmt), ids('{"a": [1, {"b": null}]}'))
    assert not allows(constraint(False, response_format=fmt), ids("[1]"))


@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, {"not": {"type": "string"}}, {"$ref": "#/nowhere"}, {"type": 3}]
)
def test_unsupported_schema_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError) as e:
        constraint(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    assert e.value.param == "response_format"
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "write_file"}}])
def test_b30_forced_calls(choice: Any) -> None:
    for seed in range(8):
        c = constraint(thinking=seed % 2 == 0, tools=TOOLS1_RAW, tool_choice=choice, parallel_tool_calls=False)
        if seed % 2 == 0:
            assert allows(c, ids("thought"))
            assert not can_stop(c)
            assert allows(c, ids("</think>"))
        assert not allows_any_text(c)
        drawn, answer = walk(c, seed)
        assert drawn[0] == tokenizer().special_id("<tool_call>")
        assert answer.done.reason == "tool_calls"
        assert len(answer.calls) == 1
        assert answer.content == ""
        check_arguments(answer.calls[0].name, json.loads(answer.calls[0].arguments))
        if choice != "required":
            assert answer.calls[0].name == "write_file"


def allows_any_text(c: Constraint) -> bool:
    return any(c.allowed(VOCAB)[i] for i in range(2048))


def check_arguments(name: str, arguments: dict[str, Any]) -> None:
    if name == "list_mailboxes":
        assert arguments == {}
        return
    assert isinstance(arguments["path"], str)
    if isinstance(arguments.get("ratio"), str):  # a number no double can hold stays what the model wrote
        assert abs(float(arguments["ratio"])) == float("inf")
        del arguments["ratio"]
    kinds: dict[str, Any] = {"mode": int, "exec": bool, "tags": list, "opts": dict, "ratio": int | float}
    for key, kind in kinds.items():
        assert key not in arguments or isinstance(arguments[key], kind)


def test_b30_several_calls_if_parallel() -> None:
    call = ids("<tool_call>", "list_mailboxes", "</tool_call>")
    c = constraint(False, tools=TOOLS1_RAW, tool_choice="required")
    assert allows(c, [*call, *call])
    assert can_stop(c)
    c = constraint(False, tools=TOOLS1_RAW, tool_choice="required", parallel_tool_calls=False)
    assert not allows(c, [*call, *call])


def test_b02_forced_call_inside_the_reasoning() -> None:
    c = constraint(True, tools=TOOLS1_RAW, tool_choice="required", thinking_budget=3)
    assert allows(c, ids("a", "<tool_call>", "list_mailboxes", "</tool_call>"))
    assert can_stop(c)


def test_call_arguments_follow_the_schema() -> None:
    head = ids("<tool_call>", "write_file", "<arg_key>", "path", "</arg_key>", "<arg_value>")
    mode = ids("</arg_value>", "<arg_key>", "mode", "</arg_key>", "<arg_value>")
    c = constraint(False, tools=TOOLS1_RAW, tool_choice="required")
    assert allows(c, [*head, *ids("a b\n\t<x>"), *mode, *ids("40", "</arg_value>", "</tool_call>")])
    for bad in (
        ids("<tool_call>", "other"),
        ids("<tool_call>", "write_file", "</tool_call>"),
        [*head, *mode, *ids("x")],
    ):
        assert not allows(constraint(False, tools=TOOLS1_RAW, tool_choice="required"), bad)
    spelled = [i for ch in "</arg_value>" for i in tokenizer().encode(ch)]
    assert not allows(constraint(False, tools=TOOLS1_RAW, tool_choice="required"), [*head, *spelled])


TYPES = {
    "e": ({"enum": ["a", 'b"\n']}, 'b"\n', "c"),
    "i": ({"enum": [1, 2]}, "2", "3"),
    "r": ({"$ref": "#/$defs/N"}, "7", "x"),
    "u": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", "true"),
    "s": ({"type": ["string", "null"]}, "anything", None),
    "w": ({"type": "array", "not": {}}, "[ what llguidance cannot enforce is free", None),
}


@pytest.mark.parametrize("key", TYPES)
def test_argument_types(key: str) -> None:
    schema, good, bad = TYPES[key]
    parameters = {"properties": {key: schema}, "$defs": {"N": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    head = ids("<tool_call>", "f", "<arg_key>", key, "</arg_key>", "<arg_value>")
    tail = ids("</arg_value>", "</tool_call>")
    assert allows(constraint(False, tools=tools, tool_choice="required"), [*head, *ids(good), *tail])
    if bad:
        assert not allows(constraint(False, tools=tools, tool_choice="required"), [*head, *ids(bad), *tail])


def test_an_argument_that_cannot_be_enforced_leaves_the_others_typed() -> None:
    parameters = {"properties": {"w": {"type": "array", "not": {}}, "n": {"type": "integer"}}, "required": ["n"]}
    other = {"name": "g", "parameters": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}}
    functions = [{"name": "f", "parameters": parameters}, other]
    tools = [{"type": "function", "function": f} for f in functions]
    for name in ("f", "g"):
        head = ids("<tool_call>", name, "<arg_key>", "n", "</arg_key>", "<arg_value>")
        tail = ids("</arg_value>", "</tool_call>")
        assert allows(constraint(False, tools=tools, tool_choice="required"), [*head, *ids("5"), *tail])
        assert not allows(constraint(False, tools=tools, tool_choice="required"), [*head, *ids("x"), *tail])


def test_parameters_that_are_a_reference() -> None:
    named = {"properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"]}
    for definitions in (
        {"P": named, "N": {"type": "integer"}},
        {"P": {"$ref": "#/$defs/Q"}, "Q": named, "N": {"enum": [5]}},
    ):
        parameters = {"$ref": "#/$defs/P", "$defs": definitions}
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        head = ids("<tool_call>", "f")
        call = [*head, *ids("<arg_key>", "n", "</arg_key>", "<arg_value>", "5", "</arg_value>", "</tool_call>")]
        assert allows(constraint(False, tools=tools, tool_choice="required"), call)
        assert not allows(constraint(False, tools=tools, tool_choice="required"), [*head, *ids("</tool_call>")])
    loop = [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}]
    assert allows(constraint(False, tools=loop, tool_choice="required"), [*head, *ids("</tool_call>")])


def test_b05_prefill_is_part_of_the_format() -> None:
    def prefilled(text: str) -> Constraint | None:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
        return constraint(False, messages=messages, continue_final_message=True, response_format=FORMAT)

    c = prefilled('{"answer": "ye')
    assert allows(c, ids('s"}'))
    assert can_stop(c)
    with pytest.raises(RequestError, match="continued"):
        prefilled("Sure")


def test_recursive_schemas_end() -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/L"}, {"$ref": "#/$defs/L"}]}
    parameters = {"properties": {"x": {"$ref": "#/$defs/L"}}, "$defs": {"L": loop}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert constraint(False, tools=tools, tool_choice="required") is not None


def test_tool_without_schema() -> None:
    tools = [{"type": "function", "function": {"name": "größe"}}]
    pairs = ids("<arg_key>", "k1", "</arg_key>", "<arg_value>", "any", "</arg_value>")
    sequence = [*ids("<tool_call>", "größe"), *pairs, *pairs, *ids("</tool_call>")]
    assert allows(constraint(False, tools=tools, tool_choice="required"), sequence)


def test_format_with_tools_leaves_the_choice() -> None:
    call = ids("<tool_call>", "list_mailboxes", "</tool_call>")
    for sequence in (call, ids('{"answer": "x"}')):
        c = constraint(False, tools=TOOLS1_RAW, response_format=FORMAT)
        assert allows(c, sequence)
        assert can_stop(c)
    assert not allows(constraint(False, tools=TOOLS1_RAW, response_format=FORMAT), ids("text"))


def test_thinking_budget() -> None:
    c = constraint(thinking_budget=3)
    assert allows(c, ids("a", "b", "c"))
    mask = c.allowed(VOCAB)
    assert mask.nonzero()[0].tolist() == [tokenizer().special_id("</think>")]
    assert allows(c, ids("</think>", "free text"))
    assert c.allowed(VOCAB) is None
    assert constraint(thinking_budget=0).allowed(VOCAB).sum() == 1
    short = constraint(thinking_budget=3)
    assert allows(short, ids("a", "</think>", "b", "c", "d", "e"))
    own = constraint(False, thinking_budget=1)
    assert allows(own, ids("<think>", "a"))
    assert own.allowed(VOCAB).sum() == 1


def test_thinking_budget_does_not_cut_a_call() -> None:
    c = constraint(thinking_budget=2, tools=TOOLS1_RAW)
    assert allows(c, ids("a", "<tool_call>", "list_mailboxes", "</tool_call>"))
    assert c.allowed(VOCAB) is None
    text = constraint(thinking_budget=2)
    assert allows(text, ids("a", "<tool_call>"))
    assert text.allowed(VOCAB).sum() == 1


def test_nothing_to_constrain() -> None:
    assert constraint() is None
    assert constraint(tools=TOOLS1_RAW) is None


def test_completions_and_generate() -> None:
    fmt = parse_completion({"prompt": "a", "response_format": FORMAT}, RequestDefaults()).decoding.response_format
    assert allows(text_constraint(grammars(), fmt, STOP), ids('{"answer":""}'))
    fmt = parse_generate(
        {"text": "a", "sampling_params": {"regex": "[0-9]{2}"}}, RequestDefaults()
    ).decoding.response_format
    c = text_constraint(grammars(), fmt, STOP)
    assert allows(c, ids("1"))
    assert not can_stop(c)
    assert allows(c, ids("2"))
    assert can_stop(c)
    with pytest.raises(RequestError):
        grammars().regex("(?=x)", STOP)
    assert text_constraint(grammars(), None, STOP) is None


def test_tools_of_the_case_file_compile() -> None:
    assert grammars().tool_calls(TOOLS1, STOP) is not None
    many = parse_tools(
        [
            {"type": "function", "function": {"name": f"t{i}", "parameters": TOOLS1_RAW[0]["function"]["parameters"]}}
            for i in range(60)
        ]
    )
    assert grammars().tool_calls(many, STOP) is not None


def test_a_token_the_grammar_forbids_is_its_failure() -> None:
    c = constraint(thinking=False, response_format=FORMAT)
    assert c is not None
    assert c.failure is None
    c.accept(ids("Sure")[0])
    assert isinstance(c.failure, RequestError)


def test_copies_of_a_constraint_go_their_own_ways() -> None:
    """The choices of a request share one compiled grammar."""
    first = constraint(thinking=True, response_format=FORMAT, thinking_budget=9)
    assert first is not None
    assert allows(first, ids("so", "</think>", '{"answer": "'))
    second = first.copy()
    assert allows(first, ids('a"}'))
    assert not first.copy().failure
    assert allows(second, ids('b", "n": 5}'))
    assert can_stop(first) == can_stop(second) == set(STOP)
    second.accept(min(STOP))
    first.accept(ids("x")[0])
    assert first.failure
    assert not second.failure
