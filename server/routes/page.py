"""The status page: three static files, read from the package at import."""

from __future__ import annotations

from importlib.resources import files

from aiohttp import web

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
CSP = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


def _read_assets() -> dict[str, tuple[str, bytes]]:
    """All files of the web folder by name: (content type, bytes)."""
    out = {}
    for file in files("glm53.server").joinpath("web").iterdir():
        kind = TYPES.get("." + file.name.rpartition(".")[2])
        if kind:
            out[file.name] = (kind, file.read_bytes())
    return out


ASSETS = _read_assets()


def _send(name: str) -> web.Response:
    if name not in ASSETS:
        raise web.HTTPNotFound
    kind, data = ASSETS[name]
    headers = {"Cache-Control": "no-cache", "Content-Security-Policy": CSP, "X-Content-Type-Options": "nosniff"}
    return web.Response(body=data, content_type=kind, charset="utf-8", headers=headers)


async def index(request: web.Request) -> web.Response:
    """The page."""
    return _send("index.html")


async def asset(request: web.Request) -> web.Response:
    """Its style sheet and script."""
    return _send(request.match_info["name"])
