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
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config import example_config
from ..console import put
from ..errors import ResourceError

PACKAGE = Path(__file__).resolve().parent.parent
MANIFEST = Path("usr/local/lib/glm53/service-files.json")
UNIT = Path("etc/systemd/system/glm53.service")
CONFIG = Path("etc/glm53/config.toml")
ENABLED = Path("etc/systemd/system/multi-user.target.wants/glm53.service")
CACHES = (Path("var/cache/private/glm53"), Path("var/cache/glm53"))
"""Directory and link that systemd makes for CacheDirectory= of a service with DynamicUser=."""
UNSEEN = ("/home/", "/root/", "/tmp/", "/var/tmp/")
"""What ProtectHome= and PrivateTmp= of the unit hide."""
STATE = Path("var/lib/private/glm53")
STATE_LINK = Path("var/lib/glm53")


def add(commands: Any) -> None:
    """Register the subcommand."""
    about = "install or remove the systemd service"
    parser = commands.add_parser("service", help=about, description=about)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, act, text in (
        ("install", install, "write the unit, its helpers and an example configuration"),
        ("uninstall", uninstall, "remove what install wrote; model, state and changed configuration stay"),
    ):
        sub = actions.add_parser(name, help=text, description=text)
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
    written, wanted = _read_manifest(root), files()
    config = root / CONFIG
    if config.exists() and _digest(config) != written.get(str(CONFIG)):
        _print(f"kept    {config} (yours)")
        del wanted[CONFIG]
    written |= {str(path): hashlib.sha256(text.encode()).hexdigest() for path, text in wanted.items()}
    # The manifest first: should a later file fail, uninstall knows of those before it.
    for path, text in {MANIFEST: json.dumps(written, indent=2) + "\n", **wanted}.items():
        _write(root / path, text)
        _print(f"wrote   {root / path}")
    _systemctl(root, "daemon-reload")
    if sys.prefix.startswith(UNSEEN):
        _print(f"warning: the service cannot see {sys.prefix} (homes, /tmp); install glm53 below /opt")
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
    temporary = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except OSError as e:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        what = "mend that and run it again, or take back the rest with `glm53 service uninstall`"
        if isinstance(e, PermissionError):
            what = f"run as root: sudo {command()} service install"
        raise ResourceError(f"cannot write {path} ({e.strerror}); {what}") from None


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
    with suppress(BrokenPipeError, ResourceError):  # what was begun is brought to its end, whoever reads of it
        put(text + "\n")
