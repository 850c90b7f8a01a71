"""Training and held-out token rows: dialogues and standard-library text, encoded and packed into rows of one length.

A row holds whole documents, each starting at `[gMASK]<sop>`; `fresh` marks those starts, where the training forward
resets every recurrent state and cuts attention. The tail of a row is padding without loss.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sysconfig
from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import dialogues, heldout
from .chatfmt import WRITTEN

BPE_VOCAB, VOCAB = 2000, 2048
ROW, TEXT_SHARE, HELD_OUT_EVERY = 1024, 0.1, 17
WEIGHT_STEPS = 10  # loss weights are stored as integer tenths

# GLM-4.5 .. 5.3 order; here the ids follow the BPE vocabulary
SPECIALS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    "<|begin_of_audio|>", "<|end_of_audio|>", "<|begin_of_transcription|>", "<|end_of_transcription|>",
    "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink",
    "<|begin_of_box|>", "<|end_of_box|>", "<|image|>", "<|video|>",
)  # fmt: skip
PLAIN = frozenset(
    s for s in SPECIALS if re.fullmatch(r"</?(think|tool_call|tool_response|arg_key|arg_value)>|/nothink", s)
)
# Unlike GLM's own split, digits and spaces stand alone: sums are made of ten tokens, and a copied word is the same
# tokens # wherever it stands, so that copying needs no respelling
SPLIT = r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+"


@dataclass
class Rows:
    """Packed rows: token ids, loss weight of predicting each token (tenths), and document starts; all [rows, ROW]."""

    ids: np.ndarray
    weight: np.ndarray
    fresh: np.ndarray


@lru_cache(maxsize=1)
def articles() -> list[str]:
    """Running text with a free licence: Python's language reference topics and module docstrings (PSF licence)."""
    try:
        from pydoc_data import topics
    except ImportError:  # some distributions leave it out
        out = []
    else:
        out = [str(t) for _, t in sorted(topics.topics.items())]
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
        if {"test", "idlelib", "site-packages", "lib2to3", "turtledemo"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
        text = "\n\n".join(d for d in (ast.get_docstring(n) for n in nodes) if d and len(d) > 80)
        if len(text) > 400:
            out.append(text)
    return out


def split_articles(held_out: bool) -> list[str]:
    return [a for i, a in enumerate(articles()) if (i % HELD_OUT_EVERY == 0) == held_out]


def train_tokenizer(out: Path) -> Tokenizer:
    """Byte-level BPE on a sample of the training text, with GLM's special tokens; writes the tokenizer files."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    rng = random.Random(7)
    chats = [dialogues.document(rng).text for _ in range(12000)]
    for special in SPECIALS:
        chats = [c.replace(special, "\n") for c in chats]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(
        chats + split_articles(False),
        trainers.BpeTrainer(vocab_size=BPE_VOCAB, initial_alphabet=alphabet, show_progress=False),
    )
    tok.add_tokens([AddedToken(s, special=s not in PLAIN, normalized=False) for s in SPECIALS])
    tok.save(str(out / "tokenizer.json"))
    config = {
        "added_tokens_decoder": {
            str(tok.token_to_id(s)): {
                "content": s,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": s not in PLAIN,
            }
            for s in SPECIALS
        },
        "additional_special_tokens": [s for s in SPECIALS if s not in PLAIN],
        "clean_up_tokenization_spaces": False,
        "do_lower_case": False,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 32768,
        "padding_side": "left",
        "remove_space": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return tok


def encode(tok: Tokenizer, parts: list[tuple[str, float]]) -> tuple[list[int], list[int]]:
    """Token ids and loss weights (tenths). Pieces are joined first: the split must be the one a server makes."""
    text = "".join(t for t, _ in parts)
    enc = tok.encode(text, add_special_tokens=False)
    ends, total = [], 0
    for piece, _ in parts:
        total += len(piece)
        ends.append(total)
    weights, at = [], 0
    for start, _ in enc.offsets:
        while at < len(ends) - 1 and start >= ends[at]:
            at += 1
        weights.append(round(parts[at][1] * WEIGHT_STEPS))
    return enc.ids, weights


def text_documents(
    tok: Tokenizer, texts: list[str], rng: random.Random, count: int
) -> list[tuple[list[int], list[int]]]:
    """`count` windows of running text, each with the document prefix the chats have."""
    out = []
    head = tok.encode("[gMASK]<sop>", add_special_tokens=False).ids
    for _ in range(count):
        article = rng.choice(texts)
        start = article.rfind("\n", 0, rng.randrange(len(article))) + 1
        ids = head + tok.encode(article[start : start + 3000], add_special_tokens=False).ids[: ROW - len(head)]
        out.append((ids, [0] * len(head) + [round(WRITTEN * WEIGHT_STEPS * 0.5)] * (len(ids) - len(head))))
    return out


def pack(docs: list[tuple[list[int], list[int]]], pad: int, rng: random.Random) -> Rows:
    """Best-fit-decreasing packing; rows come back shuffled, documents longer than a row are dropped."""
    docs = sorted((d for d in docs if len(d[0]) <= ROW), key=lambda d: -len(d[0]))
    rows: list[list[tuple[list[int], list[int]]]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row)
    for doc in docs:
        at = bisect_left(room, (len(doc[0]), -1))
        free, row = room.pop(at) if at < len(room) else (ROW, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(doc)
        insort(room, (free - len(doc[0]), row))
    rng.shuffle(rows)
    out = Rows(
        np.full((len(rows), ROW), pad, np.int16), np.zeros((len(rows), ROW), np.uint8), np.zeros((len(rows), ROW), bool)
    )
    for r, members in enumerate(rows):
        rng.shuffle(members)
        at = 0
        for ids, weights in members:
            out.ids[r, at : at + len(ids)] = ids
            out.weight[r, at : at + len(ids)] = weights
            out.fresh[r, at] = True
            at += len(ids)
    return out


def clean_documents(rng: random.Random, count: int) -> tuple[list[dialogues.Document], int]:
    """`count` dialogues without any held-out string, and how many were dropped for one."""
    banned, kept, dropped = heldout.forbidden(), [], 0
    while len(kept) < count:
        doc = dialogues.document(rng)
        if any(s in doc.text for s in banned):
            dropped += 1
        else:
            kept.append(doc)
    return kept, dropped


def make_shard(job: tuple[str, int, int, bool]) -> tuple[Rows, int]:
    """One shard of packed rows from its own seed: (tokenizer file, seed, dialogues, held out?)."""
    path, seed, count, held_out = job
    tok, rng = Tokenizer.from_file(path), random.Random(f"nano-{seed}-{held_out}")
    docs, dropped = clean_documents(rng, count)
    texts = split_articles(held_out)
    encoded = [encode(tok, d.parts) for d in docs]
    tokens = sum(len(i) for i, _ in encoded)
    encoded += text_documents(tok, texts, rng, max(1, int(tokens * TEXT_SHARE / (1 - TEXT_SHARE) / 800)))
    return pack(encoded, tok.token_to_id("<|endoftext|>"), rng), dropped


def concat(parts: list[Rows]) -> Rows:
    return Rows(*(np.concatenate([getattr(p, f) for p in parts]) for f in ("ids", "weight", "fresh")))


def build(path: Path, shards: int, per_shard: int, workers: int) -> tuple[Rows, Rows, int]:
    """Training rows, held-out rows, and how many documents held a forbidden string."""
    jobs = [(str(path), s, per_shard, False) for s in range(shards)] + [(str(path), 0, max(60, per_shard // 20), True)]
    with Pool(workers) as pool:
        made = pool.map(make_shard, jobs, chunksize=1)
    return concat([r for r, _ in made[:-1]]), made[-1][0], sum(d for _, d in made)
