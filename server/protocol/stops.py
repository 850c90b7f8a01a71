"""Stop strings over text that arrives in pieces.

A stop string is met where its last character arrives first; text is held back only while it may still begin one, so the
result does not depend on how the text was cut.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cost: linear in the text times the number of stop strings. `held` is text fed but not yet known to be visible."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.held = ""
        self._stops = tuple(s for s in stops if s)

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text now known to be visible, the stop string met or None). After a match nothing is held."""
        text = self.held + text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best:
            self.held = ""
            return text[: best[1]], best[2]
        keep = max((self._overlap(text, s) for s in self._stops), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The held text, visible after all."""
        text, self.held = self.held, ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0:
            if stop.startswith(text[at:]):
                return len(text) - at
            at = text.find(stop[0], at + 1)
        return 0
