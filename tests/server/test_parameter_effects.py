"""No parameter without a test of what it does: the names the parsers read, against the tests' `effect` marks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import glm53.server
from glm53.server.protocol import anthropic, requests, responses
from glm53.server.protocol.fields import Fields

HERE = Path(__file__).parent
SERVER = Path(glm53.server.__file__).parent
DEFAULTS = requests.RequestDefaults(vocab_size=2084)
USER = [{"role": "user", "content": "x"}]
FUNCTION = {"type": "function", "function": {"name": "f"}}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"schema": {}}}
EVERY_BRANCH: list[tuple[Any, dict[str, Any]]] = [
    (requests.parse_chat, {"messages": USER, "tools": [FUNCTION], "tool_choice": FUNCTION, "stream": True}),
    (requests.parse_chat, {"messages": USER, "thinking": {"type": "enabled"}, "response_format": SCHEMA_FORMAT}),
    (requests.parse_completion, {"prompt": "x", "stream": True, "response_format": SCHEMA_FORMAT}),
    (requests.parse_generate, {"text": "x", "return_logprob": True}),
    (requests.parse_generate, {"input_ids": [1]}),
    (requests.parse_tokenize, {"prompt": "x"}),
    (requests.parse_tokenize, {"messages": USER}),
    (requests.parse_detokenize, {"tokens": [1]}),
    (anthropic.parse_messages, {"messages": USER, "tool_choice": {"type": "auto"}}),
    (anthropic.parse_messages, {"messages": USER, "output_format": {"type": "json_schema", "schema": {}}}),
    (anthropic.parse_messages, {"messages": USER, "output_config": {"format": {"type": "json_schema", "schema": {}}}}),
    (responses.parse_responses, {"input": "x", "text": {"format": {"type": "json_schema", "schema": {}}}}),
]


def accepted(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every name that a parser asks a body for; /generate's `sampling_params` without their prefix."""
    seen: set[str] = set()
    get, given = Fields.get, Fields.given

    def recorded_get(self: Fields, key: str) -> Any:
        seen.add(self.name(key))
        return get(self, key)

    def recorded_given(self: Fields, *keys: str) -> str | None:
        seen.update(self.name(k) for k in keys)
        return given(self, *keys)

    monkeypatch.setattr(Fields, "get", recorded_get)
    monkeypatch.setattr(Fields, "given", recorded_given)
    for parse, body in EVERY_BRANCH:
        parse(body, DEFAULTS)
    for path in (*SERVER.glob("protocol/*.py"), *SERVER.glob("routes/*.py")):
        seen.update(re.findall(r"\bbody\.get\(\"(\w+)\"", path.read_text(encoding="utf-8")))
    return {name.removeprefix("sampling_params.") for name in seen} - {"sampling_params"}


def effects() -> Iterator[tuple[str, str]]:
    """(parameter, test) of every `pytest.mark.effect` in this folder."""
    for path in HERE.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef) or not function.name.startswith("test_"):
                continue
            for mark in function.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.effect":
                    yield from ((ast.literal_eval(name), f"{path.stem}::{function.name}") for name in mark.args)


def test_every_parameter_has_a_test_of_its_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    names, tested = accepted(monkeypatch), {name for name, _ in effects()}
    assert len(names) > 70
    assert sorted(names - tested) == [], "accepted, but no test has the mark `effect` for it"
    assert sorted(tested - names) == [], "marked, but no parser asks for it"


def test_a_test_that_is_marked_speaks_of_the_parameter() -> None:
    """In its body, its parametrisation, or what it calls in its module."""
    for name, test in effects():
        module, function = test.split("::")
        tree = ast.parse((HERE / f"{module}.py").read_text(encoding="utf-8"))
        functions = {f.name: f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)}
        marked = functions[function]
        called = {n.id for n in ast.walk(marked) if isinstance(n, ast.Name) and n.id in functions}
        parts: list[ast.AST] = [*marked.body, *(functions[c] for c in called)]
        parts += [m for m in marked.decorator_list if "pytest.mark.effect" not in ast.unparse(m)]
        text = "\n".join(ast.unparse(p) for p in parts)
        assert name.rpartition(".")[2] in text, f"{test} does not mention {name}"
