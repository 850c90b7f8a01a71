"""The application: routes and middleware put together, and `serve`, which the command line calls."""

from __future__ import annotations

import asyncio

from aiohttp import web

from glm53.tokenizer import Tokenizer

from .lifecycle import LoadEngine, Server, run
from .middleware import authenticate, decorate, errors_as_json, observe, preflight
from .options import ServerOptions
from .routes import chat, completions, generate, info, messages, page, responses
from .state import STATE, ServerState

__all__ = ["ROUTES", "LoadEngine", "Server", "ServerOptions", "create_app", "serve"]

ROUTES = [
    web.post("/v1/chat/completions", chat.chat_completions),
    web.post("/v1/completions", completions.completions),
    web.post("/v1/responses", responses.responses),
    web.post("/v1/messages", messages.messages),
    web.post("/v1/messages/count_tokens", messages.count_tokens),
    web.post("/generate", generate.generate),
    web.post("/tokenize", generate.tokenize),
    web.post("/detokenize", generate.detokenize),
    web.get("/health", info.health),
    web.get("/health_generate", info.health_generate),
    web.get("/v1/models", info.models),
    web.get("/v1/models/{id:.+}", info.model),
    web.get("/stats", info.stats),
    web.get("/server_info", info.server_info),
    web.get("/get_server_info", info.server_info),
    web.get("/model_info", info.model_info),
    web.get("/get_model_info", info.model_info),
    web.get("/metrics", info.metrics),
    web.get("/openapi.json", info.openapi_json),
    web.get("/", page.index),
    web.get("/web/{name}", page.asset),
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
