# ruff: noqa: PLR0917 - the signatures are those of exllamav3
from __future__ import annotations

import torch
from safetensors.torch import load_file


class SafetensorsCollection:
    def __init__(self, directory: str) -> None:
        self.tensors = load_file(f"{directory}/model.safetensors")

    def has_tensor(self, key: str) -> bool:
        return key in self.tensors

    def get_tensor(
        self, key: str, device: object = None, optional: bool = False, allow_bf16: bool = False,
        float2half: bool = False, no_defer: bool = False, transpose: bool = False, pad_to: object = None,
        fidx: object = None,
    ) -> torch.Tensor:  # fmt: skip
        return self.tensors[key]
