"""The three bench clients against servers that fail: no figures from half an answer, and one line that says why."""

from __future__ import annotations

import http.server
import importlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_bench_clients import bare
from test_process import BENCH

PANEL = {
    "prompts": [{"name": "one", "ids": [1, 2], "start": 0, "top": [[[3, -0.1], [4, -3.0]]]}],
    "top_k": 2,
    "texts": {"3": "c", "4": "d"},
}
CLIENTS = {
    "stream_rate": ["--max-tokens", "90"],
    "sweep": ["--prefill", "10", "--conc", "1", "--reps", "1", "--dec-reps", "1"],
    "score_ref_panel": ["--panel"],
}


class Faulty(http.server.BaseHTTPRequestHandler):
    """Streams 90 events and scores one prompt, but for its fault."""

    fault = ""
    paths: list[str]

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.whole(404, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.paths.append(self.path)
        long = isinstance(body.get("prompt"), list) and len(body["prompt"]) > 1000
        if self.fault == "page":
            self.whole(502, b"<html>\n<h1>Bad\ngateway</h1>\n</html>\n")
        elif self.fault == "key":
            self.whole(401, b'{"error": {"message": "no such key"}}')
        elif self.fault == "too long" and long:
            self.whole(400, b'{"error": {"message": "the context has 1000 tokens"}}')
        elif body.get("stream"):
            self.stream(body)
        elif self.fault == "shape":
            self.whole(200, b'{"choices": 5}')
        else:
            entry = {"c": -0.1} if self.fault == "few scores" else {"c": -0.1, "d": -3.0}
            scores = {"choices": [{"logprobs": {"top_logprobs": [None, entry]}}]}
            self.whole(404 if self.path == "/generate" else 200, json.dumps(scores).encode())

    def whole(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        prompt = "prompt" in body
        if prompt:
            self.wfile.write(b'data: {"choices": [{"text": ""}]}\n\n')
            time.sleep(0.3 if self.fault == "empty first" else 0)
        for i in range(1 if prompt else 90):
            if i == 70 and self.fault == "cut":
                return
            time.sleep(0.3 if i == 70 and self.fault == "slow" else 0)
            broken = i == 70 and self.fault in ("text", "list")
            event: Any = {"choices": [{"delta": {"content": "word "}, "text": "word "}]}
            data = json.dumps([event]) if self.fault == "list" and broken else json.dumps(event)
            self.wfile.write(b"data: oops\n\n" if self.fault == "text" and broken else f"data: {data}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


Start = Callable[[str], str]


@pytest.fixture
def faulty() -> Iterator[Start]:
    """`faulty(fault)` -> URL of a server that has it; it appends what was asked to `Faulty.paths`."""
    servers = []

    def make(fault: str) -> str:
        Faulty.paths = []
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Faulty,), {"fault": fault}))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


def arguments(client: str, tmp_path: Path) -> list[str]:
    panel = tmp_path / "panel.json"
    panel.write_text(json.dumps(PANEL))
    return [*CLIENTS[client], str(panel)] if client == "score_ref_panel" else list(CLIENTS[client])


@pytest.mark.parametrize("client", CLIENTS)
def test_without_a_fault_the_server_is_measured(client: str, faulty: Start, tmp_path: Path) -> None:
    """So that each failure below is its fault's."""
    done = bare(f"{client}.py", "--url", faulty(""), *arguments(client, tmp_path))
    assert done.returncode in ((0, 1) if client == "stream_rate" else (0,)), done.stderr  # 1: this machine was busy


@pytest.mark.parametrize(
    ("client", "fault", "words"),
    [
        ("stream_rate", "cut", "broke off after 70 events"),
        ("sweep", "cut", "broke off before its end"),
        ("stream_rate", "text", "'oops'"),
        ("sweep", "text", "'oops'"),
        ("stream_rate", "list", "no event"),
        ("sweep", "list", "no event"),
        ("score_ref_panel", "shape", "not of the known shape"),
        ("score_ref_panel", "few scores", "lists 1 log-probabilities of 2"),
        *[(client, "page", "502: <html> <h1>Bad gateway</h1>") for client in CLIENTS],
        *[(client, "key", "no such key (give its key with --api-key)") for client in CLIENTS],
    ],
)
def test_a_fault_of_the_server_is_one_line(client: str, fault: str, words: str, faulty: Start, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = bare(f"{client}.py", "--url", faulty(fault), *arguments(client, tmp_path), "--out", str(out))
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{client}: ")
    assert words in last
    assert "Traceback" not in done.stderr
    if client == "sweep":
        assert json.loads(out.read_text())["raw"]["decode"] == []
    else:
        assert not out.exists()


def test_a_length_that_is_refused_leaves_the_other_cells(faulty: Start, tmp_path: Path) -> None:
    out, cells = tmp_path / "sweep.json", ["--prefill", "2000", "10", "--conc", "1", "--reps", "1", "--dec-reps", "1"]
    done = bare("sweep.py", "--url", faulty("too long"), *cells, "--out", str(out))
    assert done.returncode == 2
    record = json.loads(out.read_text())
    assert [c["tokens"] for c in record["raw"]["prefill"]] == [10]
    assert [c["streams"] for c in record["raw"]["decode"]] == [1]
    assert list(record["refused"]) == ["prefill 2000"]
    assert "prefill 2000: not measured: " in done.stdout
    assert "the context has 1000 tokens" in done.stdout


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("ending", ["/", "/v1", "/v1/"])
def test_the_base_url_of_other_clients_is_taken(client: str, ending: str, faulty: Start, tmp_path: Path) -> None:
    done = bare(f"{client}.py", "--url", faulty("") + ending, *arguments(client, tmp_path))
    assert done.returncode in (0, 1), done.stderr
    assert set(Faulty.paths) <= {"/generate", "/v1/completions", "/v1/chat/completions"}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://127.0.0.1:99999", "http://127.0.0.1:x", "http://", ""])
def test_what_is_no_address_is_said(client: str, url: str, tmp_path: Path) -> None:
    done = bare(f"{client}.py", "--url", url, *arguments(client, tmp_path))
    assert done.returncode == 2
    assert "is no address of a server" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("client", CLIENTS)
def test_a_file_that_cannot_be_written_is_known_before_the_measurement(
    client: str, faulty: Start, tmp_path: Path
) -> None:
    url = faulty("")
    done = bare(f"{client}.py", "--url", url, *arguments(client, tmp_path), "--out", str(tmp_path / "none" / "x.json"))
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert Faulty.paths == []


@pytest.mark.parametrize(
    ("client", "option"),
    [("stream_rate", "--streams"), ("stream_rate", "--max-tokens"), ("sweep", "--reps"), ("sweep", "--conc")],
)
def test_nothing_cannot_be_measured(client: str, option: str) -> None:
    done = bare(f"{client}.py", option, "0")
    assert done.returncode == 2
    assert "'0' is no whole number above 0" in done.stderr


def test_an_event_before_the_first_token_is_not_its_time(faulty: Start, tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    done = bare("sweep.py", "--url", faulty("empty first"), *CLIENTS["sweep"], "--out", str(out))
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(out.read_text())["raw"]["prefill"][0]["runs"]
    assert run["first_token_s"] >= 0.3


@pytest.mark.parametrize("client", ["stream_rate", "sweep"])
def test_long_answers_show_that_they_go_on(
    client: str, faulty: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module(client)
    monkeypatch.setattr(module, "PROGRESS_S", 0.05)
    assert module.main(["--url", faulty("slow"), *CLIENTS[client]]) in (0, 1)
    assert re.search(r"\b70 events", capsys.readouterr().err)
