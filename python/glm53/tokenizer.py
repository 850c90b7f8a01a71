"""The checkpoint's tokenizer: text to ids without ever producing a special token, and ids to bytes.

Source: `tokenizer.json` (Hugging Face tokenizers, byte-level BPE). Added tokens ("<|user|>", "<think>", ...) are taken
out of the encoder, so that a user who types one gets its letters; they are reachable by name through `special_id`.
Thread-safe after construction; encoding releases the GIL.

Costs: encoding takes up to 160 bytes of memory a token, and its result is made while holding the GIL. So a long text is
encoded in pieces, cut where no token can span the cut, and only as far as a caller's limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer

from .errors import CheckpointError, RequestError

PIECE = 1 << 18  # characters encoded at a time: their ids are made in a few ms
BREAK = re.compile(r"(?<=[A-Za-z\u0410-\u044f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff])[\s,.;:!?()\u3001\u3002\uff0c]")
"""What may follow a letter and begins a new word for every splitter of byte-level BPE. `Tokenizer` tries it."""
BREAK_SAMPLE = "Ab cd,e\nf.g \u0416\u0416 \u4e2d\u6587\u3002\u306a:1"
MAX_RUN = 1 << 22  # characters without a break: the splitter's regex gives up on runs of blanks not much longer
LOST_AT_CUTS = 16  # tokens that a cut within a word may add, with room to spare


class TextTooLong(ValueError):
    """A text has at least `tokens` tokens, more than the caller takes."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"the text has at least {tokens} tokens")
        self.tokens = tokens


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
            raise CheckpointError(f"{model_dir}: no tokenizer.json in this folder; run `glm53 pull`") from None
        except MemoryError:
            raise
        except OSError as e:
            raise CheckpointError(f"{path}: cannot read it ({e.strerror}); check its permissions") from None
        except Exception as e:
            why = f"{type(e).__name__}: {e}"
            raise CheckpointError(f"{path}: not a readable tokenizer ({why}); download the file again") from e
        self._plain = plain
        self._special = added
        table = _byte_of_char()
        self._bytes: dict[int, bytes] = {i: name.encode() for name, i in added.items()}
        for piece, i in plain.get_vocab(with_added_tokens=False).items():
            if i not in self._bytes:
                self._bytes[i] = bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()
        self.size = max(self._bytes) + 1
        self._can_cut = self._breaks_at_letters()

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Token ids of plain text; no special token is ever produced, whatever the text says.

        Of texts longer than PIECE characters, raises TextTooLong as soon as it turns out to have more than `most`
        tokens, and RequestError if it has no break for more than MAX_RUN characters.
        """
        if len(text) <= PIECE:
            return self._encode(text)
        ids: list[int] = []
        start = 0
        while start < len(text):
            end = self._next_break(text, start + PIECE)
            if end - start > 2 * PIECE:
                self._check_run(text[start:end], most, len(ids))
            ids += self._encode(text[start:end])
            if most is not None and len(ids) > most:
                raise TextTooLong(len(ids))
            start = end
        return ids

    def _next_break(self, text: str, start: int) -> int:
        """Where a word begins, at or behind `start`; looked for in parts, for a search holds the GIL, and only as far
        as a run may reach."""
        for at in range(start, min(len(text), start + MAX_RUN), PIECE) if self._can_cut else ():
            if match := BREAK.search(text, at, at + PIECE):
                return match.start()
        return len(text)

    def _check_run(self, run: str, most: int | None, before: int) -> None:
        """A run without a break must be encoded whole; first see in parts that it has not far more tokens than `most`,
        of which `before` were there already."""
        found = before
        for at in range(0, len(run), PIECE) if most is not None else ():
            found += max(0, len(self._encode(run[at : at + PIECE])) - LOST_AT_CUTS)
            if most is not None and found > most:
                raise TextTooLong(found)
        if len(run) > MAX_RUN:
            message = f"The text has {len(run):,} characters without a word break; at most {MAX_RUN:,} are accepted."
            raise RequestError(message, code="text_too_long")

    def _breaks_at_letters(self) -> bool:
        splitter = self._plain.pre_tokenizer
        if splitter is None:
            return False
        begins = {span[0] for _, span in splitter.pre_tokenize_str(BREAK_SAMPLE)}
        return all(match.start() in begins for match in BREAK.finditer(BREAK_SAMPLE))

    def _encode(self, text: str) -> list[int]:
        # The batch call, unlike `encode`, releases the GIL; without offsets it is also several times faster.
        try:
            ids: list[int] = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except BaseException as e:
            if type(e).__name__ != "PanicException":  # of Rust code, no Exception: it would end the caller's thread
                raise
            raise RequestError("The tokenizer cannot read this text.", code="text_too_long") from None
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

    def special_ids(self, names: Sequence[str]) -> frozenset[int]:
        """Ids of those of `names` that this tokenizer has."""
        return frozenset(self._special[n] for n in names if n in self._special)
