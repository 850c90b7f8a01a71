"""The application: routes and middleware put together, and `serve`, which the command line calls."""

from __future__ import annotations

import asyncio
from functools import partial

from aiohttp import web

from glm53.tokenizer import Tokenizer

from .body import ask_later
from .lifecycle import LoadEngine, Server, run
from .middleware import authenticate, decorate, errors_as_json, observe, preflight
from .options import ServerOptions
from .routes import chat, completions, generate, info, messages, page, responses
from .state import STATE, ServerState

__all__ = ["ROUTES", "LoadEngine", "Server", "ServerOptions", "create_app", "serve"]

_post = partial(web.post, expect_handler=ask_later)
_get = partial(web.get, expect_handler=ask_later)

ROUTES = [
    _post("/v1/chat/completions", chat.chat_completions),
    _post("/v1/completions", completions.completions),
    _post("/v1/responses", responses.responses),
    _post("/v1/messages", messages.messages),
    _post("/v1/messages/count_tokens", messages.count_tokens),
    _post("/generate", generate.generate),
    _post("/tokenize", generate.tokenize),
    _post("/detokenize", generate.detokenize),
    _get("/health", info.health),
    _get("/health_generate", info.health_generate),
    _get("/v1/models", info.models),
    _get("/v1/models/{id:.+}", info.model),
    _get("/stats", info.stats),
    _get("/server_info", info.server_info),
    _get("/get_server_info", info.server_info),
    _get("/model_info", info.model_info),
    _get("/get_model_info", info.model_info),
    _get("/metrics", info.metrics),
    _get("/openapi.json", info.openapi_json),
    _get("/", page.index),
    _get("/web/{name}", page.asset),
]


def create_app(options: ServerOptions, tokenizer: Tokenizer) -> web.Application:
    """An application in phase "loading"; `Server` runs it. Raises ConfigError for a chat template or a
    generation_config.json that is none."""
    app = web.Application(
        middlewares=[observe, errors_as_json, preflight, authenticate],
        client_max_size=options.max_body_bytes,
    )
    app[STATE] = ServerState(options, tokenizer)
    app.on_response_prepare.append(decorate)
    app.add_routes(ROUTES)
    return app


def serve(options: ServerOptions, load_engine: LoadEngine, tokenizer: Tokenizer) -> None:
    """Serve until SIGTERM or SIGINT.

    `load_engine(progress)` is called on a thread of its own, after the port is bound. Raises ResourceError (port in
    use), ConfigError (address, template) or what `load_engine` raised; returns normally after a clean stop.
    """
    asyncio.run(run(Server(create_app(options, tokenizer), load_engine)))
