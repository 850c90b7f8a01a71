"""Tools the nano model learns to call: fixed ones with many phrasings, and invented ones so that it reads the
signature.

A `Case` is one request with the calls it must lead to, what the tools answer, and the sentence that uses the answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import results
from . import values as v

Schema = dict[str, Any]
Rng = random.Random


@dataclass(frozen=True)
class Tool:
    """A function signature, its argument generators, phrasings of a request, and what it answers."""

    name: str
    description: str
    params: dict[str, tuple[str, str, Callable[[Rng], Any]]]
    requests: tuple[str, ...]
    result: Callable[[Rng, dict[str, Any]], tuple[str, str]]

    def schema(self) -> Schema:
        props: dict[str, Any] = {}
        for key, (kind, text, _) in self.params.items():
            props[key] = {"type": kind, "description": text} if text else {"type": kind}
            if kind == "array":
                props[key]["items"] = {"type": "string"}
        return {
            "name": self.name,
            "description": self.description,
            "parameters": {"type": "object", "properties": props, "required": list(self.params)},
        }


@dataclass(frozen=True)
class Case:
    """One tool request: the user's words, the calls due, their results, and the answer that uses them."""

    tools: list[Schema]
    user: str
    calls: list[dict[str, Any]]
    results: list[str]
    answer: str


ROOMS = ["kitchen", "bedroom", "bathroom", "living room", "office", "hall", "garage", "cellar", "attic", "garden"]
STR, INT, NUM, BOOL = "string", "integer", "number", "boolean"

TOOLS: tuple[Tool, ...] = (
    Tool(
        "get_weather",
        "Get the current weather for a city",
        {"city": (STR, "The city", v.place)},
        (
            "What is the weather in {city}?",
            "How is the weather in {city}?",
            "weather in {city}?",
            "Is it warm in {city} today?",
            "Tell me the weather in {city}.",
        ),
        results.weather,
    ),
    Tool(
        "get_time",
        "Get the local time in a city",
        {"city": (STR, "", v.place)},
        ("What time is it in {city}?", "Tell me the time in {city}.", "Current time in {city}, please."),
        results.local_time,
    ),
    Tool(
        "convert_currency",
        "Convert an amount of money",
        {
            "amount": (NUM, "", v.amount),
            "source": (STR, "", lambda r: r.choice(v.CURRENCIES)),
            "target": (STR, "", lambda r: r.choice(v.CURRENCIES)),
        },
        (
            "Convert {amount} {source} to {target}.",
            "How much is {amount} {source} in {target}?",
            "What is {amount} {source} in {target}?",
        ),
        results.convert,
    ),
    Tool(
        "send_email",
        "Send an email",
        {"to": (STR, "Address", v.email), "subject": (STR, "", v.title), "body": (STR, "", v.phrase)},
        (
            "Send an email to {to} with subject {subject} and text {body}.",
            "Email {to}: subject {subject}, body {body}.",
        ),
        results.email,
    ),
    Tool(
        "create_event",
        "Add an event to the calendar",
        {"title": (STR, "", v.title), "date": (STR, "YYYY-MM-DD", v.date), "time": (STR, "HH:MM", v.clock)},
        (
            "Add {title} to my calendar on {date} at {time}.",
            "Create an event called {title} on {date} at {time}.",
            "Put {title} in the calendar for {date}, {time}.",
        ),
        results.event,
    ),
    Tool(
        "search_web",
        "Search the web",
        {"query": (STR, "What to search for", v.phrase)},
        ("Search the web for {query}.", "Look up {query} online.", "Find something about {query} on the web."),
        results.search,
    ),
    Tool(
        "set_timer",
        "Start a timer",
        {"minutes": (INT, "", lambda r: v.integer(r, 1, 180))},
        (
            "Set a timer for {minutes} minutes.",
            "Start a timer of {minutes} minutes.",
            "Remind me in {minutes} minutes.",
        ),
        results.timer,
    ),
    Tool(
        "add_numbers",
        "Add two numbers exactly",
        {"a": (INT, "", lambda r: v.integer(r, 100, 10000)), "b": (INT, "", lambda r: v.integer(r, 100, 10000))},
        (
            "Use the calculator: {a} + {b}.",
            "Add {a} and {b} with the tool.",
            "Calculate {a} plus {b} with the calculator.",
        ),
        results.add,
    ),
    Tool(
        "translate",
        "Translate a text",
        {"text": (STR, "", v.phrase), "language": (STR, "Target language", lambda r: r.choice(v.LANGUAGES))},
        ("Translate {text} into {language}.", "How do you say {text} in {language}?"),
        results.translate,
    ),
    Tool(
        "get_stock_price",
        "Get the price of a share",
        {
            "symbol": (
                STR,
                "Ticker symbol",
                lambda r: "".join(r.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=r.choice((3, 4)))),
            )
        },
        ("What is the price of {symbol}?", "Stock price of {symbol}?", "How much is one share of {symbol}?"),
        results.stock,
    ),
    Tool(
        "book_table",
        "Book a table in a restaurant",
        {
            "restaurant": (STR, "", lambda r: v.word(r).capitalize()),
            "people": (INT, "", lambda r: v.integer(r, 1, 13)),
            "time": (STR, "", v.clock),
        },
        (
            "Book a table for {people} at {restaurant} at {time}.",
            "Reserve a table at {restaurant} for {people} people, {time}.",
        ),
        results.book,
    ),
    Tool(
        "set_light",
        "Turn a light on or off",
        {"room": (STR, "", lambda r: r.choice(ROOMS)), "on": (BOOL, "", lambda r: r.random() < 0.5)},
        ("Turn {on} the light in the {room}.", "Please switch the {room} light {on}.", "Light {on} in the {room}."),
        results.light,
    ),
    Tool(
        "set_temperature",
        "Set the temperature of a room",
        {
            "room": (STR, "", lambda r: r.choice(ROOMS)),
            "degrees": (NUM, "", lambda r: r.choice((r.randrange(15, 28), r.randrange(30, 55) / 2))),
        },
        (
            "Set the {room} to {degrees} degrees.",
            "Heat the {room} to {degrees} degrees.",
            "Make the {room} {degrees} degrees.",
        ),
        results.thermostat,
    ),
    Tool(
        "read_file",
        "Read a text file",
        {"path": (STR, "", v.path)},
        ("Read the file {path}.", "What is in {path}?", "Show me {path}.", "Open {path} for me."),
        results.read,
    ),
    Tool(
        "write_note",
        "Save a note",
        {"title": (STR, "", v.title), "text": (STR, "", v.phrase)},
        ("Save a note called {title}: {text}.", "Write a note with title {title} and text {text}."),
        results.note,
    ),
    Tool(
        "lookup_user",
        "Find a user by number",
        {"user_id": (INT, "", lambda r: v.integer(r, 1, 100000))},
        ("Who is user {user_id}?", "Look up user {user_id}.", "Find the user with number {user_id}."),
        results.user,
    ),
    Tool(
        "track_parcel",
        "Find a parcel",
        {"code": (STR, "Tracking code", v.code)},
        ("Where is my parcel {code}?", "Track parcel {code}.", "Where is {code} now?"),
        results.parcel,
    ),
    Tool(
        "get_distance",
        "Distance between two places",
        {"start": (STR, "", v.place), "end": (STR, "", v.place)},
        (
            "How far is it from {start} to {end}?",
            "Distance from {start} to {end}?",
            "How many km are there from {start} to {end}?",
        ),
        results.distance,
    ),
    Tool(
        "play_song",
        "Play a song",
        {"song": (STR, "", v.title), "artist": (STR, "", v.name)},
        ("Play {song} by {artist}.", "I want to hear {song} by {artist}.", "Put on {song} by {artist}."),
        results.play,
    ),
    Tool(
        "add_tags",
        "Add tags to an item",
        {
            "item": (STR, "", v.code),
            "tags": (
                "array",
                "",
                lambda r: [r.choice(v.NOUNS) if r.random() < 0.5 else v.word(r) for _ in range(r.choice((1, 2, 3)))],
            ),
        },
        ("Tag {item} with {tags}.", "Add the tags {tags} to {item}."),
        results.tags,
    ),
)


def shown(value: Any) -> str:
    """An argument as a user writes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return " and ".join(value) if isinstance(value, list) else str(value)


def fill(rng: Rng, tool: Tool, template: str | None = None) -> tuple[str, dict[str, Any]]:
    """A request in the user's words and the arguments it asks for, in signature order."""
    arguments = {key: make(rng) for key, (_, _, make) in tool.params.items()}
    text = template or rng.choice(tool.requests)
    return text.format(**{k: shown(a) for k, a in arguments.items()}), arguments


def invented(rng: Rng) -> Tool:
    """A tool nobody has seen: its name, parameters and request come from the signature alone."""
    verb, noun = rng.choice(v.VERBS), rng.choice(v.NOUNS) if rng.random() < 0.5 else v.word(rng)
    makers: list[tuple[str, Callable[[Rng], Any]]] = [
        (STR, v.word),
        (STR, v.code),
        (STR, v.name),
        (INT, v.integer),
        (NUM, v.amount),
        (STR, v.phrase),
        (STR, v.date),
        (STR, v.place),
    ]
    keys = rng.sample(
        ["id", "item", "target", "count", "size", "owner", "label", "place", "day", "note", v.word(rng), v.word(rng)],
        rng.choice((1, 1, 2, 2, 3)),
    )
    params = {}
    for key in keys:
        kind, make = rng.choice(makers)
        params[key] = (kind, "", make)
    tail = ", ".join(f"{k} {{{k}}}" for k in keys)
    requests = (
        f"{verb.capitalize()} the {noun} with {tail}.",
        f"Please {verb} {noun}: {tail}.",
        f"I need you to {verb} the {noun}, {tail}.",
    )
    ident = v.code(rng)
    return Tool(
        f"{verb}_{noun}",
        f"{verb.capitalize()} the {noun}",
        params,
        requests,
        lambda r, a: (results.as_json(result=ident), f"Done. The result is {ident}."),
    )


def toolset(rng: Rng, needed: list[Tool], most: int = 4) -> list[Schema]:
    """The signatures of the tools needed among a few that are not, shuffled."""
    names = {t.name for t in needed}
    spare = [t for t in TOOLS if t.name not in names]
    chosen = needed + rng.sample(spare, rng.randrange(0, max(1, most - len(needed) + 1)))
    if rng.random() < 0.15:
        chosen.append(invented(rng))
    rng.shuffle(chosen)
    return [t.schema() for t in chosen]


def single_case(rng: Rng, tool: Tool | None = None, most: int = 4) -> Case:
    """One request that needs one call."""
    used = tool or (invented(rng) if rng.random() < 0.25 else rng.choice(TOOLS))
    user, arguments = fill(rng, used)
    result, answer = used.result(rng, arguments)
    return Case(toolset(rng, [used], most), user, [{"name": used.name, "arguments": arguments}], [result], answer)


def parallel_case(rng: Rng) -> Case:
    """One request that needs two calls at once: the same tool twice, or two tools."""
    first = rng.choice(TOOLS)
    second = first if rng.random() < 0.5 else rng.choice([t for t in TOOLS if t is not first])
    (u1, a1), (u2, a2) = fill(rng, first), fill(rng, second)
    (r1, s1), (r2, s2) = first.result(rng, a1), second.result(rng, a2)
    joined = f"{u1} {rng.choice(('Also: ', 'And then: ', ''))}{u2}"
    calls = [{"name": first.name, "arguments": a1}, {"name": second.name, "arguments": a2}]
    return Case(toolset(rng, [first] if first is second else [first, second]), joined, calls, [r1, r2], f"{s1} {s2}")
