"""Where the parser's text goes: reasoning, content (through the stop strings) and calls, each with its tokens.

Offsets count characters of the whole text. Tokens are attributed in order and once: to the content that shows their
first visible character, to the reasoning, or to text that does not show (tags, calls).
"""

from __future__ import annotations

from collections.abc import Sequence

from .events import ContentText, Event, ReasoningText, merge
from .spans import TokenSpans
from .stops import StopMatcher


class Channels:
    """Collects events. `stopped_at`: offset behind the stop string that was met; nothing may follow it."""

    def __init__(self, stop: Sequence[str], keep_tokens: bool) -> None:
        self.spans = TokenSpans()
        self.reasoning_tokens = 0
        self.stop_sequence: str | None = None
        self.stopped_at: int | None = None
        self._stops = StopMatcher(stop) if any(stop) else None
        self._keep_tokens = keep_tokens
        self._events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Add an event that holds no text of its own."""
        self._events.append(event)

    def take(self) -> list[Event]:
        """The events since the last call, neighbours of one kind joined."""
        events, self._events = self._events, []
        return merge(events) if len(events) > 1 else events

    def skip(self, end: int) -> None:
        """Text up to `end` does not show."""
        self.spans.drop(end)

    def reasoning(self, text: str, end: int) -> None:
        """Reasoning that ends at `end`; "" for a tag that belongs to it."""
        if text:
            self._events.append(ReasoningText(text))
        self.reasoning_tokens += self.spans.drop(end)

    def content(self, text: str, end: int) -> None:
        """Content that ends at `end`; may set `stopped_at`."""
        start = end - len(text)
        if self._stops:
            start -= len(self._stops.held)
            text, met = self._stops.feed(text)
            if met is not None:
                self.stop_sequence = met
                self.stopped_at = start + len(text) + len(met)
        self._show(text, start + len(text))

    def flush(self, end: int) -> None:
        """Content ends here at `end`: text held for a stop string shows."""
        if self._stops:
            self._show(self._stops.flush(), end)

    def _show(self, text: str, end: int) -> None:
        if not text:
            return
        taken = self.spans.take(end)
        self._events.append(ContentText(text, tuple(taken) if self._keep_tokens else ()))
