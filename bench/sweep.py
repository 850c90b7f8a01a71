#!/usr/bin/env python3
r"""Prefill and decode speed of a server, by prompt length and number of streams. Standard library only.

    python3 bench/sweep.py --url http://127.0.0.1:30000 --card rtx-3090-24gb/glm-5.3-flash --template glm \
        --config "0.1.0 fast" --prefill 8192 32768 --conc 1 2 4 --reps 3 --dec-reps 2 --no-early-exit --out sweep.json

Prefill: a prompt of fresh random tokens, so that no prefix cache can help; tokens / time to the first token, the median
of --reps. Decode: --conc greedy answers at once, each to its natural end (at most --max-tokens); all tokens / wall time
from the first request to the last token, the median of --dec-reps. Without --no-early-exit a cell stops once two runs
agree within 2 %. Works with SGLang-shaped servers (/generate) and OpenAI-shaped ones (/v1/completions with token ids).

A cell that the server refuses, a prompt too long for its context say, is named and left out. Exit code 0: every cell
was measured; 2: not, or the server failed. What was measured is written all the same.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import platform
import random
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

AGREEMENT = 0.02
FALLBACK_VOCAB = 32000
PROGRESS_S = 10.0
QUESTIONS = (
    "Explain in a few paragraphs how a lighthouse lens works.",
    "Describe the water cycle to a child, step by step.",
    "Write a short story about a clockmaker and a storm.",
    "List ten household tools and say what each is for.",
    "Compare trains and ships for moving goods. Give reasons.",
    "Write instructions for baking bread without a machine.",
    "Summarise how a computer adds two numbers.",
    "Describe a walk through an old harbour town in autumn.",
)


def web_address(text: str) -> str:
    """A server's address: host:port alone means http, and the /v1 at the end of a client's base URL is not part of it.

    Raises ArgumentTypeError."""
    address = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(address)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise argparse.ArgumentTypeError(f"{text!r} is no address of a server; http://127.0.0.1:30000 is one")
    return address.rstrip("/").removesuffix("/v1")


def positive(text: str) -> int:
    """A whole number of at least 1. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def out_file(text: str) -> str:
    """A file that can be written, which is better known before the measurement. Raises ArgumentTypeError."""
    if os.path.isdir(text) or not os.path.isdir(os.path.dirname(text) or "."):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: its folder is missing, or it is one")
    return text


def reason(status: int, data: bytes) -> str:
    """An answer that is no success, on one line: its status, what it says, and what to do."""
    try:
        words = json.loads(data)
        words = words.get("error", words)
        words = words.get("message", words)
    except (ValueError, AttributeError):
        words = data.decode(errors="replace")
    key, path = "give its key with --api-key", "check --url and --model"
    hint = {301: path, 302: path, 307: path, 308: path, 401: key, 403: key, 404: path, 503: "try later"}.get(status)
    return f"{status}: {' '.join(str(words).split())[:300]}" + (f" ({hint})" if hint else "")


def trouble(url: str, error: Exception) -> str:
    """A connection that failed, on one line with what to do."""
    hint = "is the server running there?" if isinstance(error, ConnectionRefusedError) else ""
    hint = "--timeout waits longer" if isinstance(error, TimeoutError) else hint
    hint = "does it speak http, not https?" if "SSL" in str(error) else hint
    return f"{url}: {' '.join(str(error).split()) or type(error).__name__}" + (f" ({hint})" if hint else "")


class Failure(Exception):
    """The server could not be measured; the text says why."""


class Refused(Failure):
    """The server will not have this request, of a prompt that is too long for its context, say; others it may."""


@dataclass
class PrefillRun:
    """One prompt: tokens, seconds to the first token."""

    tokens: int
    first_token_s: float

    @property
    def rate(self) -> float:
        return self.tokens / self.first_token_s


@dataclass
class DecodeRun:
    """`streams` answers at once: all their tokens, seconds from the first request to the last token."""

    streams: int
    tokens: int
    wall_s: float
    first_token_s: float
    finished: int

    @property
    def rate(self) -> float:
        return self.tokens / self.wall_s


class Client:
    """Requests to one server; each call has its own connection, so calls may run in threads."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.url, self.timeout, self.model = args.url, args.timeout, args.model
        self.headers = {"Content-Type": "application/json"}
        if args.api_key:
            self.headers["Authorization"] = f"Bearer {args.api_key}"

    def open(
        self, method: str, path: str, body: Any = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "127.0.0.1", parts.port, timeout=self.timeout)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, parts.path.rstrip("/") + path, data, self.headers)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as e:
            connection.close()
            raise Failure(trouble(self.url, e)) from None

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`, or {} where the server has none."""
        connection, reply = self.open("GET", path)
        try:
            found = json.loads(reply.read()) if reply.status == 200 else {}
        except (ValueError, OSError, http.client.HTTPException):
            found = {}
        finally:
            connection.close()
        return found if isinstance(found, dict) else {}

    def events(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """The JSON events of a stream that comes to its end. Raises Failure; a missing route gives one with "404"."""
        connection, reply = self.open("POST", path, {**body, "stream": True})
        whole = False
        try:
            if reply.status != 200:
                kind = Refused if reply.status in (400, 413, 422) else Failure
                raise kind(f"{path} answered {reason(reply.status, reply.read(4000))}")
            while line := reply.readline():
                if not line.startswith(b"data:"):
                    continue
                if line[5:].strip() == b"[DONE]":
                    return
                event = event_of(path, line[5:])
                whole = whole or finish_of(event) != ""
                yield event
        except (OSError, http.client.HTTPException) as e:
            raise Failure(f"{path}: {trouble(self.url, e)}") from None
        finally:
            connection.close()
        if not whole:
            raise Failure(f"{path}: a stream broke off before its end: see the server's log")


def event_of(path: str, data: bytes) -> dict[str, Any]:
    """One event of a stream. Raises Failure if it is none, or tells of an error."""
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise Failure(f"{path}: this is no event of a stream: {data[:100].decode(errors='replace').strip()!r}")
    if error := event.get("error"):
        words = error.get("message", error) if isinstance(error, dict) else error
        raise Failure(f"{path}: the stream ended with an error: {' '.join(str(words).split())[:300]}")
    return event


def finish_of(event: dict[str, Any]) -> str:
    """Why the answer ended, where the event says so; "" where it goes on."""
    ends = [(event.get("meta_info") or {}).get("finish_reason")]
    ends += [choice.get("finish_reason") for choice in event.get("choices") or ()]
    return next((str(end) for end in ends if end), "")


class Prefill:
    """Times prompts of random tokens; finds out once which route takes token ids."""

    def __init__(self, client: Client, vocab: int, seed: int) -> None:
        self.client, self.vocab, self.rng = client, vocab, random.Random(seed)
        self.path = "/generate" if client.get("/get_model_info") or client.get("/server_info") else "/v1/completions"

    def run(self, tokens: int) -> PrefillRun:
        ids = [self.rng.randrange(self.vocab) for _ in range(tokens)]
        if self.path == "/generate":
            body: dict[str, Any] = {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 1, "ignore_eos": True, "temperature": 0},
            }
        else:
            body = {"model": self.client.model, "prompt": ids, "max_tokens": 1, "ignore_eos": True, "temperature": 0}
        started = time.perf_counter()
        first = None
        for event in self.client.events(self.path, body):
            texts = [event.get("text"), *(choice.get("text") for choice in event.get("choices") or ())]
            if any(texts) or finish_of(event) or (event.get("meta_info") or {}).get("completion_tokens"):
                first = first or time.perf_counter()  # an event before the first token is not counted
        if first is None:
            raise Failure(f"{self.path}: a prompt of {tokens} tokens got no answer")
        return PrefillRun(tokens, first - started)


def answer_body(client: Client, question: str, args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Route and request of one greedy answer: the server's chat template (glm), or the bare question (raw)."""
    body: dict[str, Any] = {
        "model": client.model,
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    if args.template == "raw":
        return "/v1/completions", {**body, "prompt": question}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": question}]}


@dataclass
class Answer:
    """What one stream brought; times are perf_counter seconds."""

    tokens: int = 0
    events: int = 0
    first: float = 0.0
    last: float = 0.0
    finish: str = ""


def take(client: Client, question: str, args: argparse.Namespace, out: Answer) -> None:
    path, body = answer_body(client, question, args)
    for event in client.events(path, body):
        now = time.perf_counter()
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if choice.get("text") or any(delta.get(k) for k in ("content", "reasoning_content", "tool_calls")):
                out.first, out.last, out.events = out.first or now, now, out.events + 1
            out.finish = choice.get("finish_reason") or out.finish
        if event.get("usage"):
            out.tokens = event["usage"].get("completion_tokens") or 0
    out.tokens = out.tokens or out.events
    if not out.tokens or not out.first:
        raise Failure(f"{path}: an answer had no tokens")


def decode(client: Client, streams: int, questions: Iterator[str], args: argparse.Namespace) -> DecodeRun:
    """`streams` answers at once. Raises the first stream's Failure."""
    answers = [Answer() for _ in range(streams)]
    failures: list[Failure] = []

    def work(out: Answer, question: str) -> None:
        try:
            take(client, question, args, out)
        except Failure as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(a, next(questions)), daemon=True) for a in answers]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.join(PROGRESS_S) or thread.is_alive():
            say(f"decode x{streams}: {sum(a.events for a in answers)} events so far")
    if failures:
        raise failures[0]
    wall = max(a.last for a in answers) - started
    finished = sum(a.finish != "length" for a in answers)
    return DecodeRun(streams, sum(a.tokens for a in answers), wall, min(a.first for a in answers) - started, finished)


def agree(rates: list[float]) -> bool:
    return len(rates) > 1 and max(rates[-2:]) / min(rates[-2:]) - 1 <= AGREEMENT


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def fill(record: dict[str, Any], kind: str, size: int, measure: Callable[[int], dict[str, Any]]) -> None:
    """One cell of the record; one that the server refuses is noted, and the others may still be measured."""
    say(f"{kind} {size}")
    try:
        record["raw"][kind].append(measure(size))
    except Refused as e:
        say(f"{kind} {size}: {e}")
        record.setdefault("refused", {})[f"{kind} {size}"] = str(e)


def prefill_cell(prefill: Prefill, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    runs: list[PrefillRun] = []
    for i in range(args.reps):
        runs.append(prefill.run(tokens))
        say(f"prefill {tokens}: {runs[-1].first_token_s:.3f} s, {runs[-1].rate:.1f} tok/s ({i + 1}/{args.reps})")
        if not args.no_early_exit and agree([r.rate for r in runs]):
            break
    return {"tokens": tokens, "tok_s": statistics.median(r.rate for r in runs), "runs": [asdict(r) for r in runs]}


def decode_cell(client: Client, streams: int, questions: Iterator[str], args: argparse.Namespace) -> dict[str, Any]:
    runs: list[DecodeRun] = []
    for i in range(args.dec_reps):
        runs.append(decode(client, streams, questions, args))
        speed = f"{runs[-1].tokens} tokens, {runs[-1].wall_s:.2f} s, {runs[-1].rate:.2f} tok/s"
        say(f"decode x{streams}: {speed} ({i + 1}/{args.dec_reps})")
        if not args.no_early_exit and agree([r.rate for r in runs]):
            break
    return {"streams": streams, "tok_s": statistics.median(r.rate for r in runs), "runs": [asdict(r) for r in runs]}


def sweep(args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Fill `record["raw"]` cell by cell. Raises Failure; what was measured before stays."""
    client = Client(args)
    info = client.get("/server_info")
    record["server"] = {k: info[k] for k in ("model_path", "version", "mode", "device", "vocab_size") if k in info}
    vocab = args.vocab or int(info.get("vocab_size") or FALLBACK_VOCAB)
    prefill = Prefill(client, vocab - vocab // 10, args.seed)  # the last ids are special tokens and padding
    say("warm-up")
    prefill.run(64)
    for tokens in args.prefill:
        fill(record, "prefill", tokens, lambda n: prefill_cell(prefill, n, args))
    questions = itertools.cycle(QUESTIONS)
    for streams in args.conc:
        fill(record, "decode", streams, lambda n: decode_cell(client, n, questions, args))


def machine(card: str) -> dict[str, Any]:
    """The card as it was told, and this host; the server may be elsewhere."""
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            cpu = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), cpu)
    except OSError:
        pass
    return {**({"card": card} if card else {}), "cpu": cpu, "cpus": os.cpu_count()}


def figures(raw: dict[str, Any]) -> dict[str, Any]:
    """The medians by name; they have no limit."""
    told = {"unit": "tokens/s", "says": "median, over HTTP"}
    found = {f"sweep.prefill_{c['tokens']}": c["tok_s"] for c in raw["prefill"]}
    found |= {f"sweep.decode_x{c['streams']}": c["tok_s"] for c in raw["decode"]}
    return {name: {"value": round(value, 3), **told} for name, value in found.items()}


def table(record: dict[str, Any]) -> str:
    lines = [f"{record['settings']['card']}  {record['settings']['config']}".strip()]
    for cell in record["raw"]["prefill"]:
        spread = ", ".join(f"{r['first_token_s']:.2f} s" for r in cell["runs"])
        lines.append(f"prefill {cell['tokens']:>7} tokens  {cell['tok_s']:>9.1f} tok/s   ({spread})")
    for cell in record["raw"]["decode"]:
        spread = ", ".join(f"{r['tokens']} tokens in {r['wall_s']:.2f} s" for r in cell["runs"])
        cut = sum(cell["streams"] - r["finished"] for r in cell["runs"])
        spread += f"; {cut} answer(s) cut at --max-tokens" if cut else ""
        lines.append(f"decode  {cell['streams']:>7} streams {cell['tok_s']:>9.2f} tok/s   ({spread})")
    lines += [f"{name}: not measured: {why}" for name, why in record.get("refused", {}).items()]
    return "\n".join(line for line in lines if line)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--url", type=web_address, default="http://127.0.0.1:30000", help="server (default: %(default)s)"
    )
    parser.add_argument("--card", default="", help="machine and model, for the record")
    parser.add_argument("--config", default="", help="version and mode, for the record")
    parser.add_argument("--template", choices=("glm", "raw"), default="glm", help="decode through chat, or bare text")
    parser.add_argument("--prefill", type=positive, nargs="*", default=[8192], help="prompt lengths in tokens")
    parser.add_argument("--conc", type=positive, nargs="*", default=[1], help="numbers of streams at once")
    parser.add_argument("--reps", type=positive, default=3, help="prompts a length (default: %(default)s)")
    parser.add_argument("--dec-reps", type=positive, default=2, help="rounds of streams (default: %(default)s)")
    parser.add_argument("--no-early-exit", action="store_true", help="do all repetitions even if two agree")
    parser.add_argument("--max-tokens", type=positive, default=2048, help="cap on an answer (default: %(default)s)")
    parser.add_argument(
        "--vocab", type=int, default=0, help="draw random tokens below this id (default: ask the server)"
    )
    parser.add_argument("--seed", type=int, default=None, help="seed of the random prompts (default: none)")
    parser.add_argument("--model", default="glm-5.3-flash", help="model name to send (default: %(default)s)")
    parser.add_argument("--api-key", default="", help="sent as a bearer token")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds without a byte (default: %(default)s)")
    parser.add_argument("--out", type=out_file, metavar="FILE", help="write the figures as JSON")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    settings = {k: v for k, v in vars(args).items() if k not in ("api_key", "out")}
    record: dict[str, Any] = {
        "what": "prefill and decode speed over HTTP",
        "machine": machine(args.card),
        "versions": {"python": platform.python_version()},
        "command": shlex.join(["python3", "bench/sweep.py", *argv]),
        "settings": settings,
        "raw": {"prefill": [], "decode": []},
        "bars": {},
    }
    code = 0
    try:
        sweep(args, record)
    except Failure as e:
        print(f"sweep: {e}", file=sys.stderr)
        record["failure"], code = str(e), 2
    except KeyboardInterrupt:
        print("sweep: stopped before the end", file=sys.stderr)
        record["failure"], code = "stopped before the end", 130
    code = code or (2 if "refused" in record else 0)
    record["bars"] = figures(record["raw"])
    if told := table(record):
        print(told)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as f:
            json.dump(record, f, indent=1)
            f.write("\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
