"""Output items of recent answers of /v1/responses, in memory, for clients that send an item's id instead of the item.

The Vercel AI SDK does so unless it is told `store: false`. Ids cannot be guessed, so who knows one may have its item.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from .options import MIB


class ItemStore:
    """The oldest items go where they are more than `most_bytes` of JSON. Any thread may put and get."""

    def __init__(self, most_bytes: int = 16 * MIB) -> None:
        self._most = most_bytes
        self._items: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Keep items that have an id."""
        sized = [(len(orjson.dumps(item)), item) for item in items]
        with self._lock:
            for size, item in sized:
                if size <= self._most:
                    self._bytes += size - self._items.pop(item["id"], (0, item))[0]
                    self._items[item["id"]] = (size, item)
            while self._bytes > self._most:
                size, _ = self._items.pop(next(iter(self._items)))
                self._bytes -= size

    def get(self, item_id: object) -> Mapping[str, Any] | None:
        """The item, or None if it is not kept (any more)."""
        found = self._items.get(item_id) if isinstance(item_id, str) else None
        return None if found is None else found[1]
