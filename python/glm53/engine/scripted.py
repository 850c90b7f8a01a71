"""An engine that answers from a file: for tests, benchmarks and authors of clients. No model is loaded.

File: JSON lines, one answer a line, taken in order and from the top again:
`{"pieces": ["text", "<think>", {"hex": "f09f"}], "end": "user", "rate": 30, "prefill_s": 0.5}`.
One piece is one token. A piece that spells a special token is delivered as that token; `hex` gives raw bytes (half a
character, say). `end` is user, observation, eos, length or error; `rate` is tokens per second, null = no pause;
`prefill_s` (optional, default 0) delays the first token.

What is real: queueing, batching, cancellation, limits, counters, the common prefix with earlier prompts reported as
cached. What is not: log-probabilities (the scripted token has probability 1) and scores (uniform over the vocabulary);
sampling parameters and grammars change nothing.

States of a stream: waiting -> running (prefill, then tokens) -> finished; only the engine thread moves it, except that
`submit` creates it and its reader may set `cancelled`.
Costs: while anything runs the thread wakes at least every 20 ms, so that a cancelled stream leaves quickly; idle, twice
a second for its heartbeat.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, EngineError, PromptTooLong
from ..tokenizer import Tokenizer
from .protocol import Engine, EngineInfo, Finish, GenerationRequest, Token, TokenScore, TokenStream
from .stream import QueuedStream

END_TOKENS = {"user": "<|user|>", "observation": "<|observation|>", "eos": "<|endoftext|>"}
ENDS = (*END_TOKENS, "length", "error")
KEYS = {"pieces", "end", "rate", "prefill_s"}
EXAMPLE = '{"pieces": ["Hi"], "end": "user"}'
POLL_S = 0.02
IDLE_S = 0.5
ID_CHARS = 32  # a piece is one token whatever its length; its id is that of its beginning
BURST = 16  # tokens a stream without a rate gets before the next one has its turn
REMEMBERED_PROMPTS = 8


@dataclass(frozen=True, slots=True)
class Answer:
    """One line of the file. `end_id` is None for length and error."""

    tokens: tuple[Token, ...]
    end: str
    end_id: int | None
    rate: float | None
    prefill_s: float


@dataclass(slots=True, eq=False)
class _Running:
    request: GenerationRequest
    stream: QueuedStream
    answer: Answer
    first_due_s: float = 0.0
    sent: int = 0

    def due_s(self) -> float:
        """When the next token is to leave, counted from the first one, so that delays do not add up."""
        rate = self.answer.rate
        return self.first_due_s + (self.sent / rate if rate else 0.0)


@dataclass(slots=True)
class _Counters:
    requests: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


def load_answers(path: Path, tokenizer: Tokenizer) -> list[Answer]:
    """Read a script. Raises ConfigError naming the file and the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--scripted {path}: cannot be read ({e})") from None
    answers = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            answers.append(_parse_answer(json.loads(line), tokenizer))
        except json.JSONDecodeError as e:
            raise ConfigError(f"--scripted {path}, line {number}: not JSON ({e}); a line is {EXAMPLE}") from None
        except ValueError as e:
            raise ConfigError(f"--scripted {path}, line {number}: {e}") from None
    if not answers:
        raise ConfigError(f"--scripted {path}: no answer in it; a line is {EXAMPLE}")
    return answers


def _parse_answer(line: Any, tokenizer: Tokenizer) -> Answer:
    if not isinstance(line, dict):
        raise ValueError("an answer is a JSON object")
    if unknown := sorted(set(line) - KEYS):
        raise ValueError(f"unknown key {unknown[0]!r}; known: {', '.join(sorted(KEYS))}")
    pieces, end = line.get("pieces"), line.get("end")
    if not isinstance(pieces, list):
        raise ValueError('"pieces" must be a list of strings and {"hex": ".."} objects')
    if end not in ENDS:
        raise ValueError(f'"end" must be one of {", ".join(ENDS)}, not {end!r}')
    return Answer(
        tokens=tuple(_parse_piece(i, p, tokenizer) for i, p in enumerate(pieces)),
        end=end,
        end_id=tokenizer.special_id(END_TOKENS[end]) if end in END_TOKENS else None,
        rate=_number(line, "rate", exclusive=True),
        prefill_s=_number(line, "prefill_s", exclusive=False) or 0.0,
    )


def _number(line: dict[str, Any], key: str, *, exclusive: bool) -> float | None:
    value = line.get(key)
    if value is None:
        return None
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (exclusive and value == 0):
        raise ValueError(
            f'"{key}" must be a {"positive" if exclusive else "non-negative"} number or null, not {value!r}'
        )
    return float(value)


def _parse_piece(index: int, piece: Any, tokenizer: Tokenizer) -> Token:
    if isinstance(piece, dict) and set(piece) == {"hex"} and isinstance(piece["hex"], str):
        try:
            data = bytes.fromhex(piece["hex"])
        except ValueError:
            raise ValueError(f"pieces[{index}]: {piece['hex']!r} is not hexadecimal") from None
        return Token(id=data[0] if data else 0, data=data)
    if not isinstance(piece, str):
        raise ValueError(f'pieces[{index}] must be a string or {{"hex": ".."}}, not {piece!r}')
    special = tokenizer.special_ids([piece])
    ids = [*special] or tokenizer.encode(piece[:ID_CHARS]) or [0]
    return Token(id=ids[0], data=piece.encode("utf-8", "replace"))


class ScriptedEngine(Engine):
    """Engine over a list of answers; see the module docstring for the file and for what is real."""

    def __init__(
        self, path: Path, tokenizer: Tokenizer, *, name: str = "scripted", context: int = 131072, max_streams: int = 8
    ) -> None:
        self._answers = load_answers(path, tokenizer)
        self.info = EngineInfo(
            name=name,
            mode="scripted",
            device="none",
            model_path=str(path),
            context=context,
            vocab_size=tokenizer.size,
            max_streams=max_streams,
            scripted=True,
        )
        self._next = 0
        self._condition = threading.Condition()
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._prompts: deque[np.ndarray[Any, np.dtype[np.int32]]] = deque(maxlen=REMEMBERED_PROMPTS)
        self._counters = _Counters()
        self._scoring = asyncio.Lock()
        self._closed = False
        self._beat_s = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="scripted-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Queue the next answer of the script. Raises PromptTooLong, or EngineError after `close`."""
        if len(request.prompt_ids) >= self.info.context:
            raise PromptTooLong(len(request.prompt_ids), self.info.context)
        stream = QueuedStream(len(request.prompt_ids))
        stream.usage.submitted_s = time.monotonic()
        with self._condition:
            if self._closed:
                raise EngineError("the engine is closed")
            answer = self._answers[self._next % len(self._answers)]
            self._next += 1
            self._waiting.append(_Running(request, stream, answer))
            self._condition.notify()
        return stream

    async def score(self, ids: Sequence[int], top: int) -> list[TokenScore]:
        """Scores of a model that knows nothing: every token has probability 1 / vocab_size."""
        uniform = -math.log(self.info.vocab_size)
        best = tuple((i, uniform) for i in range(top))

        def make() -> list[TokenScore]:
            return [TokenScore(t, None if i == 0 else uniform, () if i == 0 else best) for i, t in enumerate(ids)]

        async with self._scoring:
            return await asyncio.to_thread(make)

    def stats(self) -> dict[str, Any]:
        """Counters since start."""
        with self._condition:
            c = self._counters
            return {
                "running": len(self._running),
                "waiting": len(self._waiting),
                "heartbeat_age_s": round(time.monotonic() - self._beat_s, 3),
                "requests": c.requests,
                "cancelled": c.cancelled,
                "prompt_tokens": c.prompt_tokens,
                "cached_tokens": c.cached_tokens,
                "completion_tokens": c.completion_tokens,
            }

    def close(self) -> None:
        """Cancel everything and end the thread."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait(self._pause_s())
                if self._closed:
                    break
                self._beat_s = time.monotonic()
                self._drop_cancelled()
                admitted = self._admit()
            for entry in admitted:
                self._begin(entry)
            self._step()
        for entry in [*self._waiting, *self._running]:
            entry.stream.finish(Finish("cancelled"))
        self._waiting.clear()
        self._running.clear()

    def _pause_s(self) -> float:
        """Seconds until there is something to do (0 = now)."""
        if self._waiting and len(self._running) < self.info.max_streams:
            return 0.0
        if not self._running:
            return POLL_S if self._waiting else IDLE_S
        return min(POLL_S, max(0.0, min(e.due_s() for e in self._running) - time.monotonic()))

    def _drop_cancelled(self) -> None:
        # Each flag is read once: it may be raised at any time, and a stream that leaves a list must be finished.
        gone = [e for e in [*self._waiting, *self._running] if e.stream.cancelled]
        for entry in gone:
            self._counters.cancelled += 1
            entry.stream.finish(Finish("cancelled"))
        if gone:
            self._waiting = deque(e for e in self._waiting if e not in gone)
            self._running = [e for e in self._running if e not in gone]

    def _admit(self) -> list[_Running]:
        admitted: list[_Running] = []
        while self._waiting and len(self._running) < self.info.max_streams:
            entry = self._waiting.popleft()
            entry.stream.usage.prefill_start_s = time.monotonic()
            self._counters.requests += 1
            self._counters.prompt_tokens += entry.stream.usage.prompt_tokens
            self._running.append(entry)
            admitted.append(entry)
        return admitted

    def _begin(self, entry: _Running) -> None:
        """Not under the lock, which the event loop takes: a long prompt is compared with others."""
        usage = entry.stream.usage
        usage.cached_tokens = self._cached_tokens(entry.request.prompt_ids)
        self._counters.cached_tokens += usage.cached_tokens
        entry.first_due_s = usage.prefill_start_s + entry.answer.prefill_s

    def _cached_tokens(self, prompt_ids: Sequence[int]) -> int:
        """Longest prefix shared with a remembered prompt; the last token always has to be computed."""
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        best = 0
        for old in self._prompts:
            size = min(len(old), len(prompt))
            differs = np.flatnonzero(old[:size] != prompt[:size])
            best = max(best, int(differs[0]) if len(differs) else size)
        self._prompts.append(prompt)
        return max(0, min(best, len(prompt) - 1))

    def _step(self) -> None:
        now = time.monotonic()
        for entry in [e for e in self._running if e.due_s() <= now]:
            self._advance(entry, now)

    def _advance(self, entry: _Running, now: float) -> None:
        """Send what is due of one stream. One that ends leaves `_running` first: its reader then counts it no more."""
        count = 1 if entry.answer.rate else BURST
        tokens: list[Token] = []
        finish: Finish | None = None
        while finish is None and len(tokens) < count:
            finish = self._draw(entry, tokens)
        usage = entry.stream.usage
        if tokens:
            usage.first_token_s = usage.first_token_s or now
            usage.last_token_s = now
            usage.completion_tokens += len(tokens)
            self._counters.completion_tokens += len(tokens)
        if finish:
            with self._condition:
                self._running.remove(entry)
            entry.stream.finish(finish, tokens)
        else:
            entry.stream.push(tokens)

    def _draw(self, entry: _Running, tokens: list[Token]) -> Finish | None:
        """Append the stream's next token to `tokens`, or say why there is none."""
        request, answer = entry.request, entry.answer
        if entry.sent >= len(answer.tokens):
            return self._end(answer, request)
        token = answer.tokens[entry.sent]
        if token.id in request.stop_ids:
            return Finish("stop", stop_id=token.id)
        tokens.append(token if request.top_logprobs is None else _certain(token, request.top_logprobs))
        entry.sent += 1
        if entry.sent >= request.max_tokens:
            return Finish("length")
        # The end marker is drawn together with the last token: it costs no step of its own.
        return self._end(answer, request) if entry.sent == len(answer.tokens) else None

    def _end(self, answer: Answer, request: GenerationRequest) -> Finish:
        if answer.end == "error":
            return Finish("error", error="the script says: error")
        if answer.end_id is None:
            return Finish("length")
        return Finish("stop", stop_id=answer.end_id if answer.end_id in request.stop_ids else None)


def _certain(token: Token, count: int) -> Token:
    """The token with probability 1 and `count` alternatives, the others with probability 0."""
    others = (i for i in range(count + 1) if i != token.id)
    top = [(token.id, 0.0), *((i, -math.inf) for i in others)][:count]
    return Token(token.id, token.data, 0.0, tuple(top))
