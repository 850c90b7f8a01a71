"""bench/score_ref_panel.py and bench/sweep.py as a user runs them: a bare interpreter against a running server."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_process import BENCH, Served, dead_port
from tiny_checkpoint import TINY

GOLDEN = Path(__file__).parents[1] / "data" / "tiny-exllamav3-1.5.1.npz"


def bare(script: str, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a client with no site packages, no environment and no path of its own."""
    command = [sys.executable, "-S", "-I", str(BENCH / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def panel() -> Path:
    """The tests' panel of the tiny checkpoint: what stock exllamav3 answered on a GPU."""
    return GOLDEN.with_name("tiny-panel.json")


class FakeServer(http.server.BaseHTTPRequestHandler):
    """Scores from a table, in the shape of one of two kinds of server, and streams four tokens for anything else."""

    kind = "sglang"
    tops: dict[tuple[int, ...], list[list[tuple[int, float]]]]
    texts: dict[str, str]
    requests: list[tuple[str, dict[str, Any]]]

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.kind == "sglang" and self.path == "/server_info":
            self.reply({"vocab_size": 1000, "version": "9", "mode": "exact"})
        else:
            self.reply({}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.path, body))
        if self.path == "/generate" and self.kind != "sglang":
            self.reply({"error": {"message": "no such route"}}, 404)
        elif body.get("stream"):
            self.stream(body)
        elif self.path == "/generate":
            tops = self.tops[tuple(body["input_ids"])]
            listed = [None, *[[[lp, i, None] for i, lp in top] for top in tops]]
            self.reply({"text": "x", "meta_info": {"input_top_logprobs": listed}})
        else:
            tops = self.tops[tuple(body["prompt"])]
            listed = [None, *[{self.texts[str(i)]: lp for i, lp in top} for top in tops], {"x": -1.0}]
            self.reply({"choices": [{"text": "x", "logprobs": {"top_logprobs": listed}}]})

    def reply(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        if "chat" in self.path:
            events: list[Any] = [{"choices": [{"delta": {"content": "word "}}]} for _ in range(4)]
            events.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
            events.append({"choices": [], "usage": {"completion_tokens": 7}})
        else:
            events = [{"text": "w", "choices": [{"text": "w"}], "meta_info": {}}]
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


Fake = Callable[..., str]


@pytest.fixture
def fake(panel: Path) -> Iterator[Fake]:
    """`fake(kind, change)` -> URL of a server whose scores are the panel's, altered by `change(top)`."""
    servers = []

    def make(kind: str = "sglang", change: Callable[[Any], Any] = lambda top: top) -> str:
        content = json.loads(panel.read_text())
        tops = {tuple(p["ids"]): [change([tuple(e) for e in top]) for top in p["top"]] for p in content["prompts"]}
        members = {"kind": kind, "tops": tops, "texts": content["texts"], "requests": []}
        handler = type("Handler", (FakeServer,), members)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


def test_panel_holds_what_stock_predicted(panel: Path, tmp_path: Path) -> None:
    made = tmp_path / "panel.json"
    command = [sys.executable, str(BENCH / "make_ref_panel.py"), "--model", str(TINY), "--recorded", str(GOLDEN)]
    subprocess.run([*command, "--fewest", "200", "--out", str(made)], check=True, capture_output=True)
    content, golden = json.loads(panel.read_text()), np.load(GOLDEN)
    assert json.loads(made.read_text())["prompts"] == content["prompts"]
    assert content["versions"]["exllamav3"] == "1.5.1"
    first = content["prompts"][0]
    assert first["ids"] == golden["text_ids"].tolist()
    assert len(first["top"]) == len(first["ids"]) - 1
    row = golden["text_logits"][3].astype(np.float64)  # padding rows of the head count, but are not listed
    expected = (row - np.log(np.exp(row - row.max()).sum()) - row.max())[: known_ids()]
    assert [i for i, _ in first["top"][3]] == np.argsort(-expected, kind="stable")[:20].tolist()
    assert first["top"][3][0][1] == pytest.approx(expected.max(), abs=1e-6)


def known_ids() -> int:
    """Ids that its tokenizer knows; the model's head has more rows."""
    tokenizers = pytest.importorskip("tokenizers")
    return int(tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json")).get_vocab_size())


@pytest.mark.parametrize("kind", ["sglang", "openai"])
def test_the_same_scores_give_one_and_zero(kind: str, fake: Fake, panel: Path, tmp_path: Path) -> None:
    out = tmp_path / "score.json"
    limits = ("--min-top1", "1", "--max-kl", "1e-6")
    done = bare("score_ref_panel.py", "--url", fake(kind), "--panel", str(panel), "--out", str(out), *limits)
    assert done.returncode == 0, done.stderr
    score = json.loads(out.read_text())["score"]
    assert score["positions"] == 36 + 199
    if kind == "sglang":  # texts of half characters fall together, so text keys can only come close
        assert score["top1"] == 1.0
        assert abs(score["kl_mean"]) < 1e-9
    assert "1.0000" in done.stdout


def test_ties_count_as_agreement_and_bars_carry_their_limits(fake: Fake, panel: Path, tmp_path: Path) -> None:
    """Of equal logits a server may name either first; a panel with one tied position is still met."""
    content = json.loads(panel.read_text())
    for top in content["prompts"][0]["top"]:
        top[1][1] = top[0][1]
    path, out = tmp_path / "tied.json", tmp_path / "score.json"
    path.write_text(json.dumps({**content, "prompts": content["prompts"][:1]}))

    def other_first(top: list[tuple[int, float]]) -> list[tuple[int, float]]:
        return [(top[1][0], top[0][1]), (top[0][0], top[0][1]), *top[2:]]

    limits = ("--min-top1", "1", "--max-kl", "1e-6", "--bars", "panel.exact")
    done = bare(
        "score_ref_panel.py", "--url", fake("sglang", other_first), "--panel", str(path), "--out", str(out), *limits
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["bars"]["panel.exact_top1"] == {"value": 1.0, "want": ">= 1.0", "ok": True}
    assert set(record) >= {"what", "machine", "versions", "command", "settings", "raw", "bars"}
    assert "cpu" in record["machine"]


def test_a_wrong_server_is_found_out(fake: Fake, panel: Path, tmp_path: Path) -> None:
    def swapped(top: list[tuple[int, float]]) -> list[tuple[int, float]]:
        return [(top[0][0], top[1][1]), (top[1][0], top[0][1]), *top[2:]]

    out = tmp_path / "score.json"
    url = fake("sglang", swapped)
    done = bare("score_ref_panel.py", "--url", url, "--panel", str(panel), "--out", str(out), "--min-top1", "0.999")
    assert done.returncode == 1
    score = json.loads(out.read_text())["score"]
    assert score["top1"] == 0.0
    assert score["kl_mean"] > 1e-3


@pytest.mark.parametrize("fault", ["nobody there", "no panel", "no scores"])
def test_no_verdict_is_exit_code_2_with_one_line(fault: str, fake: Fake, panel: Path, tmp_path: Path) -> None:
    url, path = fake("sglang", lambda top: []), panel
    if fault == "no panel":
        path = tmp_path / "none.json"
    with dead_port() as nobody:
        if fault == "nobody there":
            url = f"http://127.0.0.1:{nobody}"
        done = bare("score_ref_panel.py", "--url", url, "--panel", str(path))
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("score_ref_panel: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["sglang", "openai"])
def test_sweep_measures_every_cell(kind: str, fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    arguments = [
        "--card",
        "box",
        "--template",
        "glm",
        "--config",
        "0 exact",
        "--prefill",
        "100",
        "300",
        "--conc",
        "1",
        "2",
    ]
    arguments += ["--reps", "3", "--dec-reps", "2", "--no-early-exit", "--vocab", "1000"]
    done = bare("sweep.py", "--url", fake(kind), *arguments, "--out", str(out))
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert [(c["tokens"], len(c["runs"])) for c in record["raw"]["prefill"]] == [(100, 3), (300, 3)]
    assert [(c["streams"], [r["tokens"] for r in c["runs"]]) for c in record["raw"]["decode"]] == [
        (1, [7, 7]),
        (2, [14, 14]),
    ]
    cell = record["raw"]["prefill"][1]
    assert cell["tok_s"] == pytest.approx(sorted(300 / r["first_token_s"] for r in cell["runs"])[1])
    assert "prefill     300 tokens" in done.stdout
    assert "decode x2" in done.stderr


def test_sweep_against_the_scripted_server(start: Any, tmp_path: Path) -> None:
    live = start([{"pieces": ["</think>", *["word "] * 40], "end": "user", "rate": 200}])
    out = tmp_path / "sweep.json"
    arguments = ["--prefill", "500", "--conc", "1", "3", "--reps", "2", "--dec-reps", "1", "--no-early-exit"]
    done = bare("sweep.py", "--url", live.url, *arguments, "--out", str(out))
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["server"]["vocab_size"] == live.engine.info.vocab_size
    one, three = record["raw"]["decode"]
    assert three["runs"][0]["tokens"] == 3 * one["runs"][0]["tokens"]
    assert three["runs"][0]["finished"] == 3
    assert one["tok_s"] == pytest.approx(one["runs"][0]["tokens"] / one["runs"][0]["wall_s"])
    assert one["tok_s"] < 220  # the script speaks at 200 tokens a second; a busy machine makes it less


def test_sweep_keeps_what_it_measured_before_a_failure(fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    with dead_port() as nobody:
        done = bare("sweep.py", "--url", f"http://127.0.0.1:{nobody}", "--prefill", "10", "--out", str(out))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert json.loads(out.read_text())["failure"]


@pytest.fixture(scope="module")
def cpu_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server with the CPU engine on the tiny checkpoint."""
    server = Served(tmp_path_factory.mktemp("server") / "log", "--model-dir", str(TINY), "--device", "cpu")
    try:
        server.wait_ready()
        yield server.url
    finally:
        server.process.terminate()
        server.process.wait(60)


def test_panel_score_of_the_cpu_engine(cpu_server: str, panel: Path, tmp_path: Path) -> None:
    """The whole way: stock's logits from a GPU against our own engine on this CPU, over HTTP."""
    out = tmp_path / "score.json"
    limits = ("--min-top1", "0.96", "--max-kl", "0.02", "--bars", "panel.cpu")
    done = bare("score_ref_panel.py", "--url", cpu_server, "--panel", str(panel), "--out", str(out), *limits)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["score"]["positions"] == 36 + 199
    assert record["score"]["kl_p50"] < 1e-3
    assert record["server"]["mode"] == "cpu"
    assert [bar["ok"] for bar in record["bars"].values()] == [True, True]


def test_panel_score_of_the_demo(tmp_path: Path) -> None:
    """The command of the README on the first six prompts, 1,340 positions of conversations; all of them, without HTTP:
    tests/python/test_panel_detects.py."""
    out, part = tmp_path / "score.json", tmp_path / "panel.json"
    content = json.loads((BENCH / "panels" / "nano-recorded.json").read_text())
    part.write_text(json.dumps({**content, "prompts": content["prompts"][:6]}))
    server = Served(tmp_path / "log", "--demo", "--device", "cpu")
    try:
        server.wait_ready()
        limits = ("--min-top1", "0.99", "--max-kl", "0.0005")
        done = bare("score_ref_panel.py", "--url", server.url, "--panel", str(part), "--out", str(out), *limits)
    finally:
        server.process.terminate()
        server.process.wait(60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(out.read_text())["score"]["positions"] == 1340


def test_sweep_of_the_cpu_engine(cpu_server: str, tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    arguments = ["--prefill", "64", "256", "--conc", "1", "2", "--reps", "2", "--dec-reps", "1", "--max-tokens", "24"]
    done = bare("sweep.py", "--url", cpu_server, *arguments, "--no-early-exit", "--out", str(out))
    assert done.returncode == 0, done.stderr
    raw = json.loads(out.read_text())["raw"]
    assert [(c["tokens"], len(c["runs"])) for c in raw["prefill"]] == [(64, 2), (256, 2)]
    assert [c["runs"][0]["tokens"] for c in raw["decode"]] == [24, 48]  # random weights hardly ever end an answer


def test_stream_rate_of_the_cpu_engine(cpu_server: str, tmp_path: Path) -> None:
    """Even, at least once in ten runs: other work on this machine can hold one stream up."""
    out = tmp_path / "rate.json"
    for _ in range(10):
        done = bare("stream_rate.py", "--url", cpu_server, "--max-tokens", "200", "--ignore-eos", "--out", str(out))
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(out.read_text())["raw"]["streams"][0]["tokens"] == 200
