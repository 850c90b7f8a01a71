"""A request body's bytes to a JSON object."""

from __future__ import annotations

from typing import Any, NoReturn

from glm53.chat.messages import MAX_DEPTH, check_depth, type_name
from glm53.errors import RequestError
from glm53.json_text import load

BOM = b"\xef\xbb\xbf"


def _bad(message: str, code: str = "invalid_json") -> NoReturn:
    raise RequestError(message, code=code)


def parse_body(raw: bytes) -> dict[str, Any]:
    """The object in `raw`. A byte order mark is skipped, halves of surrogate pairs become U+FFFD.

    Raises RequestError for an empty body, bytes that are not UTF-8, anything JSON forbids (NaN, trailing commas),
    nesting deeper than MAX_DEPTH, and values that are not objects.
    """
    data = raw.removeprefix(BOM)
    if not data or data.isspace():
        _bad("The request body is empty; send a JSON object.")
    value = load(data)
    if not isinstance(value, dict):
        _bad(f"The request body must be a JSON object, but it is {type_name(value)}.", "invalid_type")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        check_depth(value)
    return value
