"""Routes that tell about the server: health, models, statistics, metrics, description."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from glm53 import __version__
from glm53.engine.protocol import EngineInfo, GenerationRequest, SamplingParams
from glm53.errors import EngineError

from .. import openapi
from ..errors import HttpError, Unavailable
from ..generation_config import KEYS
from ..jobs import Job, deltas
from ..metrics import CONTENT_TYPE
from ..middleware import json_response
from ..state import STATE, ServerState

DEEP_LIMIT_S = 60.0
WARNINGS = (
    "fast decode is not bit-exact: its answers may differ from stock exllamav3; use mode exact where that matters",
    "the reference panel proves the prefill path only, not decode",
    "one mode per port: start a second server on another port to have both fast and exact",
)


async def health(request: web.Request) -> web.Response:
    """200 when ready, 503 while loading, draining or failed; `?deep=1` also generates one token."""
    state = request.app[STATE]
    status = state.status()
    body: dict[str, object] = {"status": status}
    if status == "loading":
        stage, fraction = state.progress
        body.update(stage=stage, progress=round(fraction, 4))
    if status == "ready" and request.query.get("deep", "0") not in {"", "0", "false"}:
        body["seconds"] = await _deep(state)
    response = json_response(body, status=200 if status == "ready" else 503)
    if status != "ready":
        response.headers["Retry-After"] = "5"
    return response


async def health_generate(request: web.Request) -> web.Response:
    """SGLang's deep health check: one generated token."""
    return json_response({"status": "ready", "seconds": await _deep(request.app[STATE])})


async def _deep(state: ServerState) -> float:
    """Seconds for one token. Raises Unavailable if none comes."""
    engine = state.engine_or_503()
    started = time.monotonic()
    prompt = [state.tokenizer.special_id("<|user|>"), *state.tokenizer.encode("Hi")]
    stream = engine.submit(GenerationRequest("health", prompt, 1, SamplingParams(temperature=0.0)))
    try:
        async with asyncio.timeout(DEEP_LIMIT_S):
            async for _ in deltas(stream):
                pass
    except (TimeoutError, EngineError) as e:
        raise Unavailable(f"the engine generated no token: {e or 'timeout'}", code="engine_unhealthy") from None
    finally:
        stream.cancel()
    return round(time.monotonic() - started, 4)


def _model(state: ServerState) -> dict[str, object]:
    context = state.engine_or_503().info.context
    return {
        "id": state.options.served_name,
        "object": "model",
        "created": state.created,
        "owned_by": "glm53",
        "root": state.options.served_name,
        "max_model_len": context,
        "context_length": context,
    }


async def models(request: web.Request) -> web.Response:
    """The one model."""
    return json_response({"object": "list", "data": [_model(request.app[STATE])]})


async def model(request: web.Request) -> web.Response:
    """The model by its served name; 404 for any other."""
    state = request.app[STATE]
    found = _model(state)
    if request.match_info["id"] != state.options.served_name:
        message = (
            f"the model {request.match_info['id'][:80]!r} does not exist; this server has {state.options.served_name}"
        )
        raise HttpError(404, message, code="model_not_found")
    return json_response(found)


def _live(job: Job) -> dict[str, object]:
    """One running request for /stats; `tokens_per_s` is the mean since its first token."""
    usages = [s.usage for s in job.streams]
    tokens = sum(u.completion_tokens for u in usages)
    seconds = sum(u.last_token_s - u.first_token_s for u in usages if u.first_token_s) / max(1, len(usages))
    phase = "queued"
    if any(u.prefill_start_s for u in usages):
        phase = "decode" if any(u.first_token_s for u in usages) else "prefill"
    return {
        "id": job.id,
        "route": job.route,
        "phase": phase,
        "streamed": job.streamed,
        "age_s": round(time.monotonic() - job.started_s, 3),
        "prompt_tokens": usages[0].prompt_tokens if usages else 0,
        "cached_tokens": usages[0].cached_tokens if usages else 0,
        "completion_tokens": tokens,
        "tokens_per_s": round((tokens - len(usages)) / seconds, 2) if seconds > 0 else 0.0,
    }


def _resident_bytes() -> int:
    """Memory of this process in RAM (proc(5), statm); 0 where there is no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()


async def stats(request: web.Request) -> web.Response:
    """Counters of the server and, under `engine`, of the engine."""
    state = request.app[STATE]
    stage, fraction = state.progress
    metrics, admission = state.metrics, state.admission
    engine = state.engine.stats() if state.engine is not None else None
    body = {
        "status": state.status(),
        "loading": {"stage": stage, "progress": round(fraction, 4)} if state.phase == "loading" else None,
        "uptime_s": round(time.monotonic() - state.started_s, 3),
        "load_s": round(state.load_s, 3),
        "running": engine["running"] if engine else 0,
        "waiting": engine["waiting"] if engine else 0,
        "queue": {
            "admitted": admission.admitted,
            "waiting": admission.waiting,
            "max_running": admission.max_running,
            "max_queue": admission.max_queue,
            "refused": admission.refused,
        },
        "totals": {
            "streams": metrics.streams,
            "prompt_tokens": metrics.prompt_tokens,
            "cached_tokens": metrics.cached_tokens,
            "completion_tokens": metrics.completion_tokens,
        },
        "memory": {"process_bytes": _resident_bytes()},
        "requests": [_live(job) for job in state.live.values()],
        "engine": engine,
    }
    return json_response(body)


async def server_info(request: web.Request) -> web.Response:
    """What is loaded and what to know before trusting it."""
    state = request.app[STATE]
    engine = state.engine_or_503()
    info, options = engine.info, state.options
    body = {
        "version": __version__,
        "model": info.name,
        "served_model_name": options.served_name,
        "model_path": info.model_path,
        "mode": info.mode,
        "device": info.device,
        "scripted": info.scripted,
        "context_length": info.context,
        "max_total_num_tokens": info.context,
        "vocab_size": info.vocab_size,
        "max_streams": info.max_streams,
        "max_queue": options.max_queue,
        "chat_template": options.chat_template,
        "sampling_defaults": _sampling_defaults(state),
        "load_s": round(state.load_s, 3),
        "warnings": warnings_of(info, engine.stats()),
    }
    return json_response(body)


def warnings_of(info: EngineInfo, stats: Mapping[str, Any]) -> list[str]:
    """What holds for every server, after what is special about this one now."""
    own = []
    if info.scripted:
        own.append("answers are scripted: they come from a file, no model is loaded")
    split = stats.get("split")
    if split is not None and not split["on"]:
        own.append(f"decoding goes on as in exact mode until a restart: {split['off_because']}")
    return [*own, *WARNINGS]


def _sampling_defaults(state: ServerState) -> dict[str, float]:
    sampling = state.generation_config.sampling
    return {name: getattr(sampling, name) for name in KEYS}


async def model_info(request: web.Request) -> web.Response:
    """SGLang's short description, which routers ask for."""
    state = request.app[STATE]
    info = state.engine_or_503().info
    return json_response({"model_path": info.model_path, "tokenizer_path": info.model_path, "is_generation": True})


async def metrics(request: web.Request) -> web.Response:
    """Prometheus exposition."""
    return web.Response(body=request.app[STATE].metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def openapi_json(request: web.Request) -> web.Response:
    """The OpenAPI document of this server."""
    return json_response(openapi.document(request.app[STATE].options.served_name))
