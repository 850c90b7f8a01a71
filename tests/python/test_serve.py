"""`glm53 serve` as a process: it comes up on the bundled checkpoint, answers, and leaves cleanly."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Serving:
    """A running server; `url` once it listens, `log` what it has said."""

    def __init__(self, args: list[str], log: Path, env: dict[str, str]) -> None:
        self._log = log
        clean = {k: v for k, v in os.environ.items() if not k.startswith("GLM53_")}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "glm53", "serve", "--port", "0", *args], stderr=out, env={**clean, **env}
            )
        self.url = self.wait(r"listening on (\S+?),")

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait(self, pattern: str, seconds: float = 240) -> str:
        """The first group of `pattern` in the log, once it is there."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            match = re.search(pattern, self.log)
            if match:
                return match[1]
            assert self.process.poll() is None, self.log
            time.sleep(0.1)
        pytest.fail(f"no {pattern!r} within {seconds} s in:\n{self.log}")

    def get(self, path: str) -> dict[str, object]:
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            value: dict[str, object] = json.load(reply)
            return value

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(*args: str, env: dict[str, str] | None = None) -> Serving:
        started.append(Serving(list(args), tmp_path / f"log{len(started)}", env or {}))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.wait(30)


def test_demo_answers_and_stops_with_status_0(serve: Callable[..., Serving], tmp_path: Path) -> None:
    server = serve("--demo", "--device", "cpu", "--isa", "scalar", "--served-name", "toy", "-cs", "4096", "-ambs", "2")
    server.wait(r"(loaded in \d+ s)")
    info = server.get("/server_info")
    assert "scalar expert kernels" in str(info["device"])
    assert (info["served_model_name"], info["context_length"], info["max_streams"]) == ("toy", 4096, 2)
    asked = subprocess.run(
        [sys.executable, str(ROOT / "scripts/ask.py"), "--url", server.url, "--max-tokens", "8", "Hello"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    assert re.search(r"\[(reasoning_content|content)\] \S", asked.stdout)
    assert re.search(r"[1-8] tokens in", asked.stdout)
    assert server.stop() == 0
    assert "Traceback" not in server.log


def test_api_keys_from_the_environment_are_asked_for_and_not_logged(
    serve: Callable[..., Serving], tmp_path: Path
) -> None:
    script = tmp_path / "answers.jsonl"
    script.write_text('{"pieces": ["Hi"], "end": "user"}\n')
    server = serve("--scripted", str(script), env={"GLM53_API_KEYS": "sk-secret"})
    server.wait(r"(loaded in)")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        server.get("/v1/models")
    request = urllib.request.Request(server.url + "/v1/models", headers={"authorization": "Bearer sk-secret"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        assert reply.status == 200
    assert server.stop() == 0
    assert "sk-secret" not in server.log


@pytest.mark.parametrize("stage", ["listening on", "routed experts", "dense weights"])
def test_a_stop_while_loading_leaves_with_status_0_and_without_noise(serve: Callable[..., Serving], stage: str) -> None:
    """The loader's thread is in native code then, which an interpreter must not end beneath."""
    server = serve("--demo", "--device", "cpu")
    server.wait(f"({stage})")
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0, server.log
    last = [line.split(maxsplit=1)[-1] for line in server.log.splitlines()]
    assert last[-1] == "stopped", server.log
