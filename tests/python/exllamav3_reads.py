"""Which tensors of a checkpoint exllamav3's own Python asks for, text model and MTP layer: a program for one test.

usage: python exllamav3_reads.py WHEEL CHECKPOINT     (WHEEL: the unpacked wheel; prints one JSON object)

Its compiled extension and packages that only kernels and servers need are stood in for; nothing is computed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

ABSENT = ("triton", "marisa_trie", "formatron", "kbnf", "llguidance", "flash_attn", "xformers", "PIL")


class _Stand(ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        absent = name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: Any) -> ModuleType:
        return _Stand(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def find_python_of(wheel: str) -> None:
    """From now on exllamav3 is the one of the unpacked wheel, without what is compiled."""
    sys.path.insert(0, wheel)
    sys.meta_path.insert(0, _Finder())
    extension = ModuleType("exllamav3.ext")
    extension.exllamav3_ext = MagicMock(name="ext")  # type: ignore[attr-defined]
    sys.modules["exllamav3.ext"] = extension


def main() -> None:
    wheel, checkpoint = sys.argv[1:]
    find_python_of(wheel)
    import torch
    from exllamav3 import Config, Model

    config = Config.from_directory(checkpoint, load_method="python")
    asked: set[str] = set()
    collection = type(config.stc)
    read = collection.get_tensor

    def get_tensor(self: Any, key: str, *args: Any, **more: Any) -> Any:
        found = read(self, key, *args, **more)
        if found is not None:
            asked.add(key)
        return found

    collection.get_tensor = get_tensor
    linears = {}
    for component in ("text", "mtp"):
        model = Model.from_config(config, component=component)
        for module in model.modules:
            module.load(torch.device("cpu"))
        linears[component] = sum(type(m).__name__ == "Linear" for m in model)
    stored = {k for k in config.stc.tensor_file_map if k != "__metadata__"}
    print(json.dumps({"linears": linears, "asked": len(asked), "unread": sorted(stored - asked)}))


if __name__ == "__main__":
    main()
