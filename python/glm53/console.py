"""What a person sees while something long runs: one line that redraws in a terminal, plain lines in a journal or pipe.

States of a Progress: idle -> running (first `update`) -> closed (`close`, which leaves the terminal on a fresh line).
Threads: `update` may come from any thread (loaders report from their workers); one lock covers the drawing.
Cost: at most ten redraws a second in a terminal; elsewhere one line per stage and tenth of it, at most one every 2 s.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TextIO

from .errors import ResourceError

REDRAW_S = 0.1
PLAIN_S = 2.0
BAR = 30


def say(text: str, stream: TextIO | None = None) -> None:
    """One line on stderr, flushed, so that a journal shows it at once."""
    out = stream or sys.stderr
    out.write(text + "\n")
    out.flush()


def put(text: str) -> None:
    """A command's result on stdout, at once. Raises BrokenPipeError (its reader has gone) or ResourceError (full)."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in it would fail again at exit
        if isinstance(e, BrokenPipeError):
            raise
        raise ResourceError(f"cannot write the result to stdout ({e.strerror}); send it to a place with room") from None


class Progress:
    """Shows `update(stage, fraction)` calls; usable as the `progress` callback of loaders and downloads."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._out = stream or sys.stderr
        self.redraws = self._out.isatty() and os.environ.get("TERM") != "dumb"  # which knows no escape sequences
        self._lock = threading.Lock()
        self._stage = ""
        self._shown = -1
        self._last_s = 0.0
        self._drawn = False

    def update(self, stage: str, fraction: float) -> None:
        """`fraction` of `stage` is done (0..1)."""
        fraction = min(max(fraction, 0.0), 1.0)
        with self._lock:
            now = time.monotonic()
            fresh = stage != self._stage
            self._stage = stage
            if self.redraws:
                if fresh or fraction >= 1.0 or now - self._last_s >= REDRAW_S:
                    self._draw(stage, fraction, now)
            else:
                self._print(stage, fraction, now, fresh)

    __call__ = update

    def _draw(self, stage: str, fraction: float, now: float) -> None:
        filled = round(fraction * BAR)
        self._out.write(f"\r\x1b[2K{stage} [{'#' * filled}{'.' * (BAR - filled)}] {fraction * 100:3.0f} %")
        self._out.flush()
        self._last_s, self._drawn = now, True

    def _print(self, stage: str, fraction: float, now: float, fresh: bool) -> None:
        tenth = int(fraction * 10)
        if fresh or (tenth != self._shown and (tenth == 10 or now - self._last_s >= PLAIN_S)):
            say(f"{stage} {fraction * 100:.0f} %", self._out)
            self._shown, self._last_s = tenth, now

    def close(self) -> None:
        """End the line being redrawn, if there is one. Idempotent."""
        with self._lock:
            if self._drawn:
                self._out.write("\n")
                self._out.flush()
                self._drawn = False
