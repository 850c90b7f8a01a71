"""When drafting is on: pure logic, against hosts whose speeds are known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from glm53.engine.exllama.draft_policy import MAX_ROWS, DraftPolicy, PolicySettings, draft_length

SETTINGS = PolicySettings(window=20, skip=2, pairs=2, margin=0.03, again=200, again_most=800)
MEASUREMENT = 4 * (SETTINGS.window + SETTINGS.skip)

Host = Callable[[bool], tuple[int, float]]


def host(plain_ms: float, drafting_ms: float, accept: float, seed: int = 0) -> Host:
    """Tokens and seconds of a step, without and with one drafted token that is accepted with probability `accept`."""
    rng = random.Random(seed)

    def step(drafted: bool) -> tuple[int, float]:
        noise = rng.uniform(0.9, 1.1)
        if not drafted:
            return 1, plain_ms / 1e3 * noise
        return 1 + (rng.random() < accept), drafting_ms / 1e3 * noise

    return step


def run(policy: DraftPolicy, step: Host, steps: int, streams: int = 1) -> list[bool]:
    """Which of `steps` steps drafted."""
    drafted = []
    for _ in range(steps):
        want = policy.want(streams)
        tokens, seconds = step(want)
        policy.observe(streams, want, tokens * streams, seconds)
        drafted.append(want)
    return drafted


@pytest.mark.parametrize(("accept", "on"), [(0.8, True), (0.1, False)])
def test_it_settles_on_what_is_faster(accept: float, on: bool) -> None:
    policy = DraftPolicy(SETTINGS)
    run(policy, host(30, 40, accept), MEASUREMENT)
    assert policy.states()["1"]["state"] == ("on" if on else "off")
    assert run(policy, host(30, 40, accept), 100) == [on] * 100
    assert policy.lost is not on


def test_a_gain_inside_the_margin_does_not_switch_on_and_does_not_switch_off() -> None:

    class Even:  # exactly the mean, so that chance decides nothing
        def __init__(self) -> None:
            self.n = 0

        def __call__(self, drafted: bool) -> tuple[int, float]:
            self.n += drafted
            return (1 + self.n % 2, 0.030 * 1.5 / 1.015) if drafted else (1, 0.030)

    fresh = DraftPolicy(SETTINGS)
    run(fresh, Even(), MEASUREMENT)
    assert fresh.states()["1"] == {"state": "off", "speedup": pytest.approx(1.015, abs=0.001)}
    was_on = DraftPolicy(SETTINGS)
    run(was_on, host(30, 30, 1.0), MEASUREMENT)
    run(was_on, Even(), SETTINGS.again + SETTINGS.skip + MEASUREMENT)
    assert was_on.states()["1"] == {"state": "on", "speedup": pytest.approx(1.015, abs=0.001)}


def test_a_host_that_becomes_slower_is_noticed_and_one_that_becomes_faster_too() -> None:
    policy = DraftPolicy(SETTINGS)
    run(policy, host(30, 35, 0.9), MEASUREMENT)
    assert policy.want(1)
    run(policy, host(30, 70, 0.9), SETTINGS.again + SETTINGS.skip + MEASUREMENT)
    assert not policy.want(1)
    run(policy, host(30, 35, 0.9), 2 * SETTINGS.again + SETTINGS.skip + MEASUREMENT)
    assert policy.want(1)


def test_losing_measurements_become_rare() -> None:
    policy = DraftPolicy(SETTINGS)
    drafted = run(policy, host(30, 60, 0.2), 6000)
    assert sum(drafted) < 0.08 * len(drafted)
    tail = drafted[-2 * (SETTINGS.again_most + MEASUREMENT) :]
    assert any(tail), "it never asks again"


def test_streams_are_judged_apart() -> None:
    policy = DraftPolicy(SETTINGS)
    run(policy, host(30, 33, 0.9), MEASUREMENT, streams=1)
    run(policy, host(30, 90, 0.9), MEASUREMENT, streams=3)
    assert policy.want(1)
    assert not policy.want(3)
    assert not policy.lost
    policy.start_over()
    assert policy.states() == {}
    assert not policy.lost


def test_steps_after_a_change_are_left_out() -> None:
    """The first steps of a window are 100 times slower (kernels are being compiled): they decide nothing."""
    policy, fast = DraftPolicy(SETTINGS), host(30, 30, 0.9)
    last: list[bool] = []

    def step(drafted: bool) -> tuple[int, float]:
        tokens, seconds = fast(drafted)
        slow = drafted and (not last or last[-2:] != [True, True])
        last.append(drafted)
        return tokens, seconds * (100 if slow else 1)

    run(policy, step, MEASUREMENT)
    assert policy.want(1)


def test_a_step_that_could_not_draft_counts_for_nothing() -> None:
    policy = DraftPolicy(SETTINGS)
    for _ in range(SETTINGS.window + SETTINGS.skip):
        policy.observe(1, False, 1, 0.03)
    assert policy.want(1)
    for _ in range(1000):
        policy.observe(1, False, 1, 0.03)  # asked for drafts, but the MTP layer's state was missing
    assert policy.states()["1"]["state"] == "measuring"


@pytest.mark.parametrize("wanted", range(8))
@pytest.mark.parametrize("streams", range(1, 9))
def test_a_step_never_has_more_rows_than_decode_kernels_take(streams: int, wanted: int) -> None:
    length = draft_length(streams, wanted)
    assert 0 <= length <= wanted
    assert streams * (length + 1) <= MAX_ROWS
    assert length == wanted or streams * (length + 2) > MAX_ROWS


def test_no_stream_drafts_nothing() -> None:
    assert draft_length(0, 3) == 0
