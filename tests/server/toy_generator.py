"""What the toy models of the tests on exllamav3's own generator have in common (`real_generator`).

A state is a hash of all tokens so far. Its class makes one from what was stashed with `resumed`.
"""

from __future__ import annotations

from typing import Any

from real_generator import BaseCache, BaseModel

PAGE = 256


def mix(state: int, token: int) -> int:
    """The hash of one more token; exact in float32."""
    return (state * 31 + token * 7 + 1) % 1000003


class ToyCache(BaseCache):
    """Pages of cells: by page and place in it, what a model put there."""

    def __init__(self, state: Any, tokens: int, slots: int) -> None:
        super().__init__(tokens, slots)
        self.recurrent_state_cls = state
        self.cells: dict[tuple[int, int], Any] = {}

    def get_new_state(self) -> Any:
        return self.recurrent_state_cls()

    def resumed(self, stashed: dict[str, Any]) -> Any:
        return self.recurrent_state_cls.resumed(stashed)

    def copy_page(self, target: Any, source: int, to: int, count: int) -> None:
        self.cells |= {(to, i): self.cells[source, i] for i in range(count) if (source, i) in self.cells}


class ToyModel(BaseModel):
    def __init__(self, cache: Any, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.cache = cache


class ToyTokenizer:
    """Pieces are <0>, <1> and so on."""

    def __init__(self, vocab_size: int) -> None:
        self.actual_vocab_size = vocab_size

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        return [f"<{i}>" for i in range(self.actual_vocab_size)]

    def decode(self, ids: Any, decode_special_tokens: bool = False) -> list[str]:
        return ["".join(f"<{i}>" for i in ids[0].tolist())]
