#!/usr/bin/env python3
"""What the HTTP server itself costs: tokens per second through SSE with an engine that costs nothing, and /health.

    python3 bench/server_overhead.py                      # starts `glm53 serve --scripted` on one core by itself
    python3 bench/server_overhead.py --url http://host:30000

Standard library only. The server's engine must answer at once (a script with "rate": null). Bars: 20,000 tokens/s over
8 streams, 99th percentile of /health below 20 ms. Exit code 0: both held; 1: not; 2: the server failed.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.metadata
import json
import multiprocessing
import multiprocessing.synchronize
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

BAR_TOKENS_PER_S = 20_000
BAR_HEALTH_P99_MS = 20.0
PROBE_S = 0.005
WORDS = ["The ", "light", "house ", "keep", "er ", "mends ", "a ", "clock", ", ", "slow", "ly.", "\n"]


class Failed(Exception):
    """The measurement could not be made; the text says why."""


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# ---- the server ----


def write_script(path: Path, tokens: int) -> None:
    """One answer of `tokens` tokens in the content channel, without a pause."""
    pieces = ["</think>", *(WORDS[i % len(WORDS)] for i in range(tokens - 1))]
    path.write_text(json.dumps({"pieces": pieces, "end": "user", "rate": None}) + "\n", encoding="utf-8")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def own_server(tokens: int, cpu: int) -> Iterator[str]:
    """A scripted server pinned to one core; yields its URL."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "answers.jsonl"
        write_script(script, tokens)
        port = free_port()
        command = [sys.executable, "-m", "glm53", "serve", "--scripted", str(script), "--port", str(port)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            os.sched_setaffinity(process.pid, {cpu})
            if others := os.sched_getaffinity(0) - {cpu}:
                os.sched_setaffinity(0, others)  # the clients must not compete with the server for its core
            wait_ready(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)


def wait_ready(url: str, process: subprocess.Popen[bytes] | None) -> None:
    for _ in range(600):
        if process is not None and process.poll() is not None:
            raise Failed(f"the server exited with code {process.returncode}; try `glm53 serve --scripted FILE` by hand")
        try:
            if get(url, "/health") == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise Failed(f"{url} did not become ready within 60 s")


def connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=120)


def get(url: str, path: str) -> int:
    connection = connect(url)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        reply.read()
        return reply.status
    finally:
        connection.close()


# ---- the clients ----


def run_stream(url: str, tokens: int, out: dict[str, Any]) -> None:
    """Read one stream to its end; count bytes and events, and take the usage from its last chunk."""
    body = {
        "messages": [{"role": "user", "content": "go"}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = connect(url)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise Failed(f"the server answered {reply.status}: {reply.read(200)!r}")
        tail, events, size = b"", 0, 0
        while block := reply.read1(1 << 16):
            events += block.count(b"data: ")
            size += len(block)
            tail = (tail + block)[-4096:]
        usage = next(json.loads(x[6:])["usage"] for x in tail.split(b"\n\n")[::-1] if b'"completion_tokens"' in x)
        out.update(tokens=usage["completion_tokens"], events=events, bytes=size)
    except (OSError, http.client.HTTPException, StopIteration, Failed) as e:
        out["error"] = str(e) or type(e).__name__
    finally:
        connection.close()


def probe_health(url: str, stop: multiprocessing.synchronize.Event, results: Any) -> None:
    """In a process of its own, so that reading the streams does not slow the clock: latencies of /health in ms."""
    connection = connect(url)
    latencies = []
    while not stop.is_set():
        started = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        latencies.append(1000 * (time.perf_counter() - started))
        time.sleep(PROBE_S)
    results.put(latencies)


def measure(url: str, streams: int, tokens: int) -> dict[str, Any]:
    """All streams at once with /health probed meanwhile. Raises Failed."""
    stop, results = multiprocessing.Event(), multiprocessing.Queue()
    prober = multiprocessing.Process(target=probe_health, args=(url, stop, results), daemon=True)
    prober.start()
    time.sleep(0.2)
    outs: list[dict[str, Any]] = [{} for _ in range(streams)]
    threads = [threading.Thread(target=run_stream, args=(url, tokens, out)) for out in outs]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    stop.set()
    latencies = results.get(timeout=10)
    prober.join(5)
    if errors := [o["error"] for o in outs if "error" in o]:
        raise Failed(errors[0])
    total = sum(o["tokens"] for o in outs)
    return {
        "streams": streams,
        "tokens": total,
        "seconds": round(seconds, 4),
        "tokens_per_s": round(total / seconds, 1),
        "events_per_s": round(sum(o["events"] for o in outs) / seconds, 1),
        "mbyte_per_s": round(sum(o["bytes"] for o in outs) / seconds / 1e6, 2),
        "health_probes": len(latencies),
        "health_p50_ms": round(percentile(latencies, 0.5), 2),
        "health_p99_ms": round(percentile(latencies, 0.99), 2),
        "health_max_ms": round(max(latencies), 2),
    }


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--url", help="a running server; without it one is started")
    parser.add_argument("--streams", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=20_000, help="per stream (default: %(default)s)")
    parser.add_argument("--cpu", type=int, default=0, help="core for the server that is started (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE (- = standard output, no table)")
    parser.add_argument("--out", metavar="FILE", help="write a result in the form of bench/results to FILE")
    return parser.parse_args(argv)


def result(argv: list[str], args: argparse.Namespace, figures: dict[str, Any]) -> dict[str, Any]:
    """The figures in the form that bench/results keeps and bench/report.py reads."""
    info = Path("/proc/cpuinfo")
    models = [x for x in info.read_text().splitlines() if x.startswith("model name")] if info.exists() else []
    rate, p99 = figures["tokens_per_s"], figures["health_p99_ms"]
    return {
        "what": "HTTP server: tokens/s through SSE with an engine that costs nothing, and /health meanwhile",
        "machine": {"cpu": models[0].partition(":")[2].strip() if models else platform.machine(), "cpus": len(models)},
        "versions": {"python": platform.python_version(), "glm53": importlib.metadata.version("glm53")},
        "command": " ".join(["python", "bench/server_overhead.py", *argv]),
        "settings": {"streams": args.streams, "tokens_per_stream": args.tokens, "url": args.url or "its own server"},
        "raw": figures,
        "bars": {
            "server.tokens_per_s": {
                "value": rate,
                "want": f">= {BAR_TOKENS_PER_S}",
                "ok": rate >= BAR_TOKENS_PER_S,
            },
            "server.health_p99_ms": {
                "value": p99,
                "want": f"<= {BAR_HEALTH_P99_MS:g}",
                "ok": p99 <= BAR_HEALTH_P99_MS,
            },
        },
    }


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    try:
        if args.url:
            figures = measure(args.url, args.streams, args.tokens)
        else:
            with own_server(args.tokens, args.cpu) as url:
                figures = measure(url, args.streams, args.tokens)
    except Failed as e:
        print(f"server_overhead: {e}", file=sys.stderr)
        return 2
    fast = figures["tokens_per_s"] >= BAR_TOKENS_PER_S
    prompt = figures["health_p99_ms"] < BAR_HEALTH_P99_MS
    figures["passed"] = fast and prompt
    text = json.dumps(figures, indent=2)
    if args.out:
        Path(args.out).write_text(json.dumps(result(argv, args, figures), indent=1) + "\n", encoding="utf-8")
    if args.json == "-":
        print(text)
    else:
        if args.json:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
        print(f"tokens/s through SSE  {figures['tokens_per_s']:>10,.0f}   bar {BAR_TOKENS_PER_S:,}   {_word(fast)}")
        p99 = f"{figures['health_p99_ms']:.1f} ms"
        print(f"/health p99           {p99:>10}   bar {BAR_HEALTH_P99_MS:g} ms   {_word(prompt)}")
        print(json.dumps(figures))
    return 0 if figures["passed"] else 1


def _word(good: bool) -> str:
    return "held" if good else "MISSED"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
