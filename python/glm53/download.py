"""Fetch a checkpoint from the Hugging Face hub: space checked first, resumable, every large file's SHA-256 verified.

The revision is resolved to a commit once, and all files come from that commit. A file that is complete is not fetched
again; an unfinished one goes on where it stopped (huggingface_hub keeps it below `.cache` in the target folder).
config.json comes last, so that a folder without it is an unfinished download: all of its files are verified then, also
those of earlier runs.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .engine.protocol import Progress
from .errors import ResourceError
from .host import GIB, Host

WORKERS = 4
SLACK_BYTES = 256 * 2**20
LAST = "config.json"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of the repository; `sha256` is known for large (LFS) files only."""

    name: str
    size: int
    sha256: str | None


def download(repo: str, revision: str, target: Path, progress: Progress) -> str:
    """Bring `repo` at `revision` into `target`; returns the commit. Raises ResourceError with what to do."""
    commit, files = _listing(repo, revision)
    missing = [f for f in files if not _complete(target / f.name, f)]
    check_space(target, missing)
    body = [f for f in missing if f.name != LAST]
    with _reported(target, missing, progress):
        _fetch(repo, commit, target, body)
    if len(body) < len(missing):  # without config.json an earlier pull may have ended before it verified its files
        body = [f for f in files if f.name != LAST]
    _verify(target, body, progress)
    _fetch(repo, commit, target, [f for f in missing if f.name == LAST])
    return commit


@contextmanager
def _reported(target: Path, missing: list[RemoteFile], progress: Progress) -> Iterator[None]:
    """Tells twice a second how much of `missing` has arrived."""
    total, watch, stop = sum(f.size for f in missing) or 1, _Watch(target), threading.Event()

    def report() -> None:
        progress("downloading", min(1.0, watch.received(missing) / total))

    def go_on() -> None:
        while not stop.wait(0.5):
            report()

    report()
    reporter = threading.Thread(target=go_on, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        stop.set()
        reporter.join()
    progress("downloading", 1.0)


def check_space(target: Path, missing: Iterable[RemoteFile]) -> None:
    """Raise ResourceError if `missing`, less what is already on disk unfinished, does not fit."""
    files = list(missing)
    needed = sum(f.size for f in files) - _Watch(target).unfinished() + SLACK_BYTES
    free = Host().disk_free_bytes(target)
    if files and free < needed:
        raise ResourceError(
            f"not enough disk space in {target}: {needed / GIB:.1f} GiB needed, {free / GIB:.1f} GiB free; "
            "free space or name another folder with --model-dir"
        )


def _listing(repo: str, revision: str) -> tuple[str, list[RemoteFile]]:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import HfApi

    with _Explained(repo, revision):
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    files = []
    for sibling in info.siblings or []:
        lfs: Any = sibling.lfs
        sha = getattr(lfs, "sha256", None) or (lfs.get("sha256") if isinstance(lfs, dict) else None)
        files.append(RemoteFile(sibling.rfilename, sibling.size or 0, sha))
    if not any(f.name == LAST for f in files):
        raise ResourceError(f"{repo} at {revision} has no {LAST}: not a model repository; check --model-repo")
    return info.sha or revision, files


def _complete(path: Path, remote: RemoteFile) -> bool:
    return path.is_file() and path.stat().st_size == remote.size


def _fetch(repo: str, commit: str, target: Path, files: list[RemoteFile]) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()

    def one(remote: RemoteFile) -> None:
        hf_hub_download(repo, remote.name, revision=commit, local_dir=target)

    with _Explained(repo, commit), ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(one, sorted(files, key=lambda f: -f.size)))


def _verify(target: Path, files: list[RemoteFile], progress: Progress) -> None:
    hashed = [f for f in files if f.sha256]
    done = 0
    with ThreadPoolExecutor(WORKERS) as pool:
        for remote, digest in zip(hashed, pool.map(lambda f: _sha256(target / f.name), hashed), strict=True):
            if digest != remote.sha256:
                (target / remote.name).unlink()
                raise ResourceError(
                    f"{target / remote.name}: the SHA-256 is {digest[:12]}…, the hub says {str(remote.sha256)[:12]}…; "
                    "the file was removed: run the same command again"
                )
            done += 1
            progress("verifying", done / len(hashed))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Watch:
    """Counts bytes that have arrived, from the sizes on disk."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def unfinished(self) -> int:
        """Bytes of files being fetched."""
        parts = (self._target / ".cache" / "huggingface").rglob("*.incomplete")
        return sum(_size(p) for p in parts)

    def received(self, files: Iterable[RemoteFile]) -> int:
        """Bytes of `files` on disk, unfinished ones included."""
        return sum(min(f.size, _size(self._target / f.name)) for f in files) + self.unfinished()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class _Explained:
    """Turns the hub client's exceptions into one line that says what to do."""

    def __init__(self, repo: str, revision: str) -> None:
        self._what = f"{repo} at {revision}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, Exception):
            return
        from huggingface_hub import errors

        hint = "check the network and run the command again, it goes on where it stopped"
        if isinstance(error, errors.GatedRepoError):
            hint = "access needs a token: accept the terms on the hub and set HF_TOKEN"
        elif isinstance(error, errors.RevisionNotFoundError):
            hint = "no such revision; check --model-revision"
        elif isinstance(error, errors.RepositoryNotFoundError):
            hint = "no such repository, or a private one (HF_TOKEN); check --model-repo"
        elif isinstance(error, errors.HFValidationError):
            hint = "no such name is possible; check --model-repo and --model-revision"
        elif isinstance(error, OSError) and error.errno == 28:
            hint = "the disk is full; free space or name another folder with --model-dir"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ResourceError(f"cannot download {self._what}: {hint} ({reason})") from error
