"""The checkpoint's tokenizer: text to ids without ever producing a special token, and ids to bytes.

Source: `tokenizer.json` (Hugging Face tokenizers, byte-level BPE). Added tokens ("<|user|>", "<think>", ...) are taken
out of the encoder, so that a user who types one gets its letters; they are reachable by name through `special_id`.
Thread-safe after construction; encoding releases the GIL.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer

from .errors import CheckpointError


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, inverted (byte-level BPE vocabularies are written in them)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = (b for b in range(256) if b not in set(printable))
    table.update({chr(256 + i): b for i, b in enumerate(others)})
    return table


class Tokenizer:
    """Encode plain text, look special tokens up by name, decode ids to bytes."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        path = model_dir / "tokenizer.json"
        try:
            spec = json.loads(path.read_text(encoding="utf-8"))
            added = {t["content"]: int(t["id"]) for t in spec["added_tokens"]}
            plain = HfTokenizer.from_str(json.dumps({**spec, "added_tokens": []}))
        except FileNotFoundError:
            raise CheckpointError(f"{model_dir}: no tokenizer.json; is this a model directory?") from None
        except MemoryError:
            raise
        except Exception as e:
            raise CheckpointError(f"{path}: not a readable tokenizer ({e})") from e
        self._plain = plain
        self._special = added
        self._special_names = {i: name for name, i in added.items()}
        table = _byte_of_char()
        self._bytes: dict[int, bytes] = {i: name.encode() for name, i in added.items()}
        for piece, i in plain.get_vocab(with_added_tokens=False).items():
            if i not in self._bytes:
                self._bytes[i] = bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()
        self.size = max(self._bytes) + 1

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; no special token is ever produced, whatever the text says."""
        # The batch call, unlike `encode`, releases the GIL; without offsets it is also several times faster.
        ids: list[int] = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Iterable[int]) -> bytes:
        """UTF-8 bytes of the ids (special tokens as their text; ids outside the vocabulary as nothing)."""
        return b"".join(self._bytes.get(i, b"") for i in ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; b"" for the padding rows beyond the vocabulary."""
        return self._bytes.get(token_id, b"")

    def special_id(self, name: str) -> int:
        """Id of an added token by its text. Raises CheckpointError if the tokenizer lacks it."""
        try:
            return self._special[name]
        except KeyError:
            raise CheckpointError(f"the tokenizer has no token {name!r}: not a GLM-5.3 tokenizer") from None

    def special_name(self, token_id: int) -> str | None:
        """Text of an added token, or None for an ordinary one."""
        return self._special_names.get(token_id)

    def special_ids(self, names: Sequence[str]) -> frozenset[int]:
        """Ids of those of `names` that this tokenizer has."""
        return frozenset(self._special[n] for n in names if n in self._special)
