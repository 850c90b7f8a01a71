"""JSON texts of clients: looked at in windows, with the same result as in one piece."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm53 import json_text
from glm53.chat.messages import parse_arguments
from glm53.errors import RequestError

UNITS = (rb"\ud83d", rb"\ude00", rb"\\", rb"\n", b"a", rb"\u0041", b"ud83d", rb"\"", "é".encode())
# In order: a proper surrogate pair, a lone half (group 1), any other escape (so that `\\ud83d` stays letters).
WHOLE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.")


@given(st.lists(st.sampled_from(UNITS), max_size=60), st.sampled_from([13, 16, 31, 1 << 18]))
def test_halves_of_pairs_are_mended_alike_however_the_text_is_cut(units: list[bytes], window: int) -> None:
    data = b"".join(units)
    expected = WHOLE.sub(lambda m: rb"\ufffd" if m[1] else m[0], data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "WINDOW", window)
        assert json_text.mend_surrogates(data) == (expected if expected != data else None)


def test_a_text_is_looked_at_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "WINDOW", 10)
    assert list(json_text.count_marks(b"[1,2],{3:4}," * 5)) == [5, 5, 5, 5, 5, 5]
    seen: list[int] = []

    class Recorder:
        def subn(self, replacement: bytes, part: bytes) -> tuple[bytes, int]:
            seen.append(len(part))
            return part, 0

    monkeypatch.setattr(json_text, "_LONE", Recorder())
    assert json_text.mend_surrogates(b"a" * 95 + b"\\" * 1000) is None
    assert sum(seen) == 1095
    assert max(seen) < 40


@pytest.mark.parametrize("place", [0, 8, 9, 10, 11, 25])
def test_the_place_of_what_is_not_utf8_is_told(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    monkeypatch.setattr(json_text, "WINDOW", 10)
    text = "é" * 4 + "abc" + "中" * 8
    data = text.encode()[:place].decode("utf-8", "ignore").encode()
    with pytest.raises(RequestError, match=rf"not valid UTF-8 \(byte {len(data)}\)"):
        json_text.load(data + b"\xff" + b"b" * 30)
    with pytest.raises(RequestError, match="not valid UTF-8"):
        json_text.load(b'"' + b"a" * 8 + "é".encode()[:1])


def test_json_within_a_string_has_the_same_limit() -> None:
    """Its commas may have been escaped in the body, where they were not counted then."""
    with pytest.raises(RequestError, match="at most 300,000 are accepted") as e:
        parse_arguments('{"a":[1' + ",1" * json_text.MAX_MARKS + "]}", "arguments")
    assert e.value.code == "request_too_complex"
    assert e.value.param == "arguments"
    assert parse_arguments('{"a":"' + "x" * 400_000 + '"}', "arguments")["a"] == "x" * 400_000
