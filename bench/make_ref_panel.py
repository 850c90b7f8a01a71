#!/usr/bin/env python3
"""Make a reference panel: what stock exllamav3 1.5.1 predicts, position by position.

    python bench/make_ref_panel.py --model CHECKPOINT --out PANEL.json [--text FILE ...] [--prompts 8] [--tokens 280]
    python bench/make_ref_panel.py --model CHECKPOINT --out PANEL.json --recorded ANSWERS.npz
    python bench/make_ref_panel.py --model CHECKPOINT --out PANEL.json --ids IDS.npz --logits LOGITS.npz

The first form needs a GPU and exllamav3: it runs the checkpoint (all of it in VRAM, or with --on-cpu N experts a layer
in host RAM, stock's own split) over windows of the given texts, by default this repository's documents, in one pass per
window. Triton's kernels run with the picks of --pins (default: those shipped for this GPU) and choose for themselves
where it has none; --write-pins writes all that were used, with which the server that is scored must run. The other
forms take logits that stock exllamav3 computed earlier: ANSWERS.npz holds NAME_ids and NAME_logits per prompt; IDS.npz
`ids` and `lengths` of whole documents, LOGITS.npz `logits` of the first `documents` of them. Panels are read by
score_ref_panel.py.

Log-probabilities are over the whole row of logits, as exllamav3's own are, padding rows of the head included; only ids
of the tokenizer are listed.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

TOP_K = 20
DIGITS = 7
ROOT = Path(__file__).resolve().parents[1]


def top_of(logits: np.ndarray, usable: int) -> list[list[list[float]]]:
    """For each row of logits [T, V], the TOP_K likeliest of the first `usable` ids as [id, log-probability]."""
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    order = np.argsort(-scores[:, :usable], axis=1, kind="stable")[:, :TOP_K]
    return [[[int(i), round(float(row[i]), DIGITS)] for i in best] for best, row in zip(order, scores, strict=True)]


def prompt_of(name: str, ids: np.ndarray, logits: np.ndarray, usable: int) -> dict[str, Any]:
    """One panel entry; the last position predicts a token that is not in the prompt and is left out."""
    return {"name": name, "ids": [int(i) for i in ids], "start": 0, "top": top_of(logits[: len(ids) - 1], usable)}


def windows(encoder: Any, paths: list[Path], prompts: int, tokens: int) -> list[tuple[str, np.ndarray]]:
    """`prompts` windows of `tokens` tokens, spread over the texts; each starts as the model's own prompts do."""
    head = encoder.encode("[gMASK]<sop>", add_special_tokens=False).ids
    found = []
    for path in paths:
        ids = encoder.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids
        found += [(f"{path.name}:{at}", ids[at : at + tokens]) for at in range(0, max(1, len(ids) - tokens), tokens)]
    full = [(name, ids) for name, ids in found if len(ids) == tokens]
    if len(full) < prompts:
        raise SystemExit(f"make_ref_panel: the texts hold {len(full)} windows of {tokens} tokens, {prompts} are needed")
    step = len(full) // prompts
    return [(name, np.array(head + ids)) for name, ids in full[:: max(1, step)][:prompts]]


def run_stock(args: argparse.Namespace, chosen: list[tuple[str, np.ndarray]], usable: int) -> list[dict[str, Any]]:
    """Panel entries from stock exllamav3 on the GPU."""
    import torch
    from exllamav3 import Config, Model

    from glm53.engine.exllama import pins
    from glm53.engine.exllama.loader import architecture

    chosen_pins = pins.pin_path(architecture(0), args.pins)
    if chosen_pins is not None:
        pins.apply_pins(chosen_pins, architecture(0))
    config = Config.from_directory(args.model)
    config.infer_params.moe_cpu_split = args.on_cpu
    model = Model.from_config(config)
    model.load(progressbar=False)
    out = []
    for i, (name, ids) in enumerate(chosen):
        with torch.inference_mode():
            logits = model.forward(torch.from_numpy(ids)[None], {"attn_mode": "flash_attn_nc"})[0].float().cpu().numpy()
        out.append(prompt_of(name, ids, logits, usable))
        print(f"{i + 1}/{len(chosen)} {name}", file=sys.stderr, flush=True)
    if args.write_pins:
        pins.write_pins(args.write_pins, architecture(0), version("exllamav3"), version("triton"))
    return out


def from_recorded(path: Path, usable: int) -> list[dict[str, Any]]:
    """Panel entries from NAME_ids and NAME_logits of one file."""
    with np.load(path) as held:
        names = [k.removesuffix("_logits") for k in held if k.endswith("_logits")]
        return [prompt_of(name, held[f"{name}_ids"], held[f"{name}_logits"], usable) for name in names]


def from_files(ids_path: Path, logits_path: Path, prompts: int, usable: int) -> list[dict[str, Any]]:
    """Panel entries from logits saved earlier: the longest documents among those that have logits."""
    held, saved = np.load(ids_path), np.load(logits_path)
    count, lengths = int(saved["documents"]), held["lengths"].astype(int)
    ends = np.cumsum(lengths)
    pairs = [(i, ends[i] - lengths[i], ends[i]) for i in range(count)]
    longest = sorted(sorted(pairs, key=lambda p: p[1] - p[2])[:prompts])
    ids, logits = held["ids"].astype(int), saved["logits"]
    return [prompt_of(f"held-out {i}", ids[a:b], logits[a:b], usable) for i, a, b in longest]


def panel_of(args: argparse.Namespace, entries: list[dict[str, Any]], encoder: Any) -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    if args.recorded or args.logits:
        versions["exllamav3"] = args.recorded_by
    else:
        versions |= {name: version(name) for name in ("exllamav3", "torch", "triton")}
    used = sorted({t for e in entries for top in e["top"] for t, _ in top})
    return {
        "what": "reference panel: stock exllamav3, teacher-forced",
        "model": args.model_name or Path(args.model).name,
        "machine": args.machine,
        "versions": versions,
        "command": shlex.join(["python", "bench/make_ref_panel.py", *sys.argv[1:]]),
        "top_k": TOP_K,
        "positions": sum(len(e["top"]) for e in entries),
        "texts": {str(i): encoder.decode([i], skip_special_tokens=False) for i in used},
        "prompts": entries,
    }


def main() -> int:
    ap = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    ap.add_argument("--model", required=True, help="checkpoint folder")
    ap.add_argument("--out", required=True)
    ap.add_argument("--text", nargs="*", help="text files to take windows from (default: the repository's *.md)")
    ap.add_argument("--prompts", type=int, default=8)
    ap.add_argument("--tokens", type=int, default=280, help="tokens a prompt (default: %(default)s)")
    ap.add_argument("--on-cpu", type=int, default=0, help="experts of each layer that stock keeps in host RAM")
    ap.add_argument("--pins", type=Path, help="Triton picks to run stock with (default: those shipped for this GPU)")
    ap.add_argument("--write-pins", type=Path, help="write all Triton picks that stock used here")
    ap.add_argument("--recorded", type=Path, help="prompts with the logits that stock exllamav3 computed for them")
    ap.add_argument("--recorded-by", default="1.5.1", help="version of exllamav3 behind recorded logits (1.5.1)")
    ap.add_argument("--ids", help="documents that --logits belong to")
    ap.add_argument("--logits", help="logits computed by stock exllamav3 earlier")
    ap.add_argument("--fewest", type=int, default=2000, help="positions a panel must hold (default: %(default)s)")
    ap.add_argument("--model-name", default="", help="name to record (default: the folder's)")
    ap.add_argument("--machine", default=platform.node(), help="machine to record (default: this host)")
    args = ap.parse_args()
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(Path(args.model) / "tokenizer.json"))
    usable = encoder.get_vocab_size()
    if args.recorded:
        entries = from_recorded(args.recorded, usable)
    elif args.logits:
        entries = from_files(Path(args.ids), Path(args.logits), args.prompts, usable)
    else:
        paths = (
            [Path(p) for p in args.text] if args.text else [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        )
        entries = run_stock(args, windows(encoder, paths, args.prompts, args.tokens), usable)
    panel = panel_of(args, entries, encoder)
    if panel["positions"] < args.fewest:
        print(f"make_ref_panel: {panel['positions']} positions, {args.fewest} are needed", file=sys.stderr)
        return 1
    Path(args.out).write_text(json.dumps(panel, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{args.out}: {len(entries)} prompts, {panel['positions']} positions")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
