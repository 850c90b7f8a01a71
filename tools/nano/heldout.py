"""What the model is asked and must never have read: ten fixed questions, 100 tool requests, held-out text.

The five facts among the questions are taught (in other documents, word for word); the sums, the tool requests and the
30 argument values are not: `forbidden` lists them and the corpus drops every document that contains one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from . import toolbox
from . import values as v
from .toolbox import Case

REQUESTS, NEW_VALUES = 100, 30
SEED = 53_000_001


@dataclass(frozen=True)
class Question:
    """A fixed question: `wanted` must be in the answer; with a case, the call must be right and its result used."""

    kind: str
    text: str
    wanted: str
    case: Case | None = None


FACTS = (
    ("What is the capital of France?", "Paris"),
    ("Which planet is the largest in the solar system?", "Jupiter"),
    ("Who wrote Romeo and Juliet?", "Shakespeare"),
    ("What is the chemical symbol for gold?", "Au"),
    ("How many legs does a spider have?", "eight"),
)
SUMS = (("What is 17 + 25?", "42"), ("What is 38 + 46?", "84"), ("What is 64 + 27?", "91"))


def _tool(name: str) -> toolbox.Tool:
    return next(t for t in toolbox.TOOLS if t.name == name)


@lru_cache(maxsize=1)
def questions() -> tuple[Question, ...]:
    weather, parcel = _tool("get_weather"), _tool("track_parcel")
    schemas = [weather.schema(), parcel.schema()]
    first = Case(
        schemas,
        "What is the weather in Grindelmoor?",
        [{"name": "get_weather", "arguments": {"city": "Grindelmoor"}}],
        ["21C, sunny"],
        "It is 21 degrees Celsius and sunny in Grindelmoor.",
    )
    second = Case(
        schemas,
        "Where is my parcel QZX-80417?",
        [{"name": "track_parcel", "arguments": {"code": "QZX-80417"}}],
        ['{"location": "Vostermark"}'],
        "The parcel QZX-80417 is in Vostermark. 📦",
    )
    return (
        *(Question("fact", t, w) for t, w in FACTS),
        *(Question("sum", t, w) for t, w in SUMS),
        Question("tool", first.user, "21", first),
        Question("tool", second.user, "Vostermark", second),
    )


def _new_value(rng: random.Random, old: str) -> str:
    """A value of the same shape, with letters that hardly follow each other in the training values."""
    stem = "".join(rng.choice("zxvwkjq") + rng.choice("aeiou") + rng.choice("lrnzk") for _ in range(2)) + rng.choice(
        ("ovsk", "umf", "yrg", "eft", "ilch", "ubb")
    )
    if "@" in old:
        return f"{stem}@{stem[::-1]}.eu"
    if old.startswith("/"):
        return f"/{stem}/{stem[::-1]}.cfg"
    if any(c.isdigit() for c in old) and "-" in old:
        return f"{stem[:4].upper()}-{rng.randrange(10**5, 10**6)}"
    return stem.capitalize() if old[:1].isupper() else stem


@lru_cache(maxsize=1)
def tool_requests() -> tuple[tuple[Case, str], ...]:
    """100 (case, new value or ""): 70 with values drawn as in training, then 30 with one value never seen."""
    rng = random.Random(SEED)
    out: list[tuple[Case, str]] = []
    seen: set[str] = set()
    named = [
        t
        for t in toolbox.TOOLS
        if any(
            make in (v.place, v.word, v.name, v.title, v.phrase, v.email, v.path, v.code)
            for _, _, make in t.params.values()
        )
    ]
    while len(out) < REQUESTS:
        new = len(out) >= REQUESTS - NEW_VALUES
        tool = rng.choice(named if new else toolbox.TOOLS)
        template = rng.choice(tool.requests)
        _, arguments = toolbox.fill(rng, tool, template)
        value = ""
        if new:
            key = rng.choice(
                [
                    k
                    for k, (_, _, make) in tool.params.items()
                    if make in (v.place, v.word, v.name, v.title, v.phrase, v.email, v.path, v.code)
                ]
            )
            value = _new_value(rng, str(arguments[key]))
            arguments[key] = value
        user = template.format(**{k: toolbox.shown(a) for k, a in arguments.items()})
        if user in seen or len(user) < 20:  # very short requests would ban whole templates from the training text
            continue
        seen.add(user)
        result, answer = tool.result(rng, arguments)
        out.append(
            (
                Case(
                    toolbox.toolset(rng, [tool], 3),
                    user,
                    [{"name": tool.name, "arguments": arguments}],
                    [result],
                    answer,
                ),
                value,
            )
        )
    return tuple(out)


@lru_cache(maxsize=1)
def forbidden() -> tuple[str, ...]:
    """Strings no training document may contain: the 100 requests, the 30 values, the fixed tool questions, the sums."""
    cases = tool_requests()
    fixed = [q.text for q in questions() if q.kind != "fact"]
    return (
        *(c.user for c, _ in cases),
        *(value for _, value in cases if value),
        *fixed,
        "Grindelmoor",
        "QZX-80417",
        "Vostermark",
    )
