# ruff: noqa: PLR0917 - the signatures are those of exllamav3
"""A small stand-in for exllamav3 1.5.1 on the CPU: the calls glm53 makes, with a toy model behind them.

It reads the routed experts of a real checkpoint only through their address tables, so that a table that leads to
wrong bytes changes the answer.
"""

from __future__ import annotations

import torch

from . import mtp
from .generator.sampler.custom import (
    CustomSampler,
    SS_Argmax,
    SS_LogitBias,
    SS_MinP,
    SS_Sample,
    SS_Temperature,
    SS_TopK,
    SS_TopP,
)
from .loader.safetensors import SafetensorsCollection
from .modules.block_sparse_mlp import BlockSparseMLP

__all__ = [
    "Cache", "ComboSampler", "Config", "CustomSampler", "Filter", "Generator", "Job", "Model", "SS_Argmax",
    "SS_LogitBias", "SS_MinP", "SS_Sample", "SS_Temperature", "SS_TopK", "SS_TopP", "Tokenizer",
]  # fmt: skip


class Config:
    def __init__(self, directory: str) -> None:
        import json
        from pathlib import Path

        text = json.loads((Path(directory) / "config.json").read_text())["text_config"]
        self.text, self.vocab_size = text, text["vocab_size"]
        self.stc = SafetensorsCollection(directory)

    @staticmethod
    def from_directory(directory: str) -> Config:
        return Config(directory)


class Head:
    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.caps = vocab_size, {"logits_output": True}

    def prepare_for_device(self, x, params):
        return x

    def forward(self, x, params):
        ids = torch.arange(self.vocab_size, dtype=torch.float64)
        return torch.cos(x.unsqueeze(-1) * 50.0 * (ids + 1)).half()


class Block:
    """What stands around a MoE layer: one number a token, spread over the hidden size and gathered again."""

    def __init__(self, mlp: BlockSparseMLP) -> None:
        self.mlp, self.caps = mlp, {}

    def __iter__(self):
        return iter([self, self.mlp])

    def prepare_for_device(self, x, params):
        return x

    def forward(self, x, params):
        steps = torch.arange(1, self.mlp.hidden_size + 1, dtype=torch.float64)
        y = torch.sin(2.0 * x.unsqueeze(-1) + steps).half()
        out = self.mlp.forward(y, params)
        return torch.sin(x + (out.double() * torch.cos(steps)).sum(-1))


class Model:
    fail_load: BaseException | None = None

    def __init__(self, config: Config) -> None:
        text = config.text
        kinds = text["mlp_layer_types"]
        self.moe = [
            BlockSparseMLP(config.stc, i, text["n_routed_experts"], text["num_experts_per_tok"], text["hidden_size"])
            for i, kind in enumerate(kinds) if kind == "sparse"
        ]  # fmt: skip
        self.head = Head(config.vocab_size)
        self.blocks = [Block(m) for m in self.moe]
        self.modules = [*self.blocks, self.head]
        self.last_kv_module_idx = len(self.blocks) - 1
        self.fwd_modules = [(m, 0, i) for i, m in enumerate(self.modules)]
        self.loaded = False
        self.output_device = "cpu"

    @staticmethod
    def from_config(config: Config, component: str = "text"):
        return Model(config) if component == "text" else mtp.MtpModel(config)

    def __iter__(self):
        return iter([*self.moe, self.head])

    def load(self, device: object = None, progressbar: bool = False) -> None:
        self.embedding = torch.nn.Embedding(self.head.vocab_size, 8, device="meta")  # its weight is replaced at once
        for module in self.moe:
            module.load(device)
        if Model.fail_load is not None:
            raise Model.fail_load
        self.loaded = True

    def unload(self) -> None:
        self.loaded = False

    def warmup(self, cache, max_chunk_size=2048, max_batch_size=8):
        self.forward(torch.tensor([[1, 2, 3]]))
        return []

    def prepare_inputs(self, input_ids, params):
        return torch.sin(input_ids.double())

    def forward(self, input_ids: torch.Tensor, params: dict | None = None):
        params = params if params is not None else {}
        x = self.prepare_inputs(input_ids, params)
        for module, _, _ in self.fwd_modules:
            x = module.forward(x, params)
        return x

    def prefill(self, input_ids: torch.Tensor, params: dict | None = None):
        params = params if params is not None else {}
        x = self.prepare_inputs(input_ids, params)
        for block in self.blocks[: self.last_kv_module_idx]:  # of that last one stock runs the attention alone
            x = block.forward(x, params)


class Cache:
    def __init__(self, model: Model, max_num_tokens: int, max_batch_size: int = 16, max_history: int = 0) -> None:
        assert not model.loaded
        self.max_num_tokens, self.num_slots, self.max_history = max_num_tokens, max_batch_size, max_history
        self.pairs: dict[tuple[int, int], tuple[int, int]] = {}


class Tokenizer:
    @staticmethod
    def from_config(config: Config) -> Tokenizer:
        return Tokenizer()


class Filter:
    def __init__(self, tokenizer, trigger_token, prefix_str, eos_after_completed) -> None:
        self.tokenizer = tokenizer


def ComboSampler(temperature: float = 1.0) -> CustomSampler:
    return CustomSampler([SS_Temperature(temperature), SS_Sample()])


class Job:
    def __init__(self, input_ids, max_new_tokens, max_rq_tokens=None, sampler=None, seed=None, stop_conditions=None,
                 decode_special_tokens=False, return_logits=False, filters=None, identifier=None) -> None:  # fmt: skip
        self.ids, self.left, self.sampler = input_ids[0].tolist(), max_new_tokens, sampler
        self.stops, self.return_logits = set(stop_conditions or ()), return_logits
        self.filters, self.identifier = filters or [], identifier
        self.fed = self.cached_pages = self.cached_tokens = 0
        self.accepted_draft_tokens = self.rejected_draft_tokens = 0
        self.mtp_last_hidden = None
        self.sequences = [self]
        self.block_index_tensor = torch.tensor([[id(self)]])

    @property
    def kv_position(self) -> int:
        return self.fed

    def is_prefill_done(self) -> bool:
        return self.fed == len(self.ids) - 1

    def get_input_ids_list(self, draft_tokens=None, idx=0, add_to_cache=False):
        return [torch.tensor([self.ids[self.fed :]])]


class Generator:
    def __init__(
        self, model, cache, tokenizer, draft_model=None, draft_cache=None, num_draft_tokens=None,
        max_batch_size=256, max_chunk_size=2048, recurrent_cache_size=0,
    ) -> None:  # fmt: skip
        self.model, self.cache, self.chunk = model, cache, max_chunk_size
        self.batch = min(max_batch_size, cache.num_slots)
        self.padded_vocab_size = model.head.vocab_size
        self.pending_jobs: list[Job] = []
        self.active_jobs: list[Job] = []
        self.pages: set[tuple[int, ...]] = set()
        self.draft_model, self.draft_cache, self.mtp_draft = draft_model, draft_cache, draft_model is not None
        self.num_draft_tokens = num_draft_tokens or 0
        if draft_model is not None:
            draft_model.attach_to(model)

    def enqueue(self, job: Job) -> None:
        assert len(job.ids) < self.cache.max_num_tokens, "Job requires more pages than there are"
        self.pending_jobs.append(job)

    def cancel(self, job: Job) -> None:
        for queue in (self.pending_jobs, self.active_jobs):
            if job in queue:
                queue.remove(job)

    def clear_queue(self) -> None:
        self.pending_jobs.clear()
        self.active_jobs.clear()

    def num_remaining_jobs(self) -> int:
        return len(self.pending_jobs) + len(self.active_jobs)

    def num_active_jobs(self) -> int:
        return len(self.active_jobs)

    def num_pending_jobs(self) -> int:
        return len(self.pending_jobs)

    def iterate(self) -> list[dict]:
        results: list[dict] = []
        while self.pending_jobs and len(self.active_jobs) < self.batch:
            self.active_jobs.append(self.pending_jobs.pop(0))
            self._reuse(self.active_jobs[-1])
            results.append({"job": self.active_jobs[-1], "stage": "started", "eos": False,
                            "identifier": self.active_jobs[-1].identifier})  # fmt: skip
        for job in list(self.active_jobs):
            end = min(job.fed + self.chunk, len(job.ids) - 1)
            if end > job.fed:
                self.model.prefill(torch.tensor([job.ids[job.fed : end]]), {"cache": self.cache})
                if self.mtp_draft:
                    mtp.read_prompt(self, job, job.fed, end)
                job.fed = end
        self.iterate_gen(results, self.iterate_draftmodel_mtp_gen(results) if self.mtp_draft else None)
        return results

    def iterate_draftmodel_mtp_gen(self, results: list):
        ready = [j for j in self.active_jobs if j.is_prefill_done()]
        return mtp.draft(self, ready) if ready else None

    def iterate_gen(self, results: list, draft_tokens=None) -> None:
        ready = [j for j in self.active_jobs if j.is_prefill_done()]
        if not ready:
            return
        drafts = [[]] * len(ready) if draft_tokens is None else draft_tokens[: len(ready)].tolist()
        fed = [[j.ids[-1], *d] for j, d in zip(ready, drafts, strict=True)]
        assert len(fed[0]) <= self.cache.max_history + 1
        logits = self.model.forward(torch.tensor(fed).view(-1, 1), {"cache": self.cache})
        for job, row, tokens, drafted in zip(ready, logits.split(len(fed[0])), fed, drafts, strict=True):
            at, taken = job.fed, 0
            for i in range(len(tokens)):
                results.append(self._sample(job, row[i : i + 1]))
                if job not in self.active_jobs or i == len(drafted) or job.ids[-1] != drafted[i]:
                    break
                taken += 1
            job.accepted_draft_tokens += taken
            job.rejected_draft_tokens += len(drafted) - taken
            if self.mtp_draft:
                mtp.accept(self, job, at, tokens, taken)

    def _reuse(self, job: Job) -> None:
        """Whole pages that an earlier prompt began with need not be read again."""
        ends = list(range(256, len(job.ids), 256))
        job.cached_pages = sum(tuple(job.ids[:end]) in self.pages for end in ends)
        job.fed = 256 * job.cached_pages
        self.pages |= {tuple(job.ids[:end]) for end in ends}

    def _sample(self, job: Job, logits: torch.Tensor) -> dict:
        mask = sum(f.get_next_logit_mask() for f in job.filters) if job.filters else None
        token = int(job.sampler.forward(logits, None, 0, None, logit_mask=mask))
        for f in job.filters:
            f.accept_token(token)
        job.ids.append(token)
        job.fed += 1
        job.left -= 1
        r = {"job": job, "stage": "streaming", "eos": False, "identifier": job.identifier}
        ids = {"token_ids": torch.tensor([[token]])} | ({"logits": logits} if job.return_logits else {})
        if token in job.stops:
            r |= {"eos": True, "eos_reason": "stop_token", "eos_triggering_token_id": token, "held": ids}
        else:
            r |= ids
            if job.left == 0:
                r |= {"eos": True, "eos_reason": "max_new_tokens"}
        if r["eos"]:
            self.active_jobs.remove(job)
        return r
