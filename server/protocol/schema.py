"""What a JSON schema says about one tool argument, and the argument's JSON from the text the model wrote.

GLM writes string values verbatim and all others as JSON, without marking which is which; only the tool's schema tells.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from glm53.json_schema import resolve

STRING = frozenset({"string"})
ANY = frozenset({"any"})
"""No schema at all: complete JSON values other than strings are taken as such."""

_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}
ALIASES = {
    "str": "string",
    "text": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
"""Names that tool definitions use for JSON types; others write them in capitals."""
COMBINED = ("anyOf", "oneOf", "allOf")
_WORDS = {"true": True, "false": False, "none": None, "null": None}
MAX_DEPTH = 32
MOST_LOOKED_AT = 2000
"""Parts of a schema that one look-up visits, in a few ms: it happens on the event loop, whenever the model names an
argument, and a client's schema may have 100,000."""


class _Walk:
    """One look-up: how much of the schema it may still visit, and the references that it has followed."""

    def __init__(self) -> None:
        self.left = MOST_LOOKED_AT
        self.seen: set[str] = set()

    def visits(self, depth: int) -> bool:
        """Whether another part of the schema, that deep in it, is looked at."""
        self.left -= 1
        return self.left >= 0 and depth <= MAX_DEPTH

    def follows(self, ref: str) -> bool:
        """Whether `ref` was not met yet."""
        if ref in self.seen:
            return False
        self.seen.add(ref)
        return True

    def fresh(self) -> _Walk:
        """May follow all references again."""
        self.seen = set()
        return self


def argument_types(parameters: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """JSON type names that `key` may have under a tool's parameter schema; a key the schema lacks is a string."""
    root, walk = parameters or {}, _Walk()
    parts = list(_parts(root, root, _Walk(), 0))
    named = [p["properties"] for p in parts if isinstance(p.get("properties"), Mapping)]
    said = [properties[key] for properties in named if key in properties]
    if not said:  # patterns are not tried: a client's may take for ever
        patterns = [p["patternProperties"] for p in parts if isinstance(p.get("patternProperties"), Mapping)]
        said = list(itertools.islice((schema for table in patterns for schema in table.values()), MOST_LOOKED_AT))
    if not said:
        said = [p.get("additionalProperties") for p in parts]
    types = frozenset[str]().union(*(_types(schema, root, walk.fresh(), 0) for schema in said))
    return types or (STRING if named else ANY)


def _parts(schema: object, root: Mapping[str, Any], walk: _Walk, depth: int) -> Iterator[Mapping[str, Any]]:
    """The schemas of one object: itself, and those it refers to or combines. A reference counts once."""
    if not isinstance(schema, Mapping) or not walk.visits(depth):
        return
    yield schema
    ref = schema.get("$ref")
    if isinstance(ref, str) and walk.follows(ref):
        yield from _parts(resolve(ref, root), root, walk, depth + 1)
    for name in COMBINED:
        if isinstance(schema.get(name), list):
            for part in schema[name][:MOST_LOOKED_AT]:
                yield from _parts(part, root, walk, depth + 1)


def _types(schema: object, root: Mapping[str, Any], walk: _Walk, depth: int) -> frozenset[str]:
    """Empty = the schema does not say. A reference counts once: schemas may be recursive."""
    if not isinstance(schema, Mapping) or not walk.visits(depth):
        return frozenset()
    ref = schema.get("$ref")
    if isinstance(ref, str):
        return _types(resolve(ref, root), root, walk, depth + 1) if walk.follows(ref) else frozenset()
    types = _own_types(schema, root, walk, depth)
    return types | {"null"} if types and schema.get("nullable") is True else types  # OpenAPI 3.0


def _own_types(schema: Mapping[str, Any], root: Mapping[str, Any], walk: _Walk, depth: int) -> frozenset[str]:
    kind = schema.get("type")
    if isinstance(kind, str | list):
        names = [k.lower() for k in ([kind] if isinstance(kind, str) else kind) if isinstance(k, str)]
        return frozenset(ALIASES.get(n, n) for n in names)
    if isinstance(schema.get("enum"), list):
        return frozenset(_KINDS[type(v)] for v in schema["enum"][:MOST_LOOKED_AT] if type(v) in _KINDS)
    if "const" in schema:
        return frozenset({_KINDS.get(type(schema["const"]), "string")})
    for name in COMBINED:
        if isinstance(schema.get(name), list):
            parts = [_types(s, root, walk, depth + 1) for s in schema[name][:MOST_LOOKED_AT]]
            return frozenset().union(*parts)
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else frozenset()


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _decode(text: str) -> tuple[bool, Any]:
    """(is complete JSON, value); NaN, Infinity and numbers beyond a double are not JSON."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return False, None
    return True, value


def _fits(value: object, types: frozenset[str]) -> bool:
    kind = _KINDS[type(value)]
    return kind in types or (kind == "integer" and "number" in types)


def convert(text: str, types: frozenset[str]) -> Any:
    """The value of an argument. Text that does not fit the schema stays the string it is, for the tool to refuse."""
    if types == STRING:
        return text
    trimmed = text.strip()
    is_json, value = _decode(trimmed)
    if types == ANY:
        return value if is_json and not isinstance(value, str) else text
    if "string" in types:
        return value if is_json and not isinstance(value, str) and _fits(value, types) else text
    if is_json and isinstance(value, float) and "number" not in types and "integer" in types and value.is_integer():
        return int(value)
    if is_json:
        return value
    word = trimmed.lower()
    if word in _WORDS and _fits(_WORDS[word], types):
        return _WORDS[word]
    return text


def to_json(value: Any) -> str:
    """Compact JSON, characters unescaped; halves of surrogate pairs become U+FFFD."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
