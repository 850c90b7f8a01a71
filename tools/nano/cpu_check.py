"""The quantised nano checkpoint on the CPU engine: its distance from stock exllamav3, its speed, its answers over HTTP.

usage: python -m tools.nano.cpu_check --model CHECKPOINT --run DIR --out RESULTS.json [--url URL]

DIR is the --out of `run_all` (held-out.npz, stock-logits.npz, results.json). Without --url a server of it is
started on the CPU. RESULTS.json is run_all's record with the bars that need the CPU engine added.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import platform
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from . import heldout, stock
from .answers import contains
from .chatfmt import Message

CONTEXT, TIMED, CHUNK = 512, 48, 128


def load(model_dir: Path, threads: int) -> Any:
    from glm53.checkpoint import Checkpoint
    from glm53.engine.cpu.model import CpuModel

    with Checkpoint.open(model_dir) as checkpoint:
        return CpuModel(checkpoint, threads, lambda stage, fraction: None)


@torch.inference_mode()
def document_logits(model: Any, ids: np.ndarray) -> torch.Tensor:
    state, rows = model.new_state(), []
    for at in range(0, len(ids), CHUNK):
        rows.append(model.logits(model.prefill(state, ids[at : at + CHUNK].tolist())).float())
    return torch.cat(rows)


def against_stock(model: Any, run: Path) -> dict[str, Any]:
    """KL(stock || CPU engine) and top-1 agreement at every position stock's logits were kept for."""
    saved = np.load(run / "stock-logits.npz")
    documents = stock.documents(run / "held-out.npz")[: int(saved["documents"])]
    theirs = torch.from_numpy(saved["logits"]).float()
    ours = torch.cat([document_logits(model, d) for d in documents])[:, : theirs.shape[1]]
    p, q = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    return {
        "positions": len(kl),
        "kl_mean": float(kl.mean()),
        "kl_p50": float(kl.median()),
        "kl_p99": float(kl.quantile(0.99)),
        "top1": float((p.argmax(-1) == q.argmax(-1)).double().mean()),
    }


@torch.inference_mode()
def decode_speed(model: Any, run: Path) -> float:
    """Tokens a second of one stream after CONTEXT tokens of held-out text: the median of TIMED steps."""
    ids = np.load(run / "held-out.npz")["ids"].astype(int).tolist()
    state = model.new_state()
    for at in range(0, CONTEXT, CHUNK):
        model.prefill(state, ids[at : at + CHUNK])
    times = []
    for token in ids[CONTEXT : CONTEXT + TIMED]:
        start = time.perf_counter()
        model.step([state], [token])
        times.append(time.perf_counter() - start)
    return 1 / median(times[8:])


def wheel_mb(model_dir: Path) -> float:
    """Size of the checkpoint as a wheel holds it: deflated."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(model_dir.iterdir()):
            archive.write(path, path.name)
    return len(data.getvalue()) / 1e6


@contextmanager
def server(model_dir: Path) -> Iterator[str]:
    """A `glm53 serve` process on the CPU, ready."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "glm53",
        "serve",
        "--model-dir",
        str(model_dir),
        "--device",
        "cpu",
        "--port",
        str(port),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 180
        while not ready(url):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start: {' '.join(command)}")
            time.sleep(0.3)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def ready(url: str) -> bool:
    try:
        return call(url, "GET", "/health", None)[0] == 200
    except OSError:
        return False


def call(url: str, method: str, path: str, body: Any) -> tuple[int, Any]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=300)
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def chat(url: str, messages: list[Message], tools: list[dict[str, Any]], thinking: bool) -> dict[str, Any]:
    """The assistant's message, greedy."""
    body: dict[str, Any] = {
        "messages": messages,
        "temperature": 0,
        "max_tokens": stock.MAX_NEW,
        "chat_template_kwargs": {"enable_thinking": thinking},
    }
    if tools:
        body["tools"] = [{"type": "function", "function": t} for t in tools]
    status, reply = call(url, "POST", "/v1/chat/completions", body)
    if status != 200:
        raise RuntimeError(f"chat answered {status}: {reply}")
    return dict(reply["choices"][0]["message"])


def calls_of(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = [c["function"] for c in message.get("tool_calls") or ()]
    return [(f["name"], json.loads(f["arguments"])) for f in found]


def ask_question(url: str, question: heldout.Question, thinking: bool) -> dict[str, Any]:
    """One fixed question over HTTP; a tool question goes on to the answer that uses the tool's result."""
    messages: list[Message] = [{"role": "user", "content": question.text}]
    row: dict[str, Any] = {"question": question.text, "kind": question.kind, "thinking": thinking}
    case = question.case
    first = chat(url, messages, case.tools if case else [], thinking)
    row["reply"] = first.get("content")
    if case is None:
        return {**row, "right": contains(first.get("content") or "", question.wanted)}
    row["calls"] = calls_of(first)
    right = row["calls"] == [(c["name"], c["arguments"]) for c in case.calls]
    messages.append({"role": "assistant", "content": first.get("content"), "tool_calls": first.get("tool_calls")})
    sent = first.get("tool_calls") or []
    messages += [
        {"role": "tool", "tool_call_id": c["id"], "content": r} for c, r in zip(sent, case.results, strict=False)
    ]
    if sent:
        row["answer"] = chat(url, messages, case.tools, thinking).get("content")
    return {**row, "right": right and contains(row.get("answer") or "", question.wanted)}


def ask_tools(url: str) -> list[dict[str, Any]]:
    """The 100 tool requests over HTTP, without thinking."""
    out = []
    for case, value in heldout.tool_requests():
        got = calls_of(chat(url, [{"role": "user", "content": case.user}], case.tools, False))
        wanted = [(c["name"], c["arguments"]) for c in case.calls]
        out.append({"request": case.user, "new_value": value, "calls": got, "right": got == wanted})
    return out


def main() -> int:
    ap = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    ap.add_argument("--model", type=Path, required=True)
    ap.add_argument("--run", type=Path, required=True, help="--out of run_all")
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--url", default="", help="ask this server instead of starting one")
    ap.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = ap.parse_args()
    record = json.loads((args.run / "results.json").read_text())
    raw, bars = record["raw"], record["bars"]
    raw["cpu_machine"] = f"{platform.machine()}, {args.threads} threads"
    model = load(args.model, args.threads)
    raw["stock_vs_cpu"] = against_stock(model, args.run)
    bars["nano.kl_stock_vs_cpu"] = {k: raw["stock_vs_cpu"][k] for k in ("kl_mean", "top1")}
    bars["nano.cpu_tok_s"] = decode_speed(model, args.run)
    bars["nano.wheel_mb"] = wheel_mb(args.model)
    del model
    print(json.dumps({"stock_vs_cpu": raw["stock_vs_cpu"], "tok_s": bars["nano.cpu_tok_s"]}), flush=True)

    def keep() -> None:
        args.out.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n")

    def ask(url: str) -> None:
        keep()
        raw["cpu_questions"] = [ask_question(url, q, t) for t in (False, True) for q in heldout.questions()]
        keep()
        raw["cpu_tools"] = ask_tools(url)

    if args.url:
        ask(args.url)
    else:
        with server(args.model) as url:
            ask(url)
    counts = {t: sum(q["right"] for q in raw["cpu_questions"] if q["thinking"] is t) for t in (True, False)}
    bars["nano.questions"] = {
        "thinking on": counts[True],
        "thinking off": counts[False],
        "of": len(heldout.questions()),
    }
    bars["nano.tools"] = sum(t["right"] for t in raw["cpu_tools"])
    keep()
    print(json.dumps(bars, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
