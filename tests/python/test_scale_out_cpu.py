"""200 requests over two instances of the CPU engine behind a router: one is killed midway, the other one drained."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scale_out_helpers import CLIENTS, TOKENS, Clients, CpuFarm, until
from test_scale_out import router_program

pytest.importorskip("transformers")
REQUESTS = 200


@pytest.fixture(params=["nginx", "smg"])
def farm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[CpuFarm]:
    farm = CpuFarm(tmp_path, request.param, router_program(request.param))
    yield farm
    farm.close()


def test_only_the_streams_of_the_killed_instance_fail(farm: CpuFarm) -> None:
    first = Clients(farm, range(REQUESTS // 2))
    until(lambda: len(first.answers) >= REQUESTS // 8)
    killed = 0
    while farm.young(killed) < 2:  # smg may have given all to one instance: equal beginnings belong together
        killed = 1 - killed
        assert len(first.answers) < REQUESTS // 2
    farm.instances[killed].kill()
    answers = first.join()
    farm.instances[killed].wait(60)
    farm.again(killed)  # as systemd restarts it
    if farm.name == "smg":
        time.sleep(11)  # until it is given requests again

    second = Clients(farm, range(REQUESTS // 2, REQUESTS))
    drained = 1 - killed
    until(lambda: len(second.answers) >= REQUESTS // 8 and farm.young(drained) > 0)
    farm.instances[drained].send_signal(signal.SIGTERM)
    answers += second.join()
    assert farm.instances[drained].wait(60) == 0

    assert len(answers) == REQUESTS
    failed = [a for a in answers if a.end != "whole"]
    assert all(a.tokens == TOKENS for a in answers if a not in failed)
    assert 1 <= len(failed) <= CLIENTS
    assert not any(a.end != "whole" for a in second.answers), "the drained instance lost a stream"
    # nginx cannot write into a body it forwards: the connection breaks. A router that knows about events sends one.
    assert {a.end for a in failed} == {"broken" if farm.name == "nginx" else "event"}
    if farm.name == "nginx":  # passes the instances' request ids on; each tells in its log what it answered
        ids = {a.request_id for a in failed}
        assert "" not in ids, "a stream that had not begun was not given to the other instance"
        assert not ids & (farm.finished("one") | farm.finished("two"))
        whole = {a.request_id for a in answers} - ids
        # SIGKILL between a stream's last byte and its log line: at most one per stream that ran then
        assert len(whole - farm.finished("one") - farm.finished("two")) <= CLIENTS - len(failed)
        assert whole & farm.finished("one")
        assert whole & farm.finished("two")
