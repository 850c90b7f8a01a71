"""Fast mode on a GPU beside exact mode, stock exllamav3 and the floor that both lanes set; one JSON with raw figures.

usage: python bench/gpu_fast.py CHECKPOINT --out DIR --stages speed
       python bench/gpu_fast.py CHECKPOINT --out DIR --stages quality [--also CHECKPOINT] [--ids TEXTS.npz]
       python bench/gpu_fast.py --report DIR --out FILE

Each call takes less than nine minutes; within it the stages come in order of importance, and one that runs into its
limit leaves a record of that and lets the next run. Stages, each in a process of its own, all on one machine:
  fast, exact  glm53 in that mode with --slots cache slots: decode of 1 and 4 streams, misses by lane, RAM, and where a
               step goes, layer by layer; fast also the rate of both lanes at once
  fast-NAME    the same with the split of --variants NAME
  floor        stock with every expert in VRAM: the time of a step without any transfer
  stock-T      stock with its own CPU expert split on T threads
  kernel       our expert kernels and stock's `exl3_moe_cpu` on one core in one process
  kl, kl2      bench/decode_kl.py on CHECKPOINT and on --also: fast against exact beside stock's two decode paths
  equal        pytest tests/gpu/test_fast.py: prompts bit for bit stock's, a stalled lane, four streams
  soak-N       --soak seconds of mixed load with cancelled streams, paired with exact steps; N tells the calls apart
Protocol of every model: 300-token prompts, temperature 1 with fixed seeds, three runs to settle, two to count; rates as
in bench/gpu_exact.py: decodeN_tok_s for ratios to stock and exact mode, stepsN_tok_s for shares of the floor.
A ratio of speeds is only made of figures from one call.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import fast_bars
import gpu_exact

GROUPS = {
    "speed": "fast,floor,exact,stock-12,stock-14,stock-8",
    "quality": "equal,kernel,kl,kl2",
}
LIMITS = {
    "floor": 75.0,
    "fast": 150.0,
    "exact": 120.0,
    "stock": 110.0,
    "kernel": 60.0,
    "kl": 200.0,
    "kl2": 200.0,
    "equal": 300.0,
    "soak": 520.0,
}
"""Seconds a stage may take: about twice what stages of this kind took in bench/gpu_exact.py."""
ROOT = Path(__file__).resolve().parent


class Stages(gpu_exact.Stages):
    """Its stages."""

    groups, limits = GROUPS, LIMITS

    def stage(self, name: str, kind: str, *details: str) -> None:
        args = self.args
        if kind == "fast" and details:
            self.worker(name, "--split", json.dumps(json.loads(args.variants)[details[0]]))
        elif kind in {"fast", "exact", "kernel", "floor"}:
            self.worker(name)
        elif kind == "stock":
            self.worker(name, "--on-cpu", "257", "--threads", details[0])
        elif kind == "soak":
            self.worker(name, "--soak", str(args.soak))
        elif kind in {"kl", "kl2"}:
            self.distances(name, args.checkpoint if kind == "kl" else args.also)
        elif kind == "equal":
            self.tests(name, "test_fast.py")
        else:
            raise SystemExit(f"no stage is called {name}")

    def worker(self, name: str, *extra: str) -> None:
        """A measurement in a process of its own; its JSON goes to DIR/NAME.json."""
        args = self.args
        command = [sys.executable, __file__, args.checkpoint, "--out", args.out, "--slots", str(args.slots)]
        command += [
            "--new",
            str(args.new),
            "--runs",
            str(args.runs),
            "--ct-cpus",
            args.ct_cpus,
            "--worker",
            name,
            *extra,
        ]
        self.robust(name, command)

    def distances(self, name: str, checkpoint: str) -> None:
        """bench/decode_kl.py with as few slots as the speed stages have, or the same share of another checkpoint's
        experts: with all of them cached nothing would go to the CPU lane. Its result file is DIR/NAME.json."""
        if not checkpoint:
            print(f"{name}: no checkpoint was named with --also", flush=True)
            return
        out = str((self.folder / f"{name}.json").resolve())
        slots = self.args.slots if checkpoint == self.args.checkpoint else card_share(Path(checkpoint))
        command = [
            sys.executable,
            str(ROOT / "decode_kl.py"),
            checkpoint,
            "--out",
            out,
            "--slots",
            str(slots),
        ]
        self.process(name, [*command, *(["--ids", self.args.ids] if self.args.ids else [])])


def card_share(checkpoint: Path) -> int:
    """Slots of a checkpoint at the share of its experts that a 24 GB card holds of the real model's."""
    from glm53.checkpoint import Checkpoint

    with Checkpoint.open(checkpoint) as opened:
        config = opened.config
    return len(config.moe_layers) * config.n_routed_experts * gpu_exact.HOT_SHARE // gpu_exact.SHARE_OF


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="")
    parser.add_argument("--out", required=True)
    parser.add_argument("--stages", default="speed")
    parser.add_argument("--budget", type=float, default=530, help="seconds this call may take in all")
    parser.add_argument("--flash", default="", help="checkpoint of the GPU tests (default: CHECKPOINT)")
    parser.add_argument("--also", default="", help="a second checkpoint to compare decode on")
    parser.add_argument("--ids", default="", help="texts for decode_kl.py as token ids")
    parser.add_argument("--ct-cpus", default="", help="CPUs of the lane, like 2,3,4 (default: all but the first two)")
    parser.add_argument(
        "--variants", default="{}", help='splits to compare in one call: {"admit0": {"max_admissions": 0}, ...}'
    )
    parser.add_argument("--slots", type=int, default=248)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--limit", type=float, help="seconds a stage may take, instead of its own limit")
    parser.add_argument(
        "--without", default="", help=f"parts of the loader to leave out: {', '.join(gpu_exact.OPTIONAL)}"
    )
    parser.add_argument("--soak", type=float, default=400, help="seconds of a soak stage")
    parser.add_argument("--report")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--split", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--on-cpu", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=0, help=argparse.SUPPRESS)
    parser.set_defaults(brief=True)  # of stock: decode only
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    args = parse_args(argv)
    if args.report:
        fast_bars.report(Path(args.report), Path(args.out), gpu_exact.PROMPT)
        return
    if not args.worker:
        Stages(args).run()
        return
    import fast_work

    if args.worker == "kernel":
        result = fast_work.work_kernel(args)
    elif args.worker.partition("-")[0] in {"fast", "exact"}:
        result = fast_work.work_glm(args, args.worker.partition("-")[0])
    elif args.worker.startswith("soak"):
        import fast_soak

        result = fast_soak.work_soak(args)
    else:
        result = gpu_exact.work_stock(args)
    gpu_exact.save(args, result)


if __name__ == "__main__":  # stock's CPU worker is a spawned process
    main(sys.argv[1:])
