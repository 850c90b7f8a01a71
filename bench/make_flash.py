"""The checkpoint of the GPU benches: layers of the real model's shape, fewer of them, random weights.

    python bench/make_flash.py CHECKPOINT                        8 sparse layers: 23.3 GB, as much RAM while it is made
    python bench/make_flash.py CHECKPOINT --layers 4 --clamp 5   that of bench/panels/flash4.json (gpu_panel.py)

Before the sparse layers come the model's three dense ones. The router's selection bias has a spread of 0.05: the
hottest 31 of 288 experts get about as many picks as the real model's do on a 24 GB card. --clamp 5 lets every eighth
expert reach the SwiGLU clamp, so that leaving it out shows. The recorded results are of weights drawn with --device
cuda, the default where there is a GPU; the CPU draws others, and takes minutes. Needs torch and safetensors.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/oracle"))
TOKENIZER = ROOT / "tests/data/tiny-tokenizer.json"
DENSE = 3
SHAPE = {
    "hidden": 4096, "dense": DENSE, "inter": 12288, "moe": 2048, "experts": 288, "topk": 8, "kda_heads": 64,
    "heads": 64, "q_lora": 1536, "kv_lora": 512, "nope": 256, "vdim": 256, "idx_heads": 32, "idx_dim": 128,
    "idx_topk": 2048,
}  # fmt: skip
"""The model's, under the names of tests/oracle/make_tiny.py."""


class Draws:
    """Random EXL3 tensors, drawn on one device in the order in which they are asked for."""

    def __init__(self, device: str, seed: int) -> None:
        import torch

        self.torch, self.device = torch, device
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def linear(self, k: int, n: int, bits: float, codebook: str, _: Any, std: float | None = None) -> dict[str, Any]:
        """Trellis [k/16, n/16, 16 bits] int16, scales of k inputs and n outputs float16; weights have a standard
        deviation of `std`, or 1/sqrt(k). In place of `exl3_ref.random_exl3`, which draws on the CPU."""
        import exl3_ref

        if codebook != "mul1":
            raise ValueError(f"codebook {codebook}: only mul1 is drawn here")
        torch = self.torch
        std = 1 / math.sqrt(k) if std is None else std
        shape = (k // 16, n // 16, int(16 * bits))
        trellis = torch.randint(
            -32768, 32767, shape, generator=self.generator, dtype=torch.int16, device=self.device
        ).cpu()
        inputs = self.signs(k) * (std / exl3_ref.CB_STD[codebook])
        found = {"trellis": trellis, "suh": inputs.half().cpu(), "svh": self.signs(n).half().cpu()}
        multiplier = torch.tensor(exl3_ref.MUL1 - (1 << 32), dtype=torch.int32)  # as its bits are kept: signed
        return {**found, "mul1": multiplier}

    def signs(self, count: int) -> Any:
        """-1 or 1, float32."""
        ones = self.torch.randint(0, 2, (count,), generator=self.generator, device=self.device)
        return ones.float() * 2 - 1


def make(out: Path, shape: dict[str, int], device: str, clamp: float = 1.0, mtp: int = 0) -> None:
    """Write the checkpoint. `shape`: SHAPE with its `layers`, dense ones included."""
    import make_tiny

    kept = make_tiny.random_exl3
    make_tiny.random_exl3 = Draws(device, 0).linear
    try:
        make_tiny.build(str(out), shape, mtp=mtp, cal=str(TOKENIZER), clamp=clamp)
    finally:
        make_tiny.random_exl3 = kept


def main(argv: list[str]) -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="CHECKPOINT", help="folder to make; /dev/shm holds it in RAM")
    parser.add_argument("--layers", type=int, default=8, help="sparse layers (default: %(default)s)")
    parser.add_argument("--clamp", type=float, default=1.0, help="gain of every eighth expert (default: %(default)s)")
    parser.add_argument("--mtp", type=int, default=0, help="MTP layers (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where it is drawn")
    args = parser.parse_args(argv)
    if args.layers < 1:
        parser.error(f"--layers {args.layers}: at least one sparse layer is needed")
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty: name a new folder, or remove it")
    start = time.monotonic()
    make(args.out, {**SHAPE, "layers": DENSE + args.layers}, args.device, args.clamp, args.mtp)
    print(f"made on {args.device} in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
