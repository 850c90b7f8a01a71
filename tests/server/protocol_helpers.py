"""Scripted model text as tokens, and the case tools, for tests of the output parser."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from tiny_checkpoint import TINY

from glm53.chat import Tool, parse_tools
from glm53.engine.protocol import Finish, Token
from glm53.server.protocol.events import Answer, Event, collect
from glm53.server.protocol.output import OutputParser
from glm53.tokenizer import Tokenizer

TOOLS1_RAW: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "description": "w",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "content": {"type": "string"},
                    "mode": {"type": "integer"},
                    "exec": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "opts": {"type": "object"},
                    "ratio": {"type": "number"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
                "required": ["path"],
            },
        },
    },
    {"type": "function", "function": {"name": "list_mailboxes", "parameters": {"type": "object", "properties": {}}}},
]
TOOLS1 = parse_tools(TOOLS1_RAW)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


@cache
def special_names() -> dict[int, str]:
    """Text of every added token by its id, from the checkpoint's own file."""
    spec = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    return {t["id"]: t["content"] for t in spec["added_tokens"]}


def token(piece: str | bytes) -> Token:
    """A piece that is a special token's text becomes that token; everything else an ordinary one."""
    if isinstance(piece, str):
        specials = tokenizer().special_ids([piece])
        return Token(next(iter(specials)) if specials else 7, piece.encode())
    return Token(7, piece)


def ends() -> dict[str, Finish]:
    one = tokenizer().special_id
    return {
        "user": Finish("stop", one("<|user|>")),
        "obs": Finish("stop", one("<|observation|>")),
        "eos": Finish("stop", one("<|endoftext|>")),
        "length": Finish("length"),
        "stopstr": Finish("cancelled"),
    }


def parser(*, thinking: bool = True, tools: Sequence[Tool] | None = None, **options: Any) -> OutputParser:
    ids = itertools.count()
    return OutputParser(tokenizer(), thinking_open=thinking, tools=tools, new_id=lambda: f"call_{next(ids)}", **options)


def events_of(pieces: Iterable[str | bytes], end: str = "user", **options: Any) -> list[Event]:
    """Every event, fed one piece at a time."""
    p = parser(**options)
    out = [e for piece in pieces for e in p.feed([token(piece)])]
    return out + p.finish(ends()[end])


def splits(model: str) -> list[list[str]]:
    """The case's own pieces, the whole text as one piece, and one-character pieces."""
    whole = model.replace("|", "")
    return [model.split("|"), [whole], list(whole)]


def run(model: str, end: str = "user", **options: Any) -> Answer:
    """The answer to a case's MODEL text ("|" = piece boundary), the same for all ways to cut it."""
    answers = [collect(events_of(pieces, end, **options)) for pieces in splits(model)]
    messages = [(a.message(), a.done) for a in answers]
    assert messages[0] == messages[1] == messages[2]
    return answers[0]
