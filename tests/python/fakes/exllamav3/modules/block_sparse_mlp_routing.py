from __future__ import annotations

import torch


def routing_dots(bsz, cfg, y, params):
    turns = (cfg["layer"] + 1) * (1.0 + torch.arange(cfg["experts"], dtype=torch.float64))
    scores = torch.sin(y[:, :1].double() * 0.3 * turns.view(1, -1))
    values, selected = torch.topk(scores, cfg["top_k"], dim=-1)
    weights = torch.softmax(values, dim=-1).half()
    return selected.contiguous(), weights.contiguous()
