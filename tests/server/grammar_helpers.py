"""Grammars over the tests' tokenizer, and how a sampler asks them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from protocol_helpers import tokenizer
from tiny_checkpoint import TINY

from glm53.engine.protocol import Constraint
from glm53.grammar import Grammars
from glm53.server.protocol.constraints import chat_constraint
from glm53.server.protocol.requests import RequestDefaults, parse_chat

VOCAB = 2112  # more rows than the tokenizer has tokens, as in checkpoints


STOP = tokenizer().special_ids(["<|endoftext|>", "<|user|>", "<|observation|>"])


SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["answer"],
}


FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@cache
def grammars() -> Grammars:
    return Grammars(TINY, tokenizer())


def constraint(thinking: bool = True, **body: Any) -> Constraint | None:
    messages = body.pop("messages", [{"role": "user", "content": "x"}])
    call = parse_chat({"messages": messages, **body}, RequestDefaults())
    return chat_constraint(grammars(), call, thinking_open=thinking, stop_ids=STOP)


def ids(*pieces: str) -> list[int]:
    out: list[int] = []
    for piece in pieces:
        special = tokenizer().special_ids([piece])
        out += special or tokenizer().encode(piece)
    return out


def allows(c: Constraint, sequence: Sequence[int]) -> bool:
    """Feed the ids; False at the first that the mask forbids."""
    for i in sequence:
        mask = c.allowed(VOCAB)
        if mask is not None:
            assert mask.shape == (VOCAB,)
            assert not mask[tokenizer().size :].any()
            if not mask[i]:
                return False
        c.accept(i)
    return True


def can_stop(c: Constraint) -> set[int]:
    mask = c.allowed(VOCAB)
    return set(STOP) if mask is None else {i for i in STOP if mask[i]}
