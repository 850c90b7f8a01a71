"""A server's life: bind, load, serve, drain, stop; and what the service manager is told about it.

States: see `state`. The port is bound first, so that a second server fails at once and health checks get a 503 instead
of a refused connection while the model loads. The loader runs on its own daemon thread; `progress` is how it is
interrupted. First SIGTERM or SIGINT: finish what runs, up to `drain_s`, refuse what is new. Second one: end now.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError
from aiohttp.http_exceptions import HttpProcessingError

from glm53.engine.protocol import Engine, Progress
from glm53.errors import ConfigError, EngineError, ResourceError

from .connection import Connection
from .descriptors import ConnectionLimit, quiet_accept, raise_file_limit
from .notify import Notifier
from .options import ServerOptions
from .read_turns import ReadTurns
from .state import STATE, STOPPING, ServerState

log = logging.getLogger("glm53.server")
http_log = logging.getLogger("glm53.http")

LoadEngine = Callable[[Progress], Engine]
SWITCH_S = 0.001  # how long the engine thread may keep the interpreter lock from the event loop
GOODBYE_S = 5.0  # time for the last error events to leave once streams are ended
LOG_EVERY_S = 5.0
LOOK_S = 60.0  # between looks whether the server is idle, for the garbage collection
COLLECT_S = 600.0  # most time between two collections
NEVER = 1 << 30


def _without_traceback(record: logging.LogRecord) -> bool:
    """aiohttp logs a traceback for every malformed request or body, and for every client that leaves between its
    request and the reply's headers; strangers must not be able to fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ClientConnectionResetError):
        return False  # the request's own line has it already, as status 499
    if isinstance(error, HttpProcessingError | web.RequestPayloadError):
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg = f"{record.msg}: malformed HTTP ({type(error).__name__})"
    return True


http_log.addFilter(_without_traceback)


class Server:
    """One application on one port."""

    def __init__(self, app: web.Application, load_engine: LoadEngine, notifier: Notifier | None = None) -> None:
        self.state: ServerState = app[STATE]
        self.options: ServerOptions = self.state.options
        self.url = ""
        self._load_engine = load_engine
        self._notifier = notifier or Notifier()
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        self._listener: asyncio.Server | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._logged = ("", 0.0)
        self._watchdog: asyncio.Task[None] | None = None

    @property
    def stopping(self) -> bool:
        """True once a stop was asked for."""
        return self._stop.is_set()

    def request_stop(self) -> None:
        """First call: drain and stop; second call: stop now."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def bind(self) -> None:
        """Listen. Raises ResourceError for a port in use, ConfigError for an address this host does not have."""
        host, port = self.options.host, self.options.port
        await self._runner.setup()
        loop, handlers = asyncio.get_running_loop(), self._runner.server
        assert handlers is not None
        limit, turns, head_s = ConnectionLimit(raise_file_limit()), ReadTurns(loop), self.options.head_timeout_s
        quiet_accept(loop)

        def connection() -> Connection:
            return Connection(
                handlers, head_s=head_s, limit=limit, turns=turns, loop=loop, access_log=None, logger=http_log
            )

        try:
            self._listener = await loop.create_server(connection, host, port, backlog=1024)
        except (OSError, OverflowError) as e:
            await self._runner.cleanup()
            if getattr(e, "errno", None) == errno.EADDRINUSE:
                raise ResourceError(
                    f"port {port} on {host} is in use: stop the other server or choose another with --port"
                ) from None
            raise ConfigError(f"cannot listen on {host} port {port}: {e}") from None
        bound = self._listener.sockets[0].getsockname()
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        self.url = f"http://{shown}:{bound[1]}"
        log.info("listening on %s, loading the model", self.url)

    async def load(self) -> None:
        """Load the engine on a thread and open for requests. Raises what the loader raises, or EngineError on stop."""
        started = time.monotonic()
        loading = self._start_loader()
        stopping = asyncio.ensure_future(self._stop.wait())
        either: set[asyncio.Future[Any]] = {loading, stopping}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not loading.done():
            loading.cancel()
            raise EngineError("stopped while the model was loading")
        try:
            engine = loading.result()
        except BaseException:
            self.state.phase = "failed"
            raise
        self.state.load_s = time.monotonic() - started
        self.state.engine = engine
        self.state.admission.max_running = engine.info.max_streams
        gc.collect()
        gc.freeze()  # the model's objects live for ever: later collections need not walk them
        self.state.phase = "ready"
        log.info("loaded in %.0f s", self.state.load_s)
        log.info("ready: %s at %s", self.options.served_name, self.url)
        self._notifier.ready(f"serving {engine.info.name} ({engine.info.mode})")
        self._watchdog = asyncio.create_task(self._beat())

    def _start_loader(self) -> asyncio.Future[Engine]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Engine] = loop.create_future()

        def settle(engine: Engine | None, error: BaseException | None) -> None:
            if future.done():
                if engine is not None:
                    engine.close()
            elif error is not None:
                future.set_exception(error)
            elif engine is not None:
                future.set_result(engine)

        def work() -> None:
            engine, error = None, None
            try:
                _ = self.state.grammars
                engine = self._load_engine(self._progress)
            except BaseException as e:  # handed to the event loop, whatever it is
                error = e
            try:
                loop.call_soon_threadsafe(settle, engine, error)
            except RuntimeError:  # the loop has closed: the process is leaving
                if engine is not None:
                    engine.close()

        threading.Thread(target=work, name="load", daemon=True).start()
        return future

    def _progress(self, stage: str, fraction: float) -> None:
        """Called by the loader, on its thread. Raises EngineError to interrupt it once a stop was asked for."""
        if self._stop.is_set():
            raise EngineError("stopped while the model was loading")
        self.state.progress = (stage, fraction)
        self._notifier.loading(stage, fraction)
        last_stage, last_s = self._logged
        now = time.monotonic()
        if stage != last_stage or now - last_s >= LOG_EVERY_S:
            self._logged = (stage, now)
            log.info("loading: %s %.0f %%", stage, 100 * fraction)

    async def _beat(self) -> None:
        """Feed the watchdog while the engine's own thread is alive; the event loop proves itself by running this."""
        limit = self._notifier.watchdog_s
        while limit and self.state.engine is not None:
            age = self.state.engine.stats()["heartbeat_age_s"]
            if age < limit / 2 and self.state.status() != "failed":
                self._notifier.alive()
            else:
                log.warning("the engine is dead or has shown no sign of life for %.0f s", age)
            await asyncio.sleep(limit / 4)

    async def wait_stop(self) -> None:
        """Return when `request_stop` was called."""
        await self._stop.wait()

    async def drain(self) -> None:
        """Refuse new requests, let running ones finish for `drain_s` (or until the second signal), then end them."""
        state = self.state
        state.phase = "draining"
        seconds = self.options.drain_s
        self._notifier.stopping("draining", seconds + GOODBYE_S + 10)
        log.info("stopping: %g s for running requests to finish (now %d)", seconds, len(state.live))
        await self._idle_within(seconds)
        for job in [*state.live.values()]:
            job.end(STOPPING)
        self._hurry.clear()
        await self._idle_within(GOODBYE_S)

    async def _idle_within(self, seconds: float) -> None:
        """Wait until no request is left, the time is over, or somebody is in a hurry."""
        waits = {asyncio.ensure_future(e.wait()) for e in (self.state.idle, self._hurry)}
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def close(self) -> None:
        """Close connections, the engine and the threads. Idempotent."""
        self.state.phase = "stopped" if self.state.phase != "failed" else "failed"
        self._stop.set()
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
        engine, self.state.engine = self.state.engine, None
        if engine is not None:
            await asyncio.get_running_loop().run_in_executor(None, engine.close)
        self.state.close()


async def collect_when_idle(state: ServerState) -> None:
    """Look for unreachable cycles among old objects between requests, or after COLLECT_S, instead of whenever Python
    finds it due: that is while a long prompt's scores or a large body are made, and then it takes up to 600 ms."""
    before = gc.get_threshold()
    gc.set_threshold(before[0], before[1], NEVER)
    last_s = time.monotonic()
    try:
        while True:
            await asyncio.sleep(LOOK_S)
            if not state.live or time.monotonic() - last_s >= COLLECT_S:
                gc.collect()
                last_s = time.monotonic()
    finally:
        gc.set_threshold(*before)


async def run(server: Server) -> None:
    """Bind, load, serve until SIGTERM or SIGINT, drain, close. Returns normally after a clean stop."""
    sys.setswitchinterval(SWITCH_S)
    loop = asyncio.get_running_loop()
    collector = asyncio.create_task(collect_when_idle(server.state))
    await server.bind()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.request_stop)
    try:
        try:
            await server.load()
        except EngineError:
            if not server.stopping:
                raise
            log.info("stopped while loading")
            return
        await server.wait_stop()
        await server.drain()
    finally:
        collector.cancel()
        await server.close()
        log.info("stopped")
