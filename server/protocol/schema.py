"""What a JSON schema says about one tool argument, and the argument's JSON from the text the model wrote.

GLM writes string values verbatim and all others as JSON, without marking which is which; only the tool's schema tells.
"""

from __future__ import annotations

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


def argument_types(parameters: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """JSON type names that `key` may have under a tool's parameter schema; a key the schema lacks is a string."""
    root = parameters or {}
    parts = list(_parts(root, root, set(), 0))
    named = [p["properties"] for p in parts if isinstance(p.get("properties"), Mapping)]
    said = [properties[key] for properties in named if key in properties]
    if not said:  # patterns are not tried: a client's may take for ever
        patterns = [p["patternProperties"] for p in parts if isinstance(p.get("patternProperties"), Mapping)]
        said = [schema for table in patterns for schema in table.values()]
    if not said:
        said = [p.get("additionalProperties") for p in parts]
    types = frozenset[str]().union(*(_types(schema, root, set(), 0) for schema in said))
    return types or (STRING if named else ANY)


def _parts(schema: object, root: Mapping[str, Any], seen: set[str], depth: int) -> Iterator[Mapping[str, Any]]:
    """The schemas of one object: itself, and those it refers to or combines. A reference counts once (`seen`)."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return
    yield schema
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref not in seen:
        seen.add(ref)
        yield from _parts(resolve(ref, root), root, seen, depth + 1)
    for name in COMBINED:
        if isinstance(schema.get(name), list):
            for part in schema[name]:
                yield from _parts(part, root, seen, depth + 1)


def _types(schema: object, root: Mapping[str, Any], seen: set[str], depth: int) -> frozenset[str]:
    """Empty = the schema does not say. A reference counts once (`seen`): schemas may be recursive."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return frozenset()
    ref = schema.get("$ref")
    if isinstance(ref, str):
        if ref in seen:
            return frozenset()
        seen.add(ref)
        return _types(resolve(ref, root), root, seen, depth + 1)
    types = _own_types(schema, root, seen, depth)
    return types | {"null"} if types and schema.get("nullable") is True else types  # OpenAPI 3.0


def _own_types(schema: Mapping[str, Any], root: Mapping[str, Any], seen: set[str], depth: int) -> frozenset[str]:
    kind = schema.get("type")
    if isinstance(kind, str | list):
        names = [k.lower() for k in ([kind] if isinstance(kind, str) else kind) if isinstance(k, str)]
        return frozenset(ALIASES.get(n, n) for n in names)
    if isinstance(schema.get("enum"), list):
        return frozenset(_KINDS[type(v)] for v in schema["enum"] if type(v) in _KINDS)
    if "const" in schema:
        return frozenset({_KINDS.get(type(schema["const"]), "string")})
    for name in COMBINED:
        if isinstance(schema.get(name), list):
            parts = [_types(s, root, seen, depth + 1) for s in schema[name]]
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
