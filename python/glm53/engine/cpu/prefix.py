"""States of finished prompts and answers, kept so that the next turn of a conversation need not compute them again.

States of an entry: stored -> used (moves to the young end) -> evicted (least recently used, when over the budget).
Threads: the engine thread only; counters may be read anywhere. Cost: a look-up compares the prompt with every entry's
ids (a few hundred entries at most); memory counts each shared buffer once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .state import KdaState, StreamState


@dataclass(slots=True)
class _Entry:
    ids: npt.NDArray[np.int32]
    state: StreamState


class PrefixCache:
    """Longest stored prefix of a prompt, within `budget` bytes (0 = off)."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._entries: list[_Entry] = []
        self.hits = self.misses = self.evictions = self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, ids: Sequence[int]) -> StreamState | None:
        """An independent state for the longest stored prefix that leaves at least one token to compute; or None."""
        prompt = np.asarray(ids, np.int32)
        best: _Entry | None = None
        for entry in self._entries:
            n = entry.ids.size
            longer = best is None or n > best.ids.size
            if n < prompt.size and longer and np.array_equal(entry.ids, prompt[:n]):
                best = entry
        if best is None:
            self.misses += 1
            return None
        self.hits += 1
        self._touch(best)
        return best.state.resume()

    def store(self, ids: Sequence[int], state: StreamState) -> None:
        """Keep the state after `ids` (all of them fed; `state.length` tokens). The stream may go on using `state`."""
        if self._budget <= 0 or state.length == 0:
            return
        key = np.asarray(ids[: state.length], np.int32)
        for entry in self._entries:
            if np.array_equal(entry.ids, key):
                self._touch(entry)
                return
        self._entries.append(_Entry(key, state.snapshot()))
        self.nbytes = self._count()
        while self.nbytes > self._budget:
            self._entries.pop(0)
            self.evictions += 1
            self.nbytes = self._count()

    def _touch(self, entry: _Entry) -> None:
        self._entries = [e for e in self._entries if e is not entry]
        self._entries.append(entry)

    def _count(self) -> int:
        shared: dict[int, int] = {}
        own = 0
        for entry in self._entries:
            for x in entry.state.layers:
                if isinstance(x, KdaState):
                    own += x.nbytes
                else:
                    shared[x.latent.data_ptr()] = x.nbytes
        return own + sum(shared.values())

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self.nbytes = 0
