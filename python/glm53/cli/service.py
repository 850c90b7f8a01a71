"""`glm53 service install` and `uninstall`: the systemd unit and what it needs, every written file named.

For installations where pip may not write to the system (a virtual environment): the unit's ExecStart is this very
command. The files written are listed in a manifest; uninstall removes exactly those, except a config.toml that the user
has changed, and what the running service left: its caches and the files it learned. The model is never touched. Where
pip itself installed the unit, there is no manifest; uninstall then stops the service and removes only what it left.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..config import example_config
from ..errors import ResourceError

PACKAGE = Path(__file__).resolve().parent.parent
MANIFEST = Path("usr/local/lib/glm53/service-files.json")
UNIT = Path("etc/systemd/system/glm53.service")
CONFIG = Path("etc/glm53/config.toml")
ENABLED = Path("etc/systemd/system/multi-user.target.wants/glm53.service")
CACHES = (Path("var/cache/private/glm53"), Path("var/cache/glm53"))
"""Directory and link that systemd makes for CacheDirectory= of a service with DynamicUser=."""
STATE = Path("var/lib/private/glm53")
STATE_LINK = Path("var/lib/glm53")


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser("service", help="install or remove the systemd service")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, act, text in (
        ("install", install, "write the unit, its helpers and an example configuration"),
        ("uninstall", uninstall, "remove what install wrote; model, state and changed configuration stay"),
    ):
        sub = actions.add_parser(name, help=text)
        sub.add_argument(
            "--root", type=Path, default=Path("/"), metavar="DIR", help="work below DIR, not on this system"
        )
        sub.set_defaults(run=act)


def unit_files() -> Path:
    """The folder with the unit and its helpers: beside the package in a wheel, in the checkout otherwise."""
    shipped = PACKAGE / "systemd"
    return shipped if shipped.is_dir() else PACKAGE.parent.parent / "systemd"


def command() -> str:
    """Absolute path of the `glm53` of this environment."""
    return str(Path(sys.prefix) / "bin" / "glm53")


def unit_text() -> str:
    """The unit with this environment's command in ExecStart."""
    text = (unit_files() / "glm53.service").read_text(encoding="utf-8")
    return text.replace("ExecStart=glm53 ", f"ExecStart={command()} ")


def files() -> dict[Path, str]:
    """What install writes: path below the root -> text."""
    source = unit_files()
    return {
        UNIT: unit_text(),
        Path("etc/modules-load.d/glm53.conf"): (source / "modules-load.conf").read_text(encoding="utf-8"),
        CONFIG: example_config(),
    }


def install(args: argparse.Namespace) -> int:
    """Write the files, reload systemd, say what to do next."""
    root: Path = args.root
    written = _read_manifest(root)
    for path, text in files().items():
        target = root / path
        if path == CONFIG and target.exists() and _digest(target) != written.get(str(path)):
            _print(f"kept    {target} (yours)")
            continue
        _write(target, text)
        written[str(path)] = _digest(target)
        _print(f"wrote   {target}")
    _write(root / MANIFEST, json.dumps(written, indent=2) + "\n")
    _print(f"wrote   {root / MANIFEST}")
    _systemctl(root, "daemon-reload")
    if any(str(Path(sys.prefix)).startswith(home) for home in ("/home/", "/root/")):
        _print(f"warning: {sys.prefix} is in a home folder, which the service cannot see; install glm53 below /opt")
    _print("next: sudo systemctl enable --now glm53; journalctl -fu glm53")
    return 0


def uninstall(args: argparse.Namespace) -> int:
    """Stop the service and remove what install wrote and what the service left; configuration and model stay."""
    root: Path = args.root
    written = _read_manifest(root)
    left = [root / p for p in (*CACHES, STATE, ENABLED) if os.path.lexists(root / p)]
    if not written and not left:
        raise ResourceError(f"nothing to uninstall: {root / MANIFEST} is missing or empty")
    _systemctl(root, "disable", "--now", "glm53.service")
    for path, digest in written.items():
        target = root / path
        if not target.exists():
            continue
        if Path(path) == CONFIG and _digest(target) != digest:
            _print(f"kept    {target} (changed by you)")
            continue
        _remove(target)
    _remove(root / MANIFEST)
    _remove(root / ENABLED)
    _remove_left(root)
    for folder in (root / MANIFEST.parent, root / CONFIG.parent):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
            _print(f"removed {folder}")
    _systemctl(root, "daemon-reload")
    return 0


def _remove_left(root: Path) -> None:
    """Caches, and the files that the service learned. Folders in the state directory hold models: they stay."""
    for cache in (root / p for p in CACHES):
        if cache.is_dir() and not cache.is_symlink():
            shutil.rmtree(cache)
            _print(f"removed {cache}")
        else:
            _remove(cache)
    state, link = root / STATE, root / STATE_LINK
    if state.is_dir():
        for path in sorted(state.iterdir()):
            if path.is_dir() and any(path.iterdir()):
                _print(f"kept    {path}")
            elif path.is_dir():
                path.rmdir()
            else:
                _remove(path)
        if not any(state.iterdir()):
            state.rmdir()
            _print(f"removed {state}")
    if link.is_symlink() and not state.exists():
        _remove(link)


def _read_manifest(root: Path) -> dict[str, str]:
    try:
        value = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise ResourceError(f"{root / MANIFEST}: cannot be read ({e}); remove it and run install again") from None
    return {str(k): str(v) for k, v in value.items()}


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except OSError as e:
        raise ResourceError(
            f"cannot write {path} ({e.strerror}); run as root: sudo {command()} service install"
        ) from None


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as e:
        raise ResourceError(f"cannot remove {path} ({e.strerror}); run as root") from None
    _print(f"removed {path}")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _systemctl(root: Path, *arguments: str) -> None:
    """Run systemctl where systemd runs; below another root there is nobody to tell."""
    if root == Path("/") and Path("/run/systemd/system").is_dir():
        subprocess.run(["systemctl", *arguments], check=False)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
