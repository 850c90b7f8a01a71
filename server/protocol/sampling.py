"""The fields that say how tokens are drawn, when the answer ends and what it must look like, for every endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from glm53.engine.protocol import SamplingParams

from .fields import Fields, as_int, missing, refuse, wrong_type

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MOST_TOKENS = 2**63 - 1  # replies may repeat the number, and JSON's writer has 64 bits
MIN_TOP_P = 1e-6  # 0 is accepted as "the best token only"

OTHER_CONSTRAINTS = (
    "ebnf", "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema", "regex",
    "structural_tag", "structured_outputs",
)  # fmt: skip
"""What vLLM, SGLang and llama.cpp call a format of the answer."""

OTHER_INPUTS = ("audio_data", "image_data", "input_embeds", "prompt_embeds", "video_data")
"""Prompts, or parts of them, that are no text."""

OTHER_WISHES = (
    "bad_words", "include_stop_str_in_output", "logits_processors", "lora_path", "min_new_tokens", "min_tokens",
    "no_stop_trim", "prompt_logprobs", "return_hidden_states", "stop_regex", "token_ids_logprob",
    "truncate_prompt_tokens", "use_beam_search",
)  # fmt: skip
"""What else changes the answer there. Other unknown fields are ignored, but nobody shall take an answer for the one
that was asked for if it is not."""


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """A grammar for the answer. `schema` is a JSON schema for "json_schema", the expression for "regex"."""

    kind: Literal["json_object", "json_schema", "regex"]
    schema: Mapping[str, Any] | str | None = None


def parse_sampling(f: Fields, defaults: SamplingParams, vocab_size: int | None) -> SamplingParams:
    """SamplingParams of a request; `defaults` for what it leaves out. Token ids must be below `vocab_size`."""
    top_k = f.integer("top_k", -1, 1_000_000)
    seed = f.integer(f.given("seed", "sampling_seed") or "seed")  # SGLang's name
    return SamplingParams(
        temperature=f.number("temperature", defaults.temperature, 0, 100),
        top_p=max(f.number("top_p", defaults.top_p, 0, 1), MIN_TOP_P),
        top_k=defaults.top_k if top_k is None else max(top_k, 0),
        min_p=f.number("min_p", defaults.min_p, 0, 1),
        presence_penalty=f.number("presence_penalty", defaults.presence_penalty, -2, 2),
        frequency_penalty=f.number("frequency_penalty", defaults.frequency_penalty, -2, 2),
        repetition_penalty=f.number("repetition_penalty", defaults.repetition_penalty, 0.01, 100),
        seed=defaults.seed if seed is None else seed % 2**63,
        logit_bias=_logit_bias(f, vocab_size) or defaults.logit_bias,
    )


def _logit_bias(f: Fields, vocab_size: int | None) -> dict[int, float]:
    bias = f.fields("logit_bias")
    out: dict[int, float] = {}
    for key in bias.raw:
        number = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else -1
        if number < 0 or (vocab_size is not None and number >= vocab_size):
            where = f.name("logit_bias")
            refuse(f"{where}.{key[:20]}", f"Invalid key in '{where}': expected token ids, but got {key[:20]!r}.")
        if bias.get(key) is not None:
            out[number] = bias.number(key, 0.0, -100, 100)
    return out


def parse_max_tokens(f: Fields, *keys: str) -> int | None:
    """The first of `keys` that is given. None and -1 mean all that the context leaves; 0 is allowed."""
    key = f.given(*keys)
    if key is None:
        return None
    value = f.integer(key, -1)
    return None if value is None or value == -1 else min(value, MOST_TOKENS)


def parse_stop(f: Fields, key: str = "stop") -> tuple[str, ...]:
    """Stop strings from a string or a list; empty ones are dropped."""
    raw = f.get(key)
    if raw is None:
        return ()
    stops = [raw] if isinstance(raw, str) else raw
    if not isinstance(stops, list):
        wrong_type(f.name(key), "a string or an array of strings", raw)
    if len(stops) > MAX_STOPS:
        refuse(f.name(key), f"Invalid '{f.name(key)}': array too long. Expected at most {MAX_STOPS} strings.")
    for i, stop in enumerate(stops):
        where = f"{f.name(key)}[{i}]"
        if not isinstance(stop, str):
            wrong_type(where, "a string", stop)
        if len(stop) > MAX_STOP_CHARS:
            refuse(where, f"Invalid '{where}': string too long. Expected at most {MAX_STOP_CHARS} characters.")
    return tuple(s for s in stops if s)


def parse_ids(raw: object, param: str, vocab_size: int | None = None) -> tuple[int, ...]:
    """A list of token ids below `vocab_size`."""
    if not isinstance(raw, list):
        wrong_type(param, "an array of integers", raw)
    high = (vocab_size or 2**31) - 1
    return tuple(as_int(v, f"{param}[{i}]", 0, high) for i, v in enumerate(raw))


def parse_stop_ids(f: Fields) -> tuple[int, ...]:
    """Further token ids that end the answer."""
    raw = f.get("stop_token_ids")
    return () if raw is None else parse_ids(raw, f.name("stop_token_ids"))


def parse_n(f: Fields) -> int:
    """How many answers."""
    n = f.integer("n", 1, MAX_CHOICES) or 1
    best_of = f.integer("best_of", 1)
    if best_of is not None and best_of != n:
        refuse(f.name("best_of"), "'best_of' other than 'n' is not supported.", "unsupported_parameter")
    return n


def refuse_other_servers(f: Fields, instead: str, known: tuple[str, ...] = ()) -> None:
    """Raise RequestError for what other servers know and this one would leave out, and for a format of the answer in
    words not `known` to this endpoint, which takes `instead`. Fields that say no (false, 0, empty) are left out."""
    for name in OTHER_CONSTRAINTS:
        if f.raw.get(name) and name not in known:
            refuse(f.name(name), f"'{f.name(name)}' is not supported; use {instead}.", "unsupported_parameter")
    for name in OTHER_INPUTS:
        if f.raw.get(name):
            refuse(
                f.name(name), f"'{f.name(name)}' is not supported: this model reads text only.", "unsupported_content"
            )
    least = ("min_new_tokens", "min_tokens") if f.raw.get("ignore_eos") is True else ()  # it keeps answers from ending
    for name in OTHER_WISHES:
        if f.raw.get(name) and name not in least:
            refuse(f.name(name), f"'{f.name(name)}' is not supported; leave it out.", "unsupported_parameter")


def parse_response_format(f: Fields, key: str = "response_format") -> ResponseFormat | None:
    """`{"type": "text" | "json_object" | "json_schema", ...}` of the Chat Completions API."""
    fmt = f.fields(key)
    if not fmt.raw:
        return None
    kind = fmt.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        missing(fmt.name("type"))
    if kind == "text":
        return None
    if kind == "json_object":
        return ResponseFormat("json_object")
    flat = fmt.get("json_schema") is None and (key == "format" or fmt.get("schema") is not None)  # Responses API
    inner = fmt if flat else fmt.fields("json_schema")
    return json_schema_format(inner.get("schema"), inner.name("schema"))


def json_schema_format(schema: object, param: str) -> ResponseFormat:
    """ResponseFormat of a schema object (or true)."""
    if schema is None:
        missing(param)
    if schema is True:
        return ResponseFormat("json_schema", {})
    if not isinstance(schema, dict):
        wrong_type(param, "an object", schema)
    return ResponseFormat("json_schema", schema)
