"""The GPU engine: exllamav3 with its routed experts in pinned host memory. Importing this needs no CUDA."""

from __future__ import annotations

from .engine import ExllamaEngine

__all__ = ["ExllamaEngine"]
