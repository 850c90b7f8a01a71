"""The nano model's MTP layer: what transformers leaves out, in its own modules, with the names exllamav3 reads.

At a position the layer gets that token's embedding and the trunk's final hidden state of the position before, which is
how exllamav3 feeds it, and predicts the next token through the trunk's own head. Trunk, embedding and head are
constants to it: drafts must cost the model that verifies them nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import fastnet

FILE = "mtp.safetensors"
KEPT_FLOAT = "e_score_correction_bias"


class Mtp(nn.Module):
    """One plain residual block (MLA, MoE) behind the projection of embedding and hidden state; text config given."""

    def __init__(self, config: Any) -> None:
        from transformers.models.glm5_next import modeling_glm5_next as glm

        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        full = next(i for i, kind in enumerate(config.layer_types) if kind != "linear_attention")
        self.enorm, self.hnorm = (glm.Glm5NextTextRMSNorm(width, eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.input_layernorm = glm.Glm5NextTextRMSNorm(width, eps)
        self.self_attn = glm.Glm5NextTextAttention(config, full)
        self.post_attention_layernorm = glm.Glm5NextTextRMSNorm(width, eps)
        self.mlp = glm.Glm5NextTextMoE(config)
        self.shared_head = nn.ModuleDict({"norm": glm.Glm5NextTextRMSNorm(width, eps)})


def forward(model: Any, ids: Tensor, step: fastnet.Step) -> Tensor:
    """Drafts' logits [B, T, V] in step.dtype, each of the token after ids; `fastnet.forward` on ids comes first."""
    m, text = model.mtp, model.model.language_model
    b, t = ids.shape
    eps = m.enorm.variance_epsilon
    hidden = F.pad(step.hidden.detach(), (0, 0, 1, 0))[:, :-1] * ~step.fresh.unsqueeze(-1)
    embedded = F.embedding(ids, text.embed_tokens.weight.detach())
    both = torch.cat([fastnet.rms(embedded, m.enorm.weight, eps), fastnet.rms(hidden, m.hnorm.weight, eps)], -1)
    x = fastnet.linear(both, m.eh_proj.weight, step).float()
    normed = fastnet.rms(x, m.input_layernorm.weight, eps)
    x = x + fastnet.full_attention(m.self_attn, normed, step, fastnet.visible(step)).float()
    normed = fastnet.rms(x, m.post_attention_layernorm.weight, eps)
    x = x + fastnet.moe(m.mlp, normed.reshape(b * t, -1), step).view(b, t, -1)
    return fastnet.linear(fastnet.rms(x, m.shared_head["norm"].weight, eps), model.lm_head.weight.detach(), step)


def tensors(mtp: Mtp, layer: int) -> dict[str, Tensor]:
    """The layer as checkpoints name it, behind `layer` others: a tensor per expert, bfloat16 but the router's bias."""
    found: dict[str, Tensor] = {}
    for name, value in mtp.state_dict().items():
        if name == "mlp.experts.gate_up_proj":
            for e, both in enumerate(value):
                gate, up = both.chunk(2)
                found |= {f"mlp.experts.{e}.gate_proj.weight": gate, f"mlp.experts.{e}.up_proj.weight": up}
        elif name == "mlp.experts.down_proj":
            found |= {f"mlp.experts.{e}.down_proj.weight": down for e, down in enumerate(value)}
        else:
            found[name] = value
    kept = {n: v.cpu() if n.endswith(KEPT_FLOAT) else v.cpu().to(torch.bfloat16) for n, v in found.items()}
    return {f"model.language_model.layers.{layer}.{n}": v.contiguous() for n, v in kept.items()}


def save(mtp: Mtp, layer: int, out: Path) -> None:
    """Write `FILE` beside the checkpoint's other files; exllamav3 finds it there without an index."""
    from safetensors.torch import save_file

    save_file(tensors(mtp, layer), out / FILE, metadata={"format": "pt"})
