"""`glm53 serve`: settings, checks that fail in one line, then the HTTP server with an engine loading behind it.

Order matters to the user: a wrong setting, port, GPU, folder or too little RAM is said before anything is read.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import Settings, print_config
from ..console import Progress, put, say
from ..engine.protocol import Engine
from ..engine.protocol import Progress as ProgressCall
from ..errors import CheckpointError, ConfigError, DeviceError, ResourceError
from ..host import Host
from . import model_dir
from .common import add_settings, check_cpu_tier, settings_from

LoadEngine = Callable[[ProgressCall], Engine]
TRY = "or try the bundled checkpoint with --demo --device cpu"


def add(commands: Any) -> None:
    """Register the subcommand."""
    text = "load the model and answer over HTTP"
    parser = commands.add_parser("serve", help=text, description=text)
    parser.add_argument("--demo", action="store_true", help="serve the small bundled checkpoint")
    parser.add_argument(
        "--scripted", type=Path, metavar="FILE", help="answer from a file of prepared answers, no model"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="show every setting and where it came from, then exit"
    )
    add_settings(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Returns 0 after a clean stop."""
    if args.demo and "set_model_dir" in vars(args):
        raise ConfigError("--demo serves the bundled checkpoint, --model-dir another: leave one of them out")
    forced: dict[str, object] = {"model_dir": model_dir.BUNDLED, "download": False} if args.demo else {}
    settings = settings_from(args, **forced)
    if args.print_config:
        put(print_config(settings))
        return 0
    settings.all_api_keys()
    check_port(settings)
    if args.scripted is not None:
        return _serve_scripted(settings, args.scripted)
    device = choose_device(settings, Host(), "or add --device cpu" if args.demo else TRY)
    check_choices(settings, device)
    ensure_model(settings)
    model_dir.check(settings.model_dir)
    return _serve(settings, settings.model_dir, engine_loader(settings, device))


def check_port(settings: Settings) -> None:
    """Raise ResourceError if the port cannot be listened on."""
    try:
        infos = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as e:
        why = e.strerror if isinstance(e, socket.gaierror) else "a label of it is empty or too long"
        raise ConfigError(f"host {settings.host!r} is not an address of this machine ({why}); check --host") from None
    family, kind, protocol, _, address = infos[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except PermissionError:
            raise ResourceError(f"port {settings.port} needs root; choose one above 1023 with --port") from None
        except OSError as e:
            used = e.errno == errno.EADDRINUSE
            why = "is in use: stop the other server" if used else f"cannot be opened ({e.strerror}): check --host"
            where = f"port {settings.port} on {settings.host}"
            raise ResourceError(f"{where} {why} or choose another with --port") from None


def choose_device(settings: Settings, host: Host, hint: str) -> str:
    """The device, cpu or cuda. Raises DeviceError where a GPU is wanted (auto included) and none is usable.

    `hint` is what else the user of this command can do.
    """
    if settings.device == "cpu":
        return "cpu"
    from .. import _core

    gpus, why = host.gpus()
    hint = ", ".join(filter(None, ("run `glm53 doctor`", hint)))
    if not gpus:
        raise DeviceError(f"no usable GPU: {why}; {hint}")
    if settings.gpu >= len(gpus):
        raise DeviceError(f"GPU {settings.gpu} does not exist: this machine has {len(gpus)}, counted from 0; {hint}")
    if not _core.cuda_built():
        raise DeviceError(f"this build of glm53 has no CUDA objects; install a wheel built where nvcc is found; {hint}")
    return "cuda"


def ensure_model(settings: Settings) -> None:
    """Download the configured checkpoint if there is none and the settings allow it."""
    path = settings.model_dir
    if not settings.download or not model_dir.is_missing(path):
        return
    if not path.exists() and settings.sources.get("model_dir", "default") != "default":
        raise CheckpointError(
            f"{path}: no such folder; correct --model-dir, or create the folder to have "
            f"{settings.model_repo} ({settings.model_revision}) downloaded into it"
        )
    from .pull import pull

    pull(settings)


def engine_loader(settings: Settings, device: str) -> LoadEngine:
    """A function that loads the engine for `device`, called by the server on a thread of its own."""
    if device == "cpu":
        try:
            from ..engine.cpu import CpuEngine
        except ImportError as e:
            raise DeviceError(f"the CPU engine is not installed ({e}); pip install 'glm53[cpu]'") from None
        chosen = {name for name, source in settings.sources.items() if source != "default"}
        options: dict[str, Any] = {
            "threads": settings.ct_threads or len(settings.ct_cpus or ()),
            "context": settings.cache_tokens if "cache_tokens" in chosen else 0,
            "max_streams": settings.max_streams(),
            "isa": settings.isa or "auto",
        }
        if "chunk_size" in chosen:
            options["prefill_chunk"] = settings.chunk_size
        return lambda progress: CpuEngine.load(settings.model_dir, progress=progress, **options)
    try:
        from ..engine.exllama import ExllamaEngine
    except ImportError as e:
        raise DeviceError(f"the GPU engine is not installed ({e}); pip install 'glm53[cuda]'") from None
    return lambda progress: ExllamaEngine.load(settings, progress)


def check_choices(settings: Settings, device: str) -> None:
    """Raise ConfigError for what cannot work on this device or machine, before a checkpoint is downloaded or read."""
    check_mtp(settings, device)
    if device == "cpu" or settings.mode == "fast":
        check_cpu_tier(settings)
    if settings.chat_template != "checkpoint":
        chat_template(settings)


def check_mtp(settings: Settings, device: str) -> None:
    """Raise ConfigError where the settings ask for drafts that cannot be had."""
    if settings.mtp and device != "cuda":
        raise ConfigError("mtp: the CPU engine does not draft; leave --mtp out, or use a GPU")
    if settings.mtp and settings.mode == "exact":
        raise ConfigError(
            "mtp: exact mode gives the bits of stock exllamav3 decoding one token a step, and drafts are verified by "
            "kernels for several rows; use --mode fast, or leave --mtp out"
        )


def _serve_scripted(settings: Settings, script: Path) -> int:
    from ..engine.scripted import ScriptedEngine
    from ..tokenizer import Tokenizer

    path = settings.model_dir if (settings.model_dir / "tokenizer.json").exists() else model_dir.BUNDLED
    engine = ScriptedEngine(script, Tokenizer(path), context=settings.cache_tokens, max_streams=settings.max_batch_size)
    return _serve(settings, path, lambda progress: engine)


def server_options(settings: Settings) -> Any:
    """The server's part of the settings."""
    from glm53.server.options import MIB, ServerOptions

    return ServerOptions(
        host=settings.host,
        port=settings.port,
        served_name=settings.served_name,
        api_keys=settings.all_api_keys(),
        max_body_bytes=int(settings.max_body_mib * MIB),
        head_timeout_s=settings.body_timeout_s,
        body_timeout_s=settings.body_timeout_s,
        max_queue=settings.max_queue,
        max_n=settings.max_n,
        request_timeout_s=settings.request_timeout_s,
        drain_s=settings.drain_s,
        cors_origins=settings.cors_origins,
        ping_s=settings.ping_s,
        write_timeout_s=settings.write_timeout_s,
        chat_template=chat_template(settings),
        log_requests=settings.log_requests,
    )


def chat_template(settings: Settings) -> str:
    """What the server is to render with: "builtin" or a file. Raises ConfigError for a file that is not there."""
    if settings.chat_template == "builtin":
        return "builtin"
    own = settings.model_dir / "chat_template.jinja"
    path = own if settings.chat_template == "checkpoint" else Path(settings.chat_template)
    if not path.is_file():
        raise ConfigError(f"chat_template: {path} does not exist; use builtin, checkpoint or a jinja file")
    return str(path)


def _serve(settings: Settings, path: Path, load: LoadEngine) -> int:
    from glm53.server.app import serve

    from ..tokenizer import Tokenizer

    options, tokenizer, progress = server_options(settings), Tokenizer(path), Progress()
    start_logging(quiet_loading=progress.redraws)

    def load_engine(report: ProgressCall) -> Engine:
        def both(stage: str, fraction: float) -> None:
            if progress.redraws:
                progress.update(stage, fraction)
            report(stage, fraction)

        try:
            return load(both)
        finally:
            progress.close()

    say(f"glm53: loading {path}")
    serve(options, load_engine, tokenizer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C: the process is leaving already
    _leave_loader()
    return 0


def _leave_loader() -> None:
    """End the process here, with status 0, if a stop left the loader at work.

    Its daemon thread is in native code (torch, page-locking), which aborts where an interpreter ends beneath it. The
    kernel takes back what it holds.
    """
    if any(thread.daemon for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)


def start_logging(quiet_loading: bool) -> None:
    """Log to stderr: bare lines under systemd, which adds the time. A drawn progress bar replaces loading lines."""
    handler = logging.StreamHandler()
    if quiet_loading:
        handler.addFilter(lambda record: not str(record.msg).startswith("loading:"))
    form = "%(message)s" if "JOURNAL_STREAM" in os.environ else "%(asctime)s %(message)s"
    logging.basicConfig(level=logging.INFO, handlers=[handler], format=form, datefmt="%H:%M:%S")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it sets up its own logger, from this variable
    for noisy in ("asyncio", "httpx", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
