"""Every error a user may meet. Each carries the values that explain it; `str(e)` is one line that says what to do.

`nearest` finds the word that a wrong one may have been meant for.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Glm53Error(Exception):
    """Base of all errors raised on purpose. The command line prints `str(e)` and exits with `exit_code`."""

    exit_code = 1


class ConfigError(Glm53Error):
    """A setting is unknown, malformed or contradicts another. Exit code 78 (EX_CONFIG): systemd must not retry it."""

    exit_code = 78


class CheckpointError(Glm53Error):
    """The model directory is not a usable EXL3 GLM-5.3-Flash checkpoint; names the tensor and the file."""

    exit_code = 78


class DeviceError(Glm53Error):
    """No usable GPU, a driver too old, page-locking refused, too little VRAM."""


class ResourceError(Glm53Error):
    """Not enough host RAM, disk or file descriptors; names what was found and what is needed."""


class EngineError(Glm53Error):
    """The engine failed while serving; the request ends with this, the server lives on."""


class RequestError(Glm53Error):
    """A request the engine cannot serve as asked (maps to HTTP 400)."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, **extra: object) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.extra = extra


class PromptTooLong(RequestError):
    """Prompt tokens fill or exceed the context. Wording that OpenAI clients and LiteLLM match on.

    `at_least`: the prompt was not counted to its end.
    """

    def __init__(self, prompt_tokens: int, context: int, *, at_least: bool = False) -> None:
        super().__init__(
            f"This model's maximum context length is {context} tokens. However, your request has "
            f"{'at least ' if at_least else ''}{prompt_tokens} input tokens. Please reduce the length of the messages.",
            param="messages",
            code="context_length_exceeded",
            n_prompt_tokens=prompt_tokens,
            n_ctx=context,
        )


class QueueFull(Glm53Error):
    """More requests wait than `max_queue` allows (maps to HTTP 503 with Retry-After)."""

    def __init__(self, waiting: int, limit: int, retry_after_s: int = 2) -> None:
        super().__init__(f"{waiting} requests are already waiting (limit {limit}); retry in {retry_after_s} s")
        self.retry_after_s = retry_after_s


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known word, or an empty string. The first that `word` begins wins."""
    words = list(known)
    longer = [w for w in words if len(word) > 3 and w.startswith(word)]
    match = longer or difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"; did you mean {match[0]}?" if match else ""
