"""Two instances behind nginx with the shipped configuration: stickiness, drain, and what a killed instance costs."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

CONF = Path(__file__).parents[2] / "docs" / "nginx.conf"
REQUESTS = 200
WORKERS = 20


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def wait_for(port: int, path: str = "/health") -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    pytest.fail(f"nothing answers on port {port}")


class Farm:
    """nginx and two scripted instances; `one` and `two` name themselves in their answers."""

    def __init__(self, folder: Path, nginx: str) -> None:
        self.port, one, two = free_ports(3)
        self.instances = [self._instance(folder, name, port) for name, port in (("one", one), ("two", two))]
        for port in (one, two):
            wait_for(port)
        text = CONF.read_text()
        for shipped, ours in ((":30000", f":{self.port}"), (":30001", f":{one}"), (":30002", f":{two}")):
            assert shipped in text
            text = text.replace(shipped, ours)
        conf = folder / "nginx.conf"
        temp = " ".join(
            f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        user = "user root;" if os.getuid() == 0 else ""
        conf.write_text(f"{user} daemon off; pid {folder}/pid; events {{}} http {{ access_log off; {temp} {text} }}")
        self.nginx = subprocess.Popen([nginx, "-e", str(folder / "error.log"), "-c", str(conf)])
        wait_for(self.port)

    def _instance(self, folder: Path, name: str, port: int) -> subprocess.Popen[bytes]:
        script = folder / f"{name}.jsonl"
        answer = {"pieces": [f"{name} "] * 20, "end": "user", "rate": 40}
        script.write_text(json.dumps(answer) + "\n")
        command = ["serve", "--scripted", str(script), "--port", str(port), "--max-queue", "500", "--drain", "20"]
        with (folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen([sys.executable, "-m", "glm53", *command], stderr=log)

    def ask(self, session: str) -> str:
        """One streamed chat: the name of the instance that answered it whole, else what went wrong."""
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        body["chat_template_kwargs"] = {"enable_thinking": False}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps(body),
                {"content-type": "application/json", "x-session-id": session},
            )
            reply = connection.getresponse()
            data = reply.read().decode()
        except (OSError, http.client.HTTPException) as e:
            partial = getattr(e, "partial", b"").decode()
            return f"broken {'one' if 'one ' in partial else 'two' if 'two ' in partial else 'before the first token'}"
        if reply.status != 200:
            return f"status {reply.status}"
        names = set(re.findall(r'"content":"(one|two) "', data))
        whole = len(re.findall(r'"content":"(?:one|two)', data)) > 0 and "data: [DONE]" in data
        return names.pop() if whole and len(names) == 1 else f"broken {'/'.join(sorted(names))}"

    def ask_many(self, count: int, outcomes: list[str]) -> list[threading.Thread]:
        """`count` requests of different sessions over a few threads; returns the running threads."""
        numbers = iter(range(count))
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                outcome = self.ask(f"session-{number}")
                with lock:
                    outcomes.append(outcome)

        threads = [threading.Thread(target=work) for _ in range(WORKERS)]
        for thread in threads:
            thread.start()
        return threads

    def close(self) -> None:
        for process in [self.nginx, *self.instances]:
            if process.poll() is None:
                process.terminate()
        for process in [self.nginx, *self.instances]:
            process.wait(30)


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[Farm]:
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed (Debian: apt install nginx-light)")
    farm = Farm(tmp_path, nginx)
    yield farm
    farm.close()


def test_a_session_stays_on_one_instance_and_sessions_spread(farm: Farm) -> None:
    assert len({farm.ask("alpha") for _ in range(4)}) == 1
    outcomes: list[str] = []
    for thread in farm.ask_many(40, outcomes):
        thread.join()
    counts = Counter(outcomes)
    assert set(counts) == {"one", "two"}
    assert min(counts.values()) >= 5


def test_a_drained_instance_loses_nothing(farm: Farm) -> None:
    outcomes: list[str] = []
    threads = farm.ask_many(REQUESTS // 2, outcomes)
    while len(outcomes) < REQUESTS // 8:
        time.sleep(0.02)
    farm.instances[0].send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert set(outcomes) == {"one", "two"}
    assert len(outcomes) == REQUESTS // 2
    assert farm.instances[0].wait(30) == 0


def test_a_killed_instance_costs_only_its_own_streams(farm: Farm) -> None:
    outcomes: list[str] = []
    threads = farm.ask_many(REQUESTS, outcomes)
    while len(outcomes) < REQUESTS // 4:
        time.sleep(0.02)
    farm.instances[1].kill()
    for thread in threads:
        thread.join()
    counts = Counter(outcomes)
    broken = sum(n for outcome, n in counts.items() if outcome.startswith("broken"))
    assert set(counts) - {"one", "two"} <= {"broken two", "broken before the first token"}, counts
    assert broken <= WORKERS, counts
    assert len(outcomes) == REQUESTS
