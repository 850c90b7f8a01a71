"""Long texts: the same ids in pieces as in one, and limits that are noticed before everything has been encoded."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tiny_checkpoint import TINY

from glm53 import tokenizer
from glm53.chat import encode
from glm53.chat.segments import plain, special
from glm53.errors import RequestError
from glm53.tokenizer import TextTooLong, Tokenizer

LETTERS = [
    *map(chr, range(32, 127)),
    *"\n\n\r\t      the of and It's",
    *"äéßñ½Ⅷ٣",
    *"ЖжЁ",
    *"中文字。、なカ한",
    "\u0301",
    "\u3000",
    "😀",
]


def mixed(seed: int, length: int) -> str:
    return "".join(random.Random(seed).choices(LETTERS, k=length))


@pytest.mark.parametrize("piece", [1, 7, 100, 1000])
def test_pieces_give_the_ids_of_the_whole(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Tokenizer(TINY)
    text = mixed(piece, 20_000) + "word " * 500 + "\n" * 3000 + "x" * 3000 + Path(__file__).read_text(encoding="utf-8")
    whole = reader.encode(text)
    assert len(text) <= tokenizer.PIECE, "encoded in one"
    monkeypatch.setattr(tokenizer, "PIECE", piece)
    cuts = []
    monkeypatch.setattr(reader, "_encode", lambda part, real=reader._encode: cuts.append(part) or real(part))
    assert reader.encode(text) == whole
    assert len(cuts) > len(text) / max(piece * 20, 200), "hardly cut at all"
    assert "".join(cuts) == text


def test_the_limit_stops_a_long_text_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "PIECE", 100)
    reader = Tokenizer(TINY)
    count = len(reader.encode("word " * 10_000))
    read = []
    monkeypatch.setattr(reader, "_encode", lambda part, real=reader._encode: read.append(part) or real(part))
    with pytest.raises(TextTooLong) as error:
        reader.encode("word " * 10_000, 1000)
    assert 1000 < error.value.tokens < count / 5
    assert sum(map(len, read)) < 50_000 / 5
    assert len(reader.encode("word " * 10_000, count)) == count


@pytest.mark.parametrize("letter", [" ", "x", "\n", "7"])
def test_the_limit_stops_a_run_without_a_break_early(letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "PIECE", 1000)
    reader = Tokenizer(TINY)
    text = letter * 100_000
    count = len(reader.encode(text))
    with pytest.raises(TextTooLong) as error:
        reader.encode(text, count // 3)
    assert count // 3 < error.value.tokens <= count
    assert len(reader.encode(text, count)) == count


def test_the_limit_holds_for_all_texts_of_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "PIECE", 100)
    reader = Tokenizer(TINY)
    turn = [special("<|user|>"), plain("word " * 100)]
    one = len(encode(turn, reader))
    assert len(encode(turn * 3, reader, 3 * one)) == 3 * one
    with pytest.raises(TextTooLong) as error:
        encode(turn * 1000, reader, 3 * one)
    assert 3 * one < error.value.tokens <= 5 * one


def test_a_run_that_the_splitter_cannot_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Tokenizer(TINY)
    with pytest.raises(RequestError, match="4,200,004 characters without a word break") as error:
        reader.encode("one " + " " * 4_200_000)
    assert error.value.code == "text_too_long"
    monkeypatch.setattr(tokenizer, "MAX_RUN", 1 << 30)
    with pytest.raises(RequestError, match="cannot read this text"):
        reader.encode("one " + " " * 12_000_000)


def test_a_splitter_of_other_habits_gets_the_text_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    monkeypatch.setattr(tokenizer, "PIECE", 10)
    reader = Tokenizer(tmp_path)
    text = "some words, and more of them"
    assert reader.encode(text) == reader._encode(text)
    assert reader._next_break(text, 3) == len(text)
