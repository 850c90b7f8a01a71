"""A real boot: the wheel pip-installed into a Debian, and systemd doing what the unit promises.

Run by `scripts/test --system`. Each test leaves the service stopped; the last one uninstalls. A run of all tests writes
its record, with the journal, to bench/results in place of the one before.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import OUTCOMES
from container import ROOT, SUITE, Container, build, missing_tools

pytestmark = [pytest.mark.system, pytest.mark.timeout(7200)]
PORT = 30951
URL = f"http://127.0.0.1:{PORT}"
CONFIG = f'device = "cpu"\nport = {PORT}\nmodel_dir = "/usr/local/lib/python3.11/dist-packages/glm53/models/nano"\n'


RESULTS = ROOT / "bench" / "results"


@pytest.fixture(scope="module")
def machine(request: pytest.FixtureRequest) -> Iterator[Container]:
    reason = missing_tools()
    if reason:
        pytest.skip(reason)
    folder = ROOT / "build" / "system"
    folder.mkdir(parents=True, exist_ok=True)
    root = build(folder)
    shutil.rmtree(root / "var/lib/private/glm53", ignore_errors=True)  # an earlier run's
    (root / "etc/glm53").mkdir(exist_ok=True)
    (root / "etc/glm53/config.toml").write_text(CONFIG)
    container = Container(root, folder / "console.log")
    versions = container.call("glm53", "--version").splitlines()
    yield container
    outcomes = request.config.stash.get(OUTCOMES, {})
    tests = [name for name, value in globals().items() if name.startswith("test_") and callable(value)]
    if set(tests) <= set(outcomes):
        write_record(container, versions, {name: outcomes[name] for name in tests})
    container.close()
    (folder / "installed").unlink(missing_ok=True)  # the last test removed it


def write_record(container: Container, versions: list[str], outcomes: dict[str, bool]) -> None:
    """The run as one result of bench/results, with its whole journal."""
    record = {
        "what": f"boot test: the wheel pip-installed into a Debian ({SUITE}) that systemd-nspawn boots, CPU engine",
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"cpu": versions[-1].partition("(")[2].removesuffix(")"), "cpus": os.cpu_count(), "gpu": None},
        "versions": {
            "glm53": versions[0].split()[-1],
            "systemd": container.call("systemctl", "--version").splitlines()[0].removeprefix("systemd "),
        },
        "command": "scripts/test --system",
        "settings": {"config.toml": CONFIG.splitlines()},
        "raw": {"glm53 --version": versions, "journal": container.journal().splitlines()},
        "bars": {
            f"boot.{n.removeprefix('test_')}": {"value": ok, "want": True, "ok": ok} for n, ok in outcomes.items()
        },
    }
    for old in RESULTS.glob("*-boot.json"):
        old.unlink()
    (RESULTS / time.strftime("%Y-%m-%d-boot.json", time.gmtime())).write_text(json.dumps(record, indent=1) + "\n")


@pytest.fixture
def service(machine: Container) -> Iterator[Container]:
    machine.call("systemctl", "reset-failed", "glm53", check=False)
    machine.call("systemctl", "start", "glm53")
    yield machine
    machine.call("systemctl", "stop", "glm53", check=False)


def get(path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(URL + path, timeout=10) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as e:
        return e.code, e.read()


def chat(max_tokens: int, stream: bool = False) -> urllib.request.Request:
    body = {
        "model": "glm-5.3-flash",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": max_tokens,
        "stream": stream,
        "ignore_eos": True,
    }
    return urllib.request.Request(
        f"{URL}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )


def until(what: str, seconds: float, true: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            pytest.fail(f"after {seconds:.0f} s still not: {what}")
        time.sleep(0.5)


def test_start_returns_only_when_it_answers(service: Container) -> None:
    assert get("/health")[0] == 200
    shown = service.show("ActiveState", "StatusText", "User", "LimitMEMLOCK")
    assert shown["ActiveState"] == "active"
    assert shown["StatusText"].startswith("serving")
    assert shown["LimitMEMLOCK"] == "infinity"
    with urllib.request.urlopen(chat(8), timeout=120) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] > 0
    assert "loaded in" in service.journal()
    owner = int(service.call("stat", "-c", "%u", f"/proc/{service.show('MainPID')['MainPID']}"))
    assert 61184 <= owner <= 65519  # the range systemd takes dynamic users from


def test_stop_during_a_stream_drains_and_exits_0(service: Container) -> None:
    with urllib.request.urlopen(chat(64, stream=True), timeout=120) as reply:
        first = reply.readline()
        assert first.startswith(b"data: ")
        service.call("systemctl", "stop", "--no-block", "glm53")
        rest = reply.read()
    assert b"data: [DONE]" in rest
    until("stopped", 60, lambda: service.show("ActiveState")["ActiveState"] == "inactive")
    shown = service.show("Result", "ExecMainStatus")
    assert (shown["Result"], shown["ExecMainStatus"]) == ("success", "0")


def test_a_killed_server_comes_back(service: Container) -> None:
    before = service.show("MainPID")["MainPID"]
    service.call("sh", "-c", f"kill -9 {before}")
    until("another process", 60, lambda: service.show("MainPID")["MainPID"] not in {before, "0"})
    until("active again", 180, lambda: service.show("ActiveState")["ActiveState"] == "active")
    assert get("/health")[0] == 200
    assert service.show("NRestarts")["NRestarts"] == "1"


def test_a_frozen_server_is_restarted_by_the_watchdog(service: Container) -> None:
    service.call("mkdir", "-p", "/run/systemd/system/glm53.service.d")
    drop_in = "/run/systemd/system/glm53.service.d/watchdog.conf"
    service.call("sh", "-c", f"printf '[Service]\\nWatchdogSec=8\\n' > {drop_in}")
    service.call("systemctl", "daemon-reload")
    service.call("systemctl", "restart", "glm53")
    before = service.show("MainPID")["MainPID"]
    service.call("sh", "-c", f"kill -STOP {before}")
    until("another process", 120, lambda: service.show("MainPID")["MainPID"] not in {before, "0"})
    assert "atchdog" in service.journal()
    service.call("rm", drop_in)
    service.call("systemctl", "daemon-reload")


def test_a_broken_configuration_fails_once_with_the_reason(machine: Container) -> None:
    config = Path(f"/proc/{machine.leader}/root/etc/glm53/config.toml")
    config.write_text(CONFIG + 'mode = "quick"\n')
    try:
        machine.call("systemctl", "start", "glm53", check=False)
        time.sleep(8)  # longer than RestartSec
        shown = machine.show("ActiveState", "Result", "ExecMainStatus", "NRestarts")
        assert (shown["ActiveState"], shown["ExecMainStatus"], shown["NRestarts"]) == ("failed", "78", "0")
        assert "must be fast or exact" in machine.journal()
    finally:
        config.write_text(CONFIG)
        machine.call("systemctl", "reset-failed", "glm53", check=False)


def test_the_service_cannot_write_outside_its_directories(service: Container) -> None:
    pid = service.show("MainPID")["MainPID"]
    leader = f"/proc/{service.leader}/root/proc/{pid}"
    mounts = (Path(leader) / "mounts").read_text().splitlines()
    root_options = next(line.split()[3] for line in mounts if line.split()[1] == "/")
    assert "ro" in root_options.split(",")
    status = (Path(leader) / "status").read_text()
    assert "NoNewPrivs:\t1" in status
    assert "CapEff:\t0000000000000000" in status
    assert os.path.exists(f"/proc/{service.leader}/root/var/lib/private/glm53")


def test_uninstall_leaves_only_the_configuration_and_the_model(machine: Container) -> None:
    """Last: nothing is installed afterwards."""
    machine.call("systemctl", "enable", "--now", "glm53")
    machine.call("sh", "-c", "mkdir /var/lib/private/glm53/model && echo x > /var/lib/private/glm53/model/weights")
    machine.call(
        "sh", "-c", "echo x > /var/cache/private/glm53/kernel; echo x > /var/lib/private/glm53/expert-heat.npz"
    )
    said = machine.call("glm53", "service", "uninstall")
    assert "removed /var/cache/private/glm53" in said
    assert "kept    /var/lib/private/glm53/model" in said
    machine.call("sh", "-c", "cd / && pip3 uninstall -y -q --break-system-packages glm53")
    machine.call("systemctl", "daemon-reload")
    left = machine.call(
        "find", "/", "-xdev", "-iname", "*glm53*", "-not", "-path", "/opt/wheels/*", "-not", "-path", "/proc/*"
    )
    kept = {"/etc/glm53", "/var/lib/glm53", "/var/lib/private/glm53"}  # the second is systemd's link to the third
    assert {p for p in left.split() if not p.startswith(("/tmp/", "/sys/"))} == kept
    assert machine.call("find", "/etc/glm53", "/var/lib/private/glm53", "-type", "f").split() == [
        "/etc/glm53/config.toml",
        "/var/lib/private/glm53/model/weights",
    ]
    assert machine.call("systemctl", "is-active", "glm53", check=False).strip() == "inactive"
