"""The limits of the house: how many streams may be in it at once, and how many bytes of request bodies.

State: one count of admitted streams. `acquire` raises it, leaving the ticket's `with` lowers it; all on
the event loop, so there is no lock. A stream counts as waiting when it is beyond what the engine runs at once.
Cost: two integer operations a request; refusing needs neither the body parsed nor a token encoded.
"""

from __future__ import annotations

from types import TracebackType

from glm53.errors import QueueFull

from .errors import Unavailable


class Admission:
    """Counts admitted streams; refuses at `max_running + max_queue`."""

    def __init__(self, max_queue: int) -> None:
        self.max_queue = max_queue
        self.max_running = 1
        self.admitted = 0
        self.refused = 0

    @property
    def waiting(self) -> int:
        """Admitted streams beyond those the engine runs at once."""
        return max(0, self.admitted - self.max_running)

    def check(self) -> None:
        """Raise QueueFull if another stream would not be admitted now."""
        if self.admitted >= self.max_running + self.max_queue:
            self.refused += 1
            raise QueueFull(self.waiting, self.max_queue)

    def acquire(self) -> Ticket:
        """Admit one stream or raise QueueFull."""
        self.check()
        self.admitted += 1
        return Ticket(self)


class Ticket:
    """A place in the house; a context manager that gives it back."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._streams = 1

    def grow(self, streams: int) -> None:
        """The request turned out to want `streams` streams (n > 1). Never refused: it is inside already."""
        self._admission.admitted += streams - self._streams
        self._streams = streams

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._admission.admitted -= self._streams
        self._streams = 0


class BodyRoom:
    """Counts the bytes of bodies that arrive or wait to be parsed: without a limit, clients that send many large ones
    slowly would take all memory before any of their requests is admitted."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0


class BodyLease:
    """The room of one body; a context manager that gives it back."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._bytes = 0

    def grow(self, size: int) -> None:
        """`size` more bytes have arrived. Raises Unavailable if there is no room for them."""
        if self._room.held + size > self._room.limit:
            message = f"the request bodies that arrive now are larger than {self._room.limit >> 20} MiB together"
            raise Unavailable(f"{message}; retry later", code="bodies_full")
        self._room.held += size
        self._bytes += size

    def close(self) -> None:
        """The body is needed no more. Idempotent."""
        self._room.held -= self._bytes
        self._bytes = 0

    def __enter__(self) -> BodyLease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
