"""File descriptors: every connection has one, and a process may have only so many.

`ConnectionLimit` keeps a reserve that connections never take, because the rest of the process opens files too. All on
the event loop. asyncio accepts in bursts, so that a flood of connections can take the reserve for a moment; it then
reports each failed accept with a traceback, thousands a second, which `quiet_accept` makes one line a minute.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any

log = logging.getLogger("glm53.server")

MOST = 65536  # as the unit has it
RESERVE = 128
LINE_EVERY_S = 60.0


class Seldom:
    """A warning at most once in LINE_EVERY_S."""

    def __init__(self) -> None:
        self._last_s = float("-inf")

    def warn(self, message: str, *values: object) -> None:
        now = time.monotonic()
        if now - self._last_s >= LINE_EVERY_S:
            self._last_s = now
            log.warning(message, *values)


def raise_file_limit() -> int:
    """Take what the system grants this process, up to MOST; how many descriptors that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MOST if soft == resource.RLIM_INFINITY else soft


class ConnectionLimit:
    """Counts open connections. `most` of them may be open at once."""

    def __init__(self, descriptors: int) -> None:
        self.most = max(descriptors - RESERVE, descriptors // 2)
        self.open = 0
        self._refusals = Seldom()

    def entered(self) -> bool:
        """A connection was made; False if it is one too many."""
        self.open += 1
        if self.open <= self.most:
            return True
        self._refusals.warn("%d connections are open, the most that the limit of open files allows", self.most)
        return False

    def left(self) -> None:
        """A connection was lost."""
        self.open -= 1


def quiet_accept(loop: asyncio.AbstractEventLoop) -> None:
    """Have the loop report a lack of descriptors now and then, and everything else as before."""
    refusals = Seldom()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), OSError) and "accept" in context.get("message", ""):
            refusals.warn("cannot accept connections: %s", context["exception"])
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
