"""Strict reader of EXL3 GLM-5.3-Flash checkpoints: the configuration, every tensor's place, and the bytes.

Free of torch, shared by the CPU and the GPU engine. `Checkpoint.open` checks the whole folder by its headers before
anything is allocated; every failure is one CheckpointError naming the tensor and the file.
"""

from __future__ import annotations

from .memory import available_ram, require_ram
from .model_config import ModelConfig
from .reader import MARKERS, Checkpoint, Exl3Linear, ExpertLinear
from .safetensors_file import TensorInfo

__all__ = [
    "MARKERS", "Checkpoint", "Exl3Linear", "ExpertLinear", "ModelConfig", "TensorInfo", "available_ram", "require_ram",
]  # fmt: skip
