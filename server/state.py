"""What all handlers share: the engine's slot, the limits, the live requests and the metrics.

States: loading -> ready -> draining -> stopped, and loading -> failed. Only `lifecycle.Server` moves them, on the event
loop; handlers read them through `engine_or_503`. `progress` is written by the loader's thread, which replaces one
tuple: that is atomic. `items` has a lock of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from aiohttp import web

from glm53.engine.protocol import Engine
from glm53.grammar import Grammars
from glm53.tokenizer import Tokenizer

from .admission import Admission, BodyRoom
from .errors import Unavailable
from .generation_config import read_generation_config
from .item_store import ItemStore
from .metrics import Metrics
from .options import ServerOptions
from .prompt import PromptBuilder
from .protocol.requests import RequestDefaults

if TYPE_CHECKING:
    from .jobs import Job

T = TypeVar("T")
Phase = Literal["loading", "ready", "draining", "stopped", "failed"]
INLINE_BYTES = 4096  # prompts up to this size are parsed and encoded on the event loop (about 1 ms)
LARGE_BYTES = 1 << 18  # larger ones are prepared one after another: each step may keep the GIL for tens of ms
BREATH_S = 0.05  # most time between two of them, for an engine's thread that wants the GIL many times a token
WORKERS = 8  # threads that prepare requests and replies; tokenising lets go of the GIL
COMPILERS = 4  # threads that compile grammars, which also let go of it; a client's may take seconds to be refused
FREE_AFTER_S = 1.0  # time for a handler that has ended to be forgotten, with what it refers to
FREED_AT_ONCE = 256  # tokens with twenty alternatives each are freed in less than a millisecond
BODIES = 16  # as many of the largest bodies may be in memory at once
STOPPING = "the server is shutting down"


class ServerState:
    """Shared by all handlers of one application; see the module docstring for its states."""

    def __init__(self, options: ServerOptions, tokenizer: Tokenizer) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.prompts = PromptBuilder(options.chat_template, tokenizer)
        self.generation_config = read_generation_config(tokenizer.model_dir, tokenizer.size)
        self.phase: Phase = "loading"
        self.engine: Engine | None = None
        self.progress: tuple[str, float] = ("starting", 0.0)
        self.created = int(time.time())
        self.started_s = time.monotonic()
        self.load_s = 0.0
        self.admission = Admission(options.max_queue)
        self.bodies = BodyRoom(BODIES * options.max_body_bytes)
        self.metrics = Metrics(self)
        self.live: dict[str, Job] = {}
        self.refused_origins: set[str] = set()
        self.items = ItemStore()
        self.idle = asyncio.Event()  # set while `live` is empty
        self.idle.set()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="prepare")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large")
        self._rested_s = 0.0  # when the thread for large work may work again (monotonic); its own
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="compile")

    def engine_or_503(self) -> Engine:
        """The loaded engine. Raises Unavailable in every phase but "ready"."""
        if self.phase == "ready" and self.engine is not None:
            return self.engine
        if self.phase == "loading":
            stage, fraction = self.progress
            raise Unavailable(f"the model is loading ({stage}, {fraction:.0%}); retry later", code="loading")
        if self.phase == "draining":
            raise Unavailable(STOPPING, code="shutting_down", retry_after_s=10)
        raise Unavailable(f"the server is not serving ({self.phase})", code=self.phase)

    def status(self) -> Phase:
        """The phase as the outside should see it: with a dead engine the server has failed."""
        if self.phase == "ready" and self.engine is not None and self.engine.stats().get("dead"):
            return "failed"
        return self.phase

    def defaults(self) -> RequestDefaults:
        """What a request gets for fields it leaves out."""
        return RequestDefaults(self.generation_config.sampling, vocab_size=self.engine_or_503().info.vocab_size)

    async def run_sized(self, size: int, work: Callable[[], T]) -> T:
        """`work()` here if its input of `size` bytes is small, else on a thread, so that the event loop stays free; a
        large one waits for others, so that the event loop waits for no more than one of them."""
        return work() if size <= INLINE_BYTES else await self.run_on_thread(work, size)

    async def run_on_thread(self, work: Callable[[], T], size: int = 0) -> T:
        """`work()` on one of the threads that prepare requests and replies; a large one as `run_sized` says."""
        loop = asyncio.get_running_loop()
        if size <= LARGE_BYTES:
            return await loop.run_in_executor(self._workers, work)
        return await loop.run_in_executor(self._large, self._after_a_breath, work)

    def _after_a_breath(self, work: Callable[[], T]) -> T:
        """`work()`, on the thread for large work, which rests for as long as it has worked."""
        time.sleep(max(0.0, self._rested_s - time.monotonic()))
        started = time.monotonic()
        try:
            return work()
        finally:
            ended = time.monotonic()
            self._rested_s = ended + min(BREATH_S, ended - started)

    async def run_compiling(self, work: Callable[[], T]) -> T:
        """`work()`, which compiles a grammar, where it keeps only other grammars waiting: the beginning and the end of
        every stream are made on the threads of `run_on_thread`."""
        return await asyncio.get_running_loop().run_in_executor(self._compilers, work)

    def free_later(self, lists: list[list[Any]]) -> None:
        """Empty `lists` on a thread, a little at a time, once nobody else refers to what is in them."""
        if lists:
            asyncio.get_running_loop().call_later(FREE_AFTER_S, self._free_on_thread, lists)

    def _free_on_thread(self, lists: list[list[Any]]) -> None:
        with suppress(RuntimeError):  # the threads have been let go of: the process is leaving
            self._large.submit(_free, lists)

    @cached_property
    def grammars(self) -> Grammars:
        """The grammar compiler. The loader's thread makes it, before there are requests: it may take a second."""
        return Grammars(self.tokenizer.model_dir, self.tokenizer)

    def close(self) -> None:
        """Let go of the worker threads (waits for nothing)."""
        for threads in (self._workers, self._large, self._compilers):
            threads.shutdown(wait=False, cancel_futures=True)


def _free(lists: list[list[Any]]) -> None:
    for items in lists:
        while items:
            del items[-FREED_AT_ONCE:]


REQUEST_ID = web.RequestKey("request_id", str)
NOTE = web.RequestKey("note", str)  # what the log line says besides route, status and time
STATE: web.AppKey[ServerState] = web.AppKey("state", ServerState)
