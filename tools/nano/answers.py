"""Judging answers: the ten fixed questions and the 100 tool requests, against any function from prompts to replies."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from . import heldout
from .chatfmt import Message, call_text, prompt

Reply = str
Ask = Callable[[list[str]], list[Reply]]
CALL = re.compile(r"<tool_call>([^<]*)((?:<arg_key>.*?</arg_key><arg_value>.*?</arg_value>)*)</tool_call>", re.DOTALL)
ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key><arg_value>(.*?)</arg_value>", re.DOTALL)


def content(reply: Reply) -> str:
    """What follows the reasoning."""
    return reply.rpartition("</think>")[2]


def calls(reply: Reply) -> list[tuple[str, dict[str, str]]]:
    """The calls of a reply: (name, {argument: text}), argument order ignored."""
    return [(name.strip(), dict(ARGUMENT.findall(body))) for name, body in CALL.findall(content(reply))]


def wanted_calls(case: heldout.Case) -> list[tuple[str, dict[str, str]]]:
    return calls("".join(call_text(c["name"], c["arguments"]) for c in case.calls))


def contains(answer: str, wanted: str) -> bool:
    """`wanted` as a word of its own, letter case apart."""
    return re.search(rf"(?<!\w){re.escape(wanted.lower())}(?!\w)", answer.lower()) is not None


def judge_questions(ask: Ask, thinking: bool) -> list[dict[str, Any]]:
    """The ten questions in order: text, reply, right or not; a tool question is right if call and final answer are."""
    questions = heldout.questions()
    opening: list[list[Message]] = [[{"role": "user", "content": q.text}] for q in questions]
    first = ask(
        [prompt(m, q.case.tools if q.case else (), thinking=thinking) for m, q in zip(opening, questions, strict=True)]
    )
    out = [
        {"question": q.text, "kind": q.kind, "thinking": thinking, "reply": r, "right": contains(content(r), q.wanted)}
        for q, r in zip(questions, first, strict=True)
    ]
    for row, question, messages in zip(out, questions, opening, strict=True):
        if question.case is None:
            continue
        row["right"] = calls(str(row["reply"])) == wanted_calls(question.case)
        messages.append({"role": "assistant", "tool_calls": question.case.calls})
        messages += [{"role": "tool", "content": r} for r in question.case.results]
        row["answer"] = ask([prompt(messages, question.case.tools, thinking=thinking)])[0]
        row["right"] = row["right"] and contains(content(row["answer"]), question.wanted)
    return out


def judge_tools(ask: Ask) -> list[dict[str, Any]]:
    """The 100 tool requests without thinking: right means the very name and every argument."""
    requests = heldout.tool_requests()
    replies = ask([prompt([{"role": "user", "content": c.user}], c.tools, thinking=False) for c, _ in requests])
    return [
        {"request": c.user, "new_value": value, "reply": r, "right": calls(r) == wanted_calls(c)}
        for (c, value), r in zip(requests, replies, strict=True)
    ]
