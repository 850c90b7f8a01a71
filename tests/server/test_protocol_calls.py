"""Tool calls in the model's text: names, order, ends, and arguments as JSON of the types that a schema names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from protocol_helpers import TOOLS1, events_of, run, splits

from glm53.chat import parse_tools
from glm53.server.protocol.events import ToolCallArgs, ToolCallEnd, ToolCallStart, collect


def arguments(answer: Any) -> Any:
    return json.loads(answer.calls[0].arguments)


def value_of(key: str, text: str, tools: Any = TOOLS1) -> Any:
    model = f"</think><tool_call>write_file<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"
    return arguments(run(model.replace("|", "¦"), "obs", tools=tools))[key]


@pytest.mark.parametrize(
    "model",
    [
        "</think><tool_call>write_file<arg_key>path</arg_key><arg_value>a.txt</arg_value></tool_call>"
        "<tool_call>list_mailboxes</tool_call>",
        "</think>\n<tool_call>write_file\n<arg_key>path</arg_key>\n<arg_value>a.txt</arg_value>\n</tool_call>\n"
        "<tool_call>list_mailboxes\n</tool_call>",
    ],
)
def test_b12_parallel_calls(model: str) -> None:
    answer = run(model, "obs", tools=TOOLS1)
    assert [(c.name, c.arguments) for c in answer.calls] == [
        ("write_file", '{"path":"a.txt"}'),
        ("list_mailboxes", "{}"),
    ]
    assert answer.calls[0].id != answer.calls[1].id
    assert answer.message()["content"] is None
    assert answer.done.reason == "tool_calls"
    starts = [e.index for e in events_of(list(model), "obs", tools=TOOLS1) if isinstance(e, ToolCallStart)]
    assert starts == [0, 1]


B13 = (
    "</think><tool_call>write_file<arg_key>path</arg_key><arg_value>p</arg_value><arg_key>mode</arg_key>"
    "<arg_value>40</arg_value><arg_key>exec</arg_key><arg_value>true</arg_value><arg_key>tags</arg_key>"
    '<arg_value>["a","b"]</arg_value><arg_key>ratio</arg_key><arg_value>1e-3</arg_value><arg_key>opts</arg_key>'
    '<arg_value>{"k":{"n":[1,2]}}</arg_value></tool_call>'
)


def test_b13_types_from_the_schema() -> None:
    expected = {"path": "p", "mode": 40, "exec": True, "tags": ["a", "b"], "opts": {"k": {"n": [1, 2]}}, "ratio": 0.001}
    got = arguments(run(B13, "obs", tools=TOOLS1))
    assert got == expected
    assert got["exec"] is True
    assert isinstance(got["mode"], int)


@pytest.mark.parametrize(
    "text",
    ["123_456", "001", "true", "null", "1e5", '{"a":1}', "[1]", '"quoted"', "NaN", "", "  ", "<b>", "</arg_key>"],
)
def test_b14_strings_stay_strings(text: str) -> None:
    assert value_of("content", text) == text


def test_b15_whitespace_of_values() -> None:
    assert value_of("content", "    if x:\n        y\n") == "    if x:\n        y\n"
    assert value_of("mode", " \n40 ") == 40


def one_tool(parameters: Any) -> Any:
    return parse_tools([{"type": "function", "function": {"name": "write_file", "parameters": parameters}}])


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"$ref": "#/$defs/N"}, "7", 7),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1"]}, "1", "1"),
        ({"const": 3}, "3", 3),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "5.5", "5.5"),
        ({"type": "boolean"}, "True", True),
        ({"type": "integer"}, "4.0", 4),
        ({"type": "integer"}, "four", "four"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"oneOf": [{"type": "array"}, {"$ref": "#/$defs/N"}]}, "[1]", [1]),
        ({"items": {}}, "[1]", [1]),
        ({"description": "untyped"}, "5", "5"),
        ({"$ref": "#/$defs/Loop"}, "5", "5"),
        ({"$ref": "#/nowhere"}, "5", "5"),
        ({"$ref": "#/$defs/Two"}, "5", "5"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "integer", "nullable": True}, "5", 5),
        ({"type": "STRING"}, "5", "5"),
        ({"type": ["Integer", "null"]}, "5", 5),
        ({"type": "str"}, "true", "true"),
        ({"type": "dict"}, "{}", {}),
        ({"type": "object"}, '{"a": "\\ud83d"}', {"a": "\ufffd"}),
        ({"type": "object"}, "[" * 5000, "[" * 5000),
    ],
)
def test_b17_unions_refs_enums(schema: Any, text: str, expected: Any) -> None:
    tools = one_tool(
        {
            "properties": {"x": schema},
            "$defs": {
                "N": {"type": "integer"},
                "Loop": {"$ref": "#/$defs/Loop"},
                "Two": {"anyOf": [{"$ref": "#/$defs/Two"}] * 2},
            },
        }
    )
    got = value_of("x", text, tools)
    assert got == expected
    assert type(got) is type(expected)


def test_b17_null_union_and_unknown_keys() -> None:
    assert value_of("note", "null") is None
    assert value_of("note", "5") == "5"
    assert value_of("absent", "5") == "5"
    assert value_of("absent", "5", one_tool(None)) == 5
    assert value_of("absent", '"q"', one_tool({"type": "object"})) == '"q"'
    assert value_of("absent", "5", one_tool({"properties": {}, "additionalProperties": {"type": "integer"}})) == 5


def test_b17_arguments_named_elsewhere() -> None:
    named = {"properties": {"x": {"type": "string"}, "n": {"type": "integer"}}}
    for parameters in (
        {"$ref": "#/$defs/P", "$defs": {"P": named}},
        {"type": "object", "allOf": [named]},
        {"properties": {"y": {}}, "anyOf": [{"required": ["x"]}, {"$ref": "#/$defs/P"}], "$defs": {"P": named}},
        {"properties": {}, "patternProperties": {"x": {"type": "string"}}, "additionalProperties": {"type": "object"}},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"$ref": "#", "properties": named["properties"]},
    ):
        assert value_of("x", "5", one_tool(parameters)) == "5"
    assert value_of("n", "5", one_tool({"$ref": "#/$defs/P", "$defs": {"P": named}})) == 5
    assert value_of("x", "5", one_tool({"properties": {}, "patternProperties": {"": {"type": "integer"}}})) == 5


def test_b18_nested_object_last_in_stream() -> None:
    for pieces in splits(B13):
        events = events_of(pieces, "obs", tools=TOOLS1)
        text = "".join(e.fragment for e in events if isinstance(e, ToolCallArgs))
        assert text == collect(events).calls[0].arguments
        assert json.loads(text)["opts"] == {"k": {"n": [1, 2]}}


def test_b20_call_without_arguments() -> None:
    model = "</think><tool_call>list_mailboxes</tool_call>"
    assert run(model, "obs", tools=TOOLS1).calls[0].arguments == "{}"
    fragments = [e.fragment for e in events_of(list(model), "obs", tools=TOOLS1) if isinstance(e, ToolCallArgs)]
    assert "".join(fragments) == "{}"


CUT = "</think><tool_call>write_file<arg_key>path</arg_key><arg_value>NY"


def test_b22_call_cut_by_length() -> None:
    answer = run(CUT, "length", tools=TOOLS1)
    assert "tool_calls" not in answer.message()
    assert (answer.content, answer.done.reason) == ("", "length")
    assert not any(isinstance(e, ToolCallStart) for e in events_of(list(CUT), "length", tools=TOOLS1))


def test_b22_long_call_cut_by_length_is_incomplete_json() -> None:
    events = events_of(list(CUT + "x" * 1000), "length", tools=TOOLS1)
    fragments = "".join(e.fragment for e in events if isinstance(e, ToolCallArgs))
    assert len(fragments) > 900
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(fragments)
    assert not any(isinstance(e, ToolCallEnd) for e in events)
    assert collect(events).calls == []
    assert collect(events).done.reason == "length"


@pytest.mark.parametrize("end", ["obs", "user", "eos"])
def test_b23_call_left_open_at_a_natural_stop(end: str) -> None:
    answer = run("</think><tool_call>write_file<arg_key>path</arg_key><arg_value>a</arg_value>", end, tools=TOOLS1)
    assert answer.calls[0].arguments == '{"path":"a"}'
    assert answer.done.reason == "tool_calls"


def test_b25_b26_names_and_indices() -> None:
    model = "</think><tool_call>list_mailboxes</tool_call>"
    events = events_of([model], "obs", tools=TOOLS1)
    starts = [e for e in events if isinstance(e, ToolCallStart)]
    assert [(s.index, s.name) for s in starts] == [(0, "list_mailboxes")]


@pytest.mark.parametrize(
    "value",
    [
        'C:\\new\\table "x"',
        "Größe 温度 😀 \u2028\x85\x00\x1f",
        '<div class="a">&amp;</div>\n<!-- x -->',
        "a</arg_value> b",
        "<arg_value>x</arg_value>\n\n",
        "</tool_call>",
        "</tool_call>\n<tool_call>f",
        "</arg_value></arg_value>",
        "</arg_val",
        "</think><think>",
    ],
)
def test_b34_b35_values_verbatim(value: str) -> None:
    assert value_of("content", value) == value


def test_missing_tool_call_end_between_calls() -> None:
    answer = run("</think><tool_call>list_mailboxes<tool_call>list_mailboxes</tool_call>", "obs", tools=TOOLS1)
    assert len(answer.calls) == 2


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("<arg_key>path<arg_value>a</arg_value></tool_call>", {"path": "a"}),
        ("<arg_key>path</arg_key>a</arg_value></tool_call>", {"path": "a"}),
        ("<arg_key>path</arg_key>\n a</arg_value></tool_call>", {"path": "\n a"}),
        ("<arg_key>path</arg_key></tool_call>", {}),
        ("<arg_key>path</arg_key><arg_key>mode</arg_key><arg_value>1</arg_value></tool_call>", {"mode": 1}),
        ("<arg_key>path</tool_call>", {}),
        ("<arg_key> path\n</arg_key><arg_value>a</arg_value></tool_call>", {"path": "a"}),
        (
            "<arg_key>path</arg_key><arg_value>a</arg_value><arg_key>path</arg_key><arg_value>b</arg_value>",
            {"path": "b"},
        ),
    ],
)
def test_calls_with_tags_left_out(body: str, expected: Any) -> None:
    answer = run("</think><tool_call>write_file" + body, "obs", tools=TOOLS1)
    assert [arguments(answer)] == [expected]
    assert answer.content == ""
