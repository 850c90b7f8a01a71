"""What stock exllamav3 makes of the quantised checkpoint: answers, perplexity, logits, drafts. Runs in its own process.

usage: python -m tools.nano.stock CHECKPOINT HELD_OUT.npz OUT     (OUT.json, OUT-logits.npz)
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import answers, kernels

MAX_NEW = 160
LOGIT_POSITIONS = 3200


class Stock:
    """exllamav3 with the whole checkpoint on the GPU; `drafts`: tokens that its MTP layer drafts a step."""

    def __init__(self, path: Path, drafts: int = 0) -> None:
        from exllamav3 import Cache, Config, Model
        from tokenizers import Tokenizer as Encoder

        kernels.prepare()
        self.config = Config.from_directory(str(path))
        self.model = Model.from_config(self.config)
        self.cache = Cache(
            self.model, max_num_tokens=16384, max_batch_size=4, **({"max_history": drafts} if drafts else {})
        )
        self.drafting: dict[str, Any] = {}
        if drafts:
            draft = Model.from_config(self.config, component="mtp")
            draft_cache = Cache(draft, max_num_tokens=16384)
            self.drafting = {"draft_model": draft, "draft_cache": draft_cache, "num_draft_tokens": drafts}
        self.model.load(device="cuda:0", progressbar=False)
        if drafts:
            draft.load(device="cuda:0", progressbar=False)
        self.drafts = {"accepted": 0, "refused": 0}
        self.encoder = Encoder.from_file(str(path / "tokenizer.json"))
        self._generator: Any = None
        self.stops = [self.encoder.token_to_id(s) for s in ("<|endoftext|>", "<|user|>", "<|observation|>")]

    @property
    def generator(self) -> Any:
        """exllamav3's generator, made when it is first asked for."""
        if self._generator is None:
            from exllamav3 import Generator, Tokenizer

            self._generator = Generator(
                self.model,
                self.cache,
                Tokenizer.from_config(self.config),
                max_batch_size=4,
                recurrent_cache_size=1 << 28,
                **self.drafting,
            )
        return self._generator

    def ids(self, text: str) -> torch.Tensor:
        return torch.tensor([self.encoder.encode(text, add_special_tokens=False).ids])

    def ask(self, prompts: list[str]) -> list[str]:
        """Greedy replies, special tokens spelled out, without the stop token."""
        from exllamav3 import Job
        from exllamav3.generator.sampler import ArgmaxSampler

        tokens: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
        jobs = [
            Job(
                input_ids=self.ids(text),
                max_new_tokens=MAX_NEW,
                sampler=ArgmaxSampler(),
                stop_conditions=self.stops,
                identifier=i,
            )
            for i, text in enumerate(prompts)
        ]
        for job in jobs:
            self.generator.enqueue(job)
        while self.generator.num_remaining_jobs():
            for result in self.generator.iterate():
                if result["stage"] == "error":
                    raise result["error"]
                for part in (result, result.get("held") or {}):  # tokens held back come with the last result
                    if part.get("token_ids") is not None:
                        tokens[result["identifier"]] += part["token_ids"].flatten().tolist()
        self.drafts["accepted"] += sum(job.accepted_draft_tokens for job in jobs)
        self.drafts["refused"] += sum(job.rejected_draft_tokens for job in jobs)
        return [self.spell(t) for t in tokens.values()]

    def ask_slowly(self, prompts: list[str]) -> list[str]:
        """The same by whole forward passes without a cache: for when the generator cannot run this model."""
        out = []
        for text in prompts:
            ids, new = self.ids(text), []
            while len(new) < MAX_NEW:
                token = int(
                    self.logits(torch.cat([ids, torch.tensor([new], dtype=ids.dtype)], 1) if new else ids)[-1].argmax()
                )
                if token in self.stops:
                    break
                new.append(token)
            out.append(self.spell(new))
        return out

    def spell(self, tokens: list[int]) -> str:
        return self.encoder.decode([t for t in tokens if t not in self.stops], skip_special_tokens=False)

    @torch.inference_mode()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.forward(ids, {"attn_mode": "flash_attn_nc"})[0].float().cpu()


def documents(path: Path) -> list[np.ndarray]:
    held = np.load(path)
    return np.split(held["ids"], np.cumsum(held["lengths"])[:-1])


def nll(logits: torch.Tensor, ids: np.ndarray) -> tuple[float, int]:
    """(summed negative log-likelihood, predicted positions) of one document."""
    target = torch.from_numpy(ids[1:].astype(np.int64))
    return float(torch.nn.functional.cross_entropy(logits[:-1], target, reduction="sum")), len(target)


def drafts(path: Path) -> dict[str, Any]:
    """Of the fixed questions' answers: tokens the MTP layer drafted, one a step, that the model itself would take."""
    try:
        stock = Stock(path, drafts=1)
        found = answers.judge_questions(stock.ask, False)
    except Exception as error:  # everything else is recorded by now and must not be lost to this
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return {**stock.drafts, "right": sum(q["right"] for q in found), "questions": len(found)}


def main() -> None:
    path, held, out = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    start, report = time.time(), {}

    def note(key: str, value: Any) -> None:
        report[key] = value
        Path(out + ".json").write_text(json.dumps(report, ensure_ascii=False, indent=1))
        print(f"stock: {key} after {time.time() - start:.1f} s", flush=True)

    stock = Stock(path)
    note("vram_gb", round(torch.cuda.memory_allocated() / 1e9, 3))
    kept, total, count = [], 0.0, 0
    for ids in documents(held):
        logits = stock.logits(torch.from_numpy(ids.astype(np.int64))[None])
        loss, n = nll(logits, ids)
        total, count = total + loss, count + n
        if sum(len(k) for k in kept) < LOGIT_POSITIONS:
            kept.append(logits.half().numpy())
    np.savez_compressed(out + "-logits.npz", logits=np.concatenate(kept), documents=np.array(len(kept)))
    note("nll", total / count)
    note("positions", count)
    note("logit_positions", sum(len(k) for k in kept))
    try:
        stock.ask(["Hi"])
        ask = stock.ask
    except Exception as error:  # the figures matter more than which path made them; the path is recorded
        ask = stock.ask_slowly
        note("generator_error", f"{type(error).__name__}: {error}")
    found = answers.judge_questions(ask, False)
    note("questions", found)
    note("questions", found + answers.judge_questions(ask, True))
    note("tools", answers.judge_tools(ask))
    if stock.config.num_mtp_layers:
        stock.model.unload()
        note("drafts", drafts(path))


if __name__ == "__main__":
    main()
