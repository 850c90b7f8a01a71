"""QueuedStream: what an engine's thread puts in comes out on the event loop, in order, whole and once."""

import asyncio
import threading
from collections.abc import Callable, Coroutine

from glm53.engine.protocol import Delta, Finish, Token
from glm53.engine.stream import QueuedStream

A, B, C = (Token(i, bytes([97 + i])) for i in range(3))


async def rest(stream: QueuedStream) -> list[Delta]:
    """All deltas until the last."""
    return [delta async for delta in stream]


def on_loop(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_tokens_gather_until_they_are_read_and_the_end_comes_with_the_last() -> None:
    async def test() -> None:
        stream = QueuedStream(7)
        stream.push([A])
        stream.push([B])
        stream.finish(Finish("length"), [C])
        assert await rest(stream) == [Delta([A, B, C], Finish("length"))]
        assert stream.usage.prompt_tokens == 7

    on_loop(test)


def test_nothing_follows_the_first_end() -> None:
    """A failed step ends streams that another part of the engine may end too: the reader is told the first reason."""

    async def test() -> None:
        stream = QueuedStream(1)
        stream.finish(Finish("error", error="first"), [A])
        stream.push([B])
        stream.finish(Finish("cancelled"), [C])
        assert await rest(stream) == [Delta([A], Finish("error", error="first"))]

    on_loop(test)


def test_a_reader_that_waits_is_woken_from_another_thread_each_time() -> None:
    async def test() -> None:
        stream = QueuedStream(1)
        seen: list[Token] = []
        read = threading.Event()

        def engine() -> None:
            for token in (A, B, C):
                stream.push([token])
                assert read.wait(60)
                read.clear()
            stream.finish(Finish("stop"))

        thread = threading.Thread(target=engine)
        thread.start()
        deltas = []
        async for delta in stream:
            deltas.append(delta)
            seen += delta.tokens
            read.set()
        thread.join()
        assert seen == [A, B, C]
        assert [d.finish for d in deltas] == [None, None, None, Finish("stop")]

    on_loop(test)


def test_without_a_loop_to_wake_the_reader_counts_as_gone() -> None:
    async def make() -> QueuedStream:
        return QueuedStream(1)

    stream = asyncio.run(make())
    assert not stream.cancelled
    stream.push([A])
    assert stream.cancelled
