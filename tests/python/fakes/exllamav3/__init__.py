# ruff: noqa: PLR0917 - the signatures are those of exllamav3
"""A small stand-in for exllamav3 1.5.1 on the CPU: the calls glm53 makes, with a toy model behind them.

It reads the routed experts of a real checkpoint only through their address tables, so that a table that leads to
wrong bytes changes the answer.
"""

from __future__ import annotations

import torch

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
    "Cache", "Config", "CustomSampler", "Filter", "Generator", "Job", "Model", "SS_Argmax", "SS_LogitBias", "SS_MinP",
    "SS_Sample", "SS_Temperature", "SS_TopK", "SS_TopP", "Tokenizer",
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
        self.fwd_modules = [(m, 0, i) for i, m in enumerate([*self.moe, self.head])]
        self.loaded = False
        self.output_device = "cpu"

    @staticmethod
    def from_config(config: Config) -> Model:
        return Model(config)

    def __iter__(self):
        return iter([*self.moe, self.head])

    def load(self, device: object = None, progressbar: bool = False) -> None:
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
        return torch.sin(input_ids.double() + torch.arange(input_ids.shape[-1], dtype=torch.float64))

    def forward(self, input_ids: torch.Tensor, params: dict | None = None):
        params = params if params is not None else {}
        x = self.prepare_inputs(input_ids, params)
        for module, _, _ in self.fwd_modules:
            x = module.forward(x, params)
        return x

    def prefill(self, input_ids: torch.Tensor, params: dict | None = None):
        params = params if params is not None else {}
        x = self.prepare_inputs(input_ids, params)
        for module in self.moe:
            x = module.forward(x, params)


class Cache:
    def __init__(self, model: Model, max_num_tokens: int, max_batch_size: int = 16) -> None:
        assert not model.loaded
        self.max_num_tokens, self.num_slots = max_num_tokens, max_batch_size


class Tokenizer:
    @staticmethod
    def from_config(config: Config) -> Tokenizer:
        return Tokenizer()


class Filter:
    def __init__(self, tokenizer, trigger_token, prefix_str, eos_after_completed) -> None:
        self.tokenizer = tokenizer


class Job:
    def __init__(self, input_ids, max_new_tokens, max_rq_tokens=None, sampler=None, seed=None, stop_conditions=None,
                 decode_special_tokens=False, return_logits=False, filters=None, identifier=None) -> None:  # fmt: skip
        self.ids, self.left, self.sampler = input_ids[0].tolist(), max_new_tokens, sampler
        self.stops, self.return_logits = set(stop_conditions or ()), return_logits
        self.filters, self.identifier = filters or [], identifier
        self.fed = 0


class Generator:
    def __init__(
        self, model, cache, tokenizer, max_batch_size=256, max_chunk_size=2048, recurrent_cache_size=0
    ) -> None:
        self.model, self.cache, self.chunk = model, cache, max_chunk_size
        self.batch = min(max_batch_size, cache.num_slots)
        self.padded_vocab_size = model.head.vocab_size
        self.pending_jobs: list[Job] = []
        self.active_jobs: list[Job] = []

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
            results.append({"job": self.active_jobs[-1], "stage": "started", "eos": False,
                            "identifier": self.active_jobs[-1].identifier})  # fmt: skip
        for job in list(self.active_jobs):
            end = min(job.fed + self.chunk, len(job.ids) - 1)
            if end > job.fed:
                self.model.prefill(torch.tensor([job.ids[job.fed : end]]), {})
                job.fed = end
        ready = [j for j in self.active_jobs if j.fed == len(j.ids) - 1]
        if ready:
            logits = self.model.forward(torch.tensor([[j.ids[-1]] for j in ready]), {})
            for row, job in enumerate(ready):
                results.append(self._sample(job, logits[row : row + 1]))
        return results

    def _sample(self, job: Job, logits: torch.Tensor) -> dict:
        row = logits[0, 0].float()
        for f in job.filters:
            row = row + f.get_next_logit_mask()[0].float()
        token = int(row.argmax())
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
