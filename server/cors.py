"""Which web pages may call: the CORS headers of every reply, and posts that browsers send without asking first.

The setting `cors_origins` lists origins; "*" is any. "auto", the default, is any where an API key is wanted (a page
would have to know it), and without keys the pages and applications of this machine: otherwise every site that somebody
here visits could use the model through their browser.
"""

from __future__ import annotations

import ipaddress
import logging
from urllib.parse import urlsplit

from aiohttp import web

from .options import ServerOptions
from .state import STATE

log = logging.getLogger("glm53.server")
AUTO, ANY = "auto", "*"
MAX_NOTED = 20  # refused origins that get a log line; strangers must not be able to fill the log


def allowed_origin(request: web.Request) -> str | None:
    """The Access-Control-Allow-Origin value for this request, or None."""
    origin = request.headers.get("Origin")
    if origin is None:
        return None
    options = request.app[STATE].options
    if ANY in options.cors_origins or (AUTO in options.cors_origins and options.api_keys):
        return ANY
    return origin if _listed(origin, options) else None


def _listed(origin: str, options: ServerOptions) -> bool:
    return origin in options.cors_origins or (AUTO in options.cors_origins and is_local(origin))


def is_local(origin: str) -> bool:
    """A page from a loopback address, or an installed application (only those have schemes of their own). "null" is
    neither: any page can make a frame of that origin."""
    try:
        parts = urlsplit(origin)
        host = parts.hostname or ""
    except ValueError:
        return False
    if parts.scheme not in ("http", "https"):
        return bool(parts.scheme)
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_foreign(request: web.Request) -> bool:
    """A browser sent this for a page that is neither allowed nor this server's own. Without a pre-flight only the
    reply is withheld from such a page; the work would be done."""
    origin = request.headers.get("Origin")
    if origin is None or allowed_origin(request) is not None:
        return False
    try:
        return urlsplit(origin).netloc != request.headers.get("Host")
    except ValueError:
        return True


def note_refused(request: web.Request) -> None:
    """One log line for each origin whose pre-flight was refused: the page's own author sees only a blocked request."""
    origin = request.headers.get("Origin", "")[:100]
    noted = request.app[STATE].refused_origins
    if origin and origin not in noted and len(noted) < MAX_NOTED:
        noted.add(origin)
        log.info("a web page of %a may not call this server; --cors-origins would allow it", origin)
