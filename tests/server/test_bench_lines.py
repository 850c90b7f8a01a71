"""bench/lanes.py, bench/decode.py and bench/cpu_moe.py: one JSON line each, on the CPU engine and over a URL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_process import BENCH, Serve, dead_port, serve
from tiny_checkpoint import TINY

__all__ = ["serve"]  # a fixture
KEYS = {"what", "machine", "versions", "command", "settings", "raw", "bars"}


def run(script: str, *arguments: str) -> tuple[int, Any, str]:
    """Exit code, the one line of standard output, standard error; no GPU is seen."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GLM53_")} | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCH / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) <= 1, done.stdout
    return done.returncode, json.loads(lines[0]) if lines else None, done.stderr


def test_lanes_measures_what_is_here_and_names_what_is_not(tmp_path: Path) -> None:
    code, line, told = run("lanes.py", "--out", str(tmp_path / "lanes.json"))
    assert code == 0, told
    assert set(line) == KEYS
    assert set(line["raw"]["not_measured"]) == {"vram", "pcie", "copy_engine"}
    assert all("no GPU" in why for why in line["raw"]["not_measured"].values())
    assert told.count("not measured: ") == 3
    assert set(line["raw"]["lanes"]) == {"cpu", "dram"}
    assert line["bars"]["lane.cpu_gb_s"]["value"] == line["raw"]["lanes"]["cpu"]["gb_s"] > 0
    assert json.loads((tmp_path / "lanes.json").read_text()) == line


def test_decode_through_the_cpu_engine_in_this_process() -> None:
    arguments = ["--device", "cpu", "--model-dir", str(TINY), "--streams", "2", "--tokens", "20", "--runs", "2"]
    code, line, told = run("decode.py", *arguments)
    assert code == 0, told
    assert set(line) == KEYS
    assert line["settings"]["mode"] == "cpu"
    assert len(line["raw"]["tok_s"]) == len(line["raw"]["steps_tok_s"]) == 2
    assert len(line["raw"]["settle_tok_s"]) == 1
    assert min(line["raw"]["tok_s"]) <= line["bars"]["decode.x2_tok_s"]["value"] <= max(line["raw"]["tok_s"])
    assert "hit_rate" not in line["raw"]  # the CPU engine has no expert cache


def test_decode_over_a_url_gives_the_rate_of_the_server(serve: Serve) -> None:
    server = serve({"pieces": ["</think>", *["word "] * 60], "end": "user", "rate": 100})
    found = []
    while len(found) < 10 and not any(225 < rate < 375 for rate in found):  # what it measures is also a busy machine
        code, line, told = run("decode.py", "--url", server.url, "--streams", "3", "--tokens", "40", "--runs", "1")
        assert code == 0, told
        assert line["settings"]["url"] == server.url
        found.append(line["bars"]["decode.x3_tok_s"]["value"])
    assert 225 < found[-1] < 375, found


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--url", "http://127.0.0.1:{port}"], "refused"),
        (["--device", "cpu", "--model-dir", "/nothing/here"], "/nothing/here"),
        (["--device", "cpu", "--model-dir", str(TINY), "--tokens", "1", "--runs", "1"], "too short"),
    ],
)
def test_decode_that_cannot_be_measured_is_one_line(arguments: list[str], word: str) -> None:
    with dead_port() as port:
        code, line, told = run("decode.py", *[a.format(port=port) for a in arguments])
    assert (code, line) == (2, None)
    assert "Traceback" not in told
    assert told.splitlines()[-1].startswith("decode: ")
    assert word in told.splitlines()[-1]


class Cached:
    """A source with an expert cache that warms up: half of its picks hit at first, then all. Its counts come late."""

    def __init__(self) -> None:
        self.asked = -1

    def stats(self) -> dict[str, Any]:
        self.asked += 1
        if self.asked == 0:
            return {"expert_cache": {}}
        return {"expert_cache": {"hits": 50 + 100 * (self.asked - 1), "misses": 50}}


def test_the_hit_rate_is_sampled_between_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import decode

    monkeypatch.setattr(decode, "POLL_S", 0.02)
    count = decode.Counter()
    source, end = Cached(), time.monotonic() + 60
    with decode.sampled_hits(source, count) as curve:
        count.add(40)
        while source.asked < 5 and time.monotonic() < end:
            time.sleep(0.02)
    assert curve[0][1] == 0.5
    assert [share for _, share in curve[1:]] == [1.0] * (len(curve) - 1)
    assert len(curve) > 2
    assert curve[-1][0] == 40


def test_an_engine_without_an_expert_cache_has_no_hit_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import decode

    assert decode.hits_of({"running": 0}) is None
    assert decode.hits_of({"expert_cache": {"hits": 3, "misses": 1}}) == (3, 4)


def test_a_rate_leaves_out_each_streams_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import decode

    assert decode.rate([[1.0, 2.0, 3.0]]) == pytest.approx(1.0)
    assert decode.rate([[1.0, 2.0, 3.0], [2.0, 5.0]]) == pytest.approx(3 / 4)
    with pytest.raises(decode.Failed):
        decode.rate([[1.0]])


def test_a_rate_of_steps_begins_with_the_last_stream_and_ends_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from common import steps_rate

    assert steps_rate([[1.0, 2.0, 3.0]]) == pytest.approx(1.0)
    late = [5.0, 5.5, 6.0, 6.5, 7.0]  # the other waited four seconds for its second token
    assert steps_rate([[1.0, *late[:4]], late]) == pytest.approx(6 / 1.5)
    assert steps_rate([[1.0, 2.0], [3.0, 4.0]]) == 0.0


def test_cpu_moe_prints_one_line_beside_its_table(tmp_path: Path) -> None:
    fake = tmp_path / "bench_cpu_moe"
    same = {"isa": "avx2", "seconds_per_expert": [0.002], "bytes_per_cycle": [1]}
    variants = [{**same, "rows": rows, "threads": threads, "bytes_per_second": [5e9 * threads / rows]}
                for rows, threads in ((1, 1), (2, 1), (4, 1), (1, 2))]  # fmt: skip
    raw = {"settings": {"bits": 3}, "clock_hz": [3e9], "variants": variants}
    raw |= {"read_bytes_per_second_1": [3e10], "read_bytes_per_second_2": [4e10]}
    fake.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(raw)}\nEND\n")
    fake.chmod(0o755)
    code, line, told = run("cpu_moe.py", "--binary", str(fake))
    assert code == 1  # four rows at 1.25 GB/s are below their bar
    assert set(line) == KEYS
    assert line["bars"]["avx2 GB/s, 1 row"]["value"] == 5.0
    assert "MISS avx2 GB/s, 4 rows" in told
