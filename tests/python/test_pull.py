"""`glm53 pull` against a hub that lives in this process: resumes, verifies, and says what to do when it cannot."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from glm53.download import RemoteFile, check_space
from glm53.errors import ResourceError
from glm53.host import Host

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "someone/model"


@dataclass
class Hub:
    """The part of the hub's API that a download uses. `cut` breaks off the first reply for a file after n bytes."""

    files: dict[str, bytes]
    lfs: frozenset[str] = frozenset()
    cut: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    sha: dict[str, str] = field(default_factory=dict)
    log: list[tuple[str, str, str]] = field(default_factory=list)
    url: str = ""

    def info(self) -> dict[str, Any]:
        siblings = []
        for name, data in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": self.sizes.get(name, len(data)), "blobId": "b"}
            if name in self.lfs:
                digest = self.sha.get(name, hashlib.sha256(data).hexdigest())
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = self.path.split("?")[0]
            hub.log.append((self.command, path, self.headers.get("Range", "")))
            if path == f"/api/models/{REPO}/revision/main":
                return self._send(200, json.dumps(hub.info()).encode(), {"content-type": "application/json"}, True)
            prefix = f"/{REPO}/resolve/{COMMIT}/"
            name = path.removeprefix(prefix)
            if not path.startswith(prefix) or name not in hub.files:
                code = "RevisionNotFound" if f"/{REPO}/" in path else "RepoNotFound"
                return self._send(404, b"{}", {"X-Error-Code": code}, body)
            data = hub.files[name]
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            return self._send(
                206 if start else 200, data[start:], headers, body, hub.cut.pop(name, None) if body else None
            )

        def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool, cut: int | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(data if cut is None else data[:cut])
                if cut is not None:
                    self.wfile.flush()
                    self.connection.close()

    return Handler


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {
        "config.json": b'{"model_type": "glm5_next"}',
        "a.safetensors": os.urandom(25_000_000),
        "b.safetensors": os.urandom(1_000_000),
        "tokenizer.json": b"{}",
    }
    hub = Hub(files, lfs=frozenset({"a.safetensors", "b.safetensors"}))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()


def pull(hub: Hub, target: Path, *args: str, command: str = "pull") -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("GLM53_", "HF_")) and "proxy" not in k.lower()}
    env = {**clean, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(target.parent / "hf")}
    options = ["--model-repo", REPO, "--model-revision", "main", "--model-dir", str(target), *args]
    return subprocess.run(
        [sys.executable, "-m", "glm53", command, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=env,
    )


def fetched(hub: Hub, method: str = "GET") -> list[str]:
    return [path.rsplit("/", 1)[1] for m, path, _ in hub.log if m == method and "/resolve/" in path]


def test_everything_arrives_from_one_commit_and_config_last(hub: Hub, tmp_path: Path) -> None:
    target = tmp_path / "model"
    done = pull(hub, target)
    assert done.returncode == 0, done.stderr
    assert {name: (target / name).read_bytes() for name in hub.files} == hub.files
    assert fetched(hub)[-1] == "config.json"
    assert COMMIT in done.stderr.splitlines()[-1]
    assert "downloading 100 %" in done.stderr
    assert "verifying 100 %" in done.stderr


def test_a_second_pull_fetches_nothing(hub: Hub, tmp_path: Path) -> None:
    pull(hub, tmp_path / "model")
    hub.log.clear()
    assert pull(hub, tmp_path / "model").returncode == 0
    assert fetched(hub) == []


def test_a_file_from_an_unfinished_pull_is_not_fetched_again(hub: Hub, tmp_path: Path) -> None:
    target = tmp_path / "model"
    pull(hub, target)
    (target / "config.json").unlink()
    (target / "b.safetensors").unlink()
    hub.log.clear()
    assert pull(hub, target).returncode == 0
    assert fetched(hub) == ["b.safetensors", "config.json"]


def test_a_broken_connection_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    hub.cut["a.safetensors"] = 21_000_000
    done = pull(hub, tmp_path / "model")
    while done.returncode != 0:  # the client may retry by itself, or leave it to the next run
        assert "goes on where it stopped" in done.stderr.splitlines()[-1], done.stderr
        done = pull(hub, tmp_path / "model")
    assert (tmp_path / "model" / "a.safetensors").read_bytes() == hub.files["a.safetensors"]
    ranges = [r for m, path, r in hub.log if m == "GET" and path.endswith("/a.safetensors")]
    assert len(ranges) == 2
    assert 0 < int(ranges[1].removeprefix("bytes=").split("-")[0]) <= 21_000_000


def test_a_file_with_the_wrong_hash_is_removed(hub: Hub, tmp_path: Path) -> None:
    hub.sha["b.safetensors"] = "0" * 64
    done = pull(hub, tmp_path / "model")
    assert done.returncode == 1
    assert "b.safetensors: the SHA-256 is" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "model" / "b.safetensors").exists()
    assert not (tmp_path / "model" / "config.json").exists()


def test_a_pull_that_was_stopped_before_it_verified_is_verified_by_the_next(hub: Hub, tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    for name in ("a.safetensors", "b.safetensors"):  # of the right size: nothing else would look at them again
        (target / name).write_bytes(hub.files[name])
    (target / "b.safetensors").write_bytes(bytes(len(hub.files["b.safetensors"])))
    done = pull(hub, target)
    assert done.returncode == 1
    assert "b.safetensors: the SHA-256 is" in done.stderr.splitlines()[-1]
    assert not (target / "config.json").exists()
    again = pull(hub, target)
    assert again.returncode == 0, again.stderr
    assert (target / "b.safetensors").read_bytes() == hub.files["b.safetensors"]


def test_the_stages_of_a_pull_follow_each_other(hub: Hub, tmp_path: Path) -> None:
    """What has arrived is not told any more while hashes are computed: the lines would alternate for minutes."""
    lines = [line.split()[0] for line in pull(hub, tmp_path / "model").stderr.splitlines() if line.endswith(" %")]
    assert lines == sorted(lines, key=["downloading", "verifying"].index)
    assert set(lines) == {"downloading", "verifying"}


def test_disk_space_is_checked_first(hub: Hub, tmp_path: Path) -> None:
    hub.sizes["a.safetensors"] = 10**15
    done = pull(hub, tmp_path / "model")
    assert done.returncode == 1
    assert "not enough disk space" in done.stderr.splitlines()[-1]
    assert "931322" in done.stderr
    assert fetched(hub) == []


def test_a_full_disk_is_no_matter_where_nothing_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "disk_free_bytes", lambda self, path: 0)
    check_space(tmp_path, [])
    with pytest.raises(ResourceError, match="not enough disk space"):
        check_space(tmp_path, [RemoteFile("a", 1, None)])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--model-revision", "nope"], "check --model-revision"),
        (["--model-repo", "no/body"], "check --model-repo"),
        (["--model-repo", "no body"], "no such name is possible; check --model-repo"),
    ],
)
def test_wrong_names_say_which_setting(hub: Hub, tmp_path: Path, args: list[str], says: str) -> None:
    done = pull(hub, tmp_path / "model", *args)
    assert done.returncode == 1
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_an_unreachable_hub_is_one_line(hub: Hub, tmp_path: Path) -> None:
    hub.url = "http://127.0.0.1:9"
    done = pull(hub, tmp_path / "model")
    assert done.returncode == 1
    assert "check the network" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_serve_downloads_into_an_empty_folder_unless_told_not_to(hub: Hub, tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    refused = pull(hub, target, "--device", "cpu", "--port", "0", "--no-download", command="serve")
    assert refused.returncode == 78
    assert hub.log == []
    done = pull(hub, target, "--device", "cpu", "--port", "0", command="serve")
    assert (target / "a.safetensors").exists()
    assert done.returncode == 78  # what was downloaded is no EXL3 checkpoint
    assert "not an EXL3 checkpoint" in done.stderr.splitlines()[-1]
