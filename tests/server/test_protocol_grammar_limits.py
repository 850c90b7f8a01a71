"""What may not become a grammar: what no answer can meet, what is too big, what takes too long, what gives up."""

from __future__ import annotations

from typing import Any

import pytest
from grammar_helpers import STOP, VOCAB, allows, constraint, grammars, ids

from glm53 import grammar, grammar_trial
from glm53.chat import Message, Tool
from glm53.engine.protocol import Constraint
from glm53.errors import RequestError
from glm53.server.protocol.constraints import chat_constraint
from glm53.server.protocol.requests import ChatCall
from glm53.server.protocol.tools import ToolChoice

TOO_COMPLEX = "(?:(?:a{100}){100}){100}"


def test_a_grammar_that_can_never_answer_is_refused_before_it_reaches_the_engine() -> None:
    with pytest.raises(RequestError, match="allows no answer") as refused:
        grammars().regex(r"[^\s\S]", STOP)
    assert (refused.value.param, refused.value.code) == ("regex", "unsupported_grammar")


def test_a_huge_schema_is_refused_by_its_size() -> None:
    assert grammars().json_schema({"enum": [f"choice {i}" for i in range(3000)]}, STOP)
    with pytest.raises(RequestError, match="too big"):
        grammars().json_schema({"enum": ["x" * i for i in range(3000)]}, STOP)


def test_a_grammar_that_gives_up_ends_its_answer_and_never_raises() -> None:
    c = grammars().regex(TOO_COMPLEX, STOP)
    for _ in range(100):
        mask = c.allowed(VOCAB)
        assert mask is not None
        if c.failure:
            break
        c.accept(int(mask.nonzero()[0][-1]))
    assert isinstance(c.failure, RequestError)
    assert "too complex" in str(c.failure)
    mask = c.allowed(VOCAB)
    assert mask is not None
    assert set(mask.nonzero()[0].tolist()) == set(STOP)
    c.accept(7)
    c.accept(min(STOP))
    assert c.allowed(VOCAB) is None


def _patterns(count: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f"a{{{i},1000}}"} for i in range(count)]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": _patterns(40)},  # would take minutes and gigabytes, in a thread that nothing can end
        {"type": "object", "patternProperties": {f"^a{i}_.*$": {"type": "integer"} for i in range(1000)}},
    ],
)
def test_patterns_that_take_for_ever_together_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="its patterns take more than 1 s or 1 GiB to compile together") as refused:
        grammars().json_schema(schema, STOP)
    assert refused.value.code == "unsupported_grammar"


def test_many_patterns_that_do_not_meet_are_taken() -> None:
    properties = {f"k{i}": schema for i, schema in enumerate(_patterns(30))}
    assert allows(grammars().json_schema({"properties": properties, "required": ["k1"]}, STOP), ids('{"k1": "aa"'))
    names = {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False}
    assert allows(grammars().json_schema(names, STOP), ids('{"x_1": 5}'))
    assert not allows(grammars().json_schema(names, STOP), ids('{"y_1": 5}'))


def test_only_grammars_with_many_patterns_are_tried_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(grammar_trial, "_trial", lambda grammar: tried.append(grammar) or "tried")
    grammars().json_schema({"allOf": _patterns(2)}, STOP)
    grammars().json_schema({"enum": ["pattern", "format", "patternProperties"] * 9}, STOP)
    assert not tried
    with pytest.raises(RequestError, match="tried"):
        grammars().json_schema({"allOf": _patterns(9)}, STOP)
    assert len(tried) == 1


def test_a_trial_that_cannot_be_made_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    with pytest.raises(RequestError, match=r"cannot be tried here \(No such file or directory\)"):
        grammars().json_schema({"allOf": _patterns(9)}, STOP)


def test_an_argument_with_too_many_patterns_leaves_the_others_typed() -> None:
    parameters = {"properties": {"w": {"type": "array", "items": {"allOf": _patterns(40)}}, "n": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    c = constraint(False, tools=tools, tool_choice="required")
    head = ids("<tool_call>", "f", "<arg_key>", "n", "</arg_key>", "<arg_value>")
    assert c is not None
    assert allows(c.copy(), [*head, *ids("5")])
    assert not allows(c.copy(), [*head, *ids("x")])


def _forced(parameters: dict[str, Any]) -> Constraint:
    call = ChatCall(
        messages=(Message("user", "x"),),
        tools=(Tool("f", {"name": "f"}, parameters),),
        tool_choice=ToolChoice("required"),
    )
    c = chat_constraint(grammars(), call, thinking_open=False, stop_ids=STOP)
    assert c is not None
    return c


def _takes(c: Constraint, key: str, value: str) -> bool:
    return allows(c, [*ids("<tool_call>", "f", "<arg_key>", key, "</arg_key>", "<arg_value>"), *ids(value)])


def test_definitions_that_every_argument_shares_do_not_grow_the_grammar_without_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their text stands in the rule of each argument that is not a string: 8 MB could become 100 GB."""
    seen: list[int] = []
    refusal = grammar.refusal
    monkeypatch.setattr(grammar, "refusal", lambda text, ll: seen.append(len(text)) or refusal(text, ll))
    parameters = {
        "properties": {f"k{i}": {"$ref": "#/$defs/N"} for i in range(500)},
        "$defs": {"N": {"type": "integer"}, "unused": {"description": "x" * 20_000}},
    }
    c = _forced(parameters)
    assert max(seen) < 2 * grammar_trial.MOST_CHARS
    assert _takes(c.copy(), "k1", "5")
    assert not _takes(c.copy(), "k1", "x")
    assert _takes(c.copy(), "k499", "x")


def test_schemas_are_visited_a_limited_number_of_times() -> None:
    looked: list[None] = []

    class Counted(dict[str, Any]):
        def get(self, *args: Any) -> Any:
            looked.append(None)
            return super().get(*args)

    many = Counted(anyOf=[Counted(type="integer")] * 3000)
    _forced({"properties": {f"k{i}": {"$ref": "#/$defs/N"} for i in range(300)}, "$defs": {"N": many}})
    assert len(looked) < 20 * grammar.MOST_VISITS


def test_what_is_too_big_is_not_turned_into_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "LLMatcher", None)
    with pytest.raises(RequestError, match="too big"):
        grammars().regex("a" * (grammar_trial.MOST_CHARS + 1), STOP)
    with pytest.raises(RequestError, match="too big"):
        grammars().json_schema({"description": "a" * grammar_trial.MOST_CHARS}, STOP)
