"""Steps queued ahead on exllamav3's own generator without a GPU: tokens, ends and reuse are those of its own steps.

The model is a toy whose state is a hash of all tokens so far. Its KV cache holds the tokens themselves: every step
reads the whole context through the block tables, so that a token in a wrong place, or one too many, shows. Skipped
unless GLM53_EXLLAMAV3 names the unpacked wheel, see `real_generator`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generator_fixtures import exllamav3_folder
from real_generator import States, import_generator
from toy_generator import PAGE, ToyCache, ToyModel, ToyTokenizer, mix

from glm53.engine.exllama.ahead import RunAhead
from glm53.engine.exllama.sampling import make_sampler
from glm53.engine.protocol import SamplingParams

FOLDER = exllamav3_folder()

VOCAB, TOKENS, SLOTS = 64, 8192, 3


class State:
    def __init__(self, hash_: int = 0, position: int = 0) -> None:
        self.hash, self.position = hash_, position

    def push(self, token: int) -> None:
        self.hash, self.position = mix(self.hash, token), self.position + 1

    def stash(self) -> dict[str, Any]:
        return {"checkpoint_size": 1, "position": self.position, "hash": self.hash}

    @classmethod
    def resumed(cls, stashed: dict[str, Any]) -> State:
        return cls(stashed["hash"], stashed["position"])

    def free(self) -> None:
        pass


class Model(ToyModel):
    """log: what the host did, in order."""

    def __init__(self) -> None:
        super().__init__(ToyCache(State, TOKENS, SLOTS), VOCAB)
        self.log: list[tuple[str, Any]] = []
        self.read_by_gpu: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, input_ids: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        self.read_by_gpu = [(t, t.clone()) for t in (params["block_table"], params["cache_seqlens"])]
        self.log.append(("queued", params["cache_seqlens"].tolist()))
        return torch.stack([self._row(input_ids, params, row) for row in range(len(input_ids))]).half()

    def prefill(self, input_ids: torch.Tensor, params: dict[str, Any]) -> None:
        self.log.append(("prompt", input_ids.numel()))
        self._row(input_ids, params, 0)

    def _row(self, input_ids: torch.Tensor, params: dict[str, Any], row: int) -> torch.Tensor:
        state, start = params["recurrent_states"][row], int(params["cache_seqlens"][row])
        assert state.position == start
        table = params["block_table"][row].tolist()
        for i, token in enumerate(input_ids[row].tolist()):
            self.cache.cells[table[(start + i) // PAGE], (start + i) % PAGE] = token
            state.push(token)
        whole = 0
        for at in range(state.position):
            whole = mix(whole, self.cache.cells[table[at // PAGE], at % PAGE])
        assert whole == state.hash
        logits = torch.full((1, VOCAB), -20.0)
        logits[0, 2 + torch.arange(60)] = torch.tensor([float(whole // (i + 3) % 17) / 8 for i in range(60)])
        return logits


class Event:
    """The host may not touch what the GPU still has to read."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def record(self) -> None:
        self._read_by_gpu = self._model.read_by_gpu

    def synchronize(self) -> None:
        assert all(torch.equal(now, then) for now, then in self._read_by_gpu)
        self._model.log.append(("read", None))


class Asked:
    """A generator with or without steps queued ahead, and what its jobs told."""

    def __init__(self, patch: pytest.MonkeyPatch, *, ahead: bool, together: bool = True) -> None:
        self.ex = import_generator(FOLDER, patch)
        self.model = Model()
        patch.setattr(torch.cuda, "Event", lambda: Event(self.model))
        patch.setattr(torch.cuda, "synchronize", lambda *args: self.model.log.append(("read", None)))
        self.generator = self.ex.Generator(
            self.model, self.model.cache, ToyTokenizer(VOCAB), max_batch_size=SLOTS, max_chunk_size=512,
            recurrent_cache_size=1 << 20, recurrent_checkpoint_interval=512,
        )  # fmt: skip
        assert isinstance(self.generator.recurrent_cache, States)
        self.passes = SimpleNamespace(
            settled=True,
            await_room=lambda: self.model.log.append(("await room", None)),
            begins=lambda: self.model.log.append(("begins", None)),
        )
        self.waiting = False
        self.ahead: RunAhead | None = None
        if ahead:
            passes: Any = self.passes
            self.ahead = RunAhead(self.generator, passes, lambda: together, lambda: self.waiting)
        self.drained, drain = 0, self.generator.on_queue_drained

        def on_queue_drained() -> None:
            self.drained += 1
            drain()

        self.generator.on_queue_drained = on_queue_drained
        self.told: dict[int, list[Any]] = {}
        self.jobs: dict[int, Any] = {}

    def job(self, name: int, prompt: list[int], count: int, penalised: bool = False, **more: Any) -> Any:
        params = SamplingParams(temperature=0.8, frequency_penalty=0.5 if penalised else 0.0)
        self.told[name] = []
        self.jobs[name] = self.ex.Job(
            input_ids=torch.tensor([prompt]), max_new_tokens=count, seed=name, identifier=name,
            sampler=make_sampler(self.ex, params, len(prompt)), **more,
        )  # fmt: skip
        return self.jobs[name]

    def step(self) -> None:
        for r in self.generator.iterate():
            assert r["stage"] != "error", r
            if r["stage"] == "streaming":
                ids = [p["token_ids"].tolist() for p in (r, r.get("held") or {}) if p.get("token_ids") is not None]
                ends = {k: r.get(k) for k in ("eos", "eos_reason", "new_tokens", "cached_tokens", "requeue")}
                self.told[r["identifier"]].append((ids, ends))

    def run(self, arrivals: dict[int, list[Any]]) -> dict[int, list[Any]]:
        """arrivals: jobs by the number of steps after which they come, or functions to call then."""
        waiting = dict(arrivals)
        for at in range(20000):
            for what in waiting.pop(at, []):
                what() if callable(what) else self.generator.enqueue(what)
            if not waiting and not self.generator.num_remaining_jobs():
                return self.told
            self.step()
        raise AssertionError("it never ends")


def both(
    case: Callable[[Asked], dict[int, list[Any]]], together: bool = True
) -> tuple[Asked, dict[int, list[Any]], dict[int, list[Any]]]:
    """One that ran ahead, what it told, and what exllamav3 alone tells."""
    with pytest.MonkeyPatch.context() as patch:
        other = Asked(patch, ahead=False)
        alone = case(other)
    with pytest.MonkeyPatch.context() as patch:
        asked = Asked(patch, ahead=True, together=together)
        told = case(asked)
        assert asked.drained == other.drained > 0
        return asked, told, alone


def test_the_next_step_is_queued_before_a_steps_tokens_are_read() -> None:
    asked, told, alone = both(lambda a: a.run({0: [a.job(1, [5, 6, 7], 40), a.job(2, [8, 9], 40)]}))
    assert told == alone
    log = [what for what, _ in asked.model.log]
    # a step is queued when there is room behind the one before, and begins when that was read
    assert "".join(w[0] for w in log).count("aqrb") == 38
    decode = [what for what in log if what not in ("prompt", "await room", "begins")]
    assert decode[:8] == ["queued", "read", "queued", "queued", "read", "queued", "read", "queued"]
    assert asked.ahead is not None
    assert asked.ahead.steps == 38
    assert decode[-5:] == ["queued", "read", "queued", "read", "read"]


def test_streams_that_come_stop_and_end_at_any_time_tell_what_they_do_alone() -> None:
    def case(a: Asked) -> dict[int, list[Any]]:
        long = [3 + i % 50 for i in range(700)]
        return a.run({
            0: [a.job(1, [5, 6, 7], 90), a.job(2, [9] * 250, 40, stop_conditions=list(range(30, 34)))],
            7: [a.job(3, long, 300)],
            9: [a.job(4, [4, 4], 25, penalised=True), a.job(5, [*long, 7], 33)],
            60: [a.job(6, [2, 3], 1), a.job(7, [2, 3], 2), a.job(8, [2, 3], 3)],
            90: [a.job(i, [i] * i, 400, stop_conditions=[20, 21, 22]) for i in range(20, 32)],
        })  # fmt: skip

    asked, told, alone = both(case)
    assert told == alone
    assert {t[-1][1]["eos_reason"] for t in told.values()} == {"stop_token", "max_new_tokens"}
    assert asked.ahead is not None
    assert asked.ahead.steps > 200


def test_in_exact_mode_the_steps_of_several_streams_are_stocks() -> None:
    """Row for row: none is computed beside a stream that has stopped; but a step is queued before the last is told."""
    models: list[Model] = []

    def case(a: Asked) -> dict[int, list[Any]]:
        models.append(a.model)
        return a.run({0: [a.job(i, [i] * i, 300, stop_conditions=[20, 21]) for i in range(20, 32)]})

    asked, told, alone = both(case, together=False)
    assert told == alone
    ours, stocks = ([at for what, at in m.log if what == "queued" and len(at) > 1] for m in reversed(models))
    assert ours == stocks
    assert len(ours) > 100
    assert asked.ahead is not None
    assert asked.ahead.steps > 100


def test_pages_states_and_rounds_are_kept_as_without() -> None:
    """What a later prompt finds in the cache, and answers that take their pages in rounds."""

    def case(a: Asked) -> dict[int, list[Any]]:
        a.run({0: [a.job(1, [5] * 300, 900), a.job(2, [6] * 10, 1400, max_rq_tokens=512)]})
        said = [i for ids, _ in a.told[1] for part in ids for i in part[0]]
        return a.run({0: [a.job(3, [5] * 300 + said, 30), a.job(4, [5] * 300 + said[:220], 30)]})

    asked, told, alone = both(case)
    assert told == alone
    assert told[3][-1][1]["cached_tokens"] >= 1024
    log = [entry for entry in asked.model.log if entry[0] != "await room"]
    ahead = [q for q, before in zip(log[1:], log, strict=False) if q[0] == before[0] == "queued"]
    assert ahead
    assert not any(at % PAGE == 0 for _, lengths in ahead for at in lengths)


def test_a_cancelled_stream_leaves_the_others_and_its_place_to_the_next() -> None:
    def case(a: Asked) -> dict[int, list[Any]]:
        def cancel(name: int) -> Callable[[], None]:
            return lambda: a.generator.cancel(a.jobs[name])

        jobs = [a.job(i, [i] * 9, 60) for i in range(1, 4)]
        return a.run({0: jobs, 11: [cancel(2)], 12: [a.job(5, [7] * 20, 20)], 40: [cancel(1), cancel(3), cancel(5)],
                      41: [a.job(6, [1] * 9, 12)]})  # fmt: skip

    asked, told, alone = both(case)
    assert {name: t[:11] for name, t in told.items()} == {name: t[:11] for name, t in alone.items()}
    assert told[6] == alone[6]
    assert told[5] == alone[5]
    assert asked.ahead is not None
    assert asked.ahead.steps > 20


def test_a_prompt_that_comes_before_the_next_step_is_queued_is_next() -> None:
    with pytest.MonkeyPatch.context() as patch:
        asked = Asked(patch, ahead=True)
        assert asked.ahead is not None
        asked.generator.enqueue(asked.job(1, [5, 6], 60))
        for _ in range(10):
            asked.step()

        def comes() -> None:
            asked.waiting = True

        asked.passes.await_room = comes
        asked.step()
        steps = asked.ahead.steps
        asked.generator.enqueue(asked.job(2, [5, 6], 3))
        asked.model.log.clear()
        asked.step()
        assert [what for what, _ in asked.model.log][:2] == ["prompt", "queued"]
        assert asked.ahead.steps == steps


def test_nothing_is_queued_ahead_while_slots_are_lent() -> None:
    with pytest.MonkeyPatch.context() as patch:
        asked = Asked(patch, ahead=True)
        asked.passes.settled = False
        assert asked.ahead is not None
        asked.generator.enqueue(asked.job(1, [5, 6], 60))
        for _ in range(20):
            asked.step()
        assert asked.ahead.steps == 0
        asked.passes.settled = True
        for _ in range(20):
            asked.step()
        assert asked.ahead.steps == 20
        asked.passes.settled = False
        asked.step()
        assert (asked.ahead.steps, asked.model.log[-1][0]) == (20, "read")


def test_the_benches_sampler_is_one_whose_steps_are_queued_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    from exact_run import drawing

    asked = Asked(monkeypatch, ahead=True)
    assert asked.ahead is not None
    job = asked.job(1, [5, 6], 40)
    job.sampler = drawing(asked.ex)
    asked.generator.enqueue(job)
    while asked.generator.num_remaining_jobs():
        asked.step()
    assert asked.ahead.steps == 38
