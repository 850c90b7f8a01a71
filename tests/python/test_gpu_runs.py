"""Timed runs of the GPU benchmarks, on a scripted generator with a clock of its own: which time is in which rate."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
STEP_S, PROMPT_S = 0.01, 0.2


class Scripted:
    """One token a round for every stream whose prompt is read, as exllamav3's generator does. `rounds` are those a
    stream's prompt takes, one at a time, PROMPT_S each; `held` streams hand out their first token with the second."""

    def __init__(self, rounds: list[int], held: tuple[int, ...] = ()) -> None:
        self.now, self.held = 0.0, held
        self.left, self.jobs = list(rounds), []  # type: list[int], list[Any]

    def enqueue(self, job: Any) -> None:
        job.drawn = 0
        self.jobs.append(job)

    def num_remaining_jobs(self) -> int:
        return sum(job.drawn < job.max_new_tokens for job in self.jobs)

    def iterate(self) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = []
        for i, job in enumerate(self.jobs):
            if self.left[i]:
                self.left[i] -= 1
                self.now += PROMPT_S
                results.append({"job": job, "stage": "prefill", "eos": False})
        self.now += STEP_S
        for i, job in enumerate(self.jobs):
            if self.left[i] or job.drawn == job.max_new_tokens:
                continue
            job.drawn += 1
            r = {"job": job, "stage": "streaming", "eos": job.drawn == job.max_new_tokens}
            given = {1: 0, 2: 2}.get(job.drawn, 1) if i in self.held else 1
            results.append(r | ({"token_ids": SimpleNamespace(numel=lambda given=given: given)} if given else {}))
        return results


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rates of a run over a scripted generator, by its arguments."""
    monkeypatch.syspath_prepend(str(BENCH))
    import exact_run
    import torch

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def run(new: int, *script: Any) -> Any:
        generator = Scripted(*script)
        names = ("CustomSampler", "SS_Temperature", "SS_Sample")
        exl = SimpleNamespace(Job=SimpleNamespace, **{name: lambda *_: None for name in names})
        monkeypatch.setattr(exact_run, "time", SimpleNamespace(perf_counter=lambda: generator.now))
        return exact_run.Runner(exl, generator).run(20, new, len(generator.left))

    return run


def test_prompts_read_between_the_first_tokens_are_in_one_rate_and_not_in_the_other(rates: Any) -> None:
    """A stream whose prompt was cached is a round ahead; the others are read while it waits for its second token."""
    first, whole, steps = rates(64, [1, 2, 2, 2])
    assert first == pytest.approx(4 * PROMPT_S + STEP_S)
    assert whole == pytest.approx(4 * 63 / (3 * PROMPT_S + 64 * STEP_S))
    assert steps == pytest.approx(4 / STEP_S)


def test_prompts_that_are_ready_one_after_the_other_count_until_the_last_is(rates: Any) -> None:
    _, whole, steps = rates(10, [1, 3, 2, 5])
    assert whole < 0.5 * steps
    assert steps == pytest.approx(4 / STEP_S)


def test_steps_after_the_first_stream_has_ended_do_not_count(rates: Any) -> None:
    """The rest of a batch takes as long a step for fewer tokens."""
    _, whole, steps = rates(10, [1, 6])
    assert whole == pytest.approx(2 * 9 / (5 * PROMPT_S + 14 * STEP_S))
    assert steps == pytest.approx(2 / STEP_S)


@pytest.mark.parametrize("script", [[1], [1, 1, 1, 1]])
def test_without_a_prompt_in_between_both_rates_are_the_same(rates: Any, script: list[int]) -> None:
    _, whole, steps = rates(64, script)
    assert steps == pytest.approx(whole) == pytest.approx(len(script) / STEP_S)


def test_a_token_whose_text_is_held_back_was_drawn_all_the_same(rates: Any) -> None:
    assert rates(16, [1, 2, 2, 2], (0, 3)).steps_tok_s == pytest.approx(4 / STEP_S)


def test_streams_that_never_draw_at_once_have_no_rate_of_steps(rates: Any) -> None:
    assert rates(2, [1, 4]).steps_tok_s == 0.0
    assert rates(1, [1]) == pytest.approx((PROMPT_S + STEP_S, 0.0, 0.0))


def test_both_rates_are_recorded_under_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import exact_run

    asked: list[tuple[int, ...]] = []

    def run(self: Any, prompt: int, new: int, streams: int, seed: int) -> Any:
        asked.append((prompt, new, streams, seed))
        return exact_run.Rates(1.0, 100.0 + seed, 200.0 + seed)

    monkeypatch.setattr(exact_run.Runner, "run", run)
    found = exact_run.Runner(None, None).decode(64, 4, 2)
    assert found == {"decode4_tok_s": [150.0, 151.0], "steps4_tok_s": [250.0, 251.0]}
    assert asked == [(300, 64, 4, seed) for seed in (44, 50, 51)]
