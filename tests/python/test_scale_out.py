"""Two instances behind nginx (shipped configuration) and behind smg: stickiness, drain, the cost of a killed one."""

import http.client
import json
import os
import random
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
from contextlib import suppress
from pathlib import Path

import pytest

CONF = Path(__file__).parents[2] / "docs" / "nginx.conf"
REQUESTS = 200
WORKERS = 20
TOKENS = 20


def free_ports(count: int) -> list[int]:
    """Ports that are free and stay so: below those that the system gives to whoever connects or binds to port 0.

    A router's configuration names its instances, and one that is started again has to be where it was.
    """
    given_away = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(10_000, max(given_away, 20_000)), 200):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise AssertionError("no free ports")


def wait_for(port: int, path: str = "/health") -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    pytest.fail(f"nothing answers on port {port}")


class Farm:
    """A router and two scripted instances; `one` and `two` name themselves in their answers."""

    def __init__(self, folder: Path, router: str, program: str) -> None:
        self.name, self.folder = router, folder
        self.port, self.one, self.two, self.metrics = free_ports(4)
        self.instances = [self._instance(n, p) for n, p in (("one", self.one), ("two", self.two))]
        for port in (self.one, self.two):
            wait_for(port)
        command = self._nginx(folder, program) if router == "nginx" else self._smg(program)
        with (folder / "router.log").open("wb") as log:
            self.router = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(self.port, "/health" if router == "nginx" else "/readiness")

    def _nginx(self, folder: Path, program: str) -> list[str]:
        text = CONF.read_text()
        for shipped, ours in ((":30000", self.port), (":30001", self.one), (":30002", self.two)):
            assert shipped in text
            text = text.replace(shipped, f":{ours}")
        conf = folder / "nginx.conf"
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temp = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
        user = "user root;" if os.getuid() == 0 else ""
        conf.write_text(f"{user} daemon off; pid {folder}/pid; events {{}} http {{ access_log off; {temp} {text} }}")
        return [program, "-e", str(folder / "error.log"), "-c", str(conf)]

    def _smg(self, program: str) -> list[str]:
        urls = [f"http://127.0.0.1:{port}" for port in (self.one, self.two)]
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--prometheus-port", str(self.metrics)]
        policy = ["--policy", "cache_aware", "--disable-tokenizer-autoload", "--health-check-interval-secs", "1"]
        return [program, "launch", "--worker-urls", *urls, *place, *policy]

    def again(self, index: int) -> None:
        """Start an instance that has ended, as systemd does, and wait until it answers."""
        self.instances[index] = self._instance(("one", "two")[index], (self.one, self.two)[index])
        wait_for((self.one, self.two)[index])

    def _instance(self, name: str, port: int) -> subprocess.Popen[bytes]:
        script = self.folder / f"{name}.jsonl"
        answer = {"pieces": [f"{name} "] * TOKENS, "end": "user", "rate": 80}
        script.write_text(json.dumps(answer) + "\n")
        command = ["serve", "--scripted", str(script), "--port", str(port), "--max-queue", "500", "--drain", "20"]
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "glm53", *command], stderr=log)

    def ask(self, session: str) -> str:
        """One streamed chat: the name of the instance that answered it whole, else what went wrong."""
        body = {"model": "glm-5.3-flash", "messages": [{"role": "user", "content": "hi"}], "stream": True}
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
        text = "".join(re.findall(r'"content":"([^"]*)"', data))
        name = text.split(" ")[0]
        if text.split() == [name] * TOKENS and "data: [DONE]" in data:
            return name
        return f"broken {name}" + (" with an error event" if '"error"' in data else "")

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
        if self.name == "smg":  # takes five seconds to end, and leaves nothing behind
            self.router.kill()
        for process in [self.router, *self.instances]:
            if process.poll() is None:
                process.terminate()
        for process in [self.router, *self.instances]:
            process.wait(60)


def router_program(name: str) -> str:
    """Path of a router; skips where it is not installed."""
    program = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if program is None:
        pytest.skip(f"{name} is not installed (Debian: apt install nginx-light; pip install smg)")
    return program


@pytest.fixture(params=["nginx", "smg"])
def farm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Farm]:
    farm = Farm(tmp_path, request.param, router_program(request.param))
    yield farm
    farm.close()


def test_a_session_stays_on_one_instance_and_sessions_spread(farm: Farm) -> None:
    if farm.name == "nginx":  # smg goes by the prompt's beginning and by load, so one short prompt tells nothing
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
    assert farm.instances[0].wait(60) == 0


def test_a_killed_instance_costs_only_its_own_streams(farm: Farm) -> None:
    outcomes: list[str] = []
    threads = farm.ask_many(REQUESTS, outcomes)
    while len(outcomes) < REQUESTS // 4:
        time.sleep(0.02)
    farm.instances[1].kill()
    for thread in threads:
        thread.join()
    counts = Counter(outcomes)
    whole = counts.pop("one") + counts.pop("two")
    assert whole + counts.total() == REQUESTS
    assert counts.total() <= WORKERS, counts
    assert not any("one" in outcome for outcome in counts), counts
    if farm.name == "smg":  # nginx can only break the connection
        assert all(outcome.endswith("with an error event") for outcome in counts), counts


@pytest.mark.parametrize("farm", ["nginx"], indirect=True)
def test_instances_that_were_all_gone_serve_everybody_at_once(farm: Farm) -> None:
    """nginx's own bookkeeping gave each one request at a time then, and a 502 to all others."""
    for instance in farm.instances:
        instance.terminate()
        instance.wait(60)
    connection = http.client.HTTPConnection("127.0.0.1", farm.port, timeout=60)
    connection.request("POST", "/v1/chat/completions", "{}", {"content-type": "application/json"})
    reply = connection.getresponse()
    assert (reply.status, reply.headers["content-type"]) == (503, "application/json")
    assert int(reply.headers["retry-after"]) > 0
    assert json.load(reply)["error"]["type"] == "overloaded_error"
    connection.close()
    for index in (0, 1):
        farm.again(index)
    outcomes: list[str] = []
    for thread in farm.ask_many(WORKERS, outcomes):
        thread.join()
    assert set(outcomes) == {"one", "two"}
    assert len(outcomes) == WORKERS
