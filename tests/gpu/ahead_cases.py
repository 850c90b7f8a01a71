"""Steps queued ahead, driven to where it hurts: a generator's jobs by a plan, and two ways to queue the same steps.

`far_ahead` shows what a host that is ahead of the GPU does wrong: the GPU begins late, nothing waits for half a step,
and the page-locked memory of a step is overwritten as soon as its tokens have been read. `apart` queues no step before
the last one is done. Both queue the same steps of the same rows, so that they draw the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from glm53.engine.exllama.ahead import RunAhead
from glm53.engine.exllama.sampling import make_sampler
from glm53.engine.protocol import SamplingParams

LATE = 10_000_000
"""Cycles that the GPU sleeps before a step: some 6 ms, longer than the host takes to queue and read one."""
Plan = dict[int, list[Callable[[], None]]]
"""What is done after that many steps."""


@dataclass
class Told:
    """What a stream was told: its tokens, and why it ended (None: it was cancelled)."""

    ids: list[int] = field(default_factory=list)
    reason: str | None = None


class Asked:
    """The jobs of one generator by name."""

    def __init__(self, exllamav3: Any, generator: Any) -> None:
        self.exllamav3, self.generator = exllamav3, generator
        self.told: dict[int, Told] = {}
        self._jobs: dict[int, Any] = {}

    def comes(self, name: int, prompt: torch.Tensor, tokens: int, stop: list[int] | None = None) -> Callable[[], None]:
        """A stream that draws with random numbers of its own; prompt: (1, length)."""

        def enqueue() -> None:
            self.told[name] = Told()
            params = SamplingParams(temperature=0.9, top_p=0.95)
            self._jobs[name] = self.exllamav3.Job(
                input_ids=prompt, max_new_tokens=tokens, seed=name, identifier=name, stop_conditions=stop,
                sampler=make_sampler(self.exllamav3, params, prompt.shape[-1]),
            )  # fmt: skip
            self.generator.enqueue(self._jobs[name])

        return enqueue

    def goes(self, name: int) -> Callable[[], None]:
        """A stream is cancelled, unless it has ended."""
        return lambda: self.generator.cancel(self._jobs[name])

    def play(self, plan: Plan) -> dict[int, Told]:
        """Run until everything was done and every stream has ended."""
        left = dict(plan)
        for step in range(100_000):
            for act in left.pop(step, []):
                act()
            if not left and not self.generator.num_remaining_jobs():
                return self.told
            for r in self.generator.iterate():
                self._take(r)
        raise AssertionError("it never ends")

    def _take(self, r: dict[str, Any]) -> None:
        if r["stage"] == "error":
            raise r["error"]
        if r["stage"] != "streaming":
            return
        told = self.told[r["identifier"]]
        for part in (r, r.get("held") or {}):
            if part.get("token_ids") is not None:
                told.ids += part["token_ids"].reshape(-1).tolist()
        told.reason = r.get("eos_reason")


Prompt = Callable[[int, int], torch.Tensor]
"""`prompt(tokens, seed)`: (1, tokens) ids."""


def eventful(asked: Asked, prompt: Prompt, streams: int, stop: list[int]) -> Plan:
    """Streams that end at a stop token, at their limit or because they are cancelled, over the ends of pages; and
    others that take their places, pages and states while a step of the old ones may still run."""
    begun = prompt(300, 7)
    plan: Plan = {
        0: [asked.comes(i, prompt(170 + 29 * i, i), 110, stop if i == 1 else None) for i in range(streams)],
        40: [asked.goes(0), asked.comes(10, prompt(5, 10), 60)],
        41: [asked.comes(11, begun, 40)],
        75: [asked.goes(10), asked.comes(12, torch.cat([begun, prompt(3, 12)], dim=1), 30, stop)],
        76: [asked.goes(11), asked.comes(13, prompt(2, 13), 50)],
    }
    for i in range(8):
        plan[130 + 9 * i] = [asked.comes(20 + i, prompt(250 + i, 20 + i), 25, stop)]
    return plan


@contextmanager
def _replaced(what: Any, **methods: Any) -> Iterator[None]:
    vars(what).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(what)[name]


@contextmanager
def far_ahead(ahead: RunAhead) -> Iterator[None]:
    """See above."""
    queue, read = ahead._queue, ahead._read

    def late(*step: Any) -> Any:
        torch.cuda._sleep(LATE)
        return queue(*step)

    @torch.inference_mode()
    def overwritten(step: Any, results: list[dict[str, Any]], followed: bool) -> None:
        read(step, results, followed)
        for buffers in ahead._buffers[: 1 if followed else 2]:  # the next step's is the one behind
            for memory in (buffers.lengths, buffers.fed, buffers.drawn, *buffers._tables.values()):
                memory.zero_()

    with _replaced(ahead, _queue=late, _read=overwritten), _replaced(ahead._passes, await_room=lambda: None):
        yield


@contextmanager
def apart(ahead: RunAhead) -> Iterator[None]:
    """See above."""
    queue = ahead._queue

    def alone(*step: Any) -> Any:
        torch.cuda.synchronize()
        queued = queue(*step)
        torch.cuda.synchronize()
        return queued

    with _replaced(ahead, _queue=alone):
        yield


@contextmanager
def waits(ahead: RunAhead, cycles: int) -> Iterator[list[bool]]:
    """For every step queued ahead whether the host has waited for the GPU while it queued it: the GPU sleeps before it
    for `cycles`, much longer than queueing takes."""
    queue, found = ahead._queue, list[bool]()

    def watched(jobs: list[Any], ids: torch.Tensor, params: dict[str, Any]) -> Any:
        if not ids.is_cuda:  # the first of a row of steps
            return queue(jobs, ids, params)
        torch.cuda._sleep(cycles)
        awake = torch.cuda.Event()
        awake.record()
        queued = queue(jobs, ids, params)
        found.append(awake.query())
        return queued

    with _replaced(ahead, _queue=watched):
        yield found
