"""Conversations to token ids, by the built-in renderer or a Jinja template. Thread-safe: called on worker threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm53.chat import ChatOptions, JinjaRenderer, Message, Tool, encode, opens_thinking, render
from glm53.errors import ConfigError, PromptTooLong, RequestError
from glm53.tokenizer import TextTooLong, Tokenizer

MOST_COUNTED = 1 << 21  # tokens of a text that is encoded without a model to read it


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt; `thinking` = the answer starts inside the reasoning."""

    ids: list[int]
    thinking: bool


class PromptBuilder:
    """`template` is "builtin", "checkpoint" (its chat_template.jinja) or the path of a Jinja file.

    Raises ConfigError if the file cannot be read or parsed.
    """

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._jinja: JinjaRenderer | None = None
        if template != "builtin":
            path = tokenizer.model_dir / "chat_template.jinja" if template == "checkpoint" else Path(template)
            try:
                source = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as e:
                raise ConfigError(f"chat_template {template}: cannot read {path} ({e})") from None
            self._jinja = JinjaRenderer(source, str(path))

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        options: ChatOptions,
        extra: Mapping[str, Any] | None = None,
        *,
        context: int | None = None,
    ) -> Prompt:
        """Render and encode a conversation; `extra` are further variables of a Jinja template.

        Raises PromptTooLong where it is seen early that the prompt exceeds `context` (None: it is only counted).
        """
        if self._jinja is not None:
            segments = self._jinja.render(messages, tools, options, extra)
        else:
            segments = render(messages, tools, options)
        with _limit(context) as most:
            return Prompt(encode(segments, self._tokenizer, most), opens_thinking(segments))

    def text(self, text: str, context: int | None = None) -> list[int]:
        """Encode plain text; it can contain no special token. Raises as `chat` does."""
        with _limit(context) as most:
            return self._tokenizer.encode(text, most)

    def count_only(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts that no model will read. Raises RequestError if they are too long together."""
        out: list[list[int]] = []
        left = MOST_COUNTED
        for text in texts:
            out.append(self.text(text))
            left -= len(out[-1])
            if left < 0:
                raise _too_many()
        return out


@contextmanager
def _limit(context: int | None) -> Iterator[int]:
    try:
        yield MOST_COUNTED if context is None else context
    except TextTooLong as e:
        raise _too_many() if context is None else PromptTooLong(e.tokens, context, at_least=True) from None


def _too_many() -> RequestError:
    message = f"The text has more than {MOST_COUNTED:,} tokens; send it in parts."
    return RequestError(message, param="prompt", code="text_too_long")


def fit(prompt_tokens: int, wanted: int | None, context: int) -> int:
    """Tokens that may be generated: `wanted` (None = all that is left), clamped to the context.

    Raises PromptTooLong if the prompt leaves no room for a single token.
    """
    left = context - prompt_tokens
    if left < 1:
        raise PromptTooLong(prompt_tokens, context)
    return left if wanted is None else min(wanted, left)
