"""Limits and manners: queue, keys, CORS, hosts, metrics, the log. Cases B72 to B79."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import pytest
from conftest import CHAT, HELLO, Start, user

from glm53.server.errors import MAX_MESSAGE

LONG = {"pieces": ["</think>", *["tick "] * 6000], "end": "user", "rate": 50}


def _chat_bytes(body: dict[str, Any]) -> bytes:
    data = json.dumps({"messages": user("hi"), **body}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def test_b72_queue_overflow_is_refused_at_once_and_untokenised(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    live = start([LONG, *[HELLO] * 9], max_streams=1, max_queue=2)
    sockets = []
    for admitted in (1, 2, 3):  # one after the other: the first has to be the one that gets the long answer
        sockets.append(live.raw(_chat_bytes({})))
        live.until(lambda s, n=admitted: s["queue"]["admitted"] == n)  # type: ignore[misc]
    monkeypatch.setattr(live.server.state.prompts, "chat", lambda *a: pytest.fail("tokenised"))
    reply = live.chat()
    assert live.stats()["queue"]["admitted"] == 3, "refused before any of the three had ended"
    assert (reply.status, reply.error["code"]) == (503, "queue_full")
    assert int(reply.headers["retry-after"]) > 0
    monkeypatch.undo()
    sockets[0].close()
    for s in sockets[1:]:
        assert s.recv(100).startswith(b"HTTP/1.1 200")
    assert live.chat().status == 200
    assert live.stats()["queue"]["refused"] == 1
    assert live.stats()["queue"]["admitted"] == 0


def test_b72_many_at_once_all_end(start: Start) -> None:
    live = start({**HELLO, "rate": 100}, max_streams=2, max_queue=3)
    go = live.hold()
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(live.chat().status)) for _ in range(20)]
    for t in threads:
        t.start()
    live.until(lambda s: s["queue"]["refused"] == 15)
    go.set()
    for t in threads:
        t.join(60)
    assert sorted(statuses) == [200] * 5 + [503] * 15
    assert live.stats()["queue"]["admitted"] == 0


def test_each_answer_of_a_request_takes_a_place(start: Start) -> None:
    live = start(HELLO, max_streams=1, max_queue=2)
    go = live.hold()
    statuses: list[int] = []
    asking = threading.Thread(target=lambda: statuses.append(live.chat(n=3).status))
    asking.start()
    live.until(lambda s: s["queue"]["admitted"] == 3)
    assert live.chat().status == 503
    go.set()
    asking.join(60)
    assert statuses == [200]
    assert live.stats()["queue"]["admitted"] == 0
    assert live.chat().status == 200


class TestApiKeys:
    def test_bearer_and_x_api_key(self, start: Start) -> None:
        live = start(api_keys=("first", "sécond"))
        body = {"messages": user("x")}
        key = "sécond".encode().decode("latin-1")
        for headers in ({"Authorization": "Bearer first"}, {"x-api-key": key}, {"Authorization": f"bearer {key}"}):
            assert live.post(CHAT, body, {**headers, "Content-Type": "application/json"}).status == 200

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "first"},
            {"x-api-key": ""},
            {"Authorization": "Bearer"},
        ],
    )
    def test_missing_or_wrong(self, start: Start, headers: dict[str, str]) -> None:
        live = start(api_keys=("first",))
        for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/stats"), ("GET", "/metrics")):
            reply = live.request(method, path, b"{}" if method == "POST" else None, headers)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), path
            assert reply.headers["www-authenticate"] == "Bearer"

    def test_open_without_a_key(self, start: Start) -> None:
        live = start(api_keys=("first",))
        for path in ("/health", "/", "/web/page.js", "/openapi.json"):
            assert live.get(path).status == 200, path
        assert live.get("/health?deep=1").status == 401

    def test_one_client_may_send_both_headers(self, start: Start) -> None:
        live = start(api_keys=("first",))
        both = {"Authorization": "Bearer undefined", "x-api-key": "first", "Content-Type": "application/json"}
        assert live.post(CHAT, {"messages": user("x")}, both).status == 200

    def test_a_key_that_nobody_asked_for_is_ignored(self, start: Start) -> None:
        reply = start().post(
            CHAT, {"messages": user("x")}, {"Authorization": "Bearer x", "Content-Type": "application/json"}
        )
        assert reply.status == 200


class TestB77Cors:
    PREFLIGHT: dict[str, str] = {  # noqa: RUF012
        "Origin": "https://ui.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }

    def test_preflight_needs_no_key(self, start: Start) -> None:
        reply = start(api_keys=("k",)).request("OPTIONS", CHAT, None, self.PREFLIGHT)
        assert reply.status == 204
        assert reply.headers["access-control-allow-origin"] == "*"
        assert reply.headers["access-control-allow-headers"] == self.PREFLIGHT["Access-Control-Request-Headers"]
        assert "POST" in reply.headers["access-control-allow-methods"]

    def test_errors_and_streams_carry_the_header(self, start: Start) -> None:
        live = start(cors_origins=("*",))
        origin = {"Origin": "https://ui.example", "Content-Type": "application/json"}
        assert live.post(CHAT, {}, origin).headers["access-control-allow-origin"] == "*"
        assert live.request("GET", "/nope", None, origin).headers["access-control-allow-origin"] == "*"
        assert live.stream(CHAT, {"messages": user("x")}, origin).headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-origin" not in live.get("/health").headers

    def test_a_list_of_origins(self, start: Start) -> None:
        live = start(cors_origins=("https://ui.example",))
        good = live.request("GET", "/health", None, {"Origin": "https://ui.example"})
        assert good.headers["access-control-allow-origin"] == "https://ui.example"
        assert good.headers["vary"] == "Origin"
        other = live.request("OPTIONS", CHAT, None, {**self.PREFLIGHT, "Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
        none = start(cors_origins=()).request("OPTIONS", CHAT, None, self.PREFLIGHT)
        assert "access-control-allow-origin" not in none.headers

    @pytest.mark.parametrize(
        ("origin", "allowed"),
        [
            ("http://localhost:3000", True),
            ("http://127.0.0.1:8080", True),
            ("https://[::1]", True),
            ("http://ui.localhost", True),
            ("vscode-webview://1a2b", True),
            ("https://ui.example", False),
            ("http://localhost.example", False),
            ("http://127.0.0.1.example", False),
            ("http://192.168.1.5:3000", False),
            ("null", False),
            ("http://[broken", False),
            ("", False),
        ],
    )
    def test_without_keys_only_pages_of_this_machine_may_call(self, start: Start, origin: str, allowed: bool) -> None:
        live = start()
        preflight = live.request("OPTIONS", CHAT, None, {**self.PREFLIGHT, "Origin": origin})
        assert preflight.status == 204
        got = live.post(CHAT, {"messages": user("x")}, {"Origin": origin, "Content-Type": "application/json"})
        assert got.status == 200  # a browser would not have sent it
        for reply in (preflight, got):
            assert reply.headers.get("access-control-allow-origin") == (origin if allowed else None)

    @pytest.mark.parametrize("kind", [{"Content-Type": "application/x-www-form-urlencoded"}, {}])
    def test_a_strangers_page_cannot_post_without_a_preflight(self, start: Start, kind: dict[str, str]) -> None:
        """These content types need none; curl sends them too, without an Origin."""
        live = start()
        body = json.dumps({"messages": user("x")}).encode()
        assert live.request("POST", CHAT, body, kind).status == 200
        for host in (live.url.removeprefix("http://"), "gpu.example:30000"):  # as the server's own page sends it
            own = {"Origin": f"http://{host}", "Host": host}
            assert live.request("POST", CHAT, body, {**kind, **own}).status == 200
        for origin in ("https://evil.example", "null"):
            refused = live.request("POST", CHAT, body, {**kind, "Origin": origin})
            assert (refused.status, refused.error["code"]) == (403, "foreign_origin")
        assert live.stats()["engine"]["requests"] == 3, "none of a stranger's page"

    def test_a_refused_page_is_told_of_in_the_log_once(self, start: Start, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", "glm53.server")
        live = start()
        for _ in range(3):
            live.request("OPTIONS", CHAT, None, self.PREFLIGHT)
        for i in range(40):
            live.request("OPTIONS", CHAT, None, {**self.PREFLIGHT, "Origin": f"https://{i}.example"})
        lines = [r.getMessage() for r in caplog.records if "--cors-origins" in r.getMessage()]
        assert lines[0] == "a web page of 'https://ui.example' may not call this server; --cors-origins would allow it"
        assert len(lines) == 20


@pytest.mark.parametrize("host", ["gpu-box.tailnet.ts.net", "127.0.0.1:30000", "[::1]:30000"])
def test_b79_any_host_header(start: Start, host: str) -> None:
    assert start().request("GET", "/health", None, {"Host": host}).status == 200


def test_health_deep_generates_a_token(start: Start) -> None:
    live = start()
    reply = live.get("/health?deep=1")
    assert reply.status == 200
    assert reply.json["seconds"] >= 0
    assert live.stats()["engine"]["completion_tokens"] == 1
    assert live.get("/health_generate").status == 200


def test_health_deep_tells_of_a_broken_engine(start: Start) -> None:
    live = start({"pieces": [], "end": "error"})
    assert live.get("/health").status == 200
    reply = live.get("/health?deep=1")
    assert (reply.status, reply.error["code"]) == (503, "engine_unhealthy")


def test_health_and_the_watchdog_see_a_dead_engine(start: Start) -> None:
    live = start()
    engine = live.engine
    assert engine is not None
    stats = engine.stats
    engine.stats = lambda: {**stats(), "dead": True}  # type: ignore[method-assign]
    assert (live.get("/health").status, live.get("/health").json["status"]) == (503, "failed")
    assert live.stats()["status"] == "failed"
    assert "glm53_up 0.0" in live.get("/metrics").data.decode()


def test_server_info_says_what_a_user_must_know(start: Start) -> None:
    info = start().get("/server_info").json
    assert info["scripted"] is True
    warnings = " ".join(info["warnings"])
    for words in ("scripted", "not bit-exact", "prefill path only", "one mode per port"):
        assert words in warnings


def test_server_info_says_that_the_cpu_lane_is_off(start: Start) -> None:
    live = start()
    engine = live.engine
    assert engine is not None
    stats, split = engine.stats, {"on": True, "off_because": None}
    engine.stats = lambda: {**stats(), "split": dict(split)}  # type: ignore[method-assign]
    assert "restart" not in " ".join(live.get("/server_info").json["warnings"])
    split |= {"on": False, "off_because": "the CPU lane died: worker 3"}
    wanted = "decoding goes on as in exact mode until a restart: the CPU lane died: worker 3"
    assert wanted in live.get("/server_info").json["warnings"]
    assert "glm53_engine_split_on 0.0" in live.get("/metrics").data.decode()


def test_metrics(start: Start) -> None:
    live = start()
    live.chat()
    live.chat(n=0)
    live.get("/no/such/route")
    text = live.get("/metrics").data.decode()
    assert 'glm53_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
    assert 'glm53_requests_total{route="/v1/chat/completions",status="400"} 1.0' in text
    assert 'glm53_requests_total{route="(none)",status="404"} 1.0' in text
    assert "glm53_completion_tokens_total 6.0" in text
    assert "glm53_engine_running 0.0" in text
    assert "glm53_first_token_seconds_count 1.0" in text
    assert "no/such" not in text


def test_openapi_lists_every_route(start: Start) -> None:
    live = start()
    document = live.get("/openapi.json").json
    assert document["openapi"].startswith("3.1")
    for path in document["paths"]:
        assert live.get(path.replace("{id}", "glm-5.3-flash")).status in (200, 405), path
    assert "/v1/messages/count_tokens" in document["paths"]


def test_the_log_has_one_line_a_request_and_no_text_of_it(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "glm53.server")
    live = start(api_keys=("topsecret",))
    headers = {"Authorization": "Bearer topsecret", "Content-Type": "application/json"}
    live.post(CHAT, {"messages": user("privatewords"), "temperature": "privatewords" * 1000}, headers)
    live.post(CHAT, {"messages": user("privatewords")}, headers)
    live.post(CHAT, {"messages": user("privatewords")}, {"Authorization": "Bearer wrongsecret"})
    live.get("/health")
    lines = [r.getMessage() for r in caplog.records if CHAT in r.getMessage()]
    assert len(lines) == 3
    assert "200" in lines[1]
    assert "+ 6 tokens" in lines[1]
    for word in ("privatewords", "topsecret", "wrongsecret", "Hello world"):
        assert word not in caplog.text
    assert "/health" not in caplog.text.replace(live.url, "")


def test_error_texts_are_bounded(start: Start) -> None:
    reply = start().chat(response_format={"type": "x" * 100_000})
    assert reply.status == 400
    assert len(reply.error["message"]) <= MAX_MESSAGE


def test_a_slow_body_is_given_up(start: Start) -> None:
    live = start(body_timeout_s=0.3)
    with live.raw(b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{") as s:
        assert s.recv(999).startswith(b"HTTP/1.1 408")
    assert live.stats()["queue"]["admitted"] == 0


def test_an_unforeseen_error_is_a_500_without_its_text(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = start()

    def broken(*a: Any, **k: Any) -> Any:
        raise ZeroDivisionError("inner detail")

    monkeypatch.setattr(live.server.state.prompts, "chat", broken)
    reply = live.chat()
    assert (reply.status, reply.error["code"]) == (500, "internal_error")
    assert "inner detail" not in reply.error["message"]
    assert reply.headers["x-request-id"] in reply.error["message"]
    assert "inner detail" in caplog.text
    assert live.stats()["queue"]["admitted"] == 0


def test_the_page_is_served_with_a_policy(start: Start) -> None:
    live = start()
    page = live.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name, kind in (("page.css", "text/css"), ("page.js", "text/javascript")):
        assert f"web/{name}" in page.data.decode()
        assert live.get(f"/web/{name}").headers["content-type"].startswith(kind)
    assert live.get("/web/../app.py").status == 404
    assert live.get("/web/%2e%2e%2fapp.py").status == 404
    assert b"http://" not in page.data
    assert b"https://" not in page.data


def test_a_grammar_reaches_the_engine_and_a_bad_one_is_a_400(start: Start) -> None:
    live = start()
    seen: list[Any] = []
    engine = live.engine
    assert engine is not None
    submit = engine.submit
    engine.submit = lambda r: (seen.append(r.constraint), submit(r))[1]  # type: ignore[method-assign]
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    tools = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]
    assert live.chat().status == 200
    assert live.chat(response_format={"type": "json_object"}).status == 200
    assert live.chat(response_format=schema, n=2).status == 200
    assert live.chat(tools=tools, tool_choice="required").status == 200
    assert live.chat(thinking_budget=5).status == 200
    assert live.post("/v1/completions", {"prompt": "x", "response_format": {"type": "json_object"}}).status == 200
    assert live.post("/generate", {"text": "x", "sampling_params": {"regex": "[ab]+"}}).status == 200
    assert [c is None for c in seen] == [True] + [False] * 7
    assert seen[2] is not seen[3]
    bad = live.chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}})
    assert (bad.status, bad.error["type"]) == (400, "invalid_request_error")
