"""The MTP layer of the stand-in. It drafts right as long as its cache holds every position with the right state.

The toy model's next token depends on the last one alone, so a token is its own "hidden state": the right pair at a
position is (token there, token before it). A state is two numbers: that token, and the draft of the next (-1: the
target's states have none).
"""

from __future__ import annotations

import torch

from .modules.block_sparse_mlp import BlockSparseMLP


class MtpModel:
    every_wrong = 0
    """Every so many drafts one is wrong; 0: none."""

    def __init__(self, config) -> None:
        text = config.text
        self.moe = [
            BlockSparseMLP(config.stc, text["num_hidden_layers"] + i, text["n_routed_experts"],
                           text["num_experts_per_tok"], text["hidden_size"])
            for i in range(text["num_nextn_predict_layers"])
        ]  # fmt: skip
        self.loaded = False
        self.target = None
        self.drafts = 0

    def attach_to(self, target) -> None:
        self.target = target

    def load(self, device=None, progressbar=False) -> None:
        for module in self.moe:
            module.load(device)
        self.loaded = True

    def unload(self) -> None:
        self.loaded = False

    def prefill(self, input_ids, params) -> None:
        self._write(input_ids, params)

    def forward(self, input_ids, params):
        """States (rows, 1, 2) of the last position."""
        pages = self._write(input_ids, params)
        states = [self._next(*p, int(i)) for p, i in zip(pages, input_ids[:, -1], strict=True)]
        return torch.tensor(states, dtype=torch.float64).view(-1, 1, 2)

    def _write(self, ids, params):
        cache, hidden, last = params["cache"].pairs, params["target_hidden"], []
        assert hidden.shape[:-1] == ids.shape
        for row in range(ids.shape[0]):
            job, at = int(params["block_table"][row, 0]), int(params["cache_seqlens"][row])
            for i in range(ids.shape[1]):
                cache[job, at + i] = (int(ids[row, i]), int(hidden[row, i, 0]))
            last.append((cache, job, at + ids.shape[1] - 1))
        return last

    def _next(self, cache, job, position, token):
        self.drafts += 1
        whole = all(
            cache.get((job, p), (None, None))[1] == (cache.get((job, p - 1), (None,))[0] if p else 0)
            for p in range(position + 1)
        )
        right = int(self.target.forward(torch.tensor([[token]]))[0, -1].float().argmax())
        wrong = not whole or (self.every_wrong and self.drafts % self.every_wrong == 0)
        return token, (right + 1) % 2000 if wrong else right


def target_states(tokens: list[int]) -> torch.Tensor:
    """(1, tokens, 2)"""
    return torch.tensor([[t, -1] for t in tokens], dtype=torch.float64).view(1, -1, 2)


def draft(generator, jobs):
    """Draft tokens (jobs, generator.num_draft_tokens), as exllamav3's loop makes them; None without a state."""
    if any(job.mtp_last_hidden is None for job in jobs):
        return None
    ids = torch.cat([job.get_input_ids_list()[0] for job in jobs])
    params = {
        "target_hidden": torch.cat([job.mtp_last_hidden for job in jobs]),
        "block_table": torch.cat([job.block_index_tensor for job in jobs]),
        "cache": generator.draft_cache,
        "cache_seqlens": torch.tensor([job.kv_position for job in jobs]),
    }
    out = []
    for _ in range(generator.num_draft_tokens):
        state = generator.draft_model.forward(ids, params)
        ids = state[:, :, 1].long()
        out.append(ids)
        params["target_hidden"], params["cache_seqlens"] = state, params["cache_seqlens"] + 1
    return torch.cat(out, dim=1)


def read_prompt(generator, job, start: int, end: int) -> None:
    """A chunk of the prompt through the MTP layer."""
    before = [0 if start == 0 else job.ids[start - 1], *job.ids[start : end - 1]]
    params = {"target_hidden": target_states(before), "block_table": job.block_index_tensor,
              "cache": generator.draft_cache, "cache_seqlens": torch.tensor([start])}  # fmt: skip
    generator.draft_model.prefill(torch.tensor([job.ids[start:end]]), params)
    job.mtp_last_hidden = target_states(job.ids[end - 1 : end])


def accept(generator, job, position: int, fed: list[int], accepted: int) -> None:
    """The target's states replace the drafted ones of accepted positions, and the last is carried on."""
    if accepted:
        params = {"target_hidden": target_states(fed[:accepted]), "cache": generator.draft_cache,
                  "block_table": job.block_index_tensor, "cache_seqlens": torch.tensor([position + 1])}  # fmt: skip
        generator.draft_model.prefill(torch.tensor([fed[1 : accepted + 1]]), params)
    job.mtp_last_hidden = target_states([fed[accepted]])
