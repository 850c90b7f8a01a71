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
