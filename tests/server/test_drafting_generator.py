"""Drafting on exllamav3's own generator without a GPU: what `engine.exllama.mtp` wraps is the real thing.

The model is a toy whose state is a hash of all tokens so far, so a wrong position, a state that was not stepped back or
a hidden state of another position shows. The toy MTP layer drafts right only if its cache holds every position of the
stream with the right state. Skipped unless GLM53_EXLLAMAV3 names the unpacked wheel, see `real_generator`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generator_fixtures import exllamav3_folder
from real_generator import import_generator
from toy_generator import PAGE, ToyCache, ToyModel, ToyTokenizer, mix

from glm53.engine.exllama import mtp
from glm53.engine.exllama.draft_policy import MAX_ROWS, DraftPolicy, PolicySettings

FOLDER = exllamav3_folder()

VOCAB, TOKENS = 512, 8192
PROMPTS = (
    list(range(1, 40)),
    [9, 8],
    [(i * 37) % 500 for i in range(700)],
    [(i * 11) % 500 for i in range(300)],
)


def following(state: int) -> int:
    return (state * 7919 + 13) % 500


def answer(prompt: list[int], count: int) -> list[int]:
    """What the model alone says."""
    state, out = 0, []
    for token in prompt:
        state = mix(state, token)
    for _ in range(count):
        out.append(following(state))
        state = mix(state, out[-1])
    return out


class State:
    def __init__(self, tokens: tuple[int, ...] = ()) -> None:
        self.tokens: list[int] = []
        self.hashes = [0]
        self.position = self.last_history = 0
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> int:
        self.tokens.append(token)
        self.hashes.append(mix(self.hashes[-1], token))
        self.position += 1
        return self.hashes[-1]

    def rewind(self, count: int) -> None:
        assert count <= self.last_history
        if count:
            del self.tokens[-count:], self.hashes[-count:]
        self.position -= count
        self.last_history = 0

    def rollback_capacity(self) -> int:
        return self.last_history

    def stash(self) -> dict[str, Any]:
        return {"checkpoint_size": 1, "position": self.position, "tokens": tuple(self.tokens)}

    @classmethod
    def resumed(cls, stashed: dict[str, Any]) -> State:
        return cls(stashed["tokens"])

    def free(self) -> None:
        pass


class Cache(ToyCache):
    def __init__(self, history: int) -> None:
        super().__init__(State, TOKENS, 4)
        self.max_history = history


class Model(ToyModel):
    logit_layer_idx = 0
    modules = (SimpleNamespace(prepare_for_device=lambda state, params: state),)

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache, VOCAB)
        self.rows = [0]

    def forward(self, input_ids: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        streams, count = input_ids.shape
        prompt = "last_tokens_only" in params
        if not prompt:
            assert count <= self.cache.max_history + 1
            self.rows.append(streams * count)
        logits, hidden = torch.full((streams, count, VOCAB), -20.0), torch.zeros(streams, count, 1)
        for row, state in enumerate(params["recurrent_states"]):
            assert state.position == int(params["cache_seqlens"][row])
            for i in range(count):
                hidden[row, i, 0] = state.push(int(input_ids[row, i]))
                logits[row, i, following(state.hashes[-1])] = 5.0
            state.last_history = count - 1 if params.get("recurrent_history") else 0
        if params.get("export_state_norm_keys"):
            params["export_states"] = [hidden]
        return (logits[:, -1:] if prompt else logits).half()

    def prefill(self, input_ids: torch.Tensor, params: dict[str, Any]) -> None:
        for token in input_ids[0].tolist():
            params["recurrent_states"][0].push(token)


class Mtp:
    caps = {"mtp_draft": True, "attach_target": True}  # noqa: RUF012
    loaded_tp = False
    draft_verifier_params = {"export_state_norm_keys": {"norm"}}  # noqa: RUF012

    def __init__(self, wrong_every: int) -> None:
        self.wrong_every, self.drafts, self.incomplete = wrong_every, 0, 0

    def attach_to(self, model: Model) -> None:
        pass

    def prefill(self, input_ids: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        """States (rows, tokens, 2): the hash, and whether everything before is there."""
        given, out = params["target_hidden"], torch.zeros(*input_ids.shape, 2)
        assert given.shape[:-1] == input_ids.shape
        for row in range(input_ids.shape[0]):
            for i in range(input_ids.shape[1]):
                at, token = int(params["cache_seqlens"][row]) + i, int(input_ids[row, i])
                page = int(params["block_table"][row, at // PAGE])
                params["cache"].cells[page, at % PAGE] = (token, int(given[row, i, 0]))
                out[row, i, 0] = mix(int(given[row, i, 0]), token)
        return out

    def forward(self, input_ids: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        out = self.prefill(input_ids, params)
        for row in range(input_ids.shape[0]):
            whole = self._complete(params, row)
            out[row, 0, 1] = whole
            self.incomplete += not whole
        return out

    @staticmethod
    def _complete(params: dict[str, Any], row: int) -> bool:
        """Behind reused pages exllamav3 itself has no state for the first position: it gives zeros there."""
        state: int | None = 0
        for at in range(int(params["cache_seqlens"][row]) + 1):
            cell = params["cache"].cells.get((int(params["block_table"][row, at // PAGE]), at % PAGE))
            if cell is None:
                return False
            token, before = cell
            reused = before == 0 and at % PAGE == 0
            if state is not None and before != state and not reused:
                return False
            state = None if reused and at else mix(before, token)
        return True

    def sample_from_state(self, state: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        self.drafts += 1
        wrong = self.wrong_every and self.drafts % self.wrong_every == 0
        ids = [(following(int(h)) + (not whole or bool(wrong))) % 500 for h, whole in state[:, 0].tolist()]
        return torch.tensor(ids)[:, None]


class When(DraftPolicy):
    """Drafts in the steps (counted from 1) that `steps` says."""

    def __init__(self, steps: Callable[[int], bool]) -> None:
        super().__init__()
        self._steps, self._at = steps, 0

    def want(self, streams: int) -> bool:
        self._at += 1
        return self._steps(self._at)

    def observe(self, streams: int, drafted: bool, tokens: int, seconds: float) -> None:
        assert streams <= tokens


class Asked:
    """A generator with drafts."""

    def __init__(self, patch: pytest.MonkeyPatch, tokens: int, policy: DraftPolicy, wrong_every: int = 0) -> None:
        self.exllamav3 = import_generator(FOLDER, patch)
        self.model, self.mtp = Model(Cache(tokens)), Mtp(wrong_every)
        draft: Any = SimpleNamespace(model=self.mtp, cache=Cache(0), tokens=tokens)
        self.drafting = mtp.Drafting(draft, policy)
        self.generator = self.exllamav3.Generator(
            self.model, self.model.cache, ToyTokenizer(VOCAB), max_batch_size=4, max_chunk_size=512,
            recurrent_cache_size=1 << 20, **mtp.generator_arguments(draft),
        )  # fmt: skip
        self.drafting.attach(self.generator)

    def ask(self, prompts: list[list[int]], count: int, **more: Any) -> None:
        """All at once; the answers must be the model's own."""
        ex, got = self.exllamav3, [[] for _ in prompts]  # type: Any, list[list[int]]
        for i, ids in enumerate(prompts):
            sampler = ex.CustomSampler([ex.SS_Argmax()])
            self.generator.enqueue(
                ex.Job(input_ids=torch.tensor([ids]), max_new_tokens=count, sampler=sampler, identifier=i, **more)
            )
        while self.generator.num_remaining_jobs():
            for result in self.generator.iterate():
                assert result["stage"] != "error", result
                for part in (result, result.get("held") or {}):
                    if part.get("token_ids") is not None:
                        got[result["identifier"]] += part["token_ids"].reshape(-1).tolist()
        assert got == [answer(p, count) for p in prompts]


@pytest.mark.parametrize("steps", [lambda i: True, lambda i: i // 10 % 2 == 1, lambda i: i > 60],
                         ids=["always", "in turns", "late"])  # fmt: skip
@pytest.mark.parametrize("wrong_every", [0, 1, 3])
@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_answers_are_the_models_own(
    monkeypatch: pytest.MonkeyPatch, tokens: int, wrong_every: int, steps: Callable[[int], bool]
) -> None:
    asked = Asked(monkeypatch, tokens, When(steps), wrong_every)
    for prompts in ([PROMPTS[0]], [PROMPTS[2]], list(PROMPTS[:2]), list(PROMPTS), [PROMPTS[2] + PROMPTS[0]]):
        asked.ask(prompts, 80)
    stats = asked.drafting.stats()
    assert max(asked.model.rows) <= MAX_ROWS
    assert stats["drafted_tokens"] > 0
    assert asked.mtp.incomplete == 0
    if wrong_every == 0:
        assert stats["accepted_tokens"] >= stats["drafted_tokens"] - 11 * tokens  # the limit cuts last drafts
    if wrong_every == 1:
        assert stats["accepted_tokens"] == 0


def test_a_stream_that_takes_its_pages_in_rounds_and_one_of_a_single_token(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, 3, When(lambda i: True))
    asked.ask([[5]], 40)
    asked.ask([PROMPTS[0]], 2500, max_rq_tokens=1024)
    assert asked.drafting.stats()["accepted_tokens"] > 1500


def test_drafts_that_cost_more_than_they_give_are_dropped_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, 2, DraftPolicy(PolicySettings(window=8, skip=1, pairs=1, again=50)))
    drafting, now = asked.drafting, [0.0]
    drafting._clock = lambda: now[0]
    gen = drafting._gen

    def slow(results: list[Any], draft_tokens: Any = None) -> None:
        now[0] += 1.0 if draft_tokens is None else 9.0
        gen(results, draft_tokens)

    asked.generator.iterate_gen = slow
    asked.ask([PROMPTS[0]], 100)
    assert drafting.stats()["streams"]["1"] == {"state": "off", "speedup": pytest.approx(0.333, abs=0.01)}
    asked.ask([PROMPTS[3]], 60)
    assert not drafting.stats()["attached"]
    now[0] += mtp.RETRY_S
    asked.ask([[*PROMPTS[3], 4]], 60)
    assert drafting.stats()["attached"]
