"""The scripted engine by itself."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from glm53.engine.protocol import Finish, GenerationRequest, Token
from glm53.engine.scripted import ScriptedEngine
from glm53.errors import ConfigError, EngineError, PromptTooLong
from glm53.tokenizer import Tokenizer

Make = Callable[..., ScriptedEngine]


@pytest.fixture
def make(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[Make]:
    engines: list[ScriptedEngine] = []

    def build(*answers: Any, **options: Any) -> ScriptedEngine:
        path = tmp_path / f"{len(engines)}.jsonl"
        path.write_text("".join(json.dumps(a) + "\n" for a in answers), encoding="utf-8")
        engines.append(ScriptedEngine(path, tokenizer, **options))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


async def collect(engine: ScriptedEngine, **request: Any) -> tuple[list[Token], Finish]:
    given = {"request_id": "r", "prompt_ids": [1, 2, 3], "max_tokens": 100, **request}
    tokens: list[Token] = []
    async for delta in engine.submit(GenerationRequest(**given)):
        tokens += delta.tokens
        if delta.finish:
            return tokens, delta.finish
    raise AssertionError("no finish")


def text(tokens: list[Token]) -> bytes:
    return b"".join(t.data for t in tokens)


def test_answers_in_order_and_from_the_top_again(make: Make) -> None:
    async def body() -> None:
        engine = make({"pieces": ["a"], "end": "eos"}, {"pieces": ["b"], "end": "length"})
        seen = [text((await collect(engine))[0]) for _ in range(3)]
        assert seen == [b"a", b"b", b"a"]

    asyncio.run(body())


def test_special_tokens_by_id_and_bytes_by_hex(make: Make, tokenizer: Tokenizer) -> None:
    async def body() -> None:
        tokens, _ = await collect(make({"pieces": ["x", "</think>", {"hex": "f09f"}, "é"], "end": "user"}))
        assert tokens[1].id == tokenizer.special_id("</think>")
        assert [t.data for t in tokens] == [b"x", b"</think>", b"\xf0\x9f", "é".encode()]

    asyncio.run(body())


@pytest.mark.parametrize(
    ("end", "name"), [("user", "<|user|>"), ("observation", "<|observation|>"), ("eos", "<|endoftext|>")]
)
def test_end_is_a_stop_token(make: Make, tokenizer: Tokenizer, end: str, name: str) -> None:
    async def body() -> None:
        stop = tokenizer.special_id(name)
        tokens, finish = await collect(make({"pieces": ["x"], "end": end}), stop_ids=frozenset({stop}))
        assert (text(tokens), finish.reason, finish.stop_id) == (b"x", "stop", stop)

    asyncio.run(body())


def test_a_stop_token_among_the_pieces_ends_the_stream(make: Make, tokenizer: Tokenizer) -> None:
    async def body() -> None:
        stop = tokenizer.special_id("<|user|>")
        engine = make({"pieces": ["a", "<|user|>", "b"], "end": "eos"})
        tokens, finish = await collect(engine, stop_ids=frozenset({stop}))
        assert (text(tokens), finish) == (b"a", Finish("stop", stop_id=stop))
        assert text((await collect(engine))[0]) == b"a<|user|>b"

    asyncio.run(body())


def test_max_tokens(make: Make) -> None:
    async def body() -> None:
        engine = make({"pieces": ["a", "b", "c"], "end": "user"})
        tokens, finish = await collect(engine, max_tokens=2)
        assert (text(tokens), finish.reason) == (b"ab", "length")

    asyncio.run(body())


def test_rate_is_kept_over_many_tokens(make: Make) -> None:
    async def body() -> None:
        started = time.monotonic()
        await collect(make({"pieces": ["a"] * 51, "end": "user", "rate": 100}))
        assert 0.49 <= time.monotonic() - started < 1.5

    asyncio.run(body())


def test_cancel_while_running_and_while_waiting(make: Make) -> None:
    async def body() -> None:
        engine = make({"pieces": ["a"] * 100, "end": "user", "rate": 10}, max_streams=1)
        first = engine.submit(GenerationRequest("1", [1], 100))
        second = engine.submit(GenerationRequest("2", [1], 100))
        for stream in (second, first):
            stream.cancel()
            async with asyncio.timeout(60):
                finishes = [d.finish async for d in stream if d.finish]
            assert finishes[0].reason == "cancelled"
        assert engine.stats()["running"] == engine.stats()["waiting"] == 0

    asyncio.run(body())


def test_cached_tokens_are_the_common_prefix(make: Make) -> None:
    async def body() -> None:
        engine = make({"pieces": ["a"], "end": "user"})
        cached = []
        for prompt in ([1, 2, 3], [1, 2, 4, 5], [1, 2, 4], [9]):
            stream = engine.submit(GenerationRequest("r", prompt, 5))
            async for _ in stream:
                pass
            cached.append(stream.usage.cached_tokens)
        assert cached == [0, 2, 2, 0]

    asyncio.run(body())


def test_logprobs_and_scores(make: Make) -> None:
    async def body() -> None:
        engine = make({"pieces": ["a"], "end": "user"})
        tokens, _ = await collect(engine, top_logprobs=2)
        assert tokens[0].logprob == 0.0
        assert tokens[0].top[0] == (tokens[0].id, 0.0)
        assert tokens[0].top[1][1] == -math.inf
        scores = await engine.score([5, 6], 1)
        assert scores[0].logprob is None
        assert scores[1].logprob == pytest.approx(-math.log(engine.info.vocab_size))

    asyncio.run(body())


def test_prompt_too_long_and_closed(make: Make) -> None:
    async def body() -> None:
        engine = make({"pieces": ["a"], "end": "user"}, context=4)
        with pytest.raises(PromptTooLong):
            engine.submit(GenerationRequest("r", [1] * 4, 1))
        engine.close()
        with pytest.raises(EngineError):
            engine.submit(GenerationRequest("r", [1], 1))

    asyncio.run(body())


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "no answer"),
        ("\n\n", "no answer"),
        ('{"pieces": ["a"], "end": "user"}\n{', "line 2: not JSON"),
        ("root:x:0:0", 'a line is {"pieces": ["Hi"], "end": "user"}'),
        ("[]", "line 1"),
        ('{"pieces": "a", "end": "user"}', "pieces"),
        ('{"pieces": [1], "end": "user"}', "pieces[0]"),
        ('{"pieces": [{"hex": "zz"}], "end": "user"}', "hexadecimal"),
        ('{"pieces": [], "end": "stop"}', "end"),
        ('{"pieces": []}', "end"),
        ('{"pieces": [], "end": "user", "rate": 0}', "rate"),
        ('{"pieces": [], "end": "user", "rate": "9"}', "rate"),
        ('{"pieces": [], "end": "user", "rates": 1}', "rates"),
    ],
)
def test_malformed_scripts_name_the_line(tmp_path: Path, tokenizer: Tokenizer, content: str, told: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        ScriptedEngine(path, tokenizer)
    assert told in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_script(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        ScriptedEngine(tmp_path / "nowhere.jsonl", tokenizer)


def test_a_long_prompt_is_not_compared_under_the_lock_that_the_event_loop_takes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    cached = ScriptedEngine._cached_tokens

    def watched(self: ScriptedEngine, prompt_ids: Any) -> int:
        held.append(self._condition._is_owned())  # type: ignore[attr-defined]
        return cached(self, prompt_ids)

    monkeypatch.setattr(ScriptedEngine, "_cached_tokens", watched)

    async def body() -> None:
        engine = make({"pieces": ["a"], "end": "eos"})
        await collect(engine)
        await collect(engine)
        assert engine.stats()["cached_tokens"] == 2

    asyncio.run(body())
    assert held == [False, False]
