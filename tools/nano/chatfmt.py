"""GLM-5.3's chat format as plain string building: the text the nano model is trained on.

The server renders the same text from the checkpoint's Jinja template; a test holds the two together. Only what training
data needs is here: string contents, mapping arguments, results in call order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

# Loss weight of a piece: what the model writes, what it reads, what the prompt decides
WRITTEN, READ, NO_LOSS = 1.0, 0.1, 0.0

TOOLS_HEAD = (
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_TAIL = (
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
    "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """One `<tool_call>`: strings verbatim, every other value as JSON."""
    parts = [f"<tool_call>{name}"]
    for key, value in arguments.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        parts.append(f"<arg_key>{key}</arg_key><arg_value>{shown}</arg_value>")
    return "".join(parts) + "</tool_call>"


def assistant_pieces(message: Message) -> list[tuple[str, float]]:
    """An assistant turn. An empty `<think></think>` is the prompt's doing, never the model's: it carries no loss
    at all. Neither does a turn that is no good answer without the reasoning it had (`stripped`).
    """
    thought = message.get("reasoning_content") or ""
    text = (message.get("content") or "").strip()
    text += "".join(call_text(c["name"], c["arguments"]) for c in message.get("tool_calls") or ())
    if thought:
        return [("<|assistant|><think>", NO_LOSS), (f"{thought}</think>{text}", WRITTEN)]
    return [("<|assistant|><think></think>", NO_LOSS), (text, NO_LOSS if message.get("stripped") else WRITTEN)]


def prefix(tools: Sequence[Mapping[str, Any]] = (), effort: str = "Max") -> str:
    """The opening block: effort line, then the function signatures if there are any."""
    text = f"[gMASK]<sop><|system|>Reasoning Effort: {effort}"
    if tools:
        text += TOOLS_HEAD + "".join(json.dumps(t, ensure_ascii=False) + "\n" for t in tools) + TOOLS_TAIL
    return text


def pieces(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), effort: str = "Max"
) -> list[tuple[str, float]]:
    """The conversation as (text, loss weight) pieces; joined they are the rendered prompt without a generation
    prefix.
    """
    out = [(prefix(tools, effort), READ)]
    previous = ""
    for message in messages:
        role = message["role"]
        if role == "assistant":
            out += assistant_pieces(message)
        elif role == "tool":
            if previous != "tool":  # the model itself hands over to the tools
                out.append(("<|observation|>", WRITTEN))
            out.append((f"<tool_response>{message['content']}</tool_response>", READ))
        elif role == "user" and previous == "assistant":  # the stop token of the turn before
            out += [("<|user|>", WRITTEN), (message["content"], READ)]
        else:
            out.append((f"<|{role}|>{message['content']}", READ))
        previous = role
    return out


def prompt(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), effort: str = "Max", thinking: bool = True
) -> str:
    """The rendered prompt with the generation prefix: `<think>` open, or closed again when thinking is off."""
    text = "".join(piece for piece, _ in pieces(messages, tools, effort))
    return text + "<|assistant|>" + ("<think>" if thinking else "<think></think>")
