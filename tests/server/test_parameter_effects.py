"""No parameter without a test of what it does: the names the parsers read, against the tests' `effect` marks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import glm53.server
from glm53.server import openapi
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
    (requests.parse_tokenize, {"messages": USER, "stream": True}),
    (anthropic.parse_messages, {"messages": USER, "tool_choice": {"type": "auto"}}),
    (anthropic.parse_messages, {"messages": USER, "output_format": {"type": "json_schema", "schema": {}}}),
    (anthropic.parse_messages, {"messages": USER, "output_config": {"format": {"type": "json_schema", "schema": {}}}}),
    (responses.parse_responses, {"input": "x", "text": {"format": {"type": "json_schema", "schema": {}}}}),
]


REFUSED = {
    "best_of", "functions", "function_call", "suffix", "background", "conversation", "previous_response_id", "prompt",
}  # fmt: skip
ROUTES = {
    requests.parse_chat: "/v1/chat/completions",
    requests.parse_completion: "/v1/completions",
    requests.parse_generate: "/generate",
    requests.parse_tokenize: "/tokenize",
    anthropic.parse_messages: "/v1/messages",
    responses.parse_responses: "/v1/responses",
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Every name that the parser of a route asks a body for."""
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
    names: dict[str, set[str]] = {}
    for parse, body in EVERY_BRANCH:
        seen.clear()
        parse(body, DEFAULTS)
        names.setdefault(ROUTES[parse], set()).update(seen)
    return names


def accepted(asked: dict[str, set[str]]) -> set[str]:
    """All of them, /generate's `sampling_params` without their prefix."""
    names = {"tokens"}.union(*asked.values())
    for path in (*SERVER.glob("protocol/*.py"), *SERVER.glob("routes/*.py")):
        names.update(re.findall(r"\bbody\.get\(\"(\w+)\"", path.read_text(encoding="utf-8")))
    return {name.removeprefix("sampling_params.") for name in names} - {"sampling_params"}


def effects() -> Iterator[tuple[str, str]]:
    """(parameter, test) of every `pytest.mark.effect` in this folder."""
    for path in HERE.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef) or not function.name.startswith("test_"):
                continue
            for mark in function.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.effect":
                    yield from ((ast.literal_eval(name), f"{path.stem}::{function.name}") for name in mark.args)


def test_every_parameter_has_a_test_of_its_effect(asked: dict[str, set[str]]) -> None:
    names, tested = accepted(asked), {name for name, _ in effects()}
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


def test_the_openapi_document_has_every_parameter_and_no_other(asked: dict[str, set[str]]) -> None:
    paths = openapi.document("m")["paths"]
    for route, names in asked.items():
        schema = paths[route]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
        top = {name.partition(".")[0] for name in names}
        allowed = set() if route == "/v1/completions" else {"prompt"} - top
        assert top - set(schema) - REFUSED == set(), route
        assert set(schema) - top - {"model", "prompt_progress"} - allowed == set(), route
    inner = {n.partition(".")[2] for n in asked["/generate"] if n.startswith("sampling_params.")}
    assert inner - set(openapi.SAMPLING_PARAMS["properties"]) - REFUSED == set()
