"""The Debian package: installed into a Debian made from packages, asked a question, removed, purged.

Needs what the boot test needs. The root file system is kept between runs and is the same before and after.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from container import ROOT, SUITE, mirror, missing_tools, run

pytestmark = [pytest.mark.system, pytest.mark.timeout(7200)]
PORT = "30952"
FOLDER = ROOT / "build" / "system"


@pytest.fixture(scope="module")
def debian() -> Iterator[Path]:
    """A root file system with Python, without glm53."""
    reason = missing_tools()
    if reason:
        pytest.skip(reason)
    root = FOLDER / "deb-root"
    if not (root / "usr/bin/python3").exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        run("debootstrap", "--variant=minbase", "--include=systemd,python3,ca-certificates", SUITE, str(root), mirror())
    yield root
    run("dpkg", f"--root={root}", "--purge", "glm53", check=False)


@pytest.fixture(scope="module")
def package(debian: Path) -> Path:
    """The package of this tree, CPU only."""
    out = FOLDER / "deb"
    command = [str(ROOT / "packaging/build_deb.sh"), "--python", sys.executable, "--extra", "cpu"]
    run(*command, "--torch", "torch==2.13.0+cpu", "--out", str(out))
    return next(out.glob("glm53_*_amd64.deb"))


def files(root: Path) -> set[str]:
    """Everything below the root except what dpkg and apt write about packages."""
    noise = ("/var/lib/dpkg/", "/var/log/", "/var/cache/", "/dev/", "/proc/", "/tmp/", "/root/")
    found = run("find", str(root), "-xdev", "-printf", "/%P\n").splitlines()
    return {name for name in found if not name.startswith(noise)}


def ask(root: Path) -> str:
    """A server inside, on the bundled checkpoint, and one answer of it."""
    serve = ["chroot", str(root), "/usr/bin/glm53", "serve", "--demo", "--device", "cpu", "--port", PORT]
    server = subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        where = ["--url", f"http://127.0.0.1:{PORT}", "--wait", "240", "--pid", str(server.pid), "--max-tokens", "64"]
        return run(sys.executable, str(ROOT / "scripts/ask.py"), *where, "What is the capital of France?")
    finally:
        server.terminate()
        assert server.wait(60) == 0


def leave(root: Path) -> None:
    """What a service that ran leaves, a model among it."""
    for place in ("cache", "lib"):
        (root / f"var/{place}/private/glm53").mkdir(parents=True)
        (root / f"var/{place}/glm53").symlink_to("private/glm53")
    (root / "var/cache/private/glm53/kernel").write_text("x")
    (root / "var/lib/private/glm53/expert-heat.npz").write_text("x")
    (root / "var/lib/private/glm53/model").mkdir()
    (root / "var/lib/private/glm53/model/weights").write_text("x")
    (root / "etc/glm53/env").write_text("GLM53_API_KEYS=x\n")


def test_installs_answers_and_leaves_only_configuration_and_model(debian: Path, package: Path) -> None:
    before = files(debian)
    assert not any("glm53" in name for name in before)
    run("dpkg", f"--root={debian}", "--install", str(package))
    version = run("chroot", str(debian), "glm53", "--version")
    assert version.startswith("glm53 ")
    assert "native module missing" not in version
    assert "Paris" in ask(debian)
    assert not run("dpkg", f"--root={debian}", "--verify", "glm53")  # running as root changed no file
    run("systemctl", f"--root={debian}", "enable", "glm53")
    assert (debian / "etc/systemd/system/multi-user.target.wants/glm53.service").is_symlink()
    leave(debian)

    run("dpkg", f"--root={debian}", "--remove", "glm53")
    state = "/var/lib/private/glm53"
    model = {state, "/var/lib/glm53", f"{state}/model", f"{state}/model/weights"}
    ours = {"/etc/glm53", "/etc/glm53/env", "/var/lib/private", "/var/cache/private"}
    kept = {"/etc/glm53/config.toml", f"{state}/expert-heat.npz"}
    assert files(debian) - before <= model | ours | kept
    assert kept <= files(debian)
    assert not os.path.lexists(debian / "var/cache/glm53")

    run("dpkg", f"--root={debian}", "--purge", "glm53")
    assert files(debian) - before <= model | ours
    assert (debian / "var/lib/private/glm53/model/weights").read_text() == "x"
    run("rm", "-rf", *(str(debian / p) for p in ("etc/glm53", "var/lib/private/glm53", "var/lib/glm53")))
    assert before - files(debian) <= {"/opt"}  # made by a script of base-files: dpkg takes it for ours
