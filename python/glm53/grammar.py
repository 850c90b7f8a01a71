"""Grammars over token ids: JSON answers, forced tool calls in GLM's format, and the limit on reasoning.

Compiled by llguidance (github.com/guidance-ai/llguidance) to a mask per step. A grammar starts where the answer starts,
after the reasoning. Special tokens are allowed only where a grammar names them, and those that end an answer only where
the grammar may end.

Threads: `Grammars` is shared and only read after construction; each constraint belongs to one stream and is advanced by
the engine's thread. Cost with 155,000 tokens: a second for `Grammars`, milliseconds to compile most grammars and half a
second the largest, a mask mostly under 0.1 ms and up to 10 ms where free text begins. A client's grammar cannot stop
the engine: its size is limited, patterns that may be too much are tried elsewhere first (`grammar_trial`), its first
mask is computed while compiling, and one that gives up later ends its own answer (`failure`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from .chat import Tool
from .chat.segments import SPECIAL_NAMES
from .engine.protocol import Constraint
from .errors import RequestError
from .grammar_trial import LIMITS, MOST_CHARS, is_risky, refusal, too_big
from .json_schema import object_schema, resolve
from .tokenizer import Tokenizer

# Unbounded blank space between JSON tokens is a trap: a model that likes newlines never leaves it.
WHITESPACE = {"whitespace_pattern": r"[\x20\x0A]{0,32}"}
TEXT_RULES = "TEXT: /(?s:.*)/ & ~/(?s:.*)<\\/arg_value>(?s:.*)/\nKEY: /[^<>\\s]{1,128}/\n"
END_THINK = b"</think>"
MOST_VISITS = 100_000  # to the schemas of all arguments together, at a microsecond each
MOST_CHECKED = 256  # arguments that are tried one by one, at a millisecond each, where they cannot be enforced together

Enforced = Callable[[str, Sequence[str]], bool]
"""Whether the rule of an argument's value, given with its lines, is to be followed."""
Mask = NDArray[np.bool_]


class Grammars:
    """Compiles grammars for one checkpoint's tokenizer. `stop_ids` may be drawn where a grammar may end."""

    def __init__(self, model_dir: Path, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        eos = tokenizer.special_id("<|endoftext|>")
        source = (model_dir / "tokenizer.json").read_text(encoding="utf-8")
        self._ll = LLTokenizer(source, n_vocab=tokenizer.size, eos_token=eos)
        self._eos = eos
        ids = tokenizer.special_ids(SPECIAL_NAMES)
        # llguidance takes added tokens that are not marked special for text; the answer's parser does not
        self._not_text = np.array(sorted(i for i in ids if not self._ll.is_special_token(i)), dtype=np.intp)

    def json_schema(
        self, schema: Mapping[str, Any], stop_ids: frozenset[int], param: str = "response_format"
    ) -> Constraint:
        """JSON that the schema accepts. Raises RequestError for a schema llguidance cannot enforce."""
        return self._compile(_json_grammar(schema, param), stop_ids, param)

    def regex(self, expression: str, stop_ids: frozenset[int], param: str = "regex") -> Constraint:
        """Text that matches as a whole (Rust's regex syntax, without look-around)."""
        _check_size(expression, param)
        return self._compile(LLMatcher.grammar_from_regex(expression), stop_ids, param)

    def tool_calls(
        self,
        tools: Sequence[Tool],
        stop_ids: frozenset[int],
        *,
        parallel: bool = True,
        or_schema: Mapping[str, Any] | None = None,
    ) -> Constraint:
        """One call (or several) of these tools and nothing else, or with `or_schema` JSON that it accepts instead.

        Arguments come in the schema's order, required ones always; values other than strings follow their schema,
        except each that llguidance cannot enforce.
        """
        if or_schema is not None:
            self._check(_json_grammar(or_schema, "response_format"), "response_format")
        budget = iter(range(MOST_CHECKED))

        def alone(rule: str, lines: Sequence[str]) -> bool:
            grammar = _lark([f"start: {rule}", *lines])
            return next(budget, None) is not None and not is_risky(grammar) and self._is_valid(grammar)

        for enforced in (lambda rule, lines: True, alone, lambda rule, lines: False):
            grammar = self._tool_grammar(tools, parallel, or_schema, enforced)
            if self._is_valid(grammar):
                break
        return self._compile(grammar, stop_ids, "tools")

    def _is_valid(self, grammar: str) -> bool:
        return not refusal(grammar, self._ll)

    def _tool_grammar(
        self, tools: Sequence[Tool], parallel: bool, or_schema: Mapping[str, Any] | None, enforced: Enforced
    ) -> str:
        calls = "call+" if parallel else "call"
        lines = [f"start: answer | {calls}" if or_schema is not None else f"start: {calls}"]
        if or_schema is not None:
            lines.append(f"answer: %json {json.dumps({**or_schema, 'x-guidance': WHITESPACE})}")
        lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
        room = _Room()
        for i, tool in enumerate(tools):
            lines += self._call_rules(f"call_{i}", tool, enforced, room)
        return _lark([*lines, TEXT_RULES])

    def _call_rules(self, rule: str, tool: Tool, enforced: Enforced, room: _Room) -> list[str]:
        root = tool.parameters or {}
        parameters = object_schema(root)
        properties = parameters.get("properties")
        lines: list[str] = []
        body = ""
        if isinstance(properties, Mapping):
            required = parameters.get("required")
            names = {r for r in required if isinstance(r, str)} if isinstance(required, list) else set()
            for n, (key, schema) in enumerate(properties.items()):
                argument = f"{rule}_{n}"
                body += f" {argument}" + ("" if key in names else "?")
                value, more = _value_rule(f"{argument}_value", schema, root, room)
                if more and not (room.takes(more) and enforced(value, more)):
                    value, more = "TEXT", []
                lines += [self._argument(argument, json.dumps(key, ensure_ascii=False), value), *more]
        else:
            body = f" {rule}_any*"
            lines.append(self._argument(f"{rule}_any", "KEY", "TEXT"))
        name = json.dumps(tool.name, ensure_ascii=False)
        return [f"{rule}: {self._tag('<tool_call>')} {name}{body} {self._tag('</tool_call>')}", *lines]

    def _argument(self, rule: str, key: str, value: str) -> str:
        tag = self._tag
        return (
            f"{rule}: {tag('<arg_key>')} {key} {tag('</arg_key>')} {tag('<arg_value>')} {value} {tag('</arg_value>')}"
        )

    def _tag(self, name: str) -> str:
        return f"<[{self.tokenizer.special_id(name)}]>"

    def _check(self, grammar: str, param: str) -> None:
        if error := refusal(grammar, self._ll):
            raise _unsupported(error, param)

    def _compile(self, grammar: str, stop_ids: frozenset[int], param: str) -> Constraint:
        self._check(grammar, param)
        matcher = LLMatcher(self._ll, grammar, log_level=0, limits=LIMITS)
        constraint = _GrammarConstraint(matcher, self._eos, self._not_text, stop_ids, param)
        constraint.allowed(self.tokenizer.size)
        if constraint.failure:
            raise constraint.failure
        return constraint


def _unsupported(reason: str, param: str) -> RequestError:
    text = " ".join(reason.split())[:300]
    return RequestError(f"Invalid '{param}': {text}", param=param, code="unsupported_grammar")


def _lark(lines: Sequence[str]) -> str:
    return str(LLMatcher.grammar_from_lark("\n".join(lines)))


def _check_size(source: str, param: str) -> None:
    """Before it is turned into a grammar: that takes a while, and the interpreter lock."""
    if len(source) > MOST_CHARS:
        raise _unsupported(too_big(len(source)), param)


class _Room:
    """What the rules for the arguments of all tools may still take: characters, and visits to parts of their schemas.
    Each may refer to the same large definitions, whose text then stands in each rule. When it is used up, arguments are
    any text."""

    def __init__(self) -> None:
        self.chars = MOST_CHARS // 2  # the rest is for keys and tags
        self.visits = MOST_VISITS

    def takes(self, lines: Sequence[str]) -> bool:
        """Whether there is room for these lines."""
        self.chars -= sum(map(len, lines))
        return self.chars >= 0


def _json_grammar(schema: Mapping[str, Any], param: str) -> str:
    try:
        text = json.dumps({**schema, "x-guidance": WHITESPACE})
        _check_size(text, param)
        return str(LLMatcher.grammar_from_json_schema(text))
    except (ValueError, TypeError, RecursionError) as e:
        raise RequestError(f"Invalid '{param}': {' '.join(str(e).split())[:300]}", param=param) from e


def _value_rule(rule: str, schema: object, root: Mapping[str, Any], room: _Room) -> tuple[str, list[str]]:
    """(what stands for a value, further rules): verbatim text where a string is possible, else JSON of the schema."""
    if not isinstance(schema, Mapping) or room.chars <= 0:
        return "TEXT", []
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and choices and all(isinstance(c, str) and c for c in choices):
        return rule, [f"{rule}: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in choices)]
    if not _never_string(schema, root, set(), 0, room):
        return "TEXT", []
    shared = {k: root[k] for k in ("$defs", "definitions") if k in root}
    return rule, [f"{rule}: %json {json.dumps({**shared, **schema, 'x-guidance': WHITESPACE})}"]


def _never_string(schema: object, root: Mapping[str, Any], seen: set[str], depth: int, room: _Room) -> bool:
    """True if the schema says that the value is not a string. A reference counts once (`seen`)."""
    room.visits -= 1
    if not isinstance(schema, Mapping) or depth > 32 or room.visits < 0:
        return False
    ref = schema.get("$ref")
    if isinstance(ref, str):
        if ref in seen:
            return True
        seen.add(ref)
        return _never_string(resolve(ref, root), root, seen, depth + 1, room)
    kind = schema.get("type")
    kinds = [kind] if isinstance(kind, str) else kind
    if isinstance(kinds, list):
        return "string" not in kinds
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return all(_never_string(s, root, seen, depth + 1, room) for s in schema[name])
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return isinstance(values, list) and not any(isinstance(v, str) for v in values)


class _GrammarConstraint:
    """An llguidance matcher as a Constraint. States: running -> ended (a stop id was drawn), or running -> failed
    (`failure` is set; only the end of the answer is allowed)."""

    def __init__(
        self, matcher: LLMatcher, eos: int, not_text: NDArray[np.intp], stop_ids: frozenset[int], param: str
    ) -> None:
        self.failure: RequestError | None = None
        self._matcher = matcher
        self._eos = eos
        self._not_text = not_text
        self._stop_ids = stop_ids | {eos}
        self._ends = np.fromiter(self._stop_ids, np.intp, len(self._stop_ids))
        self._param = param
        self._ended = False

    def copy(self) -> _GrammarConstraint:
        """One in the same state for another stream: a client's grammar may take a second to compile."""
        twin = copy(self)
        twin._matcher = self._matcher.deep_copy()
        return twin

    def allowed(self, vocab_size: int) -> Mask | None:
        if self._ended:
            return None
        if self.failure is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            mask = _sized(np.unpackbits(bits, bitorder="little").astype(np.bool_), vocab_size)
            mask[self._not_text[self._not_text < vocab_size]] = False
            mask[self._ends[self._ends < vocab_size]] = self._matcher.is_accepting()
            if mask.any() and not self._matcher.is_error():
                return mask
            self._fail("no text can follow")
        mask = np.zeros(vocab_size, dtype=np.bool_)
        mask[self._ends[self._ends < vocab_size]] = True
        return mask

    def accept(self, token_id: int) -> None:
        if self._ended:
            return
        if token_id in self._stop_ids:
            self._ended = True
        elif self.failure is None and not self._matcher.consume_token(token_id):
            self._fail(f"token {token_id} does not fit")

    def _fail(self, otherwise: str) -> None:
        reason = self._matcher.get_error().partition("\n")[0] or otherwise
        self.failure = _unsupported(f"it allows no answer, or is too complex ({reason}).", self._param)


def _sized(mask: Mask, size: int) -> Mask:
    if len(mask) >= size:
        return mask[:size].copy()
    return np.concatenate([mask, np.zeros(size - len(mask), dtype=np.bool_)])


class ThinkingConstraint:
    """Leaves the reasoning free, ends it after `budget` tokens, and hands over to `inner` when it has ended.

    States: thinking -> answering. The reasoning ends with `</think>`, as the special token or spelled, or with
    `call_ends` (tools were given) also with `<tool_call>`. While `inner` waits, the answer cannot end inside the
    reasoning. Without `inner` an answer that opens `<think>` itself is back in thinking, on the same budget.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        inner: Constraint | None,
        *,
        thinking_open: bool,
        stop_ids: frozenset[int],
        budget: int | None = None,
        call_ends: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._inner = inner
        self._thinking = thinking_open
        self._ends = np.fromiter(stop_ids, np.intp, len(stop_ids))
        self._budget = budget
        self._used = 0
        self._tail = b""
        self._call_ends = call_ends
        self._call_id = tokenizer.special_id("<tool_call>")
        self._think_id = tokenizer.special_id("<think>")
        self._end_id = tokenizer.special_id("</think>")

    def copy(self) -> ThinkingConstraint:
        """One in the same state for another stream."""
        twin = copy(self)
        twin._inner = self._inner.copy() if self._inner else None
        return twin

    @property
    def failure(self) -> Exception | None:
        """Why `inner` gave up."""
        return self._inner.failure if self._inner else None

    def allowed(self, vocab_size: int) -> Mask | None:
        if not self._thinking:
            return self._inner.allowed(vocab_size) if self._inner else None
        if self._budget is not None and self._used >= self._budget:
            mask = np.zeros(vocab_size, dtype=np.bool_)
            mask[self._end_id] = True
            return mask
        if self._inner is None:
            return None
        mask = np.ones(vocab_size, dtype=np.bool_)
        mask[self._tokenizer.size :] = False  # padding rows of the output layer
        mask[self._ends[self._ends < vocab_size]] = False
        return mask

    def accept(self, token_id: int) -> None:
        if not self._thinking:
            if self._inner:
                self._inner.accept(token_id)
            elif token_id == self._think_id:
                self._thinking = True
            return
        if token_id == self._call_id and self._call_ends:
            self._thinking = False
            if self._inner:
                self._inner.accept(token_id)
            return
        self._used += 1
        self._tail = (self._tail + self._tokenizer.token_bytes(token_id))[-64:]
        if token_id == self._end_id or END_THINK in self._tail:
            self._thinking = False
            self._tail = b""
