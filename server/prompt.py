"""Conversations to token ids, by the built-in renderer or a Jinja template. Thread-safe: called on worker threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm53.chat import ChatOptions, JinjaRenderer, Message, Tool, encode, opens_thinking, render
from glm53.errors import ConfigError, PromptTooLong
from glm53.tokenizer import Tokenizer


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
    ) -> Prompt:
        """Render and encode a conversation; `extra` are further variables of a Jinja template."""
        if self._jinja is not None:
            segments = self._jinja.render(messages, tools, options, extra)
        else:
            segments = render(messages, tools, options)
        return Prompt(encode(segments, self._tokenizer), opens_thinking(segments))

    def text(self, text: str) -> list[int]:
        """Encode plain text; it can contain no special token."""
        return self._tokenizer.encode(text)


def fit(prompt_tokens: int, wanted: int | None, context: int) -> int:
    """Tokens that may be generated: `wanted` (None = all that is left), clamped to the context.

    Raises PromptTooLong if the prompt leaves no room for a single token.
    """
    left = context - prompt_tokens
    if left < 1:
        raise PromptTooLong(prompt_tokens, context)
    return left if wanted is None else min(wanted, left)
