"""`glm53 serve --scripted` as a process: signals, exit codes, readiness; and the benchmarks against it."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
TALK = {"pieces": ["</think>", *["word "] * 100], "end": "user", "rate": 100}


@contextmanager
def dead_port() -> Iterator[int]:
    """A port on which nobody listens, kept from everybody else."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        yield int(s.getsockname()[1])


class Served:
    """A running server process on a port that the system chose; its whole output goes to `log`."""

    def __init__(self, log: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.log = log
        command = [sys.executable, "-m", "glm53", "serve", "--port", "0", *arguments]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GLM53_")} | (env or {})
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)

    @property
    def url(self) -> str:
        """Where it listens, by its own log."""
        found = self.until(lambda: re.search(r"listening on (http://\S+?),", self.log.read_text()), "listening")
        assert found
        return str(found[1])

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 120) -> Any:
        """The first true value of `condition` while the process runs."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := condition():
                return value
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(f"not {what} within {seconds} s: {self.log.read_text()}")

    def wait_ready(self) -> None:
        self.until(lambda: self.get("/health") == 200, "ready")

    def get(self, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    def open_stream(self, lines: int = 12) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert reply.status == 200
        for _ in range(lines):
            reply.readline()
        return connection, reply

    def end(self) -> tuple[int, str]:
        code = self.process.wait(60)
        return code, self.log.read_text()


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    started: list[Served] = []

    def make(answer: Any, *arguments: str, ready: bool = True, **options: Any) -> Served:
        script = tmp_path / f"{len(started)}.jsonl"
        script.write_text(answer if isinstance(answer, str) else json.dumps(answer) + "\n", encoding="utf-8")
        started.append(Served(tmp_path / f"{len(started)}.log", "--scripted", str(script), *arguments, **options))
        if ready:
            started[-1].wait_ready()
        return started[-1]

    yield make
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait(60)


def test_b75_sigterm_finishes_the_stream_and_exits_0(serve: Serve) -> None:
    server = serve(TALK)
    connection, reply = server.open_stream()
    server.process.send_signal(signal.SIGTERM)
    assert reply.read().endswith(b"data: [DONE]\n\n")
    connection.close()
    code, output = server.end()
    assert code == 0
    assert "Traceback" not in output
    assert "loaded in" in output
    assert sum("loaded in" in line for line in output.splitlines()) == 1


def test_b75_second_sigterm_ends_the_stream_with_an_error_event(serve: Serve) -> None:
    server = serve({**TALK, "rate": 1})
    connection, reply = server.open_stream(lines=4)
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: server.get("/health") == 503, "draining")  # else the two could arrive as one
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    rest = reply.read()
    assert b'"shutting_down"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    connection.close()
    code, output = server.end()
    assert (code, time.monotonic() - started < 60) == (0, True)  # the stream itself takes 100 s
    assert "Traceback" not in output


def test_readiness_is_notified(serve: Serve, short_path: Path) -> None:
    path = str(short_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(path)
        s.settimeout(60)
        server = serve(TALK, ready=False, env={"NOTIFY_SOCKET": path})
        seen = ""
        while "READY=1" not in seen:
            seen += s.recv(4096).decode() + "\n"
        assert server.get("/health") == 200
        server.process.send_signal(signal.SIGTERM)
        assert "STOPPING=1" in s.recv(4096).decode()
    assert server.end()[0] == 0


def test_limits_in_the_settings_hold_for_a_script_too(serve: Serve) -> None:
    server = serve({**TALK, "rate": 1}, "--max-batch-size", "1", "--max-queue", "0", "--cache-tokens", "300")
    with urllib.request.urlopen(server.url + "/server_info", timeout=60) as reply:
        info = json.load(reply)
    assert (info["context_length"], info["max_streams"], info["max_queue"]) == (300, 1, 0)
    connection, _ = server.open_stream(lines=2)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(server.url + "/v1/completions", b'{"prompt": "x"}', timeout=60)
    connection.close()


@pytest.mark.parametrize("script", ["{", '{"pieces": [], "end": "nowhere"}\n', ""])
def test_a_malformed_script_is_one_line_and_exit_78(serve: Serve, script: str) -> None:
    code, output = serve(script, ready=False).end()
    assert code == 78
    assert "Traceback" not in output
    told = [line for line in output.splitlines() if "--scripted" in line]
    assert len(told) == 1


def test_a_port_in_use_is_one_line(serve: Serve) -> None:
    first = serve(TALK)
    code, output = serve(TALK, "--port", str(first.port), ready=False).end()
    assert code != 0
    assert "Traceback" not in output
    assert f"port {first.port}" in output
    assert "in use" in output


def test_connections_without_end_do_not_fill_the_log(serve: Serve) -> None:
    served = serve(TALK)
    port, pid = served.port, served.process.pid
    served.until(lambda: "ready" in served.log.read_text(), "ready")
    files = 10 + max(int(fd) for fd in os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (files, files))
    connections = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(100)]
    served.until(lambda: "cannot accept connections" in served.log.read_text(), "out of files")
    time.sleep(2.5)  # it tries again every second
    for connection in connections:
        connection.close()

    def answers() -> bool:
        try:
            return urllib.request.urlopen(f"{served.url}/health", timeout=5).status == 200
        except OSError:
            return False

    served.until(answers, "an answer")
    told = served.log.read_text()
    assert told.count("cannot accept connections") == 1
    assert "Traceback" not in told
    assert len(told) < 2000


def bench(name: str, *arguments: str) -> tuple[int, Any, str]:
    """Exit code, figures and messages of a client that needs the standard library alone."""
    done = subprocess.run(
        [sys.executable, "-S", "-I", str(BENCH / name), *arguments, "--json", "-"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def test_stream_rate_passes_on_this_server(serve: Serve) -> None:
    """Once in ten: what it measures is also how busy this machine is."""
    url, attempts = serve(TALK).url, []
    while len(attempts) < 10:
        code, figures, told = bench("stream_rate.py", "--url", url, "--streams", "4")
        assert told == ""
        streams, even = figures["raw"]["streams"], figures["raw"]["even"]
        assert code == (0 if even else 1)
        assert [stream["tokens"] for stream in streams] == [101] * 4
        for stream in streams:
            assert stream["curve"][-1] == [1.0, 1.0]
            assert stream["curve"] == sorted(stream["curve"])
        if even and all(80 < stream["tokens_per_s"] < 120 for stream in streams):
            return
        attempts.append([(stream["tokens_per_s"], stream["bend"], stream["last_burst"]) for stream in streams])
    pytest.fail(f"never even: {attempts}")


class HalfSpeed(http.server.BaseHTTPRequestHandler):
    """Stands before a real server and passes its events on at half the rate they come; the rest at the end, at once."""

    upstream = ""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = urllib.request.Request(self.upstream + self.path, body, {"Content-Type": "application/json"})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        with urllib.request.urlopen(request, timeout=60) as reply:
            held: list[bytes] = []
            for i, line in enumerate(reply):
                held.append(line)
                if i % 4 == 3:  # an event is two lines, so one event for every two that came
                    self.wfile.write(held.pop(0) + held.pop(0))
                    self.wfile.flush()
        self.wfile.write(b"".join(held))

    def log_message(self, *args: Any) -> None:
        pass


def test_stream_rate_fails_on_a_server_at_half_speed_that_flushes_at_the_end(serve: Serve) -> None:
    handler = type("Handler", (HalfSpeed,), {"upstream": serve(TALK).url})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        code, figures, _ = bench("stream_rate.py", "--url", f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
    assert code == 1
    assert figures["raw"]["even"] is False
    assert figures["raw"]["streams"][0]["tokens"] == 101
    assert figures["bars"]["stream.bend"]["value"] > 0.4
    assert [why.split()[0] for why in figures["raw"]["streams"][0]["over"]] == ["bend", "last"]
    assert figures["bars"]["stream.last_burst"]["ok"] is False


def test_stream_rate_compares_with_the_engines_own_rate(serve: Serve) -> None:
    url = serve(TALK).url
    code, figures, _ = bench("stream_rate.py", "--url", url, "--rate", "200")  # it makes 100 tokens/s
    assert code == 1
    assert figures["raw"]["even"] is False
    assert figures["bars"]["stream.gap_off"]["value"] > 0.5
    assert figures["bars"]["stream.gap_off"]["ok"] is False
    for _ in range(10):  # a busy machine may spoil some
        code, figures, _ = bench("stream_rate.py", "--url", url, "--rate", "100")
        if code == 0:
            break
    assert code == 0, figures["bars"]
    assert figures["bars"]["stream.gap_off"]["value"] <= 0.1
    assert figures["bars"]["stream.gap_max_ms"]["value"] <= 50


def test_stream_rate_gives_no_verdict_without_a_server_or_on_a_short_answer(serve: Serve) -> None:
    with dead_port() as port:
        code, _, told = bench("stream_rate.py", "--url", f"http://127.0.0.1:{port}")
    assert (code, told.startswith("stream_rate: ")) == (2, True)
    assert "Traceback" not in told
    code, _, told = bench("stream_rate.py", "--url", serve({"pieces": ["</think>", "x"], "end": "user"}).url)
    assert code == 2
    assert "only 1 events" in told
    short = {**TALK, "pieces": TALK["pieces"][:41]}  # 5 % of its time are two events: chance would decide
    code, _, told = bench("stream_rate.py", "--url", serve(short).url)
    assert code == 2
    assert re.search(r"only \d\d events with text; 60 are needed \(try --ignore-eos\)", told)


@pytest.mark.parametrize("client", ["stream_rate.py", "sweep.py", "score_ref_panel.py"])
def test_clients_take_an_address_without_a_scheme(client: str) -> None:
    """They spoke to port 80 of this machine instead."""
    panel = ["--panel", str(BENCH / "panels/nano-recorded.json")] if client == "score_ref_panel.py" else []
    with dead_port() as port:
        command = [sys.executable, "-S", "-I", str(BENCH / client), "--url", f"127.0.0.1:{port}", *panel]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert f" http://127.0.0.1:{port}: " in done.stderr


def test_server_overhead_runs(serve: Serve) -> None:
    """The figures are for a quiet machine; here only that they are made, and of what."""
    server = serve({"pieces": ["</think>", *["x"] * 999], "end": "user"})
    code, figures, told = bench("server_overhead.py", "--url", server.url, "--tokens", "1000", "--streams", "2")
    assert code in (0, 1), told
    assert figures["tokens"] == 2000
    assert figures["health_probes"] > 0
