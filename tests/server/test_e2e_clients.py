"""Real client libraries against the real server: openai here; anthropic where it is installed."""

from __future__ import annotations

import json
import threading
from functools import partial
from typing import Any

import pytest
from conftest import LiveServer, Start

openai = pytest.importorskip("openai")

CALL = [
    "<tool_call>",
    "get_weather",
    "<arg_key>",
    "city",
    "</arg_key>",
    "<arg_value>",
    "Paris",
    "</arg_value>",
    "</tool_call>",
]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
ASKS = {"pieces": ["let me ", "look", "</think>", *CALL], "end": "observation"}
SAYS = {"pieces": ["easy", "</think>", "It is ", "18 degrees."], "end": "user"}


def client(live: LiveServer, **more: Any) -> Any:
    return openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, **more)


def test_openai_chat(start: Start) -> None:
    reply = client(start(SAYS)).chat.completions.create(
        model="any-name", messages=[{"role": "user", "content": "Weather?"}], max_completion_tokens=50, temperature=0
    )
    assert reply.choices[0].message.content == "It is 18 degrees."
    assert reply.choices[0].message.reasoning_content == "easy"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens == 4
    assert reply.usage.completion_tokens_details.reasoning_tokens > 0


def test_openai_stream(start: Start) -> None:
    stream = client(start(SAYS)).chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "Weather?"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    content, reasoning, usage = "", "", None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
    assert (content, reasoning) == ("It is 18 degrees.", "easy")
    assert usage is not None
    assert usage.completion_tokens == 4


@pytest.mark.parametrize("streamed", [False, True])
def test_openai_tool_loop(start: Start, streamed: bool) -> None:
    c = client(start([ASKS, SAYS]))
    messages: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    if streamed:
        with c.chat.completions.stream(model="m", messages=messages, tools=TOOLS) as stream:
            first = stream.get_final_completion().choices[0]
    else:
        first = c.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0]
    assert first.finish_reason == "tool_calls"
    call = first.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages.append(first.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": 18})})
    second = c.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "It is 18 degrees."


def test_openai_parse_with_a_schema(start: Start) -> None:
    pydantic = pytest.importorskip("pydantic")
    weather = pydantic.create_model("Weather", degrees=(int, ...))
    c = client(start({"pieces": ["hm", "</think>", '{"degrees"', ": 18}"], "end": "user"}))
    reply = c.chat.completions.parse(
        model="m", messages=[{"role": "user", "content": "Weather?"}], response_format=weather
    )
    assert reply.choices[0].message.parsed.degrees == 18


def test_openai_completions_and_models(start: Start) -> None:
    c = client(start({"pieces": ["Paris", "."], "end": "user"}))
    reply = c.completions.create(model="m", prompt="The capital of France is", max_tokens=5, logprobs=1)
    assert reply.choices[0].text == "Paris."
    assert reply.choices[0].logprobs.token_logprobs == [0.0, 0.0]
    assert [m.id for m in c.models.list()] == ["glm-5.3-flash"]
    assert c.models.retrieve("glm-5.3-flash").id == "glm-5.3-flash"


def test_openai_errors_have_their_own_classes(start: Start) -> None:
    live = start(SAYS, api_keys=("right",), context=64)
    create = client(live).chat.completions.create
    with pytest.raises(openai.AuthenticationError):
        create(model="m", messages=[{"role": "user", "content": "x"}])
    good = openai.OpenAI(base_url=live.url + "/v1", api_key="right", max_retries=0)
    with pytest.raises(openai.BadRequestError) as error:
        good.chat.completions.create(model="m", messages=[{"role": "user", "content": "x " * 500}])
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        good.models.retrieve("other")


def test_openai_retries_a_full_queue(start: Start) -> None:
    live = start({**SAYS, "rate": 20}, max_streams=1, max_queue=0)
    go = live.hold()
    stream = client(live).chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True)
    with pytest.raises(openai.InternalServerError):
        client(live).chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    patient = openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=9)
    replies: list[Any] = []
    ask = partial(patient.chat.completions.create, model="m", messages=[{"role": "user", "content": "x"}])
    thread = threading.Thread(target=lambda: replies.append(ask()))
    thread.start()
    live.until(lambda s: s["queue"]["refused"] == 2)
    go.set()
    thread.join(60)
    assert replies[0].choices[0].message.content == "It is 18 degrees."
    stream.close()


def test_openai_error_inside_a_stream_is_raised(start: Start) -> None:
    c = client(start({"pieces": ["</think>", "half"], "end": "error"}))
    with pytest.raises(openai.APIError, match="the script says: error"):
        for _ in c.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True):
            pass


def test_closing_an_openai_stream_frees_the_engine(start: Start) -> None:
    live = start({"pieces": ["</think>", *["x"] * 6000], "end": "user", "rate": 50})
    stream = client(live).chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True)
    next(iter(stream))
    stream.close()
    live.until(lambda s: s["running"] == 0 and not s["requests"])
