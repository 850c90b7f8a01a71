#!/usr/bin/env python3
"""How far fast decode is from exact decode, token by token, beside the distance between stock exllamav3's own paths.

    python bench/decode_kl.py CHECKPOINT --out bench/results/decode_kl.json [--paths stock stock-fp16 exact fast]

Every path decodes the same tokens: after the same prompt the sampler hands out the next token of a fixed text, whatever
the logits say, and keeps the logits. So both models are always in the same place, and each position gives one KL.
  stock       exllamav3 with its own CPU expert split (--on-cpu experts of each layer), its default decode kernels
  stock-fp16  the same with EXL3_INT8_GEMV=0: the other of stock's two decode paths; stock against it is the noise floor
  exact, fast glm53 in that mode
Fast's mean KL against exact, and its share of other likeliest tokens, should be no larger than the noise floor's.
Exact and fast run in one process, one after the other, because exllamav3 chooses kernels by timing them and two
processes may choose differently; stock's two paths are chosen by its environment, so each has its own. All in one call.
Needs a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import command, machine, save, versions

GROUPS = (("stock",), ("stock-fp16",), ("exact", "fast"))
"""Paths that share a process."""
PAIRS = (("stock", "stock-fp16"), ("exact", "fast"), ("stock", "exact"), ("stock", "fast"))
PATHS = ("stock", "stock-fp16", "exact", "fast")


class Forced:
    """A sampler, as exllamav3 calls one, that hands out given tokens and keeps the logits they were not drawn from."""

    reqs_past_ids = reqs_torch_seed = False

    def __init__(self, tokens: list[int], usable: int) -> None:
        self.tokens, self.usable = tokens, usable
        self.logits: list[torch.Tensor] = []

    def forward(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """logits [..., V] of one position -> the next token, shaped like the positions."""
        self.logits.append(logits.reshape(-1, logits.shape[-1])[-1, : self.usable].float().cpu())
        shape = logits.shape[:-1]
        return torch.full(shape, self.tokens[len(self.logits) - 1], dtype=torch.long, device=logits.device)


def texts(args: argparse.Namespace, encoder: Any) -> list[list[int]]:
    """--prompts texts of prompt + new tokens: held-out documents, or windows of the repository's own documents."""
    need = args.prompt + args.new
    if args.ids:
        held = np.load(args.ids)
        found = [d.astype(int).tolist() for d in np.split(held["ids"], np.cumsum(held["lengths"])[:-1])]
    else:
        root = Path(__file__).resolve().parents[1]
        words = "\n".join(p.read_text(encoding="utf-8") for p in [root / "README.md", *sorted(root.glob("docs/*.md"))])
        ids = encoder.encode(words, add_special_tokens=False).ids
        found = [ids[at : at + need] for at in range(0, len(ids) - need, need)]
    found = [d[:need] for d in found if len(d) >= need][: args.prompts]
    if not found:
        raise SystemExit(f"decode_kl: no text has {need} tokens (--prompt + --new)")
    return found


def generator_of(args: argparse.Namespace, path: str) -> tuple[Any, Any]:
    """An exllamav3 generator over the path's model, and what glm53 loaded (None for stock)."""
    import exllamav3 as exl

    if path in ("exact", "fast"):
        from glm53.config import Settings
        from glm53.engine.exllama.loader import LoadOptions, load

        state = Path(tempfile.mkdtemp())
        settings = Settings(model_dir=args.checkpoint, mode=path, state_dir=state, cache_tokens=16384)
        loaded = load(settings, lambda stage, fraction: None, LoadOptions(max_slots=args.slots))
        return exl.Generator(loaded.model, loaded.cache, loaded.tokenizer, max_batch_size=1), loaded
    config = exl.Config.from_directory(str(args.checkpoint))
    config.infer_params.moe_cpu_split = args.on_cpu
    model = exl.Model.from_config(config)
    cache = exl.Cache(model, max_num_tokens=16384, max_batch_size=1)
    model.load(progressbar=False)
    return exl.Generator(model, cache, exl.Tokenizer.from_config(config), max_batch_size=1), None


def record(args: argparse.Namespace, path: str, out: Path) -> None:
    """Decode every text on one path; logits [texts * (new - 1), V] float16 and the lanes' picks go to `out`."""
    import exllamav3 as exl
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    (generator, loaded), kept = generator_of(args, path), []
    for i, ids in enumerate(texts(args, encoder)):
        sampler = Forced(ids[args.prompt :], encoder.get_vocab_size())
        prompt = torch.tensor([ids[: args.prompt]])
        generator.enqueue(exl.Job(input_ids=prompt, max_new_tokens=args.new, sampler=sampler))
        while generator.num_remaining_jobs():
            generator.iterate()
        kept += sampler.logits[1 : args.new]  # the first comes from the prompt's own pass, not from decoding
        print(f"decode_kl: {path} text {i + 1}", file=sys.stderr, flush=True)
    lanes = {} if loaded is None else lanes_of(loaded)
    np.savez(out, logits=torch.stack(kept).half().numpy(), lanes=json.dumps(lanes))
    del generator
    if loaded is not None:
        loaded.close()
        gc.collect()
        torch.cuda.empty_cache()


def lanes_of(loaded: Any) -> dict[str, int]:
    """Distinct picks of the decode steps by lane, which show that the path was the one it is called."""
    fault = loaded.passes.fault()
    if fault is not None:
        raise SystemExit(f"decode_kl: {fault}")
    stats = loaded.runtime.stats(loaded.passes.stream)
    return {name: int(stats[name]) for name in ("hits", "misses", "cpu_picks")}


def distance(reference: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """KL(reference || other) in nats and top-1 agreement, over rows of logits."""
    p, q = (torch.from_numpy(a).double().log_softmax(-1) for a in (reference, other))
    kl = (p.exp() * (p - q)).sum(-1)
    return {
        "positions": len(kl),
        "kl_mean": float(kl.mean()),
        "kl_p50": float(kl.median()),
        "kl_p99": float(kl.quantile(0.99)),
        "top1": float((p.argmax(-1) == q.argmax(-1)).double().mean()),
    }


def compare(found: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Every pair of PAIRS of which both paths were recorded."""
    return {f"{a} | {b}": distance(found[a], found[b]) for a, b in PAIRS if a in found and b in found}


def bars(distances: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Fast against exact, held to the distance between stock's own paths where that was measured."""
    floor, fast = distances.get("stock | stock-fp16"), distances.get("exact | fast")
    out: dict[str, Any] = {}
    for name, found in (("noise_floor", floor), ("fast", fast)):
        if found:
            out[f"decode.{name}_kl"], out[f"decode.{name}_top1"] = ({"value": found[k]} for k in ("kl_mean", "top1"))
    if floor and fast:
        kl, top1 = fast["kl_mean"] <= floor["kl_mean"], fast["top1"] >= floor["top1"]
        out["decode.fast_kl"] |= {"want": f"<= {floor['kl_mean']}", "ok": kl}
        out["decode.fast_top1"] |= {"want": f">= {floor['top1']}", "ok": top1}
    return out


def run_paths(
    args: argparse.Namespace, argv: list[str]
) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, str]]:
    """Each group of paths in its own process: (logits by path, picks by lane by path, failure by path)."""
    found, lanes, failed = {}, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for group in ([p for p in group if p in args.paths] for group in GROUPS):
            if not group:
                continue
            env = {**os.environ, **({"EXL3_INT8_GEMV": "0"} if group == ["stock-fp16"] else {})}
            child = [sys.executable, __file__, *argv, "--out", folder, "--record", *group]
            done = subprocess.run(child, env=env, stderr=subprocess.PIPE, text=True, check=False)
            told = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
            for path in group:
                out = Path(folder) / f"{path}.npz"
                if not out.exists():
                    failed[path] = told[-1]
                    print(f"decode_kl: {path} failed: {failed[path]}", file=sys.stderr, flush=True)
                    continue
                with np.load(out) as saved:
                    found[path], lanes[path] = saved["logits"], json.loads(str(saved["lanes"]))
    return found, lanes, failed


def table(distances: dict[str, dict[str, float]]) -> str:
    lines = [f"{'paths':<22} {'positions':>9} {'mean KL':>11} {'p50':>11} {'p99':>11} {'top-1':>8}"]
    for name, d in distances.items():
        kls = " ".join(f"{d[k]:>11.3e}" for k in ("kl_mean", "kl_p50", "kl_p99"))
        lines.append(f"{name:<22} {d['positions']:>9} {kls} {d['top1']:>8.4f}")
    return "\n".join(lines)


def parse_args(argv: list[str]) -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    ap.add_argument("checkpoint", type=Path)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    ap.add_argument("--record", nargs="+", choices=PATHS, help=argparse.SUPPRESS)
    ap.add_argument("--ids", type=Path, help="texts as token ids: .npz with `ids` and `lengths`")
    ap.add_argument("--prompts", type=int, default=8, help="texts (default: %(default)s)")
    ap.add_argument("--prompt", type=int, default=200, help="tokens before decoding (default: %(default)s)")
    ap.add_argument("--new", type=int, default=128, help="tokens decoded a text (default: %(default)s)")
    ap.add_argument("--slots", type=int, help="most expert slots of the exact and fast paths (default: what fits)")
    ap.add_argument("--on-cpu", type=int, default=0, help="experts of each layer on stock's CPU worker")
    return ap.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    if args.record:
        for path in args.record:
            record(args, path, args.out / f"{path}.npz")
        return 0
    found, lanes, failed = run_paths(args, argv)
    distances = compare(found)
    print(table(distances))
    result = {
        "what": "KL of decode steps on the same tokens",
        "machine": machine(torch.cuda.get_device_name() if torch.cuda.is_available() else None),
        "versions": versions("glm53", "exllamav3", "torch", "triton"),
        "command": command("decode_kl.py", argv),
        "settings": {k: str(v) for k, v in vars(args).items() if k not in ("record", "out")},
        "raw": {"distances": distances, "lanes": lanes, "failed": failed},
        "bars": bars(distances),
    }
    save(result, args.out)
    return 2 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
