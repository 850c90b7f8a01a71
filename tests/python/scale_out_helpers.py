"""Two instances of the CPU engine behind a router as we ship its configuration, and clients that tell what they saw."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from test_scale_out import Farm
from tiny_checkpoint import TINY

MODEL = TINY
TOKENS = 16
CLIENTS = 8


@dataclass(frozen=True)
class Answer:
    """What one client saw. `end`: whole, event (an error event in the stream), broken (the connection) or a status."""

    end: str
    request_id: str
    tokens: int


class CpuFarm(Farm):
    """The instances answer with the bundled checkpoint and can be started again, as systemd does."""

    def _instance(self, name: str, port: int) -> subprocess.Popen[bytes]:
        command = ["serve", "--device", "cpu", "--model-dir", str(MODEL), "--served-name", "glm-5.3-flash"]
        command += ["--port", str(port), "--ct-threads", "1", "--max-batch-size", str(CLIENTS), "--drain", "30"]
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "glm53", *command], stderr=log)

    def young(self, index: int) -> int:
        """Streams that an instance is answering now, with at least half of their tokens to come."""
        connection = http.client.HTTPConnection("127.0.0.1", (self.one, self.two)[index], timeout=60)
        connection.request("GET", "/stats")
        requests = json.load(connection.getresponse())["requests"]
        connection.close()
        return sum(r["phase"] == "decode" and r["completion_tokens"] <= TOKENS // 2 for r in requests)

    def finished(self, name: str) -> set[str]:
        """Ids of the requests that an instance answered whole, by its own log."""
        return set(re.findall(r"(req-\w+) /v1/chat/completions 200 ", (self.folder / f"{name}.log").read_text()))

    def chat(self, number: int) -> Answer:
        """One streamed answer of TOKENS tokens."""
        body = {
            "model": "glm-5.3-flash",
            "messages": [{"role": "user", "content": f"{number * 7919 % 1000:03} is the question"}],
            "stream": True,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"content-type": "application/json", "x-session-id": f"session-{number}"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        request_id = ""
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            reply = connection.getresponse()
            request_id = reply.getheader("x-request-id") or ""
            data = reply.read().decode()
        except (OSError, http.client.HTTPException):
            return Answer("broken", request_id, 0)
        finally:
            connection.close()
        if reply.status != 200:
            return Answer(f"status {reply.status}", request_id, 0)
        usage = re.search(r'"completion_tokens": ?(\d+)', data)
        if usage and "data: [DONE]" in data and '"error"' not in data:
            return Answer("whole", request_id, int(usage[1]))
        return Answer("event" if '"error"' in data else "broken", request_id, 0)


class Clients:
    """CLIENTS threads that ask, until `numbers` runs out; `answers` grows."""

    def __init__(self, farm: CpuFarm, numbers: range) -> None:
        self.answers: list[Answer] = []
        self._farm, self._numbers, self._lock = farm, iter(numbers), threading.Lock()
        self._threads = [threading.Thread(target=self._work) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _next(self) -> Iterator[int]:
        while True:
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            yield number

    def _work(self) -> None:
        for number in self._next():
            answer = self._farm.chat(number)
            with self._lock:
                self.answers.append(answer)

    def join(self) -> list[Answer]:
        for thread in self._threads:
            thread.join()
        return self.answers


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    assert true()
