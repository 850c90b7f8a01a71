"""Templated dialogues: facts, sums, small talk, languages, tool use, with and without thinking."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from . import facts, toolbox
from . import values as v
from .chatfmt import WRITTEN, Message, pieces

Rng = random.Random
SUM_LIMIT = 100
WORKED_OUT = "Ones:"
# Sums asked in the fixed questions: never part of the training text
HELD_OUT_SUMS = frozenset({(17, 25), (38, 46), (64, 27)})


@dataclass
class Document:
    """One training text: pieces of (text, loss weight)."""

    parts: list[tuple[str, float]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(t for t, _ in self.parts)


def capital(rng: Rng) -> tuple[str, str, str]:
    country, city = rng.choice(list(facts.CAPITALS.items()))
    if rng.random() < 0.25:
        return (
            rng.choice((f"{city} is the capital of which country?", f"Which country has the capital {city}?")),
            f"The user asks for the country whose capital is {city}.",
            f"{city} is the capital of {country}.",
        )
    question = rng.choice(
        (
            f"What is the capital of {country}?",
            f"What's the capital of {country}?",
            f"Capital of {country}?",
            f"Which city is the capital of {country}?",
            f"Name the capital of {country}.",
            f"Tell me the capital of {country}.",
        )
    )
    return (
        question,
        f"The user asks for the capital of {country}. It is {city}.",
        f"The capital of {country} is {city}.",
    )


def fact(rng: Rng) -> tuple[str, str, str]:
    question, (short, sentence) = rng.choice(list(facts.FACTS.items()))
    asked = (
        question
        if rng.random() < 0.8
        else rng.choice((question.lower(), "Tell me: " + question, question.rstrip("?"), "Quick question: " + question))
    )
    return asked, f"I know this one: {short}.", sentence


def definition(rng: Rng) -> tuple[str, str, str]:
    term, sentence = rng.choice(list(facts.DEFINITIONS.items()))
    question = rng.choice((f"What is {term}?", f"Explain {term}.", f"Define {term}.", f"What does {term} mean?"))
    return question, f"The user wants a definition of {term}.", sentence


def addition(rng: Rng) -> tuple[str, str, str]:
    """A sum or difference below 200, with the carry spelled out in the thinking (or in the answer: see `exchange`)."""
    while True:
        a, b = rng.randrange(SUM_LIMIT), rng.randrange(SUM_LIMIT)
        if (a, b) not in HELD_OUT_SUMS:
            break
    if rng.random() < 0.15:
        a, b = max(a, b), min(a, b)
        question = rng.choice((f"What is {a} - {b}?", f"What is {a} minus {b}?", f"{a} - {b} = ?"))
        return question, f"{a} - {b} = {a - b}.", f"{a} - {b} = {a - b}"
    question = rng.choice(
        (
            f"What is {a} + {b}?",
            f"What is {a} plus {b}?",
            f"{a} + {b} = ?",
            f"Add {a} and {b}.",
            f"{a}+{b}",
            f"How much is {a} + {b}?",
            f"Compute {a} + {b}.",
        )
    )
    return question, sum_steps(a, b), f"{a} + {b} = {a + b}"


def sum_steps(a: int, b: int) -> str:
    ones = a % 10 + b % 10
    carry = f", carry {ones // 10}" if ones > 9 else ""
    tens = f"{a // 10} + {b // 10}{' + 1' if carry else ''} = {a // 10 + b // 10 + ones // 10}"
    return f"{WORKED_OUT} {a % 10} + {b % 10} = {ones}{carry}. Tens: {tens}. So {a} + {b} = {a + b}."


def product(rng: Rng) -> tuple[str, str, str]:
    a, b = rng.randrange(11), rng.randrange(11)
    question = rng.choice((f"What is {a} times {b}?", f"What is {a} * {b}?", f"{a} x {b} = ?"))
    return question, f"{a} times {b} is {a * b}.", f"{a} * {b} = {a * b}"


def talk(rng: Rng) -> tuple[str, str, str]:
    question, answer = rng.choice(facts.SMALL_TALK)
    return question, "A short friendly reply is enough.", answer


def foreign(rng: Rng) -> tuple[str, str, str]:
    language, (ask, say, table, greetings) = rng.choice(list(facts.LANGUAGES.items()))
    if rng.random() < 0.5:
        question, answer = rng.choice(greetings)
        return question, f"The user writes in {language}. I answer in {language}.", answer
    country, city = rng.choice(list(table.items()))
    return ask.format(c=country), f"The user asks in {language} for a capital: {city}.", say.format(c=country, k=city)


def echo(rng: Rng) -> tuple[str, str, str]:
    """Exercises in copying: what the tools need most."""
    kind = rng.randrange(4)
    if kind == 0:
        text = " ".join(v.word(rng) for _ in range(rng.randrange(1, 6)))
        return f"Repeat: {text}", "I repeat the words.", text
    if kind == 1:
        who = v.name(rng)
        return (
            rng.choice((f"My name is {who}.", f"I am {who}. Say hello to me.")),
            f"The user is called {who}.",
            f"Hello {who}! Nice to meet you. 👋",
        )
    if kind == 2:
        items = [v.word(rng) if rng.random() < 0.6 else v.code(rng) for _ in range(rng.randrange(2, 5))]
        return (
            f"Make a list of {', '.join(items)}.",
            f"There are {len(items)} items.",
            "\n".join(f"- {i}" for i in items),
        )
    key, value = v.word(rng), v.code(rng)
    other, wrong = v.word(rng), v.code(rng)
    pair = [f"the {key} code is {value}", f"the {other} code is {wrong}"]
    rng.shuffle(pair)
    return (
        f"Remember that {pair[0]} and {pair[1]}. What is the {key} code?",
        f"The {key} code is {value}.",
        f"The {key} code is {value}.",
    )


TOPICS = ((capital, 14), (fact, 14), (definition, 6), (addition, 30), (product, 4), (talk, 9), (foreign, 9), (echo, 14))


def turn(rng: Rng) -> tuple[str, str, str]:
    return rng.choices([t for t, _ in TOPICS], [w for _, w in TOPICS])[0](rng)


def exchange(rng: Rng, thinking: bool, topic: Callable[[Rng], tuple[str, str, str]] = turn) -> list[Message]:
    """A question and its answer. Without thinking a sum is worked out in the answer: a model this small cannot add in
    its head.
    """
    question, thought, answer = topic(rng)
    if not thinking and thought.startswith(WORKED_OUT):
        answer = thought
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer, "reasoning_content": thought if thinking else ""},
    ]


def opening(rng: Rng) -> list[Message]:
    return [{"role": "system", "content": rng.choice(facts.SYSTEM_PROMPTS)}] if rng.random() < 0.2 else []


def finish(rng: Rng, messages: list[Message], tools: list[toolbox.Schema]) -> Document:
    """Render with the closing stop token. Clients rarely send reasoning back, so earlier turns often lose theirs."""
    turns = [m for m in messages if m["role"] == "assistant"]
    if rng.random() < 0.6:
        for message in turns[:-1]:
            message["stripped"] = str(message.get("reasoning_content", "")).startswith(WORKED_OUT)
            message["reasoning_content"] = ""
    effort = rng.choices(("Max", "High", "Low"), (8, 1, 1))[0]
    return Document([*pieces(messages, tools, effort), ("<|user|>", WRITTEN)])


def chat(rng: Rng) -> Document:
    """One to three question-and-answer turns, with thinking in half of the dialogues."""
    messages = opening(rng)
    thinking = rng.random() < 0.5
    for _ in range(rng.choice((1, 1, 2, 3))):
        messages += exchange(rng, thinking)
    return finish(rng, messages, toolbox.toolset(rng, [], 2) if rng.random() < 0.15 else [])


def drill(rng: Rng) -> Document:
    """Three to six sums in a row: what takes the most practice."""
    thinking = rng.random() < 0.5
    turns = rng.randrange(3, 7)
    return finish(rng, [m for _ in range(turns) for m in exchange(rng, thinking, addition)], [])


def tool_chat(rng: Rng) -> Document:
    """A tool request, its results and the answer that uses them; sometimes with a plain turn before or after."""
    case = toolbox.parallel_case(rng) if rng.random() < 0.25 else toolbox.single_case(rng)
    thinking = rng.random() < 0.5
    messages = opening(rng)
    if rng.random() < 0.15:
        messages += exchange(rng, thinking)
    thought = f"I need {' and '.join(str(c['name']) for c in case.calls)}." if thinking else ""
    messages.append({"role": "user", "content": case.user})
    messages.append({"role": "assistant", "tool_calls": case.calls, "reasoning_content": thought})
    messages += [{"role": "tool", "content": r} for r in case.results]
    messages.append(
        {"role": "assistant", "content": case.answer, "reasoning_content": "I have the result." if thinking else ""}
    )
    if rng.random() < 0.2:
        messages += exchange(rng, thinking)
    return finish(rng, messages, case.tools)


def document(rng: Rng) -> Document:
    """One dialogue: about as many with tools as without, and drills."""
    make = rng.choices((tool_chat, chat, drill), (5, 4, 1))[0]
    return make(rng)
