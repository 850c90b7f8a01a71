#!/usr/bin/env python3
"""Does text arrive at the rate it is generated? Standard library only; works against any OpenAI-compatible server.

    python3 bench/stream_rate.py --url http://127.0.0.1:30000

Each stream is judged by two numbers. "bend" is the largest distance between the share of text that has arrived and the
share of time that has passed: 0 for a steady stream, 0.5 for a server that delivers at half speed and flushes the other
half at the end. "last burst" is the share of text in the last 5 % of the time. Against a server whose engine makes a
known number of tokens a second, --rate wants more: a median gap within 10 % of one token's time, and none above 50 ms.

    glm53 serve --scripted bench/steady.jsonl
    python3 bench/stream_rate.py --streams 4 --rate 200 --max-tokens 2000

--json writes the figures in the form of bench/results, with each stream's arrival curve. Exit code 0: even; 1: not;
2: no verdict (the server failed, a stream broke off before its end, or the answer was too short).
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import platform
import shlex
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

PROMPT = "Write a long, detailed story about a lighthouse keeper who repairs clocks."
MAX_BEND = 0.25
MAX_LAST_BURST = 0.2
MAX_GAP_OFF = 0.1  # share of one token's time
MAX_GAP_MS = 50.0
FEWEST_EVENTS = 60  # so that the last 5 % of the time are several of them
CURVE = 100
PROGRESS_S = 10.0


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


class NoVerdict(Exception):
    """The measurement could not be made; the text says why."""


@dataclass
class Arrivals:
    """What one stream delivered: (seconds since the request, characters) for each event with text in it."""

    events: list[tuple[float, int]] = field(default_factory=list)
    completion_tokens: int = 0
    finish: str = ""
    whole: bool = False
    """Its end has come: [DONE] or a finish reason."""


@dataclass
class Verdict:
    """Figures of one stream; times in seconds, gaps in milliseconds."""

    tokens: int
    events: int
    first_text_s: float
    seconds: float
    tokens_per_s: float
    gap_median_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    bend: float
    last_burst: float
    even: bool
    over: list[str]
    """Each limit that is not kept, with the value."""
    finish: str
    curve: list[tuple[float, float]]
    """(share of the time, share of the text), about CURVE points."""


def read_stream(args: argparse.Namespace, out: Arrivals) -> None:
    """Run one streamed chat request and note when text arrives. Raises NoVerdict."""
    url = urlsplit(args.url)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname or "127.0.0.1", url.port, timeout=args.timeout)
    headers = {"Content-Type": "application/json"}
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    started = time.perf_counter()
    try:
        connection.request("POST", f"{url.path.rstrip('/')}/v1/chat/completions", request_body(args), headers)
        reply = connection.getresponse()
        if reply.status != 200:
            raise NoVerdict(f"the server answered {reason(reply.status, reply.read(4000))}")
        while line := reply.readline():
            if line.startswith(b"data:") and not note(line[5:], time.perf_counter() - started, out):
                break
    except (OSError, http.client.HTTPException) as e:
        raise NoVerdict(trouble(args.url, e)) from None
    finally:
        connection.close()
    if not out.whole:
        raise NoVerdict(f"a stream broke off after {len(out.events)} events, before its end: see the server's log")


def request_body(args: argparse.Namespace) -> bytes:
    body: dict[str, Any] = {
        "model": args.model,
        "messages": [{"role": "user", "content": args.prompt}],
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if args.ignore_eos:
        body["ignore_eos"] = True
    return json.dumps(body).encode()


def note(data: bytes, now: float, out: Arrivals) -> bool:
    """Take one event in; False at the end of the stream. Raises NoVerdict."""
    if data.strip() == b"[DONE]":
        out.whole = True
        return False
    try:
        event = json.loads(data)
        if event.get("error"):
            error = event["error"]
            words = error.get("message", error) if isinstance(error, dict) else error
            raise NoVerdict(f"the stream ended with an error: {' '.join(str(words).split())[:300]}")
        if event.get("usage"):
            out.completion_tokens = event["usage"].get("completion_tokens") or 0
        for choice in event.get("choices") or ():
            size = size_of(choice.get("delta") or {})
            if size:
                out.events.append((now, size))
            out.finish = choice.get("finish_reason") or out.finish
    except (ValueError, AttributeError, TypeError):
        words = data[:100].decode(errors="replace").strip()
        raise NoVerdict(f"the server sent what is no event of a chat: {words!r}") from None
    out.whole = out.whole or bool(out.finish)
    return True


def size_of(delta: dict[str, Any]) -> int:
    """Characters of text in a part of an answer."""
    calls = ((call.get("function") or {}).get("arguments") for call in delta.get("tool_calls") or ())
    return sum(len(text or "") for text in (delta.get("reasoning_content"), delta.get("content"), *calls))


def judge(arrivals: Arrivals, rate: float = 0.0) -> Verdict:
    """Figures and verdict of one stream; `rate`: tokens/s its engine makes, 0 = not known.

    Raises NoVerdict if it is too short."""
    events = arrivals.events
    if len(events) < FEWEST_EVENTS:
        more = "try --ignore-eos" if arrivals.finish != "length" else "a larger --max-tokens gives more"
        raise NoVerdict(f"only {len(events)} events with text; {FEWEST_EVENTS} are needed ({more})")
    first, last = events[0][0], events[-1][0]
    span = max(last - first, 1e-9)
    total = sum(n for _, n in events)
    gaps = [1000 * (b[0] - a[0]) for a, b in itertools.pairwise(events)]
    tokens = arrivals.completion_tokens or len(events)
    bend = largest_bend(events, first, span, total)
    last_burst = sum(n for t, n in events if t > first + 0.95 * span) / total
    off = gap_off(statistics.median(gaps), rate) if rate else 0.0
    checks = [("bend", bend, MAX_BEND), ("last burst", last_burst, MAX_LAST_BURST)]
    checks += [("median gap off by", off, MAX_GAP_OFF), ("largest gap, ms", max(gaps), MAX_GAP_MS)] if rate else []
    return Verdict(
        tokens=tokens,
        events=len(events),
        first_text_s=round(first, 4),
        seconds=round(span, 4),
        tokens_per_s=round((tokens - 1) / span, 2),
        gap_median_ms=round(statistics.median(gaps), 3),
        gap_p99_ms=round(sorted(gaps)[int(0.99 * (len(gaps) - 1))], 3),
        gap_max_ms=round(max(gaps), 3),
        bend=round(bend, 4),
        last_burst=round(last_burst, 4),
        even=all(value <= limit for _, value, limit in checks),
        over=[f"{name} {value:.3g} > {limit:g}" for name, value, limit in checks if value > limit],
        finish=arrivals.finish,
        curve=curve_of(events, first, span, total),
    )


def gap_off(median_ms: float, rate: float) -> float:
    """How far the median gap is from one token's time, as a share of that."""
    return abs(median_ms * rate / 1000 - 1)


def curve_of(events: list[tuple[float, int]], first: float, span: float, total: int) -> list[tuple[float, float]]:
    """The arrival curve, thinned; its last point stays."""
    sums = itertools.accumulate(size for _, size in events)
    points = [(round((t - first) / span, 4), round(n / total, 4)) for (t, _), n in zip(events, sums, strict=True)]
    return [*points[: -1 : max(1, len(points) // CURVE)], points[-1]]


def largest_bend(events: list[tuple[float, int]], first: float, span: float, total: int) -> float:
    """Largest distance of the arrival curve from a straight line, looked at just before and just after each event."""
    bend, arrived = 0.0, 0
    for when, size in events:
        line = (when - first) / span
        before, arrived = arrived, arrived + size
        bend = max(bend, abs(arrived / total - line), abs(before / total - line))
    return bend


def measure(args: argparse.Namespace) -> list[Verdict]:
    """All streams at once. Raises the first stream's NoVerdict, if any."""
    arrivals = [Arrivals() for _ in range(args.streams)]
    failures: list[NoVerdict] = []

    def work(out: Arrivals) -> None:
        try:
            read_stream(args, out)
        except NoVerdict as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(a,), daemon=True) for a in arrivals]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.join(PROGRESS_S) or thread.is_alive():
            events, passed = sum(len(a.events) for a in arrivals), time.perf_counter() - started
            print(f"{passed:.0f} s: {events} events of {len(arrivals)} stream(s)", file=sys.stderr, flush=True)
    if failures:
        raise failures[0]
    return [judge(a, args.rate) for a in arrivals]


def table(verdicts: list[Verdict]) -> str:
    """The figures for people."""
    lines = ["stream  tokens  first text  tokens/s  gap median / p99 / max ms   bend  last burst  verdict"]
    for i, v in enumerate(verdicts):
        gaps = f"{v.gap_median_ms:.1f} / {v.gap_p99_ms:.1f} / {v.gap_max_ms:.1f}"
        word = "even" if v.even else f"NOT EVEN ({', '.join(v.over)})"
        lines.append(
            f"{i:>6}  {v.tokens:>6}  {v.first_text_s:>8.3f} s  {v.tokens_per_s:>8.2f}  {gaps:>25}  "
            f"{v.bend:>5.3f}  {v.last_burst:>9.1%}  {word}"
        )
    total = sum(v.tokens_per_s for v in verdicts)
    lines.append(f"{len(verdicts)} stream(s), {total:.2f} tokens/s together")
    return "\n".join(lines)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--url", type=web_address, default="http://127.0.0.1:30000", help="server (default: %(default)s)"
    )
    parser.add_argument("--model", default="glm-5.3-flash", help="model name to send (default: %(default)s)")
    parser.add_argument("--prompt", default=PROMPT, help="what to ask")
    parser.add_argument("--max-tokens", type=positive, default=400, help="tokens per stream (default: %(default)s)")
    parser.add_argument("--streams", type=positive, default=1, help="streams at the same time (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.0, help="tokens/s that the engine makes of each stream")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    parser.add_argument("--ignore-eos", action="store_true", help="ask for all of --max-tokens")
    parser.add_argument("--api-key", default="", help="sent as a bearer token")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds without a byte (default: %(default)s)")
    parser.add_argument(
        "--json", "--out", type=out_file, metavar="FILE", help="write the figures there (- = standard output, no table)"
    )
    return parser.parse_args(argv)


def machine() -> dict[str, Any]:
    """This host; the server may be elsewhere."""
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            cpu = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), cpu)
    except OSError:
        pass
    return {"cpu": cpu, "cpus": os.cpu_count()}


def server_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the server says of itself at /server_info; {} where it says nothing."""
    url = urlsplit(args.url)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname or "127.0.0.1", url.port, timeout=min(args.timeout, 30))
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    try:
        connection.request("GET", f"{url.path.rstrip('/')}/server_info", headers=headers)
        reply = connection.getresponse()
        told = json.loads(reply.read()) if reply.status == 200 else {}
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    finally:
        connection.close()
    return {k: told[k] for k in ("version", "mode", "device") if k in told} if isinstance(told, dict) else {}


def record_of(args: argparse.Namespace, argv: list[str], verdicts: list[Verdict]) -> dict[str, Any]:
    """The figures with their origin."""
    return {
        "what": "delivery of streams: does text arrive at the rate it is generated",
        "machine": machine(),
        "server": (server := server_of(args)),
        "versions": {
            "python": platform.python_version(),
            **({"glm53": server["version"]} if "version" in server else {}),
        },
        "command": shlex.join(["python3", "bench/stream_rate.py", *argv]),
        "settings": {k: v for k, v in vars(args).items() if k not in ("api_key", "json")},
        "raw": {"url": args.url, "even": all(v.even for v in verdicts), "streams": [asdict(v) for v in verdicts]},
        "bars": bars_of(args.rate, verdicts),
    }


def bars_of(rate: float, verdicts: list[Verdict]) -> dict[str, Any]:
    """The worst stream against each limit."""
    bars: dict[str, Any] = {}

    def bar(name: str, value: float, limit: float, **more: str) -> None:
        bars[f"stream.{name}"] = {"value": value, "want": f"<= {limit:g}", "ok": value <= limit, **more}

    bar("bend", max(v.bend for v in verdicts), MAX_BEND)
    bar("last_burst", max(v.last_burst for v in verdicts), MAX_LAST_BURST)
    if rate:
        off = max(gap_off(v.gap_median_ms, rate) for v in verdicts)
        says = f"{len(verdicts)} streams of an engine that makes {rate:g} tokens/s of each: "
        bar("gap_off", round(off, 4), MAX_GAP_OFF, says=says + "median gap, share it is off one token's time")
        bar("gap_max_ms", max(v.gap_max_ms for v in verdicts), MAX_GAP_MS, says=says + "largest gap", unit="ms")
    return bars


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    try:
        verdicts = measure(args)
    except NoVerdict as e:
        print(f"stream_rate: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stream_rate: stopped before the end: nothing was measured", file=sys.stderr)
        return 130
    even = all(v.even for v in verdicts)
    figures = json.dumps(record_of(args, argv, verdicts), indent=1)
    if args.json == "-":
        print(figures)
    else:
        print(table(verdicts))
        if args.json:
            with open(args.json, "w", encoding="utf-8") as f:
                f.write(figures + "\n")
    return 0 if even else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
