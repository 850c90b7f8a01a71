#!/usr/bin/env python3
"""Would guessing the next layer's experts pay? Records routing on the CPU engine and replays it under the cost model.

    python bench/ahead_replay.py --model python/glm53/models/tiny --out bench/results/DATE-ahead.json
    python bench/ahead_replay.py --model CHECKPOINT --ids held-out.npz --save guesses.npz
    python bench/ahead_replay.py --trace guesses.npz

The guess for a layer is the next router applied to this layer's input, best ranks first. A guess that is not in the
cache is copied while PCIe is idle: from the moment this layer's input is known until the next layer's router has run,
less what this layer's own misses take. Only copies that fit whole are started, into a buffer of their own, so a wrong
guess costs nothing but the idle time. A right one is a hit. Residency is that of the native policy on the same picks,
with the reference card's share of slots; times are those of `glm53 plan`'s reference host. With --ids, tokens come from
an .npz (`ids`); otherwise from --text.
Decision: kept where the gain in tokens a second, fast mode, is at least --least. Exit code 0: measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import command, emit, machine, say, versions

from glm53 import _core
from glm53.sizing import REFERENCE, SHAPE, Constants

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 128
BLIND = 0.04
"""Sum over ranks 1 and 2 by which the router's guesses must be right more often than the hottest experts."""
Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """picks (tokens, layers, k), each token's best first is not asked for; guesses (tokens, layers, ranks): the experts
    the layer's router would pick on the input of the layer before, best first (-1 in the first layer)."""

    picks: Ints
    guesses: Ints
    experts: int


def record(model: Any, ids: list[int], context: int, ranks: int) -> Recorded:
    """Decode `ids` token by token behind the first `context` of them, teacher-forced."""
    import torch

    state = model.new_state()
    for at in range(0, context, CHUNK):
        model.prefill(state, ids[at : min(at + CHUNK, context)])
    layers = model.config.moe_layers
    routers = [model._text.layers[i].mlp.gate for i in layers]
    picks, guesses = [], []
    with torch.inference_mode(), _watched(model, len(layers)) as seen:
        for token in ids[context:]:
            seen.clear()
            (answer,) = model.step([state], [token])
            if isinstance(answer, Exception):
                raise answer
            rows = [seen[i] for i in range(len(layers))]
            picks.append([p for _, p in rows])
            ahead = [torch.full((ranks,), -1)]
            for (x, _), router in zip(rows, routers[1:], strict=False):
                scores = (x @ router.weight.T).sigmoid() + router.e_score_correction_bias
                ahead.append(scores[0].topk(ranks).indices)
            guesses.append(torch.stack(ahead).numpy())
    return Recorded(np.array(picks, np.int64), np.array(guesses, np.int64), model.config.n_routed_experts)


@contextmanager
def _watched(model: Any, layers: int) -> Iterator[dict[int, tuple[Any, list[int]]]]:
    """What each MoE layer's experts were given last: {layer: (input (1, hidden), picks)}."""
    seen: dict[int, tuple[Any, list[int]]] = {}

    def hook(index: int) -> Callable[[Any, tuple[Any, ...]], None]:
        def before(module: Any, args: tuple[Any, ...]) -> None:
            seen[index] = args[0].clone(), args[1][0].tolist()

        return before

    handles = [model._experts[i].register_forward_pre_hook(hook(i)) for i in range(layers)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def split(misses: int, c: Constants, cpu: bool) -> tuple[float, float]:
    """(time of the layer's experts, time PCIe is busy in it), ms: the best split of the cost model."""
    best = (c.cached_ms + misses * c.pcie_expert_ms, misses * c.pcie_expert_ms)
    for n in range(1, misses + 1) if cpu else ():
        busy = (misses - n) * c.pcie_expert_ms
        best = min(best, (max(c.handoff_ms + n * c.cpu_expert_ms, c.cached_ms + busy), busy))
    return best


def residents(recorded: Recorded, slots: int) -> Iterator[set[int]]:
    """Before each token, the entries (layer * experts + expert) that the native policy holds."""
    layers = recorded.picks.shape[1]
    policy = _core.ClockPolicy(_core.ClockConfig(layers, recorded.experts, slots))
    for token in recorded.picks:
        yield {int(e) for e in policy.owners() if e >= 0}
        policy.replay(np.ascontiguousarray(token[None]), 1)


def replay(recorded: Recorded, slots: int, warmup: int, *, ranks: int, cpu: bool, c: Constants) -> dict[str, float]:
    """Mean time of a token in ms, misses a layer, copies and useful copies a layer; `ranks` 0: without guesses."""
    tokens, layers, _ = recorded.picks.shape
    fixed = c.fixed_ms / layers * (layers / SHAPE.moe_layers)  # what one MoE layer has of a token's rest
    total = misses = copies = useful = 0.0
    for t, held in enumerate(residents(recorded, slots)):
        idle = 0.0
        for layer in range(layers):
            base = layer * recorded.experts
            missing = {int(e) for e in recorded.picks[t, layer] if base + int(e) not in held}
            room = int(idle / c.pcie_expert_ms + 1e-9)
            wanted = [int(g) for g in recorded.guesses[t, layer, :ranks] if g >= 0 and base + int(g) not in held]
            copied = set(wanted[:room])
            took, busy = split(len(missing - copied), c, cpu)
            idle = took - busy + fixed
            if t >= warmup:
                total += took + fixed
                misses += len(missing)
                copies += len(copied)
                useful += len(missing & copied)
    counted = tokens - warmup
    per_layer = counted * layers
    return {
        "token_ms": total / counted,
        "misses_per_layer": misses / per_layer,
        "copies_per_layer": copies / per_layer,
        "useful_per_layer": useful / per_layer,
    }


def accuracy(recorded: Recorded) -> dict[str, Any]:
    """How often the guess of each rank is picked, beside a guess that sees no input: the layer's hottest experts."""
    picks, guesses = recorded.picks[:, 1:], recorded.guesses[:, 1:]
    ranks = guesses.shape[2]
    hot = np.stack(
        [np.bincount(p.ravel(), minlength=recorded.experts).argsort()[::-1][:ranks] for p in picks.swapaxes(0, 1)]
    )

    def rate(guessed: npt.NDArray[np.bool_]) -> list[float]:
        return [round(float(guessed[..., r].mean()), 4) for r in range(ranks)]

    right = (guesses[..., :, None] == picks[..., None, :]).any(-1)
    return {
        "right_by_rank": rate(right),
        "right_by_rank_of_the_hottest": rate((hot[None, :, :, None] == picks[..., None, :]).any(-1)),
        "right_rank1_by_layer": [round(float(right[:, layer, 0].mean()), 4) for layer in range(right.shape[1])],
        "recall_at_k": round(float(right[..., : picks.shape[2]].mean()), 4),
        "by_chance": round(picks.shape[2] / recorded.experts, 4),
    }


def evaluate(recorded: Recorded, slots: int, warmup: int, least: float, c: Constants = REFERENCE) -> dict[str, Any]:
    """Everything that is reported, with the decision."""
    table = []
    for cpu in (True, False):
        plain = replay(recorded, slots, warmup, ranks=0, cpu=cpu, c=c)
        for ranks in (0, 1, 2, recorded.guesses.shape[2]):
            found = plain if ranks == 0 else replay(recorded, slots, warmup, ranks=ranks, cpu=cpu, c=c)
            gain = plain["token_ms"] / found["token_ms"] - 1
            row = {"mode": "fast" if cpu else "exact", "ranks": ranks, **found, "gain": gain}
            table.append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    best = max((r for r in table if r["mode"] == "fast" and r["ranks"] <= 2), key=lambda r: float(r["gain"]))
    found = accuracy(recorded)
    by_router, by_heat = (sum(found[k][:2]) for k in ("right_by_rank", "right_by_rank_of_the_hottest"))
    lead = round(by_router - by_heat, 4)
    if lead < BLIND:
        verdict = "undecided, for a guess that sees no input is as good on this routing"
    else:
        verdict = "kept" if best["gain"] >= least else "dropped"
    decision = f"{verdict}: {best['gain']:+.1%} at best with ranks <= 2 in fast mode, {least:.0%} wanted"
    return {"accuracy": found, "table": table, "decision": decision, "best_gain": best["gain"], "lead": lead}


def token_ids(args: argparse.Namespace) -> list[int]:
    """The tokens to decode."""
    wanted = args.context + args.tokens
    if args.ids is not None:
        with np.load(args.ids) as data:
            ids = data["ids"].astype(int).tolist()
    else:
        from glm53.tokenizer import Tokenizer

        ids = list(Tokenizer(args.model).encode(args.text.read_text(encoding="utf-8")))
    if len(ids) < wanted:
        raise SystemExit(f"ahead_replay: {wanted} tokens wanted, there are {len(ids)}; give --tokens or a longer text")
    return ids[:wanted]


def recorded_from(args: argparse.Namespace) -> Recorded:
    """A saved recording, or a new one."""
    if args.trace is not None:
        with np.load(args.trace) as data:
            return Recorded(data["picks"].astype(np.int64), data["guesses"].astype(np.int64), int(data["experts"]))
    from glm53.checkpoint import Checkpoint
    from glm53.engine.cpu.model import CpuModel

    with Checkpoint.open(args.model) as checkpoint:
        model = CpuModel(checkpoint, args.threads, lambda stage, fraction: None)
    ranks = max(2, model.config.num_experts_per_tok)
    say(f"decoding {args.tokens} tokens behind {args.context} ...")
    found = record(model, token_ids(args), args.context, ranks)
    if args.save is not None:
        np.savez_compressed(
            args.save, picks=found.picks.astype(np.int16), guesses=found.guesses.astype(np.int16),
            experts=found.experts, rows=1,
        )  # fmt: skip
    return found


def parse(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="checkpoint to decode on the CPU engine")
    source.add_argument("--trace", type=Path, help="a recording made with --save")
    p.add_argument("--text", type=Path, default=ROOT / "README.md", help="text whose tokens are decoded")
    p.add_argument("--ids", type=Path, help="token ids instead, .npz with `ids`")
    p.add_argument("--tokens", type=int, default=600, help="tokens to decode")
    p.add_argument("--context", type=int, default=128, help="tokens read before them")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--share", type=float, default=REFERENCE.hit_share, help="slots as a share of all experts")
    p.add_argument("--warmup", type=int, help="tokens that are replayed but not counted (a third)")
    p.add_argument("--least", type=float, default=0.02, help="gain from which guesses are kept")
    p.add_argument("--save", type=Path, help="write the recording here, .npz")
    p.add_argument("--out", type=Path, help="write the result here")
    return p.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse(argv)
    recorded = recorded_from(args)
    tokens, layers, k = recorded.picks.shape
    slots = max(k, round(args.share * layers * recorded.experts))
    warmup = tokens // 3 if args.warmup is None else args.warmup
    raw = evaluate(recorded, slots, warmup, args.least)
    right, hot = (raw["accuracy"][k][:2] for k in ("right_by_rank", "right_by_rank_of_the_hottest"))
    say(f"{raw['decision']}; right by rank {right}, of the hottest {hot}, by chance {raw['accuracy']['by_chance']}")
    best, lead = raw["best_gain"], raw["lead"]
    result = {
        "what": "guessing the next layer's experts: accuracy on recorded routing, and gain under the cost model",
        "machine": machine(),
        "versions": versions("glm53", "numpy", "torch", "transformers"),
        "command": command("ahead_replay.py", argv),
        "settings": {
            "tokens": tokens, "layers": layers, "experts": recorded.experts, "picks": k, "slots": slots,
            "warmup": warmup, "constants": dataclasses.asdict(REFERENCE),
        },
        "raw": raw,
        "bars": {
            "ahead.best_gain": {"value": best, "want": f">= {args.least}", "ok": best >= args.least},
            "ahead.lead_over_heat": {"value": lead, "want": f">= {BLIND}", "ok": lead >= BLIND},
        },
    }  # fmt: skip
    emit(result, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
