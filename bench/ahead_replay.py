#!/usr/bin/env python3
"""Would guessing the next layer's experts pay? Records routing on the CPU engine and replays it under the cost model.

    python bench/ahead_replay.py --model python/glm53/models/nano --out bench/results/DATE-ahead.json
    python bench/ahead_replay.py --model CHECKPOINT --ids held-out.npz --save guesses.npz
    python bench/ahead_replay.py --trace bench/traces/nano.npz

bench/traces/nano.npz was recorded by the second command on the nano checkpoint and its held-out documents (tools/nano),
with --context 32 --tokens 4800.
The guess for a layer is the next router applied to this layer's input, best ranks first. A guess that is not in the
cache is copied, into a buffer of its own, while PCIe is idle. A wrong guess costs nothing but idle time. Three ways:
  whole     copies begin when the layer's kernels on the GPU have ended and until the next layer's router has run; only
            those that fit whole are begun, and each layer pays for one more router
  finished  the same, but a copy may be under way when the router has run: that of a right guess is finished by the step
            before its kernels begin, that of a wrong one stops
  best      the bound: as finished, but guesses cost nothing and the link is used whenever no read of the layer uses it
Residency is that of the native policy on the same picks; times are those of the hosts of bench/lane_hosts.py, for one
stream and for four that decode together (the recording in four parts). With --ids, tokens come from an .npz (`ids`;
with `lengths` each document is decoded by itself, behind its first --context tokens); otherwise from --text.
Decision: worth building where `finished`, ranks 1 and 2, fast mode, gains at least --least tokens a second on every
host, for one stream and for four.
Exit code 0: measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import command, emit, machine, say, versions
from lane_hosts import LaneTimes, hosts, layer_split
from trace_replay import together

from glm53 import _core
from glm53.sizing import REFERENCE

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 128
BLIND = 0.04
"""Sum over ranks 1 and 2 by which the router's guesses must be right more often than the hottest experts."""
Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """picks (steps, layers, rows * k), in any order; guesses (steps, layers, rows * ranks): the experts the layer's
    router would pick on the input of the layer before, best ranks of all rows first (-1 in the first layer)."""

    picks: Ints
    guesses: Ints
    experts: int
    rows: int = 1

    def streams(self, rows: int) -> Recorded:
        """The recording of one stream cut into `rows` parts that decode together."""
        steps, layers, ranks = len(self.picks) // rows, self.picks.shape[1], self.guesses.shape[2]
        guesses = together(self.guesses, rows).reshape(steps, layers, rows, ranks).swapaxes(2, 3)
        return Recorded(together(self.picks, rows), guesses.reshape(steps, layers, -1), self.experts, rows)


def record(model: Any, documents: list[list[int]], context: int, ranks: int) -> Recorded:
    """Decode each document token by token behind its first `context` ones, teacher-forced."""
    parts = [record_one(model, ids, context, ranks) for ids in documents]
    picks, guesses = (np.concatenate([p[i] for p in parts]).astype(np.int64) for i in (0, 1))
    return Recorded(picks, guesses, model.config.n_routed_experts)


def record_one(model: Any, ids: list[int], context: int, ranks: int) -> tuple[Any, Any]:
    """(picks, guesses) of one document, in a state of its own."""
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
    return np.array(picks), np.array(guesses)


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


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One layer of one step: the missed experts' rows, fewest first, and the guesses for it that no slot holds, best
    first, each behind its place among all guesses."""

    missing: dict[int, int]
    wanted: list[tuple[int, int]]


def residents(recorded: Recorded, slots: int, most: int | None) -> Iterator[set[int]]:
    """Before each step, the entries (layer * experts + expert) that the native policy holds; it admits up to `most` of
    a layer's misses."""
    layers = recorded.picks.shape[1]
    config = _core.ClockConfig(layers, recorded.experts, slots)
    if most is not None:
        config.max_admissions = most
    policy = _core.ClockPolicy(config)
    for step in recorded.picks:
        yield {int(e) for e in policy.owners() if e >= 0}
        policy.replay(np.ascontiguousarray(step[None]), recorded.rows)


def steps(recorded: Recorded, slots: int, most: int | None = None) -> list[list[Step]]:
    """What each step misses and what was guessed for it, layer by layer."""
    found = []
    for t, held in enumerate(residents(recorded, slots, most)):
        layers = []
        for layer, (picked, guessed) in enumerate(zip(recorded.picks[t], recorded.guesses[t], strict=True)):
            rows = Counter(int(e) for e in picked if layer * recorded.experts + int(e) not in held)
            base = layer * recorded.experts
            wanted = [(i, int(g)) for i, g in enumerate(guessed) if g >= 0 and base + int(g) not in held]
            layers.append(Step(dict(sorted(rows.items(), key=lambda item: item[1])), wanted))
        found.append(layers)
    return found


def layer_ms(step: Step, copied: dict[int, float], times: LaneTimes, cpu: bool) -> tuple[float, float]:
    """`layer_split` where of each expert in `copied` that share of its bytes is in VRAM already; an expert of which
    little was copied is a miss as any other if that is faster."""
    right = {e: share for e, share in copied.items() if e in step.missing}
    rest = sum(1 - share for share in right.values()) * times.pcie_expert
    found = layer_split([r for e, r in step.missing.items() if e not in right], rest, times, cpu)
    partly = {e for e, share in right.items() if share < 1}
    if not partly:
        return found
    whole = [r for e, r in step.missing.items() if e not in right or e in partly]
    return min(found, layer_split(whole, 0.0, times, cpu))


def replay(
    found: list[list[Step]], warmup: int, times: LaneTimes, *, ranks: int, cpu: bool, way: str = "best", rows: int = 1
) -> dict[str, float]:
    """Mean time of a step in ms, misses a layer, copies and useful copies a layer; `ranks` 0: without guesses."""
    total, misses, copies, useful = 0.0, 0, 0.0, 0.0
    extra = times.router if ranks and way != "best" else 0.0
    not_idle = 0.0 if way == "best" else times.cached + times.decide
    for t, layers in enumerate(found):
        idle = 0.0
        for step in layers:
            room = idle / times.pcie_expert
            copied: dict[int, float] = {}
            for guess in dict.fromkeys(g for place, g in step.wanted if place < ranks * rows):
                share = float(room >= 1 - 1e-9) if way == "whole" else min(1.0, room)
                if share <= 0:
                    break
                copied[guess], room = share, room - share
            took, busy = layer_ms(step, copied, times, cpu)
            idle = max(0.0, took - busy - not_idle + times.gap)
            if t >= warmup:
                total += took + times.fixed + extra
                misses += len(step.missing)
                copies += sum(copied.values())
                useful += sum(share for e, share in copied.items() if e in step.missing)
    counted = len(found) - warmup
    per_layer = counted * len(found[0])
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


RANKS = (1, 2)
WAYS = ("whole", "finished", "best")


def compare(recorded: Recorded, slots: int, warmup: int, cpu: bool) -> list[dict[str, Any]]:
    """One row per host, way and number of ranks, for as many streams as the recording has; gain: tokens a second."""
    found = steps(recorded, slots, _core.SplitConfig().max_admissions if cpu else None)
    table: list[dict[str, Any]] = []
    for host, times in hosts(recorded.rows).items():
        plain = replay(found, warmup, times, ranks=0, cpu=cpu)
        for ranks, way in [(0, "none"), *((r, w) for w in WAYS for r in RANKS)]:
            with_guesses = replay(found, warmup, times, ranks=ranks, cpu=cpu, way=way, rows=recorded.rows)
            row = {"host": host, "rows": recorded.rows, "mode": "fast" if cpu else "exact", "ranks": ranks}
            row |= {"way": way, **with_guesses}
            row["gain"] = plain["token_ms"] / with_guesses["token_ms"] - 1
            table.append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    return table


def evaluate(recorded: Recorded, slots: int, warmup: int, least: float) -> dict[str, Any]:
    """Everything that is reported, with the decision."""
    table = []
    for rows in (1, 4):
        for cpu in (True, False):
            table += compare(recorded.streams(rows), slots, warmup // rows, cpu)
    found = accuracy(recorded)
    by_router, by_heat = (sum(found[k][:2]) for k in ("right_by_rank", "right_by_rank_of_the_hottest"))
    lead = round(by_router - by_heat, 4)
    gains = {
        f"{way}.{host}.{rows}": max(
            r["gain"] for r in table if (r["mode"], r["way"], r["host"], r["rows"]) == ("fast", way, host, rows)
        )
        for way in WAYS
        for host in hosts(1)
        for rows in (1, 4)
    }
    worst = min(v for k, v in gains.items() if k.startswith("finished"))
    if lead < BLIND:
        verdict = "undecided, for a guess that sees no input is as good on this routing"
    else:
        verdict = "worth building" if worst >= least else "not worth building"
    decision = f"{verdict}: {worst:+.1%} on the host where it gives least, {least:.0%} wanted"
    return {"accuracy": found, "table": table, "gains": gains, "decision": decision, "lead": lead}


def bars(raw: dict[str, Any]) -> dict[str, Any]:
    """Gains in fast mode, and what the guesses know."""
    says = {
        "whole": "gain in tokens a second from fetching guessed experts ahead in fast mode, only copies that fit whole",
        "finished": "the same, copies of right guesses finished by the step",
        "best": "the same at the very best: guesses cost nothing, any idle moment of the link is used",
    }
    found: dict[str, Any] = {}
    for name, gain in raw["gains"].items():
        way, host, rows = name.split(".")
        found[f"ahead.{name}"] = {"value": gain, "says": f"{says[way]}; host {host}, streams {rows}: simulated"}
    right = raw["accuracy"]["right_by_rank"]
    found |= {f"ahead.right_at_rank_{i + 1}": {"value": right[i], "says": "share of guesses of that rank that the "
              "router then picked: recorded"} for i in range(2)}  # fmt: skip
    return found | {"ahead.lead_over_heat": {"value": raw["lead"]}}


def documents(args: argparse.Namespace) -> list[list[int]]:
    """The tokens to decode, each document with the context before it."""
    if args.ids is None:
        from glm53.tokenizer import Tokenizer

        given = [list(Tokenizer(args.model).encode(args.text.read_text(encoding="utf-8")))]
    else:
        with np.load(args.ids) as data:
            ids = data["ids"].astype(int)
            ends = np.cumsum(data["lengths"]) if "lengths" in data else [len(ids)]
        given = [part.tolist() for part in np.split(ids, ends[:-1])]
    found, left = [], args.tokens
    for ids in given:
        part = ids[: args.context + left]
        if len(part) > args.context and left:
            found.append(part)
            left -= len(part) - args.context
    if left:
        raise SystemExit(f"ahead_replay: {left} tokens are missing; give --tokens or a longer text")
    return found


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
    found = record(model, documents(args), args.context, ranks)
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
    p.add_argument("--ids", type=Path, help="token ids instead, .npz with `ids` and perhaps `lengths` of documents")
    p.add_argument("--tokens", type=int, default=600, help="tokens to decode")
    p.add_argument("--context", type=int, default=128, help="tokens read before them, of each document")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--share", type=float, default=REFERENCE.hit_share, help="slots as a share of all experts")
    p.add_argument("--warmup", type=int, help="tokens that are replayed but not counted (a third)")
    p.add_argument("--least", type=float, default=0.05, help="gain from which guesses are worth it")
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
    result = {
        "what": "guessing the next layer's experts: accuracy on recorded routing, and gain under the cost model",
        "machine": machine(),
        "versions": versions("glm53", "numpy", "torch", "transformers"),
        "command": command("ahead_replay.py", argv),
        "settings": {
            "tokens": tokens, "layers": layers, "experts": recorded.experts, "picks": k, "slots": slots,
            "warmup": warmup, "least": args.least,
            "hosts_ms": {f"{n}, {r} rows": dataclasses.asdict(t) for r in (1, 4) for n, t in hosts(r).items()},
        },
        "raw": raw,
        "bars": bars(raw),
    }  # fmt: skip
    emit(result, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
