"""Prometheus metrics: counters fed by the handlers, and gauges read from the engine when somebody asks.

Threads: everything happens on the event loop. Cost: a few hundred nanoseconds a request; nothing per token.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from glm53.engine.protocol import StreamUsage

if TYPE_CHECKING:
    from .state import ServerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1)


def flat_numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numeric leaves of nested counters as ("cache_hits", 3.0); lists and texts are left out."""
    for key, value in values.items():
        name = re.sub(r"[^a-zA-Z0-9_]", "_", f"{prefix}{key}")
        if isinstance(value, Mapping):
            yield from flat_numbers(value, f"{name}_")
        elif isinstance(value, bool | int | float):
            yield name, float(value)


class _ServerGauges(Collector):
    """Values that exist anyway and are only read at scrape time."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[GaugeMetricFamily]:
        state = self._state
        gauges: dict[str, float] = {
            "up": state.status() == "ready",
            "requests_live": len(state.live),
            "streams_admitted": state.admission.admitted,
            "streams_waiting": state.admission.waiting,
            "requests_refused": state.admission.refused,
            "uptime_seconds": time.monotonic() - state.started_s,
            "load_seconds": state.load_s,
        }
        if state.engine is not None:
            gauges.update((f"engine_{k}", v) for k, v in flat_numbers(state.engine.stats()))
        for name, value in gauges.items():
            yield GaugeMetricFamily(f"glm53_{name}", name.replace("_", " "), value=float(value))


class Metrics:
    """One registry per application (tests run several in a process)."""

    def __init__(self, state: ServerState) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry, "namespace": "glm53"}
        self._requests = Counter("requests", "Requests by route and status", ["route", "status"], **own)
        self._prompt = Counter("prompt_tokens", "Prompt tokens of admitted streams", **own)
        self._cached = Counter("cached_tokens", "Prompt tokens taken from the prefix cache", **own)
        self._completion = Counter("completion_tokens", "Tokens generated", **own)
        self._failed = Counter("stream_errors", "Streams that ended with an error event", ["code"], **own)
        self._seconds = Histogram("request_seconds", "Time of a request", ["route"], buckets=SECONDS, **own)
        self._first = Histogram("first_token_seconds", "Submit to first token", buckets=SECONDS, **own)
        self._token = Histogram("token_seconds", "Mean time per token of a stream", buckets=TOKEN_SECONDS, **own)
        self.registry.register(_ServerGauges(state))
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.streams = 0

    def request_ended(self, route: str, status: int, seconds: float) -> None:
        """Count one HTTP request."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def stream_failed(self, code: str) -> None:
        """Count one stream that ended with an error event."""
        self._failed.labels(code).inc()

    def stream_ended(self, usage: StreamUsage) -> None:
        """Count one generated stream."""
        self.streams += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._completion.inc(usage.completion_tokens)
        if usage.first_token_s:
            self._first.observe(max(0.0, usage.first_token_s - usage.submitted_s))
        if usage.completion_tokens > 1:
            self._token.observe((usage.last_token_s - usage.first_token_s) / (usage.completion_tokens - 1))

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
