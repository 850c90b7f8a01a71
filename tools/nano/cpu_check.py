"""The quantised nano checkpoint on the CPU engine: its distance from stock exllamav3, its speed, its answers over HTTP.

usage: python -m tools.nano.cpu_check --model CHECKPOINT --run DIR --out RESULTS.json [--url URL]

DIR is the --out of `run_all` (held-out.npz, stock-logits.npz, traces.npz, results.json). Without --url a server of it
is started on the CPU. RESULTS.json is a result in the form of bench/results; a bar that is missed does not end the run.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import os
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from . import heldout, stock
from .answers import contains
from .chatfmt import Message
from .record import bars, start

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


@torch.inference_mode()
def float32_logits(model: Any, ids: np.ndarray) -> torch.Tensor:
    """The same of transformers' own model with every weight decoded to float32."""
    rows: torch.Tensor = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0]
    return rows.float()


@contextlib.contextmanager
def kda_in_bfloat16(model: Any) -> Iterator[None]:
    """Round in `model` what stock exllamav3 keeps in bfloat16: input and output of KDA's convolution, KDA's output."""
    named = model.model.language_model.named_modules()
    ends = ("q_proj", "k_proj", "v_proj", "conv1d", "o_norm")
    hooks = [
        m.register_forward_hook(lambda _module, _given, out: out.bfloat16().float())
        for n, m in named
        if n.endswith(ends)
    ]
    yield
    for hook in hooks:
        hook.remove()


def routers(model: Any) -> list[Any]:
    return [m for n, m in model.named_modules() if n.endswith("mlp.gate")]


@contextlib.contextmanager
def picks_recorded(model: Any, into: list[torch.Tensor]) -> Iterator[None]:
    """Append what each router of transformers' `model` picks, call by call."""
    hooks = [m.register_forward_hook(lambda _module, _given, out: into.append(out[2])) for m in routers(model)]
    yield
    for hook in hooks:
        hook.remove()


@contextlib.contextmanager
def picks_replayed(model: Any, picks: list[torch.Tensor]) -> Iterator[None]:
    """Give each router the recorded picks instead of its own, weighted by its own scores."""
    left = iter(picks)

    def replay(module: Any, _given: Any, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        picked = next(left)
        scores = out[0].sigmoid().gather(1, picked)
        return out[0], scores / scores.sum(-1, keepdim=True) * module.routed_scaling_factor, picked

    hooks = [m.register_forward_hook(replay) for m in routers(model)]
    yield
    for hook in hooks:
        hook.remove()


def compare(reference: list[torch.Tensor], other: list[torch.Tensor], text: list[bool]) -> list[dict[str, Any]]:
    """For each document: whether it is running text, positions, mean and largest KL(reference || other), and how many
    positions have the same likeliest token.
    """
    rows = []
    for a, b, running in zip(reference, other, text, strict=True):
        p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
        kl, same = (p.exp() * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1)
        mean, largest = float(kl.mean()), float(kl.max())
        rows.append({"text": running, "positions": len(kl), "kl": mean, "kl_max": largest, "same": int(same.sum())})
    return rows


def distances(model: Any, model_dir: Path, run: Path) -> dict[str, Any]:
    """Stock, the CPU engine and float32 against each other, at every position stock's logits were kept for."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "oracle"))
    import hf_oracle

    saved = np.load(run / "stock-logits.npz")
    count = int(saved["documents"])
    documents = stock.documents(run / "held-out.npz")[:count]
    text = np.load(run / "held-out.npz")["text"][:count].tolist()
    theirs = list(torch.from_numpy(saved["logits"]).float().split([len(d) for d in documents]))
    width, exact = theirs[0].shape[1], hf_oracle.load(str(model_dir))[0]
    ours = [document_logits(model, d)[:, :width] for d in documents]
    picks: list[torch.Tensor] = []
    with picks_recorded(exact, picks):
        float32 = [float32_logits(exact, d)[:, :width] for d in documents]
    with kda_in_bfloat16(exact):
        rounded = [float32_logits(exact, d)[:, :width] for d in documents]
        with picks_replayed(exact, picks):
            unmoved = [float32_logits(exact, d)[:, :width] for d in documents]
    return {
        "stock_vs_cpu": compare(theirs, ours, text),
        "stock_vs_float32": compare(theirs, float32, text),
        "float32_vs_cpu": compare(float32, ours, text),
        "float32_vs_bfloat16_kda": compare(float32, rounded, text),
        "float32_vs_bfloat16_kda_same_picks": compare(float32, unmoved, text),
    }


@torch.inference_mode()
def step_times(model: Any, run: Path) -> list[float]:
    """Seconds of TIMED decode steps of one stream after CONTEXT tokens of held-out text."""
    ids = np.load(run / "held-out.npz")["ids"].astype(int).tolist()
    state = model.new_state()
    for at in range(0, CONTEXT, CHUNK):
        model.prefill(state, ids[at : at + CHUNK])
    times = []
    for token in ids[CONTEXT : CONTEXT + TIMED]:
        start = time.perf_counter()
        model.step([state], [token])
        times.append(time.perf_counter() - start)
    return times


def deflated(model_dir: Path) -> dict[str, int]:
    """Bytes of each file of the checkpoint as a wheel holds it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(model_dir.iterdir()):
            archive.write(path, path.name)
        return {i.filename: i.compress_size for i in archive.infolist()}


def picks_kept(traces: Path) -> float:
    """Share of a token's picks in a layer that the token before it had picked there too."""
    picks = np.load(traces)["picks"]
    same = (picks[1:, :, :, None] == picks[:-1, :, None, :]).any(-1)
    return float(same.mean())


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


def command(args: argparse.Namespace) -> str:
    """This call, with the run's folder as DIR."""
    return f"python -m tools.nano.cpu_check --model {args.model} --run DIR --out {args.out}"


def main() -> int:
    ap = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    ap.add_argument("--model", type=Path, required=True)
    ap.add_argument("--run", type=Path, required=True, help="--out of run_all")
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--url", default="", help="ask this server instead of starting one")
    ap.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = ap.parse_args()
    record = start(json.loads((args.run / "results.json").read_text()), command(args), args.threads)
    raw = record["raw"]

    def keep(**found: Any) -> None:
        raw.update(found)
        record["bars"] = bars(raw)
        args.out.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n")

    keep(deflated_bytes=deflated(args.model), picks_kept=picks_kept(args.run / "traces.npz"))
    model = load(args.model, args.threads)
    keep(cpu_step_s=step_times(model, args.run))
    keep(**distances(model, args.model, args.run))
    del model
    with contextlib.nullcontext(args.url) if args.url else server(args.model) as url:
        keep(cpu_questions=[ask_question(url, q, t) for t in (False, True) for q in heldout.questions()])
        keep(cpu_tools=ask_tools(url))
    for name, bar in record["bars"].items():
        verdict = {True: "held", False: "MISSED"}.get(bar.get("ok"), "")
        print(f"{name:28} {bar['value']:<12.5g} {bar.get('want', ''):10} {verdict}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
