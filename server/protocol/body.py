"""A request body's bytes to a JSON object."""

from __future__ import annotations

import re
from typing import Any, NoReturn

import orjson

from glm53.chat.messages import MAX_DEPTH, check_depth, type_name
from glm53.errors import RequestError

BOM = b"\xef\xbb\xbf"
# In order: a proper surrogate pair, a lone half (group 1), any other escape (so that `\\ud83d` stays letters).
_ESCAPES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)


def _bad(message: str, code: str = "invalid_json") -> NoReturn:
    raise RequestError(message, code=code)


def parse_body(raw: bytes) -> dict[str, Any]:
    """The object in `raw`. A byte order mark is skipped, halves of surrogate pairs become U+FFFD.

    Raises RequestError for an empty body, bytes that are not UTF-8, anything JSON forbids (NaN, trailing commas),
    nesting deeper than MAX_DEPTH, and values that are not objects.
    """
    data = raw.removeprefix(BOM)
    if not data.strip():
        _bad("The request body is empty; send a JSON object.")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as e:
        value = _without_lone_surrogates(data, e)
    if not isinstance(value, dict):
        _bad(f"The request body must be a JSON object, but it is {type_name(value)}.", "invalid_type")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        check_depth(value)
    return value


def _without_lone_surrogates(data: bytes, error: orjson.JSONDecodeError) -> Any:
    try:
        data.decode()
    except UnicodeDecodeError as e:
        _bad(f"The request body is not valid UTF-8 (byte {e.start}); JSON must be sent as UTF-8.")
    mended = _ESCAPES.sub(lambda m: rb"\ufffd" if m[1] else m[0], data)
    if mended != data:
        try:
            return orjson.loads(mended)
        except orjson.JSONDecodeError as e:
            error = e
    _bad(f"We could not parse the JSON body of your request: {error.msg} (line {error.lineno}, column {error.colno}).")
