"""GLM-5.3's chat format, rendered by our own code into segments.

Source: the chat_template.jinja that zai-org publishes with GLM-5.3; thinking off, which that template lacks, keeps the
effort line and closes the reasoning at once (`<think></think>`), so that both kinds of request share a prefix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .messages import Message, Tool
from .segments import Segment, plain, special

Effort = Literal["low", "high", "max"]

TOOLS_HEAD = (
    "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_FORMAT = (
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How to render a conversation. `clear_thinking` drops the reasoning of turns before the last user message;
    `continue_final` leaves the last assistant message open for the model to go on with."""

    thinking: bool = True
    effort: Effort = "max"
    clear_thinking: bool = False
    add_generation_prompt: bool = True
    continue_final: bool = False


def render(messages: Sequence[Message], tools: Sequence[Tool] | None, options: ChatOptions) -> list[Segment]:
    """The prompt. With `continue_final` the last message must be the assistant's."""
    out = [special("[gMASK]"), special("<sop>"), special("<|system|>")]
    out.append(plain(f"Reasoning Effort: {options.effort.capitalize()}"))
    if tools:
        out += _tools(tools)
    body = messages[:-1] if options.continue_final else messages
    last_user = max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)
    i = 0
    while i < len(body):
        if body[i].role == "tool":
            end = next((j for j in range(i, len(body)) if body[j].role != "tool"), len(body))
            out += _tool_results(body[i:end], body[i - 1] if i else None)
            i = end
            continue
        message = body[i]
        if message.role == "assistant":
            keep = not options.clear_thinking or i > last_user
            out += _assistant(message, keep)
        else:
            out += [special(f"<|{message.role}|>"), plain(message.content)]
        i += 1
    if options.continue_final:
        return out + open_turn(messages[-1], thinking=options.thinking)
    if options.add_generation_prompt:
        out += [special("<|assistant|>"), special("<think>")]
        if not options.thinking:
            out.append(special("</think>"))
    return out


def open_turn(message: Message, *, thinking: bool) -> list[Segment]:
    """An assistant turn to be continued, verbatim. A message of reasoning alone is continued inside the reasoning."""
    out = [special("<|assistant|>"), special("<think>")]
    reasoning, content = message.reasoning, message.content
    if reasoning is None and content.startswith("<think>"):
        reasoning, content = content.removeprefix("<think>"), ""
    if reasoning:
        out.append(plain(reasoning))
    if not content and thinking and reasoning is not None and not message.thought:
        return out
    return [*out, special("</think>"), plain(content)] if content else [*out, special("</think>")]


def _tools(tools: Sequence[Tool]) -> list[Segment]:
    lines = [json.dumps(_shown(t.definition), ensure_ascii=False) + "\n" for t in tools]
    out = [special("<|system|>"), plain(TOOLS_HEAD + "".join(lines) + TOOLS_FORMAT)]
    out += [special("<tool_call>"), plain("{function-name}")]
    for n in ("1", "2"):
        out += _argument(f"{{arg-key-{n}}}", f"{{arg-value-{n}}}")
    return [*out, plain("..."), special("</tool_call>")]


def _shown(definition: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in definition.items() if k not in ("strict", "defer_loading")}


def _argument(key: str, value: str) -> list[Segment]:
    return [
        special("<arg_key>"),
        plain(key),
        special("</arg_key>"),
        special("<arg_value>"),
        plain(value),
        special("</arg_value>"),
    ]


def _assistant(message: Message, keep_reasoning: bool) -> list[Segment]:
    out = [special("<|assistant|>"), special("<think>")]
    if message.reasoning and keep_reasoning:
        out.append(plain(message.reasoning))
    out.append(special("</think>"))
    if content := message.content.strip():
        out.append(plain(content))
    for call in message.tool_calls:
        out += [special("<tool_call>"), plain(call.name)]
        for key, value in call.arguments.items():
            out += _argument(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        out.append(special("</tool_call>"))
    return out


def _tool_results(results: Sequence[Message], before: Message | None) -> list[Segment]:
    """One observation turn; results go in the order of the calls if every id is present, unique and known."""
    order = [c.id for c in before.tool_calls] if before else []
    ids = [r.tool_call_id for r in results]
    if None not in ids and None not in order and len(set(ids)) == len(ids) and set(ids) == set(order):
        place: dict[str | None, int] = {}
        for i, call_id in enumerate(order):
            place.setdefault(call_id, i)
        results = sorted(results, key=lambda r: place[r.tool_call_id])
    out = [special("<|observation|>")]
    for result in results:
        out += [special("<tool_response>"), plain(result.content), special("</tool_response>")]
    return out
