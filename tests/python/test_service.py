"""The systemd unit: what install writes, what uninstall removes, and what systemd itself says of the unit."""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from glm53.cli.service import install, unit_files, unit_text
from glm53.errors import ResourceError

UNIT = "etc/systemd/system/glm53.service"


def service(action: str, root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glm53", "service", action, "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def files_below(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


def test_install_prints_every_file_it_wrote_and_uninstall_removes_exactly_those(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/hostname").write_text("host")
    done = service("install", tmp_path)
    assert done.returncode == 0, done.stderr
    written = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("wrote ")}
    assert written == {str(tmp_path / f) for f in files_below(tmp_path) - {"etc/hostname"}}
    assert {UNIT, "etc/glm53/config.toml", "etc/modules-load.d/glm53.conf"} <= files_below(tmp_path)
    done = service("uninstall", tmp_path)
    assert done.returncode == 0, done.stderr
    assert files_below(tmp_path) == {"etc/hostname"}
    assert not (tmp_path / "etc/glm53").exists()


def test_a_changed_configuration_is_the_users(tmp_path: Path) -> None:
    service("install", tmp_path)
    config = tmp_path / "etc/glm53/config.toml"
    config.write_text('mode = "exact"\n')
    assert f"kept    {config} (yours)" in service("install", tmp_path).stdout
    assert config.read_text() == 'mode = "exact"\n'
    assert "changed by you" in service("uninstall", tmp_path).stdout
    assert files_below(tmp_path) == {"etc/glm53/config.toml"}


def test_an_install_that_breaks_off_can_be_taken_back(tmp_path: Path) -> None:
    """The folder of the second file is a file: like a full disk, it stops the writing halfway."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/modules-load.d").write_text("in the way")
    done = service("install", tmp_path)
    assert done.returncode == 1
    assert "cannot write" in done.stderr
    assert "run as root" not in done.stderr, "no right is missing"
    assert "Traceback" not in done.stderr
    assert UNIT in files_below(tmp_path)
    assert service("uninstall", tmp_path).returncode == 0
    assert files_below(tmp_path) == {"etc/modules-load.d"}


def test_nothing_half_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ResourceError, match=r"No space left on device.*run it again"):
        install(argparse.Namespace(root=tmp_path))
    assert files_below(tmp_path) == set()


def test_a_reader_that_leaves_does_not_break_the_installation_off(tmp_path: Path) -> None:
    command = f"{sys.executable} -m glm53 service install --root {tmp_path}"
    subprocess.run(["bash", "-c", f"{command} > >(exit 0)"], check=False)
    assert {UNIT, "etc/glm53/config.toml", "etc/modules-load.d/glm53.conf"} <= files_below(tmp_path)


def leave(root: Path) -> None:
    """What a service that has run leaves: DynamicUser's directories and links, caches, learned files, a model."""
    for place in ("cache", "lib"):
        (root / f"var/{place}/private/glm53").mkdir(parents=True)
        (root / f"var/{place}/glm53").symlink_to("private/glm53")
    (root / "var/cache/private/glm53/triton").mkdir()
    (root / "var/cache/private/glm53/triton/kernel").write_text("x")
    (root / "var/lib/private/glm53/expert-heat.npz").write_text("x")
    (root / "etc/systemd/system/multi-user.target.wants").mkdir(parents=True, exist_ok=True)
    (root / "etc/systemd/system/multi-user.target.wants/glm53.service").symlink_to(f"/{UNIT}")


def test_uninstall_removes_what_the_service_left_but_not_the_model(tmp_path: Path) -> None:
    service("install", tmp_path)
    leave(tmp_path)
    model = tmp_path / "var/lib/private/glm53/model/model.safetensors"
    model.parent.mkdir()
    model.write_text("x")
    done = service("uninstall", tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"kept    {model.parent}" in done.stdout
    assert files_below(tmp_path) == {"var/lib/private/glm53/model/model.safetensors"}
    assert [p for p in tmp_path.rglob("*") if p.is_symlink()] == [tmp_path / "var/lib/glm53"]


def test_uninstall_where_pip_installed_the_unit_removes_what_the_service_left(tmp_path: Path) -> None:
    leave(tmp_path)
    done = service("uninstall", tmp_path)
    assert done.returncode == 0, done.stderr
    assert files_below(tmp_path) == set()
    assert not [p for p in tmp_path.rglob("*glm53*") if p != tmp_path / "usr/local/lib/glm53"]


def test_uninstall_without_install_says_so(tmp_path: Path) -> None:
    done = service("uninstall", tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "nothing to uninstall" in done.stderr


def test_installed_unit_runs_this_environment(tmp_path: Path) -> None:
    service("install", tmp_path)
    line = re.search(r"^ExecStart=(\S+) serve$", (tmp_path / UNIT).read_text(), re.MULTILINE)
    assert line
    assert line[1] == str(Path(sys.prefix) / "bin" / "glm53")
    done = service("install", tmp_path)  # again, over itself
    assert done.returncode == 0


def test_settings_of_the_unit_that_the_server_counts_on() -> None:
    text = unit_text()
    for line in ("Type=notify", "LimitMEMLOCK=infinity", "RestartPreventExitStatus=78", "Restart=on-failure"):
        assert re.search(rf"^{line}$", text, re.MULTILINE), line
    assert re.search(r"^WatchdogSec=\d+", text, re.MULTILINE)
    for line in ("PrivateDevices", "MemoryDenyWriteExecute", "ProcSubset"):
        assert not re.search(rf"^{line}=", text, re.MULTILINE), f"{line} breaks CUDA"
        assert re.search(rf"^#  {line}", text, re.MULTILINE), f"{line} is left out without a reason"


def test_every_hardening_line_stands_under_a_comment() -> None:
    lines = (unit_files() / "glm53.service").read_text().split("# --- Hardening")[1].splitlines()
    directives = [i for i, line in enumerate(lines) if re.match(r"[A-Z]\w+=", line) and "WantedBy" not in line]
    assert len(directives) > 20
    for i in directives:
        above = next(line for line in reversed(lines[:i]) if not re.match(r"[A-Z]\w+=", line))
        assert above.startswith("# "), f"{lines[i]}: no comment above"


@pytest.fixture
def analyze() -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed (Debian: apt install systemd)")
    return program


def test_systemd_finds_no_fault_with_the_unit(analyze: str, tmp_path: Path) -> None:
    path = tmp_path / "glm53.service"
    path.write_text(unit_text())
    done = subprocess.run([analyze, "verify", str(path)], capture_output=True, text=True, check=False)
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if "glm53" in line]
    assert (done.returncode, complaints) == (0, [])


def test_exposure_is_at_most_3_5(analyze: str, tmp_path: Path) -> None:
    path = tmp_path / "glm53.service"
    path.write_text(unit_text())
    done = subprocess.run(
        [analyze, "security", "--offline=yes", "--no-pager", str(path)], capture_output=True, text=True, check=False
    )
    score = re.search(r"exposure level for glm53.service: ([\d.]+)", done.stdout)
    assert score, done.stderr
    assert float(score[1]) <= 3.5
