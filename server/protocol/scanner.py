"""The parser's text: what has arrived and is not used yet, the position in it, and looking for tags from there.

State: a buffer, a position that only moves forward, and blank space set aside until it is known what it precedes.
`extend` adds text, `find` and `here` move the position, `compact` drops what lies behind it. One thread; each character
is looked at a bounded number of times.
"""

from __future__ import annotations

from .tags import BLANK, Tags


class Scanner:
    """See the module text. `final`: no more text will come, so nothing is held back for a tag that may be cut."""

    def __init__(self) -> None:
        self.buffer = ""
        self.position = 0
        self.final = False
        self._base = 0  # text offset of buffer[0]
        self._blank: list[str] = []

    def extend(self, text: str) -> None:
        """More text has arrived."""
        self.buffer += text

    def compact(self) -> None:
        """Forget the text before the position."""
        if self.position:
            self._base += self.position
            self.buffer = self.buffer[self.position :] if self.position < len(self.buffer) else ""
            self.position = 0

    @property
    def more(self) -> bool:
        """True if there is text at the position."""
        return self.position < len(self.buffer)

    @property
    def offset(self) -> int:
        """Offset of the position in the whole text."""
        return self._base + self.position

    def rest(self) -> str:
        """Move to the end; the text up to there."""
        text = self.buffer[self.position :] if self.position else self.buffer
        self.position = len(self.buffer)
        return text

    def find(self, tags: Tags) -> tuple[str, str]:
        """Move past the text before the next tag, not past the tag; returns both. Tag "" = none in the buffer."""
        buffer, start = self.buffer, self.position
        first = buffer.find("<", start)
        if first < 0:
            return self.rest(), ""
        if match := tags.pattern.search(buffer, first):
            self.position = match.start()
            return buffer[start : self.position], match[0]
        end = len(buffer)
        if not self.final:
            cut = buffer.rfind("<", max(start, end - tags.longest + 1))
            if cut >= 0 and tags.may_start(buffer[cut:]):
                end = cut
        self.position = end
        return buffer[start:end], ""

    def here(self, tags: Tags) -> str | None:
        """Pass blank space (kept for `take_blank`) and a tag behind it: the tag, "" for other text, None = wait."""
        if match := BLANK.match(self.buffer, self.position):
            self._blank.append(match[0])
            self.position = match.end()
        if self.position == len(self.buffer):
            return None
        if match := tags.pattern.match(self.buffer, self.position):
            self.position = match.end()
            return match[0]
        rest = self.buffer[self.position : self.position + tags.longest]
        return None if not self.final and tags.may_start(rest) else ""

    def take_blank(self) -> str:
        """The blank space that `here` has passed, once."""
        text = "".join(self._blank)
        self._blank.clear()
        return text

    def drop_blank(self) -> None:
        """Forget the blank space that `here` has passed."""
        self._blank.clear()
