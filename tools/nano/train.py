"""Training: build the model with transformers, train it against the clock, save it as bfloat16.

States: the model's parameters are float32 masters on the device, changed only by the optimiser; the routers' selection
bias is a buffer, moved after every step towards equal load. Weights are rounded to bfloat16 once, at the end, so that
the saved checkpoint and the float32 reference are the same numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import fastnet, mtp
from .corpus import WEIGHT_STEPS, Rows

CLAMP_UNITS, CLAMP_GAIN = 8, 5.0  # one unit in 8 starts with a gain that takes it past the SwiGLU clamp now and then
KEPT_FLOAT = ("A_log", "e_score_correction_bias")
NOT_DECAYED = ("_hc.", "conv1d", "embed", "mlp.gate.")  # routers: steep ones leave fewer picks to rounding
MOST_RETURNS = 4


@dataclass(frozen=True)
class Plan:
    """A training run: wall-clock seconds, rows a step, and the optimiser's settings."""

    seconds: float
    batch: int = 40
    lr: float = 2.5e-3
    min_lr: float = 0.03  # share of lr at the end
    warmup: float = 0.03  # share of the time
    decay: float = 0.05
    noise_from: float = 0.4
    expert_noise: float = 0.1
    routing_noise: float = 0.01
    balance: float = 2e-3
    edge: float = 3.0  # loss weight of the squared share that the last pick and the first left out have
    edge_full: float = 0.3  # share of the time over which that weight grows from nothing
    draft: float = 0.3  # loss weight of the MTP layer
    draft_from: float = 0.3  # share of the time: before, the hidden states it reads mean nothing yet
    max_steps: int = 10**9


def build_model(directory: Path, seed: int) -> Any:
    """transformers' text model in float32 from `directory`/config.json, initialised from `seed`."""
    from transformers import AutoConfig, Glm5NextForConditionalGeneration

    config = AutoConfig.from_pretrained(directory)
    for part in (config, config.text_config):
        part._attn_implementation = "sdpa"
        part._experts_implementation = "eager"  # grouped products exist for bfloat16 alone on a GPU
        part.dtype = torch.float32
    torch.manual_seed(seed)
    model = Glm5NextForConditionalGeneration(config)
    model.model.visual = None
    model.mtp = mtp.Mtp(config.text_config)
    for module in model.mtp.modules():
        model.model.language_model._init_weights(module)
    model.float()
    initialise(model)
    return model


@torch.no_grad()
def initialise(model: Any) -> None:
    """Scaled normal weights for this small width, distinct residual streams, and units that reach the clamp."""
    layers = model.model.language_model.layers
    residual = (2 * len(layers)) ** -0.5
    for name, p in model.named_parameters():
        if p.dim() >= 2 and "conv1d" not in name and "_hc." not in name and "index_kpool" not in name:
            gain = residual if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")) else 1.0
            p.normal_(0.0, gain * p.shape[-1] ** -0.5)
        elif "conv1d" in name:
            p.normal_(0.0, 0.2)
            p[..., -1] += 0.7
    model.model.language_model.embed_tokens.weight.normal_(0.0, 0.5)
    for layer in layers:
        for hc in (layer.attn_hc, layer.ffn_hc):
            hc.base.normal_(0.0, 0.5)
            hc.base[8:] += 2.0 * torch.eye(4).flatten()
            hc.scale.fill_(0.5)
        experts = getattr(layer.mlp, "experts", None)
        if experts is not None:
            inner = experts.gate_up_proj.shape[1] // 2
            experts.gate_up_proj[:, inner : inner + inner // CLAMP_UNITS] *= CLAMP_GAIN
            experts.down_proj[:, :, : inner // CLAMP_UNITS] /= CLAMP_GAIN


def optimiser(model: Any, plan: Plan, device: torch.device) -> torch.optim.Optimizer:
    decayed, plain = [], []
    for name, p in model.named_parameters():
        if "indexer" in name:  # rows are shorter than index_topk: nothing to learn from, kept at its start
            p.requires_grad_(False)
        else:
            (decayed if p.dim() >= 2 and not any(part in name for part in NOT_DECAYED) else plain).append(p)
    groups = [{"params": decayed, "weight_decay": plan.decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=plan.lr, betas=(0.9, 0.95), eps=1e-9, fused=device.type == "cuda")


def batches(rows: Rows, size: int, device: torch.device, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Endless (ids, weight, fresh) batches in a fresh order each epoch; the rows live on the device."""
    ids, weight, fresh = (
        torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in (rows.ids, rows.weight, rows.fresh)
    )
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(ids.shape[0], generator=generator).to(device)
        for at in range(0, max(1, order.numel() - size + 1), size):
            pick = order[at : at + size]
            yield ids[pick].long(), weight[pick].float() / WEIGHT_STEPS, fresh[pick]


def weighted_loss(logits: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """Mean cross-entropy of predicting each next token, weighted by that token's loss weight."""
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    w = weight[:, 1:].flatten()
    return (losses * w).sum() / w.sum().clamp_min(1.0)


def rate(plan: Plan, progress: float) -> float:
    """Learning rate share: linear warm-up, then cosine to `min_lr`."""
    if progress < plan.warmup:
        return max(0.01, progress / plan.warmup)
    at = (progress - plan.warmup) / (1 - plan.warmup)
    return plan.min_lr + (1 - plan.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, at)))


@torch.no_grad()
def balance(model: Any, picks: list[Tensor], step_size: float) -> None:
    """Move each router's selection bias towards equal load (the auxiliary-loss-free rule of DeepSeek-V3)."""
    gates = [layer.mlp.gate for layer in model.model.language_model.layers if hasattr(layer.mlp, "gate")]
    for gate, picked in zip([*gates, model.mtp.mlp.gate], picks, strict=False):  # the MTP layer's, if it took part
        flat = picked.flatten()
        load = torch.zeros(gate.num_experts, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat).float())
        gate.e_score_correction_bias += step_size * torch.sign(load.mean() - load)
        gate.e_score_correction_bias -= gate.e_score_correction_bias.mean()


def compiled_ops(fused_sinkhorn: bool) -> fastnet.Ops:
    """The elementwise parts through torch.compile, Sinkhorn through a Triton kernel."""
    base = fastnet.Ops()
    made = {n: torch.compile(fn, dynamic=False, fullgraph=True) for n, fn in vars(base).items() if n != "sinkhorn"}
    if fused_sinkhorn:
        from .sinkhorn import sinkhorn_cuda

        made["sinkhorn"] = sinkhorn_cuda
    return fastnet.Ops(**made)


def fused_ops() -> fastnet.Ops:
    """The plain parts with Sinkhorn in one Triton kernel: most of what the plain ones launch."""
    from .sinkhorn import sinkhorn_cuda

    return fastnet.Ops(sinkhorn=sinkhorn_cuda)


CANDIDATES: dict[str, Callable[[], fastnet.Ops]] = {
    "compiled with fused Sinkhorn": lambda: compiled_ops(True),
    "compiled": lambda: compiled_ops(False),
    "plain with fused Sinkhorn": fused_ops,
}
"""What `Trainer.warm_up` tries, best first."""


@dataclass
class Losses:
    """Of one batch: the text's mean cross-entropy, the sum that is minimised, and the picks of each router [N, k]."""

    text: Tensor
    total: Tensor
    picks: list[Tensor]


class Trainer:
    """Owns model, optimiser and data order of one run."""

    def __init__(self, model: Any, rows: Rows, plan: Plan, device: torch.device) -> None:
        self.model, self.plan, self.device = model.to(device), plan, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.optim = optimiser(model, plan, device)
        self.drafter = list(model.mtp.parameters())
        drafting = {id(p) for p in self.drafter}
        self.trunk = [p for p in model.parameters() if id(p) not in drafting]
        self.data = batches(rows, plan.batch, device, 0)
        self.ops = fastnet.Ops()
        self.tokens_a_step = plan.batch * rows.ids.shape[1]
        self.scale = 1.0
        self.good = self.last = self.copy()

    def copy(self) -> list[Tensor]:
        """Everything that training changes in the model."""
        changed = [*self.model.parameters(), *(b for n, b in self.model.named_buffers() if n.endswith(KEPT_FLOAT))]
        return [t.detach().clone() for t in changed]

    def keep(self) -> None:
        """The copy before this one has led to a finite loss: it is the one to go back to."""
        self.good, self.last = self.last, self.copy()

    @torch.no_grad()
    def go_back(self) -> None:
        """To the last good copy, with a fresh optimiser at half the rate: the loss had become infinite or no number."""
        changed = [*self.model.parameters(), *(b for n, b in self.model.named_buffers() if n.endswith(KEPT_FLOAT))]
        for tensor, good in zip(changed, self.good, strict=True):
            tensor.copy_(good)
        self.last = self.good
        self.scale /= 2
        self.optim = optimiser(self.model, self.plan, self.device)

    def losses(self, batch: tuple[Tensor, Tensor, Tensor], noise: fastnet.Noise, progress: float) -> Losses:
        """One forward pass, with the MTP layer once it takes part.

        Rounding makes a router exchange its last pick for the first it left out in one of twenty cases. That is nearly
        all of what rounding does to the logits, and it goes with the square of these two's weights: hence their cost.
        """
        ids, weight, fresh = batch
        step = fastnet.Step(self.ops, self.dtype, fresh, noise)
        text = weighted_loss(fastnet.forward(self.model, ids, step), ids, weight)
        edges = torch.stack([e.square().mean() for e in step.edges]).mean()
        total = text + self.plan.edge * min(1.0, progress / self.plan.edge_full) * edges
        if progress >= self.plan.draft_from:
            total = total + self.plan.draft * weighted_loss(mtp.forward(self.model, ids, step), ids, weight)
        return Losses(text, total, step.picks)

    def step(self, progress: float) -> Tensor:
        """One optimiser step; returns the text's loss, still on the device."""
        plan = self.plan
        noisy = progress >= plan.noise_from
        noise = fastnet.Noise(plan.expert_noise, plan.routing_noise) if noisy else fastnet.Noise()
        losses = self.losses(next(self.data), noise, progress)
        self.optim.zero_grad(set_to_none=True)
        losses.total.backward()
        for part in (self.trunk, self.drafter):  # drafts must not shorten the trunk's steps
            nn.utils.clip_grad_norm_([p for p in part if p.grad is not None], 1.0)
        for group in self.optim.param_groups:
            group["lr"] = self.scale * plan.lr * rate(plan, progress)
        self.optim.step()
        balance(self.model, losses.picks, plan.balance * rate(plan, progress))
        return losses.text.detach()

    def probe(self, batch: tuple[Tensor, Tensor, Tensor], noise: fastnet.Noise) -> float:
        """Loss of one forward and backward without an update; raises unless loss and gradients are finite."""
        losses = self.losses(batch, noise, 1.0)
        losses.total.backward()
        finite = [torch.isfinite(p.grad).all() for p in self.model.parameters() if p.grad is not None]
        self.optim.zero_grad(set_to_none=True)
        if not (torch.isfinite(losses.total) and torch.stack(finite).all()):
            raise FloatingPointError(f"loss {losses.total.item()} or its gradients are not finite")
        return float(losses.text.item())

    def warm_up(self) -> str:
        """Choose the fastest parts that compile here and agree with the plain ones on one batch."""
        if self.device.type != "cuda":
            return "plain"
        start, batch, failures = time.time(), next(self.data), ""
        plain = self.probe(batch, fastnet.Noise())
        for name, make in CANDIDATES.items():
            try:
                self.ops = make()
                loss = self.probe(batch, fastnet.Noise())
                self.probe(batch, fastnet.Noise(self.plan.expert_noise, self.plan.routing_noise))
                if abs(loss - plain) > 0.02:
                    raise ArithmeticError(f"compiled loss {loss:.4f}, plain {plain:.4f}")
                return f"{name}, {time.time() - start:.1f} s{failures}"
            except Exception as error:  # whatever a compiler throws: the plain parts compute the same
                failures += f"; {name} failed: {type(error).__name__}: {str(error)[:300]}"
                self.optim.zero_grad(set_to_none=True)
        self.ops = fastnet.Ops()
        return f"plain{failures}"

    def run(self) -> dict[str, Any]:
        """Train until the time is up, compiling included; returns the loss curve and throughput."""
        begun = time.time()
        note = self.warm_up()
        print(f"train: {note}", flush=True)
        plan, start, steps, returns, curve = self.plan, time.time(), 0, 0, []
        shown, seconds = start, max(0.2 * plan.seconds, plan.seconds - (start - begun))
        while (elapsed := time.time() - start) < seconds and steps < plan.max_steps:
            loss = self.step(max(elapsed / seconds, steps / plan.max_steps))
            steps += 1
            if steps % 4 == 0 or steps < 4:  # also keeps the host from running ahead of the clock
                value = loss.item()
                if not math.isfinite(value):
                    returns += 1
                    if returns > MOST_RETURNS:
                        raise FloatingPointError(f"loss became {value} at step {steps}, {returns} times")
                    print(f"train: loss {value} at step {steps}: back to the last good copy, half the rate", flush=True)
                    self.go_back()
                elif steps < 4 or time.time() - shown > 8:
                    shown = time.time()
                    self.keep()
                    rate_now = steps * self.tokens_a_step / (shown - start)
                    curve.append([steps, round(shown - start, 1), round(value, 4)])
                    print(
                        f"train: step {steps} {shown - start:.0f} s loss {value:.4f} {rate_now / 1e3:.0f}k tok/s",
                        flush=True,
                    )
        return {
            "ops": note,
            "steps": steps,
            "tokens": steps * self.tokens_a_step,
            "seconds": round(time.time() - start, 1),
            "curve": curve,
            "returns": returns,
        }


@torch.no_grad()
def round_weights(model: Any) -> None:
    """Round every parameter to bfloat16 in place, but for the few that stay float32 in a checkpoint."""
    for name, p in model.named_parameters():
        if not name.endswith(KEPT_FLOAT):
            p.copy_(p.to(torch.bfloat16).float())


def save(model: Any, out: Path, shard: str = "15MB") -> None:
    """Write the checkpoint with transformers' own names, bfloat16, shards of at most `shard`; the MTP layer apart."""
    import copy

    half = copy.deepcopy(model).cpu()
    mtp.save(half.mtp, len(half.model.language_model.layers), out)
    del half.mtp
    kept = {n: b.clone() for n, b in [*half.named_parameters(), *half.named_buffers()] if n.endswith(KEPT_FLOAT)}
    half.to(torch.bfloat16)
    for name, tensor in kept.items():
        owner, _, leaf = name.rpartition(".")
        setattr(
            half.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False) if leaf == "A_log" else tensor
        )
    half.save_pretrained(out, max_shard_size=shard)
