"""Run in a process of its own: loads the CPU engine's model and looks for decoded expert weights in memory.

usage: expert_scan.py CHECKPOINT. Prints "ok" when no float tensor or array holds a routed expert's matrix.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "oracle"))
import exl3_ref

from glm53.checkpoint import Checkpoint
from glm53.engine.cpu.model import CpuModel


def float_tensors() -> list[torch.Tensor]:
    """Every float matrix that Python can reach (NumPy arrays are not in gc's own list, so referents are searched)."""
    objects = gc.get_objects()
    found = {id(o): o for o in objects if isinstance(o, torch.Tensor) and o.is_floating_point()}
    for o in objects:
        for r in gc.get_referents(o):
            if isinstance(r, np.ndarray) and r.dtype.kind == "f" and r.ndim > 1:
                found[id(r)] = torch.from_numpy(np.ascontiguousarray(r))
            elif isinstance(r, torch.Tensor) and r.is_floating_point():
                found[id(r)] = r
    return list(found.values())


def probes(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """First eight values, sorted, of each (rows, columns) matrix in a tensor, read along and across: (n, 8)."""
    matrices = tensor.reshape(-1, rows * columns).float()
    views = [matrices[:, :8], matrices.view(-1, rows, columns)[:, :8, 0], matrices.view(-1, columns, rows)[:, :8, 0]]
    return torch.cat(views).sort(dim=1).values


def main() -> None:
    with Checkpoint.open(Path(sys.argv[1])) as ck, torch.inference_mode():
        c = ck.config
        model = CpuModel(ck, 1, lambda stage, fraction: None)
        state = model.new_state()
        model.prefill(state, [1, 2, 3, 4, 5])
        model.step([state], [6])
        shape = (c.moe_intermediate_size, c.hidden_size)
        size = shape[0] * shape[1]
        have = torch.cat([probes(t, *shape) for t in float_tensors() if t.numel() and t.numel() % size == 0])
        for expert in range(c.n_routed_experts):
            for which in ("gate", "up", "down"):
                x = ck.linear(f"model.language_model.layers.{c.moe_layers[0]}.mlp.experts.{expert}.{which}_proj")
                w = exl3_ref.weight(x.trellis, torch.from_numpy(x.suh), torch.from_numpy(x.svh), x.codebook).flatten()
                probe = w[:8].sort().values
                assert not torch.isclose(have, probe, atol=1e-4).all(1).any(), (expert, which)
                assert torch.isclose(probes(w, *shape), probe, atol=1e-4).all(1).any(), "the scan finds what is there"
        names = [n for n, _ in model._text.named_parameters() if ".experts." in n]
        assert not names, names
        picks = 6 * len(c.moe_layers) * c.num_experts_per_tok
        stats = model.stats()
        assert stats["cpu_moe"]["picks"] == stats["routed_picks_served"] == stats["routed_picks_expected"] == picks, (
            stats
        )
    print("ok")


if __name__ == "__main__":
    main()
