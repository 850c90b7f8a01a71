"""LiteLLM, through which aider and many gateways speak, against the running server."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from conftest import LiveServer, Start, user

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise importing it asks the internet for prices
litellm = pytest.importorskip("litellm")
pytestmark = pytest.mark.filterwarnings("ignore")  # its own

SAYS = {"pieces": ["easy", "</think>", "It is ", "18 degrees."], "end": "user"}
CALL = ["<tool_call>", "ls", "<arg_key>", "path", "</arg_key>", "<arg_value>", "/tmp", "</arg_value>", "</tool_call>"]
ASKS = {"pieces": ["look", "</think>", *CALL], "end": "observation"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "ls", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
    }
]
PROVIDERS = ("hosted_vllm", "openai")


def complete(live: LiveServer, provider: str, **more: Any) -> Any:
    given = {"messages": user("hi"), "api_base": live.url + "/v1", "api_key": "none", "num_retries": 0, **more}
    return litellm.completion(model=f"{provider}/glm-5.3-flash", **given)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_chat(start: Start, provider: str) -> None:
    reply = complete(start(SAYS), provider)
    assert reply.choices[0].message.content == "It is 18 degrees."
    assert reply.choices[0].message.reasoning_content == "easy"
    assert reply.usage.completion_tokens == 4


@pytest.mark.parametrize("provider", PROVIDERS)
def test_stream(start: Start, provider: str) -> None:
    chunks = list(complete(start(SAYS), provider, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "It is 18 degrees."
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt.choices[0].message.content == "It is 18 degrees."
    assert rebuilt.usage.completion_tokens == 4


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_loop(start: Start, streamed: bool) -> None:
    live = start([ASKS, SAYS])
    reply = complete(live, "hosted_vllm", tools=TOOLS, stream=streamed)
    first = litellm.stream_chunk_builder(list(reply)) if streamed else reply
    call = first.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"path": "/tmp"}
    history = [*user("hi"), first.choices[0].message.model_dump()]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "a.txt"})
    assert (
        complete(live, "hosted_vllm", messages=history, tools=TOOLS).choices[0].message.content == "It is 18 degrees."
    )


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_prompt_too_long_is_recognised(start: Start, provider: str) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        complete(start(SAYS, context=64), provider, messages=user("word " * 500))


def test_its_messages_adapter(start: Start) -> None:
    """LiteLLM as an Anthropic front: its adapter is one of those that read our usage chunk."""
    live = start(SAYS)
    given = {"model": "hosted_vllm/m", "max_tokens": 50, "messages": user("hi"), "api_base": live.url + "/v1"}

    async def whole() -> Any:
        return await litellm.anthropic.messages.acreate(**given, api_key="none")

    reply = asyncio.run(whole())
    content = reply["content"] if isinstance(reply, dict) else reply.content
    assert "It is 18 degrees." in json.dumps(content, default=str)
