"""A Debian with systemd as its first process, in a container made from packages: what the boot test runs against.

States: built (a folder, kept between runs while its inputs are the same) -> booted -> stopped. Needs root, debootstrap,
systemd-nspawn and a package mirror that apt on this machine knows. The container shares the host's network.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = "systemd,systemd-sysv,dbus,python3,python3-pip,ca-certificates,curl"
SUITE = "bookworm"


def missing_tools() -> str:
    """Why the container cannot be made here; "" if it can."""
    if os.getuid() != 0:
        return "needs root"
    if f"{sys.version_info[0]}.{sys.version_info[1]}" != "3.11":
        return f"the wheel must be for {SUITE}'s Python 3.11, this is {sys.version.split()[0]}"
    tools = [t for t in ("debootstrap", "systemd-nspawn", "nsenter") if shutil.which(t) is None]
    return f"needs {', '.join(tools)} (Debian: apt install debootstrap systemd-container)" if tools else ""


def run(*command: str, timeout: float = 3600, check: bool = True) -> str:
    """Output of a command on the host."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False
    )
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)[:200]} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def mirror() -> str:
    """The package mirror that this machine's apt uses for the suite."""
    targets = run("apt-get", "indextargets", "--format", "$(REPO_URI)", f"Codename: {SUITE}", "Component: main")
    if not targets.split():
        raise RuntimeError(f"apt on this machine knows no mirror of {SUITE}")
    return targets.split()[0]


def build(folder: Path) -> Path:
    """A root file system with the wheel pip-installed into the system, below `folder`."""
    root, wheels = folder / "root", folder / "wheels"
    if not (root / "usr/bin/pip3").exists():
        shutil.rmtree(root, ignore_errors=True)
        run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), mirror())
    stamp, inputs = folder / "installed", source_hash()
    if stamp.exists() and stamp.read_text() == inputs:
        return root
    shutil.rmtree(folder / "dist", ignore_errors=True)
    run(str(ROOT / "packaging/build.sh"), "--cuda", "off", "--python", sys.executable, "--out", str(folder / "dist"))
    wheel = next((folder / "dist").glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "download", "-q", "-d", str(wheels)]
    run(*pip, "torch==2.13.0+cpu", f"{wheel}[cpu]")
    target = root / "opt/wheels"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(wheels, target)
    options = ["--no-index", "--find-links=/opt/wheels", "--break-system-packages", "--root-user-action=ignore"]
    run(
        "chroot",
        str(root),
        "pip3",
        "install",
        "-q",
        *options,
        "--force-reinstall",
        "--no-deps",
        f"/opt/wheels/{wheel.name}",
    )
    run("chroot", str(root), "pip3", "install", "-q", *options, f"/opt/wheels/{wheel.name}[cpu]")
    stamp.write_text(inputs)
    return root


def source_hash() -> str:
    """Changes whenever something that goes into the wheel does."""
    digest = hashlib.sha256()
    for name in ("core", "python", "server", "systemd", "CMakeLists.txt", "pyproject.toml", "packaging/build.sh"):
        for path in sorted((ROOT / name).rglob("*")) if (ROOT / name).is_dir() else [ROOT / name]:
            if path.is_file() and path.suffix != ".pyc":
                digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()


class Container:
    """A booted container. `call` runs a command inside."""

    def __init__(self, root: Path, log: Path) -> None:
        self._log = log.open("wb")
        command = ["systemd-nspawn", "-q", "--boot", "--register=no", "--keep-unit", "-M", "glm53test", "-D", str(root)]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self.leader = self._wait_leader()
        self._wait_running()

    def _wait_leader(self) -> int:
        """Process id of the container's systemd: the child of nspawn."""
        end = time.monotonic() + 120
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        while time.monotonic() < end:
            pids = children.read_text().split()
            for pid in pids:
                with suppress(OSError):  # a child may end at any time
                    if re.search(r"systemd|init", Path(f"/proc/{pid}/comm").read_text()):
                        return int(pid)
            time.sleep(0.2)
        raise RuntimeError(f"the container did not start: {Path(self._log.name).read_text()[-2000:]}")

    def _wait_running(self) -> None:
        end = time.monotonic() + 300
        state = ""
        while time.monotonic() < end:
            state = self.call("systemctl", "is-system-running", check=False).strip()
            if state in {"running", "degraded"}:
                return
            time.sleep(0.5)
        raise RuntimeError(f"systemd in the container is {state!r}: {Path(self._log.name).read_text()[-2000:]}")

    def call(self, *command: str, check: bool = True, timeout: float = 300) -> str:
        """Output of a command inside."""
        enter = ["nsenter", "-t", str(self.leader), "-m", "-u", "-i", "-p", "--root", "--wd=/"]
        return run(
            *enter,
            "--",
            "/usr/bin/env",
            "-i",
            "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin",
            *command,
            check=check,
            timeout=timeout,
        )

    def show(self, *properties: str) -> dict[str, str]:
        """Properties of the service, by name."""
        lines = self.call("systemctl", "show", "glm53", "-p", ",".join(properties)).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def journal(self) -> str:
        """The service's journal so far."""
        return self.call("journalctl", "-b", "-u", "glm53", "-o", "short-monotonic", "--no-pager")

    def close(self) -> None:
        """Power off."""
        self.call("systemctl", "poweroff", check=False)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()
