"""Delivery over HTTP: cases B38 to B48, and what every stream keeps."""

from __future__ import annotations

import json
import logging
import re
import socket
import statistics
import struct
import threading
from itertools import pairwise
from typing import Any

import pytest
from conftest import LiveServer, Start, Streamed, check_chat_stream, user

from glm53.tokenizer import Tokenizer

LONG = {"pieces": ["</think>", *["tick "] * 6000], "end": "user", "rate": 50}  # longer than any test waits


def chat_request(body: dict[str, Any]) -> bytes:
    data = json.dumps({"messages": user("hi"), **body}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + data


def read_until(s: socket.socket, wanted: bytes) -> bytes:
    out = b""
    while wanted not in out:
        block = s.recv(65536)
        assert block, f"closed before {wanted!r} came: {out[-300:]!r}"
        out += block
    return out


def in_parallel(count: int, work: Any) -> list[Any]:
    out: list[Any] = [None] * count

    def run(i: int) -> None:
        out[i] = work()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return out


@pytest.mark.parametrize("streams", [1, 4])
def test_b38_tokens_arrive_at_the_engines_rate(start: Start, streams: int) -> None:
    """One even delivery in ten shows that the server holds nothing back; a busy machine may spoil the others."""
    count, rate = 400, 200
    live = start({"pieces": ["</think>", *["x"] * count], "end": "user", "rate": rate}, max_streams=4)

    def uneven() -> list[str]:
        faults = []
        for out in in_parallel(streams, live.chat_stream):
            check_chat_stream(out)
            times = [
                t
                for t, e in zip(out.times, out.events, strict=True)
                if e["choices"] and e["choices"][0]["delta"].get("content")
            ][1:]
            median = statistics.median(b - a for a, b in pairwise(times))
            half = sum(t <= (times[0] + times[-1]) / 2 for t in times)
            if median != pytest.approx(1 / rate, rel=0.2) or times[-1] - times[0] >= 1.3 * (count / rate):
                faults.append(f"median gap {median:.4f} s, all in {times[-1] - times[0]:.2f} s")
            if not 0.4 * count < half < 0.6 * count:
                faults.append(f"{half} of {count} pieces in the first half of the time: text gathers")
        return faults

    attempts = []
    while len(attempts) < 10 and (not attempts or attempts[-1]):
        attempts.append(uneven())
    assert not attempts[-1], attempts


@pytest.mark.parametrize("streamed", [True, False])
def test_b39_disconnect_during_decode(start: Start, streamed: bool) -> None:
    live = start(LONG, max_streams=1)
    s = live.raw(chat_request({"stream": streamed}))
    live.until(lambda st: st["engine"]["completion_tokens"] > 3)
    s.close()
    live.until(lambda st: st["running"] == 0 and not st["requests"])
    assert live.stats()["engine"]["cancelled"] == 1


@pytest.mark.parametrize("streamed", [True, False])
def test_b39_disconnect_during_prefill(start: Start, streamed: bool) -> None:
    live = start([{**LONG, "prefill_s": 100}, {"pieces": ["</think>", "next"], "end": "user"}], max_streams=1)
    s = live.raw(chat_request({"stream": streamed}))
    live.until(lambda st: st["running"] == 1)
    s.close()
    live.until(lambda st: st["running"] == 0 and not st["requests"])
    assert live.chat().message["content"] == "next"


@pytest.mark.parametrize("streamed", [True, False])
def test_b39_disconnect_while_queued(start: Start, streamed: bool) -> None:
    live = start(LONG, max_streams=1)
    first = live.raw(chat_request({"stream": True}))
    live.until(lambda st: st["running"] == 1)
    second = live.raw(chat_request({"stream": streamed}))
    live.until(lambda st: st["waiting"] == 1)
    second.close()
    live.until(lambda st: st["waiting"] == 0 and len(st["requests"]) == 1)
    first.close()
    live.until(lambda st: st["running"] == 0 and not st["requests"])


def test_many_clients_that_leave_early_cost_nothing(start: Start) -> None:
    live = start([{"pieces": ["</think>", *["x"] * 500], "end": "user", "rate": 500}], max_streams=4)
    before = live.until(lambda st: True)["memory"]["process_bytes"]
    for _ in range(200):
        with live.raw(chat_request({"stream": True})) as s:
            read_until(s, b'"role"')
    live.until(lambda st: st["running"] == 0 and not st["requests"])
    stats = live.stats()
    assert stats["queue"]["admitted"] == 0
    assert stats["memory"]["process_bytes"] - before < 50e6
    out = live.chat_stream()
    assert out.choice()["content"] == "x" * 500


def test_b39_a_reset_before_the_headers_leaves_no_traceback(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    live = start()
    reset = struct.pack("ii", 1, 0)  # close() sends RST
    for streamed in (True, False) * 30:
        s = live.raw(chat_request({"stream": streamed}))
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        s.close()
    live.until(lambda st: not st["requests"])
    assert not [r for r in caplog.records if r.exc_info or r.levelno >= logging.WARNING]


def test_b41_a_reader_that_stops_is_dropped_and_hinders_nobody(start: Start) -> None:
    big = {"pieces": ["</think>", *["y" * 20000] * 1000, *["z"] * 50_000], "end": "user", "rate": 400}
    live = start([big, {"pieces": ["</think>", "quick"], "end": "user"}], write_timeout_s=1.0)
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.connect(("127.0.0.1", live.port))
    s.sendall(chat_request({"stream": True}))
    s.recv(100)
    live.until(lambda st: st["running"] == 1)
    assert live.chat().message["content"] == "quick"
    live.until(lambda st: not st["requests"] and st["running"] == 0)
    assert live.stats()["engine"]["cancelled"] == 1
    s.close()


def test_b42_characters_cut_between_tokens(start: Start) -> None:
    text = "😀é漢"
    pieces = [{"hex": f"{b:02x}"} for b in text.encode()]
    live = start({"pieces": ["</think>", *pieces], "end": "user"})
    out = live.chat_stream()
    check_chat_stream(out)
    assert out.choice()["content"] == text
    assert live.chat().message["content"] == text


@pytest.mark.parametrize(("tail", "shown"), [(["f0", "9f"], "a\ufffd"), (["ff", "62"], "a\ufffdb")])
def test_b42_broken_bytes_become_one_replacement(start: Start, tail: list[str], shown: str) -> None:
    live = start({"pieces": ["</think>", "a", *({"hex": h} for h in tail)], "end": "user"})
    out = live.chat_stream()
    check_chat_stream(out)
    assert out.choice()["content"] == live.chat().message["content"] == shown


def test_b44_line_separators_stay_inside_their_event(start: Start) -> None:
    text = "a\u2028b\u0085c\u2029d\r\ne"
    live = start({"pieces": ["</think>", text], "end": "user"})
    out = live.chat_stream()  # read_stream asserts that each event is one line for str.splitlines too
    check_chat_stream(out)
    assert out.choice()["content"] == text


def test_b45_pings_during_a_long_prefill_and_none_between_tokens(start: Start) -> None:
    live = start({"pieces": ["</think>", *["x"] * 20], "end": "user", "rate": 100}, ping_s=0.5)
    go = live.hold()
    with live.raw(chat_request({"stream": True})) as s:
        first = read_until(s, b'"role":"assistant"')
        assert b"text/event-stream" in first
        while first.count(b": ping\n\n") < 2:
            first += read_until(s, b": ping\n\n")
        go.set()
        raw = read_until(s, b"data: [DONE]\n\n")
    assert b'"content":"x' not in first
    assert b": ping" not in raw.partition(b'"content":"x')[2]


def test_b45_progress_chunks_for_clients_that_ignore_comments(start: Start) -> None:
    live = start({"pieces": ["</think>", "x"], "end": "user", "rate": 100}, ping_s=0.2)
    for body, kind in (
        ({"prompt_progress": True}, b'"delta":{},"logprobs":null,"finish_reason":null'),
        ({}, b": ping\n\n"),
    ):
        go = live.hold()
        with live.raw(chat_request({"stream": True, **body})) as s:
            raw = b""
            while raw.count(kind) < 3:
                raw += read_until(s, kind)
            go.set()
            raw += read_until(s, b"data: [DONE]\n\n")
        assert (b": ping" in raw) == (not body)
        assert b'"content":"x"' in raw


def test_b48_usage_chunk_only_when_asked_for(start: Start) -> None:
    live = start()
    asked = live.chat_stream(stream_options={"include_usage": True})
    check_chat_stream(asked)
    usage = asked.events[-1]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert usage["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 6
    for options in ({"include_usage": False}, None, {}):
        out = live.chat_stream(stream_options=options)
        check_chat_stream(out)
        assert all(e["choices"] and not e.get("usage") for e in out.events)
    assert live.chat(stream_options={"include_usage": True}).status == 200


def test_b62_streamed_choices_keep_apart(start: Start) -> None:
    answers = [{"pieces": ["r", "</think>", c, c, c], "end": "user", "rate": 100} for c in "ab"]
    live = start(answers)
    out = live.chat_stream(n=2)
    check_chat_stream(out, choices=2)
    assert sorted(out.choice(i)["content"] for i in (0, 1)) == ["aaa", "bbb"]


def test_b20_b25_tool_calls_over_http(start: Start) -> None:
    call = ["<tool_call>", "write", "_file", "<arg_key>", "path", "</arg_key>", "<arg_value>", "a.txt", "</arg_value>"]
    live = start(
        {"pieces": ["think", *call, "</tool_call>", "<tool_call>", "ls", "</tool_call>"], "end": "observation"}
    )
    tools = [
        {"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("write_file", "ls")
    ]
    out = live.chat_stream(tools=tools)
    check_chat_stream(out)
    streamed, whole = out.choice(), live.chat(tools=tools).json["choices"][0]
    assert streamed["finish_reason"] == whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] is None
    for calls in (streamed["tool_calls"], whole["message"]["tool_calls"]):
        assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [
            ("write_file", {"path": "a.txt"}),
            ("ls", {}),
        ]
        assert len({c["id"] for c in calls}) == 2
    deltas = [c for e in out.events for c in e["choices"][0]["delta"].get("tool_calls", ())]
    first: set[int] = set()
    for delta in deltas:
        assert ("name" in delta["function"]) == ("id" in delta) == (delta["index"] not in first)
        first.add(delta["index"])


def test_stream_and_whole_agree(start: Start) -> None:
    live = start({"pieces": ["I ", "see", "</think>", "\n", "Hi", " there", "\n"], "end": "user"})
    out = live.chat_stream()
    check_chat_stream(out)
    message, streamed = live.chat().message, out.choice()
    assert streamed["content"] == message["content"]
    assert streamed["reasoning_content"] == message["reasoning_content"]


def test_an_engine_error_is_an_event_in_a_stream_and_a_status_without(start: Start) -> None:
    live = start({"pieces": ["</think>", "half"], "end": "error"})
    out = live.chat_stream()
    assert out.done
    assert out.events[-1]["error"]["code"] == "engine_error"
    assert out.choice()["finish_reason"] is None
    reply = live.chat()
    assert (reply.status, reply.error["code"]) == (500, "engine_error")
    assert 'glm53_stream_errors_total{code="engine_error"} 1.0' in live.get("/metrics").data.decode()


def test_the_connection_is_reusable_after_a_stream(start: Start) -> None:
    live = start()
    connection = live.connect()
    for _ in range(3):
        connection.request("POST", "/v1/chat/completions", json.dumps({"messages": user("x"), "stream": True}))
        reply = connection.getresponse()
        assert reply.read().endswith(b"data: [DONE]\n\n")
        connection.request("GET", "/health")
        assert connection.getresponse().read()
    connection.close()


def test_request_timeout_in_a_stream_and_without(start: Start) -> None:
    live = start(LONG, request_timeout_s=0.4)
    out = live.chat_stream()
    assert out.done
    assert out.events[-1]["error"]["code"] == "request_timeout"
    reply = live.chat()
    assert (reply.status, reply.error["code"]) == (504, "request_timeout")
    assert "0.4 s" in reply.error["message"]
    assert reply.headers["x-should-retry"] == "false"
    live.until(lambda st: st["running"] == 0 and not st["requests"])


def test_stop_strings_end_the_engine_stream(start: Start, tokenizer: Tokenizer) -> None:
    live = start({"pieces": ["</think>", "one ", "ST", "OP ", *["more "] * 6000], "end": "user", "rate": 100})
    out = live.chat_stream(stop=["STOP"])
    check_chat_stream(out)
    assert out.choice()["content"] == "one "
    assert out.choice()["finish_reason"] == "stop"
    live.until(lambda st: st["running"] == 0)


def test_an_answer_that_met_its_stop_string_leaves_the_engine_while_others_of_its_request_go_on(start: Start) -> None:
    early = {"pieces": ["</think>", "STOP", *["more "] * 50], "end": "user", "rate": 100}
    live = start([early, {"pieces": ["</think>", *["x"] * 20], "end": "user", "rate": 100}], max_streams=2)
    go = live.hold(after=10)  # both are in the engine until they are told to go on, but for a reason of their own
    replies: list[Any] = []
    asking = threading.Thread(target=lambda: replies.append(live.chat(n=2, stop=["STOP"])))
    asking.start()
    live.until(lambda st: st["engine"]["cancelled"] == 1)
    assert live.stats()["running"] == 1
    go.set()
    asking.join(60)
    assert [c["message"]["content"] for c in replies[0].json["choices"]] == ["", "x" * 20]


def test_a_burst_from_the_engine_becomes_few_events(start: Start) -> None:
    live = start({"pieces": ["</think>", *["x"] * 5000], "end": "user"})
    out = live.chat_stream(max_tokens=100000)
    check_chat_stream(out)
    assert out.choice()["content"] == "x" * 5000
    assert len(out.events) < 2500


def test_timings_say_where_the_time_went(start: Start) -> None:
    live = start({"pieces": ["</think>", *["x"] * 20], "end": "user", "rate": 100, "prefill_s": 0.2})
    assert live.engine is not None
    submit, streams = live.engine.submit, []
    live.engine.submit = lambda r: (streams.append(submit(r)), streams[-1])[1]  # type: ignore[method-assign]
    timings = live.chat().json["timings"]
    usage = streams[0].usage
    assert timings["prompt_ms"] >= 199
    assert timings["prompt_ms"] == pytest.approx(1000 * (usage.first_token_s - usage.prefill_start_s), abs=0.01)
    assert timings["predicted_n"] == 21
    assert timings["predicted_per_second"] == pytest.approx(20 / (usage.last_token_s - usage.first_token_s), rel=0.01)


def test_live_requests_are_in_the_statistics(start: Start) -> None:
    live: LiveServer = start(LONG, max_streams=1)
    sockets = [live.raw(chat_request({"stream": True})) for _ in range(2)]

    def told(st: dict[str, Any]) -> bool:  # a mean since the first token: it comes near the script's 50 in any case
        rates = [r["tokens_per_s"] for r in st["requests"] if r["completion_tokens"] > 5]
        return len(st["requests"]) == 2 and any(35 < rate < 65 for rate in rates)

    by_phase = {r["phase"]: r for r in live.until(told)["requests"]}
    assert set(by_phase) == {"decode", "queued"}
    assert re.fullmatch(r"req-[0-9a-f]{16}", by_phase["decode"]["id"])
    for s in sockets:
        s.close()


def _payloads(out: Streamed) -> list[Any]:
    return [e["choices"][0]["delta"] for e in out.events if e.get("choices")]


def test_no_delta_carries_null_or_nothing(start: Start) -> None:
    out = start().chat_stream()
    assert all(None not in d.values() for d in _payloads(out))
    assert all("reasoning_content" not in d for d in _payloads(out) if "content" in d)
