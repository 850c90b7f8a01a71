"""Steps queued ahead, over a generator and jobs that stand for exllamav3's: what is queued when, and what is dropped.

Its own generator is in tests/server/test_ahead_generator.py, where its source is at hand.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm53.engine.exllama.ahead import RunAhead, run_ahead

VOCAB, STOP = 32, 7


class Job:
    """Draws `script` in turn; its ids are those of its prompt and what it was told it drew."""

    def __init__(self, script: list[int], prompt: int = 5, count: int = 100, **changes: Any) -> None:
        self.script, self.ids, self.got = script, [1] * prompt, []  # type: Any, list[int], list[int]
        self.sequences, self.block_index_tensor = [self], torch.arange(4, dtype=torch.int32)[None]
        self.new_tokens, self.max_new_tokens, self.max_rq_tokens = 1, count, 10**6
        self.filters, self.embeddings, self.forced_ids, self.recurrent_state = [], [], None, object()  # type: Any
        self.return_logits = self.return_probs = self.return_top_tokens = False
        self.sampler, self.banned_strings_utf32_offsets = SimpleNamespace(reqs_past_ids=False), None
        self.stop_tokens, self.stop_strings, self.loop_detector = {STOP}, set(), None  # type: Any, Any, Any
        self.drawn, self.written, self.released = 0, [], False  # type: int, list[int], bool
        vars(self).update(changes)

    @property
    def kv_position(self) -> int:
        return len(self.ids) - 1

    def is_prefill_done(self) -> bool:
        return True

    def get_input_ids_list(self, add_to_cache: bool = False) -> list[torch.Tensor]:
        assert add_to_cache
        self.written.append(self.ids[-1])
        return [torch.tensor([self.ids[-1:]])]

    def receive_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        assert logits.shape == (1, 1, VOCAB)
        self.drawn += 1
        return torch.tensor([[self.script[self.drawn - 1]]]), None, None, None

    def receive_sample(self, logits: Any, token: torch.Tensor, *rest: Any) -> tuple[bool, torch.Tensor, bool]:
        assert token.shape == (1, 1)
        self.ids.append(int(token))
        self.got.append(int(token))
        self.new_tokens += 1
        rest[-1].append((self, int(token)))
        return int(token) == STOP or self.new_tokens >= self.max_new_tokens, token, False

    def deallocate_pages(self) -> None:
        self.released = True


class Generator:
    """log: inputs and lengths of every step in the order of queueing, and "own" where exllamav3's own step would be."""

    max_batch_size, cache, recurrent_cache = 4, "cache", "states"

    def __init__(self, *jobs: Job) -> None:
        self.active_jobs, self.pending_jobs, self.log, self.drained = list(jobs), [], [], 0  # type: Any, Any, Any, int
        self.model = SimpleNamespace(forward=self._forward)

    def _forward(self, input_ids: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        assert params["recurrent_states"] == [job.recurrent_state for job in self.active_jobs]
        assert params["block_table"].shape == (len(input_ids), 16)
        assert params["block_table"][:, :5].tolist() == [[0, 1, 2, 3, 0]] * len(input_ids)
        self.log.append((input_ids.reshape(-1).tolist(), params["cache_seqlens"].tolist()))
        return torch.full((len(input_ids), 1, VOCAB), 0.0)

    def iterate(self) -> list[Any]:
        results: list[Any] = []
        self.iterate_gen(results)
        return results

    def iterate_gen(self, results: list[Any], draft_tokens: Any = None) -> None:
        self.log.append("own")

    def num_remaining_jobs(self) -> int:
        return len(self.active_jobs) + len(self.pending_jobs)

    def on_queue_drained(self) -> None:
        self.drained += 1


@pytest.fixture(autouse=True)
def on_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    make = torch.zeros

    def zeros(*shape: Any, pin_memory: bool, **kwargs: Any) -> torch.Tensor:
        assert pin_memory  # what the GPU copies without the host's waiting
        return make(*shape, **kwargs)

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None))


def ahead_of(*jobs: Job, together: bool = True) -> tuple[Generator, RunAhead, Any]:
    generator: Any = Generator(*jobs)
    passes: Any = SimpleNamespace(settled=True, await_room=lambda: None, begins=lambda: None)
    return generator, RunAhead(generator, passes, lambda: together), passes


def test_a_step_is_queued_with_what_the_last_one_drew_before_that_is_told() -> None:
    a, b = Job([11, 12, 13, 14]), Job([21, 22, 23, 24], prompt=9)
    g, ahead, _ = ahead_of(a, b)
    assert g.iterate() == [(a, 11), (b, 21)]
    assert g.log == [([1, 1], [4, 8]), ([11, 21], [5, 9])]
    assert g.iterate() == [(a, 12), (b, 22)]
    assert g.log[2:] == [([12, 22], [6, 10])]
    assert ahead.steps == 2
    assert (a.written, b.written) == ([1, 11, 12], [1, 21, 22])


def test_what_a_step_drew_for_a_stream_that_has_stopped_or_was_cancelled_is_dropped() -> None:
    a, b, c = Job([STOP, 12]), Job([21, 22, 23, 24]), Job([25, 26, 27])
    g, ahead, _ = ahead_of(a, b, c)
    assert g.iterate() == [(a, STOP), (b, 21), (c, 25)]
    assert (a.released, a.written, g.active_jobs) == (True, [1], [b, c])
    g.active_jobs.remove(c)
    assert g.iterate() == [(b, 22)]
    assert len(g.log) == 2  # the step behind has other streams: it is not queued before this one's are known
    g.iterate()
    assert g.log[2] == ([22], [6])
    assert (a.got, c.got, ahead.steps) == ([STOP], [25], 2)
    g.active_jobs.clear()
    assert g.iterate() == []
    assert g.drained == 0


def test_the_last_stream_that_ends_drains_the_queue() -> None:
    a = Job([11, 12, 13], count=3)
    g, ahead, _ = ahead_of(a)
    assert [g.iterate(), g.iterate()] == [[(a, 11)], [(a, 12)]]
    assert (ahead.steps, g.drained, a.released, len(g.log)) == (1, 1, True, 2)


def test_nothing_is_queued_ahead_over_the_end_of_a_page_or_a_round() -> None:
    for job in (Job([11, 12, 13, 14], prompt=255), Job([11, 12, 13, 14], max_rq_tokens=3)):
        g, ahead, _ = ahead_of(job)
        g.iterate()
        g.iterate()
        assert (job.got, ahead.steps) == ([11, 12], 1)
    g.iterate()
    assert g.log[2:] == ["own"]  # exllamav3 ends the round


@pytest.mark.parametrize(
    "change",
    [{"filters": [1]}, {"embeddings": [1]}, {"forced_ids": 1}, {"return_logits": True}, {"return_probs": True},
     {"return_top_tokens": 2}, {"sampler": SimpleNamespace(reqs_past_ids=True)}, {"new_tokens": 0},
     {"banned_strings_utf32_offsets": 1}, {"sequences": [1, 2]}, {"is_prefill_done": lambda: False}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_streams_that_need_the_host_between_two_steps_have_exllamav3s_own(change: dict[str, Any]) -> None:
    g, ahead, _ = ahead_of(Job([11]), Job([21], **change))
    g.iterate()
    assert (g.log, ahead.steps) == (["own"], 0)


def test_a_stream_that_could_start_and_drafts_and_lent_slots_have_exllamav3s_own() -> None:
    g, ahead, passes = ahead_of(*(Job([11] * 9) for _ in range(3)))
    g.pending_jobs.append(Job([1]))
    g.iterate()
    assert g.log == ["own"]
    g.active_jobs.append(Job([11] * 9))  # now nobody else could start
    g.iterate()
    assert ahead.steps == 1
    passes.settled = False
    g.iterate()
    assert (ahead.steps, len(g.log)) == (1, 3)  # what was queued already is read
    g.iterate()
    assert g.log[3:] == ["own"]
    drafted: list[Any] = []
    g, ahead, _ = ahead_of(Job([11]))
    g.iterate_gen(drafted, torch.ones(1))
    assert (g.log, ahead.steps) == (["own"], 0)


def followed(monkeypatch: pytest.MonkeyPatch, ahead: RunAhead) -> list[str]:
    """In which order steps are queued, waited for and told."""
    order: list[str] = []
    queue, read = ahead._queue, ahead._read
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: order.append("wait"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(ahead, "_queue", lambda *a: (order.append("queue"), queue(*a))[1])
    monkeypatch.setattr(ahead, "_read", lambda *a: (read(*a), order.append("told"))[0])
    return order


def test_in_exact_mode_several_streams_go_on_once_their_tokens_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead of a stop token the other streams' rows would be computed beside one that stock's step has not."""
    a, b = Job([11, 12, STOP, 14]), Job([21, 22, 23, 24, 25])
    g, ahead, _ = ahead_of(a, b, together=False)
    order = followed(monkeypatch, ahead)
    assert g.iterate_gen([]) is None
    assert order == ["queue", "wait", "queue", "wait", "told"]
    assert g.log[1] == ([11, 21], [5, 5])
    g.iterate()
    g.iterate()
    assert (g.active_jobs, a.got, len(g.log)) == ([b], [11, 12, STOP], 3)
    assert not ahead.unread
    order.clear()
    g.iterate_gen([])
    assert g.log[3:] == [([23], [7]), ([24], [8])]
    assert order == ["queue", "queue", "wait", "told"]  # alone: before its token is there


@pytest.mark.parametrize("change", [{"stop_strings": {"no"}}, {"loop_detector": object()}])
def test_in_exact_mode_streams_that_may_stop_by_their_text_wait_for_it(change: dict[str, Any]) -> None:
    g, ahead, _ = ahead_of(Job([11, 12]), Job([21, 22], **change), together=False)
    g.iterate_gen([])
    assert (ahead.steps, len(g.log)) == (0, 1)


def test_a_lane_that_was_given_up_leaves_what_exact_mode_does(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = SimpleNamespace(settled=True, await_room=lambda: None, begins=lambda: None, lane="a lane")
    loaded: Any = SimpleNamespace(tokens=1, draft=None, passes=passes)
    generator: Any = Generator(*(Job([11 + i] * 9) for i in range(2)))
    ahead = run_ahead(generator, loaded)
    assert ahead is not None
    order = followed(monkeypatch, ahead)
    generator.iterate()
    assert order == ["queue", "queue", "wait", "told"]
    passes.lane = None
    generator.iterate()
    assert order[4:] == ["wait", "queue", "wait", "told"]


def test_a_step_whose_streams_have_all_gone_is_unread_until_the_next_one() -> None:
    g, ahead, _ = ahead_of(Job([STOP, 12]))
    assert not ahead.unread
    g.iterate()
    assert (ahead.unread, g.active_jobs) == (True, [])
    assert g.iterate() == []
    assert not ahead.unread
    assert len(g.log) == 2


def test_a_model_without_a_table_or_with_drafts_does_not_run_ahead() -> None:
    for loaded in ({"tokens": None, "draft": None}, {"tokens": 1, "draft": 1}):
        generator: Any = Generator()
        assert run_ahead(generator, SimpleNamespace(**loaded, passes=None)) is None  # type: ignore[arg-type]
        assert "iterate" not in vars(generator)
