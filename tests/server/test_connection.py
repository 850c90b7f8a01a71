"""Connections that are not what they should be: bytes that are no HTTP, heads that never end, and silence."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
from conftest import LiveServer, Start, user

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


def reply_to(live: LiveServer, sent: bytes) -> tuple[bytes, Any]:
    """(status line, JSON body) of what comes back before the connection is closed."""
    with live.raw(sent) as s:
        raw = b""
        while block := s.recv(65536):
            raw += block
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return head.partition(b"\r\n")[0], json.loads(body)


@pytest.mark.parametrize(
    "sent",
    [
        b"hello, is this a server?\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03secretsecret\r\n\r\n",  # a TLS client on a port without TLS
        HEAD + b"no colon secret here\r\n\r\n",
        HEAD + b"X-Long: " + b"secret" * 20_000 + b"\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nsecret",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nsecret",
        HEAD + b"Content-Length: -5\r\n\r\nsecret",
        HEAD + b"Content-Length: 1e3\r\n\r\nsecret",
        b"GET /health HTTP/9.9secret\r\n\r\n",
        HEAD + b"X: " + bytes(range(1, 9)) + b"secret\r\n\r\n",
    ],
)
def test_what_is_not_http_gets_a_json_error_that_quotes_nothing(start: Start, sent: bytes) -> None:
    live = start()
    status, body = reply_to(live, sent)
    assert status.startswith(b"HTTP/1.") and b" 400 " in status
    assert body["error"]["code"] == "bad_http"
    assert "not a valid HTTP request" in body["error"]["message"]
    assert "secret" not in json.dumps(body)
    assert len(body["error"]["message"]) < 200
    assert live.get("/health").status == 200


def test_http_2_is_told_what_is_spoken_here(start: Start) -> None:
    _, body = reply_to(start(), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert "HTTP/1.1" in body["error"]["message"]


def test_a_path_too_long_is_not_quoted(start: Start) -> None:
    _, body = reply_to(start(), b"GET /" + b"secret" * 2000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert body["error"]["message"].endswith("Got more than 8190 bytes when reading")


def expecting(live: LiveServer, headers: bytes, expect: bytes = b"100-continue") -> socket.socket:
    """A request whose client waits to be asked for the body."""
    start_of_it = HEAD + b"Connection: close\r\nContent-Type: application/json\r\nExpect: " + expect + b"\r\n"
    return live.raw(start_of_it + headers + b"\r\n")


def everything(s: socket.socket) -> bytes:
    s.settimeout(30)
    return b"".join(iter(lambda: s.recv(65536), b""))


def test_a_body_is_asked_for(start: Start) -> None:
    body = json.dumps({"messages": user("x")}).encode()
    with expecting(start(), b"Content-Length: %d\r\n" % len(body)) as s:
        assert s.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        s.sendall(body)
        assert b"HTTP/1.1 200 OK" in everything(s)


def test_a_body_nobody_wants_is_not_asked_for(start: Start) -> None:
    live = start(api_keys=("right",), max_body_bytes=1000)
    with expecting(live, b"Content-Length: 900\r\n") as s:
        assert s.recv(65536).startswith(b"HTTP/1.1 401 ")
    key = b"Authorization: Bearer right\r\n"
    with expecting(live, key + b"Content-Length: 99999999999\r\n") as s:
        reply = s.recv(65536)
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in reply
    with live.raw(HEAD + key + b"Content-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n") as s:
        s.settimeout(30)
        assert s.recv(65536).startswith(b"HTTP/1.1 413 "), "the body was waited for"


def test_other_expectations_are_no_error(start: Start) -> None:
    body = json.dumps({"messages": user("x")}).encode()
    with expecting(start(), b"Content-Length: %d\r\n" % len(body), b"a miracle") as s:
        s.sendall(body)
        assert everything(s).startswith(b"HTTP/1.1 200 OK")


def is_closed(s: socket.socket) -> None:
    """Wait until the other side has closed. Fails if it does not in time."""
    s.settimeout(60)
    with contextlib.suppress(ConnectionResetError):
        assert s.recv(1000) == b""


def test_a_connection_without_a_request_is_closed(start: Start) -> None:
    live = start(head_timeout_s=1.0)
    started = time.monotonic()
    with live.raw(b"") as s:
        is_closed(s)
    assert time.monotonic() - started > 0.9


def test_a_head_that_never_ends_is_closed_however_it_trickles(start: Start) -> None:
    live = start(head_timeout_s=1.0)
    connections = [live.raw(HEAD) for _ in range(20)]
    started = time.monotonic()
    alive = set(connections)
    while alive and time.monotonic() < started + 60:
        for s in list(alive):
            try:
                s.sendall(b"X-A: b\r\n")
                s.setblocking(False)
                if s.recv(100) == b"":
                    alive.discard(s)
            except BlockingIOError:
                s.setblocking(True)
            except OSError:
                alive.discard(s)
        assert live.get("/health").status == 200
        time.sleep(0.05)
    assert not alive
    for s in connections:
        s.close()


def test_the_limit_counts_again_for_each_request_of_a_connection(start: Start) -> None:
    live = start(head_timeout_s=1.0)
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with live.raw(whole) as s:
        assert b" 200 " in s.recv(1000)
        time.sleep(1.5)  # idle between requests: not limited
        s.sendall(whole)
        assert b" 200 " in s.recv(1000)
        s.sendall(whole[:20])
        is_closed(s)


def test_a_request_may_take_longer_than_its_head(start: Start) -> None:
    live = start({"pieces": ["a"] * 30, "end": "user", "rate": 20}, head_timeout_s=1.0)
    assert live.chat().status == 200
    assert live.chat_stream().choice()["finish_reason"] == "stop"
    data = json.dumps({"messages": user("x")}).encode()
    with live.raw(HEAD + f"Content-Length: {len(data)}\r\n\r\n".encode()) as s:
        for i in range(0, len(data), 8):  # a slow body has its own limit
            s.sendall(data[i : i + 8])
            time.sleep(0.25)
        assert b" 200 " in s.recv(100)


def test_one_connection_too_many_is_closed_and_the_others_are_not(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("glm53.server.lifecycle.raise_file_limit", lambda: 20)
    live = start()
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(live.raw(HEAD)) for _ in range(10)]
        for _ in range(5):
            with live.raw(HEAD) as s:
                is_closed(s)
        held[0].close()
        body = json.dumps({"messages": user("x")}).encode()
        for s in held[1:]:
            s.sendall(b"Connection: close\r\nContent-Type: application/json\r\n")
            s.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert everything(s).startswith(b"HTTP/1.1 200 OK")
    live.until(lambda stats: stats["running"] == 0)
    assert [r.getMessage() for r in caplog.records if "connections are open" in r.getMessage()] == [
        "10 connections are open, the most that the limit of open files allows"
    ]


def test_a_process_takes_the_files_it_may_have() -> None:
    code = (
        "import resource as r; from glm53.server.descriptors import raise_file_limit as f\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (200, 300)); print(f(), *r.getrlimit(r.RLIMIT_NOFILE), f())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["300", "300", "300", "300"]
