"""One command from nothing to an evaluated nano checkpoint.

usage: python -m tools.nano.run_all --out DIR [--seconds 300] [--budget 560] [--smoke | --resume DIR]

Stages, each saved before the next starts: data and tokenizer, training, bfloat16 checkpoint, float32 reference figures,
quantisation by exllamav3, evaluation by stock exllamav3. `--budget` is the wall-clock limit of the whole command:
training gets what is left after `--reserve` for the later stages, and each of those runs in its own process under its
own limit.

Writes to --out: bf16-*.safetensors (the unquantised weights), bf16-files.tar, nano-exl3.tar, held-out.npz, traces.npz,
stock-logits.npz, results.json. `--smoke` is the same on a CPU with toy amounts, without the two stages that need CUDA;
`--resume` takes an earlier run's --out and does only those two.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from . import config, corpus, stock, train
from .reference import examine, summary

BITS, CALIBRATION_ROWS = 3.05, 128
CHAT_DOCUMENTS, TEXT_TOKENS, TRACE_TOKENS = 60, 512, 2000


class Run:
    """One run: its folders, its clock and its record, which is rewritten after every stage."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.start = args, time.time()
        self.out, self.work = Path(args.out).absolute(), Path(args.work).absolute()
        self.out.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)
        self.model_dir, self.exl3_dir = self.work / "bf16", self.work / "exl3"
        self.model_dir.mkdir(parents=True)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.raw: dict[str, Any] = {"stages": {}}
        self.bars: dict[str, Any] = {}

    def left(self) -> float:
        return float(self.args.budget - (time.time() - self.start))

    def done(self, stage: str, **figures: Any) -> None:
        self.raw["stages"][stage] = round(time.time() - self.start, 1)
        self.raw.update(figures)
        record = {
            "what": "nano checkpoint: training, quantisation, stock exllamav3",
            "machine": self.machine(),
            "versions": versions(),
            "command": "python -m tools.nano.run_all " + " ".join(sys.argv[1:]),
            "settings": vars(self.args),
            "raw": self.raw,
            "bars": self.bars,
        }
        (self.out / "results.json").write_text(json.dumps(record, ensure_ascii=False, indent=1))
        print(f"run: {stage} done at {self.raw['stages'][stage]} s", flush=True)

    def machine(self) -> str:
        gpu = torch.cuda.get_device_name() if self.device.type == "cuda" else "no GPU"
        return f"{gpu}, {os.cpu_count()} CPU cores, {platform.machine()}"

    def child(self, module: str, args: list[str], limit: float) -> bool:
        """Run a stage as its own process, its output going to the log; False if it failed or ran out of time."""
        log = self.work / "stages.log"
        with log.open("ab") as sink:
            try:
                done = subprocess.run(
                    [sys.executable, "-m", module, *args],
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    timeout=max(20.0, limit),
                    check=False,
                )
                ended = f"exit {done.returncode}"
            except subprocess.TimeoutExpired:
                ended = "out of time"
        tail = log.read_text(errors="replace").splitlines()[-40:]
        self.raw[f"{module} {ended}"] = tail
        if ended != "exit 0":
            self.done(f"{module} failed")
            print(f"run: {module}: {ended}:\n" + "\n".join(tail[-25:]), flush=True)
        return ended == "exit 0"


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    out = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "tokenizers", "exllamav3"):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = "absent"
    return out


def held_out_documents(tok: Tokenizer, path: Path) -> list[np.ndarray]:
    """Whole dialogues from held-out seeds and windows of held-out articles, in the training rows' proportion.

    Articles stand evenly among the dialogues: what is cut off somewhere has about the same proportion. Saved one after
    another: ids, lengths, and which documents are running text.
    """
    import random

    rng = random.Random("nano-held-out")
    chats, _ = corpus.clean_documents(rng, CHAT_DOCUMENTS)
    docs = [np.array(corpus.encode(tok, d.parts)[0], np.int16) for d in chats]
    wanted = round(sum(len(d) for d in docs) * corpus.TEXT_SHARE / (1 - corpus.TEXT_SHARE))
    texts: list[np.ndarray] = []
    while (missing := wanted - sum(len(t) for t in texts)) > 0:
        ids, _ = corpus.text_documents(tok, corpus.split_articles(True), rng, 1)[0]
        texts.append(np.array(ids[: min(TEXT_TOKENS, missing)], np.int16))
    running = [False] * len(docs)
    for i in reversed(range(len(texts))):
        at = int((i + 0.5) * CHAT_DOCUMENTS / len(texts))
        docs.insert(at, texts[i])
        running.insert(at, True)
    lengths = np.array([len(d) for d in docs], np.int32)
    np.savez_compressed(path, ids=np.concatenate(docs), lengths=lengths, text=np.array(running))
    return docs


def make_data(run: Run) -> corpus.Rows:
    tok = corpus.train_tokenizer(run.model_dir)
    template = Path(__file__).with_name("chat_template.jinja").read_text()
    config.write_side_files(run.model_dir, tok, template)
    rows, _, dropped = corpus.build(
        run.model_dir / "tokenizer.json", run.args.shards, run.args.per_shard, run.args.workers
    )
    held_out_documents(tok, run.out / "held-out.npz")
    write_calibration(run, rows)
    run.done(
        "data",
        training_rows=len(rows.ids),
        row_tokens=corpus.ROW,
        documents_dropped_for_held_out=dropped,
        training_tokens=int((rows.weight > 0).sum()),
    )
    return rows


def write_calibration(run: Run, rows: corpus.Rows) -> None:
    """Training rows for the converter's Hessians."""
    from safetensors.numpy import save_file

    pick = np.random.default_rng(0).permutation(len(rows.ids))[:CALIBRATION_ROWS]
    save_file({"input_ids": rows.ids[pick].astype(np.int64)}, run.work / "calibration.safetensors")


def take_up(run: Run, earlier: Path) -> float:
    """Bring back an earlier run's checkpoint and record; returns its float32 loss on the held-out text."""
    for name in ("held-out.npz", "traces.npz"):
        shutil.copy(earlier / name, run.out / name)
    with tarfile.open(earlier / "bf16-files.tar") as tar:
        tar.extractall(run.model_dir, filter="data")
    index = json.loads((run.model_dir / "model.safetensors.index.json").read_text())
    for i, name in enumerate(sorted(set(index["weight_map"].values()))):
        shutil.copy(earlier / f"bf16-{i}.safetensors", run.model_dir / name)
    run.raw = json.loads((earlier / "results.json").read_text())["raw"]
    rows, _ = corpus.make_shard((str(run.model_dir / "tokenizer.json"), 0, 1000, False))
    write_calibration(run, rows)
    return float(run.raw.get("fp32_nll", math.nan))


def train_model(run: Run, rows: corpus.Rows) -> Any:
    torch.set_float32_matmul_precision("high")
    model = train.build_model(run.model_dir, 0)
    seconds = min(run.args.seconds, run.left() - run.args.reserve)
    if seconds < run.args.seconds:
        print(f"run: training gets {seconds:.0f} s of the {run.args.seconds} asked for", flush=True)
    plan = train.Plan(seconds=seconds, batch=run.args.batch, lr=run.args.lr, edge=run.args.edge)
    report = train.Trainer(model, rows, plan, run.device).run()
    train.round_weights(model)
    model.eval()
    run.done("training", training=report, parameters=sum(p.numel() for p in model.parameters()))
    return model


def save_model(run: Run, model: Any) -> None:
    ours = {name: (run.model_dir / name).read_text() for name in ("config.json", "generation_config.json")}
    train.save(model, run.model_dir)
    for name, text in ours.items():  # transformers writes its own over them, without the sampling
        (run.model_dir / name).write_text(text)
    shards = sorted(run.model_dir.glob("model*.safetensors"))
    with tarfile.open(run.out / "bf16-files.tar", "w") as tar:  # the MTP layer too: few files come back
        for path in sorted(run.model_dir.iterdir()):
            if path not in shards:
                tar.add(path, path.name)
    for i, path in enumerate(shards):
        shutil.copy(path, run.out / f"bf16-{i}.safetensors")
    run.done("saving")


def reference(run: Run, model: Any) -> float:
    """Float32 figures of the trained weights and routing traces; returns the mean loss.

    The training forward is the same function as transformers' own; the difference on two documents is recorded.
    """
    torch.set_float32_matmul_precision("highest")
    running = np.load(run.out / "held-out.npz")["text"].tolist()
    found, differences = [], []
    documents = list(zip(stock.documents(run.out / "held-out.npz"), running, strict=True))
    for ids, text in documents[: 2 if run.args.smoke else None]:
        document, logits = examine(model, ids, text, run.device)
        found.append(document)
        if len(differences) < 2:
            differences.append(against_transformers(model, ids, logits))
    traces = torch.cat([d.picks for d in found])[:TRACE_TOKENS].numpy()
    np.savez_compressed(run.out / "traces.npz", picks=traces, experts=np.array(config.EXPERTS))
    figures = summary(found)
    print(json.dumps({k: figures[k] for k in ("fp32_nll", "edge_share_by_layer", "drafts_as_model", "rounding")}))
    run.done("reference", **figures, trace_shape=list(traces.shape), logits_difference_to_transformers=differences)
    return float(figures["fp32_nll"])


def reference_or_why(run: Run, model: Any) -> float:
    """`reference`, or no number if that failed: the weights are saved by then, and quantising needs none of it."""
    try:
        return reference(run, model)
    except Exception as error:
        run.done("reference failed", reference_error=f"{type(error).__name__}: {error}"[:500])
        return float("nan")


@torch.no_grad()
def against_transformers(model: Any, ids: np.ndarray, logits: torch.Tensor) -> float | str:
    """Largest logit difference to transformers' own forward, or why that could not run here."""
    try:
        tokens = torch.from_numpy(ids.astype(np.int64))[None].to(logits.device)
        theirs = model(input_ids=tokens, use_cache=False).logits[0].float()
    except Exception as error:  # a missing kernel package, say: the figure is a check, not a result
        return f"{type(error).__name__}: {str(error)[:200]}"
    return float((theirs - logits).abs().max())


def quantise(run: Run) -> bool:
    ok = run.child(
        "tools.nano.convert",
        [
            str(run.model_dir),
            str(run.exl3_dir),
            str(run.work / "quant"),
            str(run.work / "calibration.safetensors"),
            str(BITS),
            str(CALIBRATION_ROWS),
            str(corpus.ROW),
        ],
        run.left() - 60,
    )
    if ok:
        for index in run.exl3_dir.glob("*.index.json"):
            index.unlink()
        for listing in run.exl3_dir.glob("quantization_config.json"):  # twice as long with its indents
            listing.write_text(json.dumps(json.loads(listing.read_text()), separators=(",", ":")))
        size = sum(p.stat().st_size for p in run.exl3_dir.iterdir())
        with tarfile.open(run.out / "nano-exl3.tar", "w") as tar:
            for path in sorted(run.exl3_dir.iterdir()):
                tar.add(path, path.name)
        run.done("quantising", checkpoint_mb=round(size / 1e6, 2))
    return ok


def judge(run: Run, fp32_nll: float) -> None:
    """Read what the stock process found and set the bars that can be set here."""
    ok = run.child(
        "tools.nano.stock", [str(run.exl3_dir), str(run.out / "held-out.npz"), str(run.work / "stock")], run.left() - 8
    )
    found = json.loads((run.work / "stock.json").read_text()) if (run.work / "stock.json").exists() else {}
    if (run.work / "stock-logits.npz").exists():
        shutil.copy(run.work / "stock-logits.npz", run.out / "stock-logits.npz")
    if "nll" in found and math.isfinite(fp32_nll):
        run.bars["nano.ppl_ratio"] = float(np.exp(found["nll"] - fp32_nll))
    if "questions" in found:
        run.bars["nano.questions"] = {
            str(t): sum(q["right"] for q in found["questions"] if q["thinking"] is t) for t in (True, False)
        }
    if "tools" in found:
        run.bars["nano.tools"] = sum(t["right"] for t in found["tools"])
        found["tools_with_new_values_right"] = sum(t["right"] for t in found["tools"] if t["new_value"])
    run.done("stock", stock=found, stock_complete=ok)
    print(json.dumps(run.bars), flush=True)
    for row in [q for q in found.get("questions", []) if not q["right"]][:6] + [
        t for t in found.get("tools", []) if not t["right"]
    ][:4]:
        print("wrong:", json.dumps(row, ensure_ascii=False)[:400], flush=True)


def parse() -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    ap.add_argument("--out", required=True)
    ap.add_argument("--work", default="/tmp/nano-work", help="scratch folder, emptied first")
    ap.add_argument("--seconds", type=float, default=300, help="training time, compiling included")
    ap.add_argument("--budget", type=float, default=560, help="wall-clock seconds of the whole command")
    ap.add_argument("--reserve", type=float, default=205, help="seconds kept for everything after training")
    ap.add_argument("--batch", type=int, default=40, help="rows of 1024 tokens a step")
    ap.add_argument("--lr", type=float, default=2.5e-3)
    ap.add_argument("--edge", type=float, default=train.Plan.edge, help="cost of the picks that rounding exchanges")
    ap.add_argument("--shards", type=int, default=96)
    ap.add_argument("--per-shard", type=int, default=2000, help="dialogues a shard")
    ap.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    ap.add_argument("--resume", default="", help="--out of an earlier run: quantise and evaluate its checkpoint")
    ap.add_argument("--smoke", action="store_true", help="toy amounts, on the CPU, no quantisation")
    args = ap.parse_args()
    if args.smoke:
        args.seconds, args.batch, args.shards, args.per_shard, args.workers, args.reserve = (
            min(args.seconds, 20),
            1,
            1,
            40,
            1,
            0,
        )
    return args


def main() -> int:
    run = Run(parse())
    if run.args.resume:
        fp32_nll = take_up(run, Path(run.args.resume))
    else:
        rows = make_data(run)
        model = train_model(run, rows)
        save_model(run, model)
        fp32_nll = reference_or_why(run, model)
        model.cpu()
    if run.device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    if not quantise(run):
        return 1
    judge(run, fp32_nll)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
