from __future__ import annotations

from enum import Enum


class SS(Enum):
    INIT = 0
    LOGITS = 2


class SS_Base:
    def __init__(self, *args) -> None:
        self.args = args


class SS_LogitBias(SS_Base): ...


class SS_Temperature(SS_Base): ...


class SS_TopK(SS_Base): ...


class SS_TopP(SS_Base): ...


class SS_MinP(SS_Base): ...


class SS_Sample(SS_Base): ...


class SS_Argmax(SS_Base): ...


class CustomSampler:
    def __init__(self, steps) -> None:
        self.steps = steps

    def forward(self, logits, sequence_ids=None, rand_u32=None, tokenizer=None, logit_mask=None):
        logits[..., -1:] = -float("inf")  # the padding of the vocabulary, in place
        return (logits if logit_mask is None else logits + logit_mask).argmax(-1)
