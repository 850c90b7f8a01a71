#!/usr/bin/env python3
"""Tokens per second of decoding, through any engine in this process or through a server; one JSON line.

    python bench/decode.py --device cpu --model-dir CHECKPOINT [--streams 1] [--tokens 128] [options of glm53 serve]
    python bench/decode.py --url http://127.0.0.1:30000

Each of --runs answers comes after --settle that are not counted. A stream's prompt is --prompt random tokens, its
answer exactly --tokens; sampling is at --temperature with a seed per stream. The rate is all tokens of all streams but
each one's first, over the time from the first token of any to the last of all; `raw.steps_tok_s` is that of the steps
alone that all streams take part in, without the time in which another's prompt is read. With an engine that has an
expert cache, `raw.hit_rate` samples its hit rate about once a second, from the first answer on, so that warming up can
be seen.
Exit code 0: measured; 2: not (one line says why).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from common import command, emit, machine, say, steps_rate, versions

POLL_S = 1.0


class Failed(Exception):
    """Nothing was measured; the text says why."""


class Source(Protocol):
    """What decodes: an engine here, or a server."""

    what: dict[str, Any]
    vocab: int

    def answers(self, prompts: list[list[int]], seeds: list[int], count: Counter) -> list[list[float]]:
        """Times at which each stream's tokens arrived. Raises Failed."""
        ...

    def stats(self) -> dict[str, Any]:
        """The engine's counters."""
        ...

    def close(self) -> None: ...


class Counter:
    """Tokens that arrived, of all streams."""

    def __init__(self) -> None:
        self.tokens, self._lock = 0, threading.Lock()

    def add(self, tokens: int) -> None:
        with self._lock:
            self.tokens += tokens


class InProcess:
    """An engine loaded here, as `glm53 serve` would load it with the same options."""

    def __init__(self, args: argparse.Namespace, options: list[str]) -> None:
        from glm53.cli.common import add_settings, settings_from
        from glm53.cli.serve import engine_loader
        from glm53.errors import Glm53Error

        parser = argparse.ArgumentParser(prog="decode.py")
        add_settings(parser, "model", "engine", "expert cache", "CPU tier")
        try:
            settings = settings_from(parser.parse_args(options))
            self.engine = engine_loader(settings, args.device)(lambda stage, fraction: None)
        except (Glm53Error, OSError) as e:
            raise Failed(str(e)) from None
        info = self.engine.info
        self.what = {"engine": info.name, "mode": info.mode, "device": info.device, "model": Path(info.model_path).name}
        self.args, self.vocab = args, info.vocab_size

    def answers(self, prompts: list[list[int]], seeds: list[int], count: Counter) -> list[list[float]]:
        return asyncio.run(self._all(prompts, seeds, count))

    async def _all(self, prompts: list[list[int]], seeds: list[int], count: Counter) -> list[list[float]]:
        return list(await asyncio.gather(*(self._one(p, s, count) for p, s in zip(prompts, seeds, strict=True))))

    async def _one(self, prompt: list[int], seed: int, count: Counter) -> list[float]:
        from glm53.engine.protocol import GenerationRequest, SamplingParams

        sampling = SamplingParams(temperature=self.args.temperature, seed=seed)
        request = GenerationRequest(f"decode-{seed}", prompt, self.args.tokens, sampling)
        times: list[float] = []
        async for delta in self.engine.submit(request):
            times += [time.perf_counter()] * len(delta.tokens)
            count.add(len(delta.tokens))
            if delta.finish and delta.finish.reason == "error":
                raise Failed(f"the engine says: {delta.finish.error}")
        return times

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def close(self) -> None:
        self.engine.close()


class OverUrl:
    """A server that takes token ids at /v1/completions."""

    def __init__(self, args: argparse.Namespace) -> None:
        import sweep

        self.args, self.failure = args, sweep.Failure
        args.timeout, args.api_key = 600.0, args.api_key
        self.client = sweep.Client(args)
        info = self.client.get("/server_info") if self._answers() else {}
        self.what = {"url": args.url, **{k: info[k] for k in ("version", "mode", "device") if k in info}}
        self.vocab = args.vocab or int(info.get("vocab_size") or sweep.FALLBACK_VOCAB)

    def _answers(self) -> bool:
        try:
            self.client.get("/health")
        except self.failure as e:
            raise Failed(str(e)) from None
        return True

    def answers(self, prompts: list[list[int]], seeds: list[int], count: Counter) -> list[list[float]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda p, s: self._one(p, s, count), prompts, seeds))

    def _one(self, prompt: list[int], seed: int, count: Counter) -> list[float]:
        """One event may bring several tokens, or half a character none: the usage at the end has the true number."""
        body = {"model": self.args.model, "prompt": prompt, "max_tokens": self.args.tokens, "seed": seed,
                "temperature": self.args.temperature, "ignore_eos": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        events: list[float] = []
        tokens = 0
        try:
            for event in self.client.events("/v1/completions", body):
                if any(c.get("text") for c in event.get("choices", ())):
                    events.append(time.perf_counter())
                    count.add(1)
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        except self.failure as e:
            raise Failed(str(e)) from None
        if not events:
            raise Failed("an answer had no text")
        return [events[min(i * len(events) // tokens, len(events) - 1)] for i in range(tokens)] if tokens else events

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.args.url}/stats", timeout=10) as reply:
            engine = json.loads(reply.read()).get("engine")
        return engine if isinstance(engine, dict) else {}

    def close(self) -> None:
        pass


def hits_of(stats: dict[str, Any]) -> tuple[int, int] | None:
    """Hits and distinct picks so far, where there is an expert cache."""
    cache = stats.get("expert_cache")
    if not isinstance(cache, dict) or "hits" not in cache or "misses" not in cache:
        return None
    return int(cache["hits"]), int(cache["hits"]) + int(cache["misses"])


@contextmanager
def sampled_hits(source: Source, count: Counter) -> Iterator[list[list[float]]]:
    """[[tokens so far, hit rate since the last sample], ...], filled by a thread while the block runs."""
    curve: list[list[float]] = []
    over = threading.Event()

    def sample() -> None:
        before = (0, 0)
        while True:
            last = over.wait(POLL_S)
            try:
                now = hits_of(source.stats())
            except (OSError, ValueError):
                return
            if now is not None and now[1] > before[1]:  # an engine's first counts may still be to come
                curve.append([count.tokens, round((now[0] - before[0]) / (now[1] - before[1]), 4)])
                before = now
            if last:
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield curve
    finally:
        over.set()
        thread.join(POLL_S + 11)


def rate(times: list[list[float]]) -> float:
    """tok/s of all streams together, without each one's first token."""
    first, last = min(t[0] for t in times), max(t[-1] for t in times)
    if last <= first:
        raise Failed("the answers were too short to time (try more --tokens)")
    return (sum(len(t) for t in times) - len(times)) / (last - first)


def measure(source: Source, args: argparse.Namespace) -> dict[str, Any]:
    """Rates of the counted runs, and the hit rate over all of them."""
    draw, number, rates, steps = random.Random(args.seed), itertools.count(), [], []
    count = Counter()
    with sampled_hits(source, count) as curve:
        for i in range(args.settle + args.runs):
            prompts = [
                [draw.randrange(source.vocab * 9 // 10) for _ in range(args.prompt)] for _ in range(args.streams)
            ]
            times = source.answers(prompts, [next(number) for _ in prompts], count)
            if any(not t for t in times):
                raise Failed("a stream brought no tokens")
            rates.append(rate(times))
            steps.append(steps_rate(times))
            say(f"run {i + 1}{' (to settle)' if i < args.settle else ''}: {rates[-1]:.2f} tokens/s")
    counted = slice(args.settle, None)
    raw: dict[str, Any] = {"settle_tok_s": rates[: args.settle], "tok_s": rates[counted], "steps_tok_s": steps[counted]}
    return raw | ({"hit_rate": curve} if curve else {})


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )  # an abbreviation would take options that are meant for the engine
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a server")
    where.add_argument("--device", choices=("cpu", "cuda"), help="an engine in this process")
    parser.add_argument("--streams", type=int, default=1, help="at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="an answer (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--settle", type=int, default=1, help="answers before those that count (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=0, help="with --url: ids below this (default: ask the server)")
    parser.add_argument("--model", default="glm-5.3-flash", help="with --url: name to send (default: %(default)s)")
    parser.add_argument("--api-key", default="", help="with --url: sent as a bearer token")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args, options = parser.parse_known_args(argv)
    if args.url and options:
        parser.error(f"unknown with --url: {' '.join(options)}")
    return args, options


def main(argv: list[str]) -> int:
    args, options = parse(argv)
    try:
        source: Source = OverUrl(args) if args.url else InProcess(args, options)
        try:
            raw = measure(source, args)
        finally:
            source.close()
    except Failed as e:
        print(f"decode: {e}", file=sys.stderr)
        return 2
    names = ("streams", "tokens", "prompt", "runs", "settle", "temperature", "seed")
    told = {"unit": "tokens/s", "says": f"decode of {args.streams} streams together, median"}
    emit(
        {
            "what": f"decode of {args.streams} stream{'s'[: args.streams - 1]}",
            "machine": machine(source.what.get("device") if args.device == "cuda" else None),
            "versions": versions("glm53", "torch", "exllamav3", "triton"),
            "command": command("decode.py", argv),
            "settings": {**{n: getattr(args, n) for n in names}, **source.what},
            "raw": raw,
            "bars": {f"decode.x{args.streams}_tok_s": {"value": round(median(raw["tok_s"]), 3), **told}},
        },
        args.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
