"""The CPU engine: transformers' glm5_next around the native expert kernels, no GPU needed."""

from __future__ import annotations

from .engine import CpuEngine

__all__ = ["CpuEngine"]
