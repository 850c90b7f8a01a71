"""`glm53 pull`: bring the configured checkpoint to this machine."""

from __future__ import annotations

import argparse
from typing import Any

from ..config import Settings
from ..console import Progress, say
from .common import add_settings, settings_from


def add(commands: Any) -> None:
    """Register the subcommand."""
    text = "download the checkpoint (117 GiB), resumable"
    parser = commands.add_parser("pull", help=text, description=text)
    add_settings(parser, "model", without=("download", "chat_template", "state_dir"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Download, verify, say where it is."""
    pull(settings_from(args))
    return 0


def pull(settings: Settings) -> None:
    """Download the configured repository into `model_dir`. Raises ResourceError."""
    from ..download import download
    from ..errors import ResourceError

    target = settings.model_dir
    say(f"glm53: fetching {settings.model_repo} ({settings.model_revision}) into {target}")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ResourceError(f"cannot create {target} ({e.strerror}); name another folder with --model-dir") from None
    progress = Progress()
    try:
        commit = download(settings.model_repo, settings.model_revision, target, progress)
    finally:
        progress.close()
    say(f"glm53: {target} holds {settings.model_repo} at {commit}")
