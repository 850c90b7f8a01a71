"""A prompt as segments: names of special tokens apart from plain text, so that no text can become a special token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from glm53.tokenizer import TextTooLong, Tokenizer

SPECIAL_NAMES = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    "<|begin_of_audio|>", "<|end_of_audio|>", "<|begin_of_transcription|>", "<|end_of_transcription|>",
    "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink",
    "<|begin_of_box|>", "<|end_of_box|>", "<|image|>", "<|video|>",
)  # fmt: skip
"""Texts of GLM-5.3's added tokens (tokenizer.json); their ids differ between checkpoints and are looked up by name."""


class Segment(NamedTuple):
    """One piece of a prompt: the text of a special token, or plain text."""

    text: str
    special: bool = False


def special(name: str) -> Segment:
    """The special token called `name`."""
    return Segment(name, True)


def plain(text: str) -> Segment:
    """Ordinary text, whatever it says."""
    return Segment(text)


def to_text(segments: Iterable[Segment]) -> str:
    """What a template would have printed."""
    return "".join(s.text for s in segments)


def opens_thinking(segments: Sequence[Segment]) -> bool:
    """True if the answer to this prompt starts inside the reasoning: the last turn has an unclosed `<think>`."""
    for segment in reversed(segments):
        if segment.special and segment.text in ("<think>", "</think>", "<|assistant|>"):
            return segment.text == "<think>"
    return False


def encode(segments: Iterable[Segment], tokenizer: Tokenizer, most: int | None = None) -> list[int]:
    """Token ids. Neighbouring plain segments are encoded as one text.

    Raises CheckpointError for an unknown token, and TextTooLong rather than encode much more than `most` tokens.
    """
    ids: list[int] = []
    text: list[str] = []

    def flush() -> None:
        left = None if most is None else most - len(ids)
        if left is not None and left < 0:
            raise TextTooLong(len(ids))
        try:
            ids.extend(tokenizer.encode("".join(text), left))
        except TextTooLong as e:
            raise TextTooLong(len(ids) + e.tokens) from None
        text.clear()

    for segment in segments:
        if not segment.special:
            text.append(segment.text)
            continue
        if text:
            flush()
        ids.append(tokenizer.special_id(segment.text))
    if text:
        flush()
    return ids
