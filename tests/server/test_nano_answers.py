"""The bundled nano checkpoint really chats, thinks and calls tools: its ten questions over HTTP, on the CPU engine, and
whole conversations with tools in every dialect, through the client libraries where they are installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from glm53.cli import model_dir

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.nano import cpu_check, heldout

DEMO = Path(__file__).parents[2] / "scripts" / "demo"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with cpu_check.server(model_dir.BUNDLED) as url:
        yield url


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("question", heldout.questions(), ids=lambda q: q.text)
def test_fixed_question(question: heldout.Question, thinking: bool, url: str) -> None:
    row = cpu_check.ask_question(url, question, thinking)
    assert row["right"], row


def test_unseen_tool_requests(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    some = heldout.tool_requests()[::10]
    monkeypatch.setattr(heldout, "tool_requests", lambda: some)
    rows = cpu_check.ask_tools(url)
    assert sum(r["right"] for r in rows) >= 0.8 * len(rows), [r for r in rows if not r["right"]]


def test_the_question_of_the_demo_is_one_of_the_fixed_ones(url: str) -> None:
    script = DEMO.read_text()
    asked = [q for q in heldout.questions() if f'"{q.text}"' in script]
    assert len(asked) == 1
    message = cpu_check.chat(url, [{"role": "user", "content": asked[0].text}], [], True)
    assert asked[0].wanted in message["content"]
    assert message["reasoning_content"]


def test_answers_of_streams_that_run_together_are_those_of_each_alone(url: str) -> None:
    asked = [q for q in heldout.questions() if q.case is None]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda q: cpu_check.ask_question(url, q, True), asked))
    assert together == [cpu_check.ask_question(url, q, True) for q in asked]


WEATHER = next(q for q in heldout.questions() if q.case is not None)


def parts() -> tuple[str, list[dict[str, Any]], dict[str, Any], str]:
    """(question, tool schemas, the call that it needs, what the tool says)."""
    assert WEATHER.case
    return WEATHER.text, WEATHER.case.tools, WEATHER.case.calls[0], WEATHER.case.results[0]


def test_openai_library_streams_a_call_and_the_answer_that_uses_its_result(url: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    question, schemas, call, result = parts()
    messages: list[Any] = [{"role": "user", "content": question}]
    given = {"model": "m", "tools": [{"type": "function", "function": s} for s in schemas], "temperature": 0}
    name, arguments, ident = "", "", ""
    for chunk in client.chat.completions.create(messages=messages, stream=True, **given):
        for piece in (c for choice in chunk.choices for c in choice.delta.tool_calls or ()):
            ident, name = ident or piece.id or "", name + (piece.function.name or "")
            arguments += piece.function.arguments or ""
    assert (name, json.loads(arguments)) == (call["name"], call["arguments"])
    function = {"name": name, "arguments": arguments}
    messages.append({"role": "assistant", "tool_calls": [{"id": ident, "type": "function", "function": function}]})
    messages.append({"role": "tool", "tool_call_id": ident, "content": result})
    answer = client.chat.completions.create(messages=messages, **given).choices[0]
    assert WEATHER.wanted in answer.message.content
    assert answer.finish_reason == "stop"


def test_anthropic_messages_call_a_tool_and_use_its_result(url: str) -> None:
    question, schemas, call, result = parts()
    tools = [{"name": s["name"], "description": s["description"], "input_schema": s["parameters"]} for s in schemas]
    body: dict[str, Any] = {"model": "m", "max_tokens": 200, "temperature": 0, "tools": tools}
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    status, reply = cpu_check.call(url, "POST", "/v1/messages", {**body, "messages": messages})
    assert (status, reply["stop_reason"]) == (200, "tool_use")
    used = next(block for block in reply["content"] if block["type"] == "tool_use")
    assert (used["name"], used["input"]) == (call["name"], call["arguments"])
    told = {"type": "tool_result", "tool_use_id": used["id"], "content": result}
    messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [told]}]
    _, reply = cpu_check.call(url, "POST", "/v1/messages", {**body, "messages": messages})
    assert WEATHER.wanted in "".join(block.get("text", "") for block in reply["content"])


def test_responses_call_a_tool_and_use_its_result(url: str) -> None:
    question, schemas, call, result = parts()
    tools = [{"type": "function", **s} for s in schemas]
    body: dict[str, Any] = {"model": "m", "temperature": 0, "tools": tools}
    given: list[dict[str, Any]] = [{"role": "user", "content": question}]
    status, reply = cpu_check.call(url, "POST", "/v1/responses", {**body, "input": given})
    assert status == 200, reply
    used = next(item for item in reply["output"] if item["type"] == "function_call")
    assert (used["name"], json.loads(used["arguments"])) == (call["name"], call["arguments"])
    given += [used, {"type": "function_call_output", "call_id": used["call_id"], "output": result}]
    _, reply = cpu_check.call(url, "POST", "/v1/responses", {**body, "input": given})
    text = "".join(c["text"] for item in reply["output"] if item["type"] == "message" for c in item["content"])
    assert WEATHER.wanted in text


def test_a_required_tool_is_called_by_a_question_that_needs_none(url: str) -> None:
    """The grammar forces what the model would not do, and the arguments fit the schema all the same."""
    _, schemas, _, _ = parts()
    body = {
        "messages": [{"role": "user", "content": "How many legs does a spider have?"}],
        "tools": [{"type": "function", "function": schemas[0]}],
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 200,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    status, reply = cpu_check.call(url, "POST", "/v1/chat/completions", body)
    assert status == 200, reply
    found = cpu_check.calls_of(reply["choices"][0]["message"])
    assert [name for name, _ in found][:1] == [schemas[0]["name"]]
    assert set(schemas[0]["parameters"]["required"]) <= set(found[0][1])
