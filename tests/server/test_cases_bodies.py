"""Request bodies over HTTP, good and bad: cases B50 to B59."""

from __future__ import annotations

import gzip
import json
import sys
import threading
import time
import zlib
from typing import Any

import pytest
from conftest import CHAT, JSON, ROUTES, Reply, Start, refused, user

from glm53.server.options import MIB


def test_b50_images_are_refused_by_name_and_never_echoed(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    live = start()
    blob = "QUJD" * 200_000
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{blob}"}}
    for messages in (
        [{"role": "user", "content": [{"type": "text", "text": "see"}, image]}],
        [*user("x"), {"role": "tool", "content": [{"type": "text", "text": "see"}, image]}],
    ):
        error = refused(live.post(CHAT, {"messages": messages}))
        assert error["code"] == "unsupported_content"
        assert error["param"] == f"messages[{len(messages) - 1}].content[1]"
        assert len(error["message"]) < 300
    assert "QUJDQUJD" not in caplog.text


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {},
        {"messages": None},
        {"messages": "hi"},
        {"messages": [None]},
        {"messages": [{}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "robot", "content": "x"}]},
    ],
)
def test_b51_bad_messages(start: Start, body: dict[str, Any]) -> None:
    assert refused(start().post(CHAT, body))["param"].startswith("messages")


def test_b51_system_only_is_answered(start: Start) -> None:
    assert start().post(CHAT, {"messages": [{"role": "system", "content": "s"}]}).status == 200


def test_b52_developer_is_system(start: Start) -> None:
    live = start()
    tokens = [
        live.post("/tokenize", {"messages": [{"role": role, "content": "Be brief"}, *user("x")]}).json["tokens"]
        for role in ("developer", "system")
    ]
    assert tokens[0] == tokens[1]


BROKEN = [
    b"",
    b"{",
    b"[]",
    b'"x"',
    b"null",
    b'{"messages":[{"role":"user","content":"x"}],}',
    b'{"messages":[{"role":"user","content":"\xff"}]}',
    '{"messages":[{"role":"user","content":"é"}]}'.encode("latin-1"),
    b'{"temperature":NaN}',
    b'{"messages":' + b"[" * 2000 + b"]" * 2000 + b"}",
]


@pytest.mark.parametrize("route", ROUTES)
def test_b54_broken_json(start: Start, route: str) -> None:
    live = start()
    for body in BROKEN:
        refused(live.post(route, body, JSON))
    assert live.chat().status == 200


def test_b54_tolerated_json(start: Start) -> None:
    live = start()
    assert live.post(CHAT, b'\xef\xbb\xbf{"messages":[{"role":"user","content":"x"}]}', JSON).status == 200
    lone = live.post("/tokenize", b'{"prompt":"a\\ud83d b"}', JSON).json["tokens"]
    assert lone == live.post("/tokenize", {"prompt": "a\ufffd b"}).json["tokens"]
    pair = live.post("/tokenize", b'{"prompt":"\\ud83d\\ude00"}', JSON).json["tokens"]
    assert live.post("/detokenize", {"tokens": pair}).json["text"] == "😀"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (None, 200),
        ("", 200),
        ("application/x-www-form-urlencoded", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/vnd.x+json", 200),
        ("text/plain", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/octet-stream", 415),
    ],
)
def test_b55_content_types(start: Start, kind: str | None, status: int) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    reply = start().post(CHAT, json.dumps({"messages": user("x")}).encode(), headers)
    assert reply.status == status
    if status == 415:
        assert "-H 'Content-Type: application/json'" in reply.error["message"]


def test_b56_chunked_one_byte_a_chunk(start: Start) -> None:
    live = start()
    connection = live.connect()
    data = json.dumps({"messages": user("x")}).encode()
    connection.request("POST", CHAT, (data[i : i + 1] for i in range(len(data))), JSON, encode_chunked=True)
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_bodies(start: Start, caplog: pytest.LogCaptureFixture, encoding: str, pack: Any) -> None:
    live = start(body_timeout_s=2.0)
    data = pack(json.dumps({"messages": user("x")}).encode())
    assert live.post(CHAT, data, {**JSON, "Content-Encoding": encoding}).status == 200
    for broken in (data[: len(data) // 2], b"not compressed"):
        reply = live.post(CHAT, broken, {**JSON, "Content-Encoding": encoding})
        assert refused(reply)["code"] == "bad_body"
    assert "Traceback" not in caplog.text


def test_zstd_bodies(start: Start) -> None:
    zstd = pytest.importorskip("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
    data = zstd.compress(json.dumps({"messages": user("x")}).encode())
    live = start()
    assert live.post(CHAT, data, {**JSON, "Content-Encoding": "zstd"}).status == 200
    refused(live.post(CHAT, b"not compressed", {**JSON, "Content-Encoding": "zstd"}))


def test_b59_five_megabytes_that_fit_are_answered(start: Start) -> None:
    live = start(context=10**7)
    reply = live.chat(messages=user("word " * 1_000_000))
    assert reply.status == 200
    assert reply.json["usage"]["prompt_tokens"] > 1_000_000


def test_the_checkpoints_own_template(start: Start) -> None:
    live = start(chat_template="checkpoint")
    assert live.chat().status == 200
    tokens = live.post("/tokenize", {"messages": user("<|user|> hi")}).json["tokens"]
    text = live.post("/detokenize", {"tokens": tokens}).json["text"]
    assert "<|user|> hi" in text


def test_a_corrupt_gzip_body_is_told_in_json(start: Start) -> None:
    error = refused(start().post(CHAT, b"not compressed", {**JSON, "Content-Encoding": "gzip"}))
    assert error["code"] == "bad_body"


def test_a_zip_bomb_is_too_large(start: Start) -> None:
    live = start(max_body_bytes=MIB)
    bomb = gzip.compress(b" " * 30_000_000)
    assert len(bomb) < MIB
    assert refused(live.post(CHAT, bomb, {**JSON, "Content-Encoding": "gzip"}), 413)["code"] == "request_too_large"


def test_body_limit(start: Start) -> None:
    live = start(max_body_bytes=MIB, context=10**6)
    error = refused(live.chat(messages=user("x" * (2 * MIB))), 413)
    assert "1 MiB" in error["message"]
    assert live.chat(messages=user("x" * (MIB // 2))).status == 200


@pytest.mark.parametrize("piece", [b"0,", b"[],", b'{"a":1},', b'"x",'])
def test_millions_of_tiny_values_are_refused_unparsed(start: Start, piece: bytes) -> None:
    live = start()
    error = refused(live.post("/tokenize", b'{"x":[' + piece * 1_000_000 + b"0]}", JSON), 413)
    assert error["code"] == "request_too_complex"
    assert live.post("/tokenize", b'{"prompt":"a","x":[' + piece * 90_000 + b"0]}", JSON).status == 200


def test_b59_context_overflow_is_a_status_before_any_stream(start: Start) -> None:
    live = start(context=64)
    for streamed in (False, True):
        reply = live.chat(messages=user("word " * 200), stream=streamed)
        error = refused(reply)
        assert error["code"] == "context_length_exceeded"
        assert "This model's maximum context length is 64 tokens" in error["message"]
        assert error["n_ctx"] == 64
        assert error["n_prompt_tokens"] > 64


def test_b59_what_exceeds_the_context_by_far_is_not_read_to_its_end(start: Start) -> None:
    live = start(context=1000, max_body_bytes=16 * MIB)
    for text in ("word " * 1_000_000, "a" * 5_000_000, " " * 12_000_000):
        error = refused(live.chat(messages=user(text)))
        assert error["code"] == "context_length_exceeded"
        assert "This model's maximum context length is 1000 tokens" in error["message"]
        assert "at least" in error["message"]
        assert 1000 < error["n_prompt_tokens"] < 300_000
    assert refused(live.post("/v1/completions", {"prompt": " " * 12_000_000}))["code"] == "context_length_exceeded"


def test_what_no_tokenizer_can_read_is_refused_in_words(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    live = start(max_body_bytes=16 * MIB)
    for body in ({"prompt": " " * 12_000_000}, {"messages": user(" " * 12_000_000)}):
        error = refused(live.post("/tokenize", body))
        assert error["code"] == "text_too_long"
        assert "12,000,000 characters without a word break" in error["message"]
    assert "Traceback" not in caplog.text


def test_more_tokens_than_anyone_counts_are_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm53.server.prompt.MOST_COUNTED", 100_000)
    live = start()
    for body in ({"prompt": "word " * 200_000}, {"prompt": ["word " * 20_000] * 6}, {"messages": user("a" * 900_000)}):
        error = refused(live.post("/tokenize", body))
        assert error["code"] == "text_too_long"
        assert "more than 100,000 tokens" in error["message"]
    assert live.post("/tokenize", {"prompt": ["word " * 20_000] * 2}).status == 200


@pytest.mark.parametrize("letter", ["a", " ", "\n"])
def test_b59_b73_two_megabytes_without_a_break_block_nobody(start: Start, letter: str) -> None:
    live = start()
    body = {"prompt": letter * 2_000_000}
    done: list[Reply] = []
    thread = threading.Thread(target=lambda: done.append(live.request("POST", "/tokenize", body, timeout=60)))
    slowest, begun = 0.0, time.monotonic()
    thread.start()
    while thread.is_alive():
        started = time.monotonic()
        assert live.get("/health").status == 200
        assert live.get("/v1/models").status == 200
        slowest = max(slowest, time.monotonic() - started)
    thread.join()
    assert done[0].status == 200
    # a blocked loop answers nothing until it is done; on a busy machine both take longer
    assert slowest < max(1.0, 0.25 * (time.monotonic() - begun)), "the event loop was blocked"
