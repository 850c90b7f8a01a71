"""Which tokens a stretch of text came from."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from glm53.engine.protocol import Token


class TokenSpans:
    """Tokens in order, each with its range of text offsets, until they are attributed to a channel of the answer.

    Tokens that complete a character together share its range. Cost: each token enters and leaves once.
    """

    def __init__(self) -> None:
        self.end = 0
        """Text offset behind the last placed token."""
        self._spans: deque[tuple[int, int, Token]] = deque()

    def place(self, tokens: Sequence[Token], chars: int) -> None:
        """`tokens` gave the next `chars` characters."""
        start, self.end = self.end, self.end + chars
        for token in tokens:
            self._spans.append((start, self.end, token))

    def drop(self, offset: int) -> int:
        """Forget tokens that end at or before `offset`; returns how many."""
        count = 0
        while self._spans and self._spans[0][1] <= offset:
            self._spans.popleft()
            count += 1
        return count

    def take(self, offset: int) -> list[Token]:
        """Remove and return tokens that begin before `offset`."""
        taken: list[Token] = []
        while self._spans and self._spans[0][0] < offset:
            taken.append(self._spans.popleft()[2])
        return taken

    def count_from(self, offset: int) -> int:
        """How many tokens begin at or behind `offset`."""
        return sum(1 for start, _, _ in self._spans if start >= offset)
