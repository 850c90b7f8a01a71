"""References inside a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_STEPS = 32


def resolve(ref: str, root: Mapping[str, Any]) -> object:
    """What `ref` ("#/$defs/Name", a JSON pointer into `root`) stands for; None if there is nothing."""
    node: object = root
    for step in ref.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def object_schema(root: Mapping[str, Any]) -> Mapping[str, Any]:
    """`root`, or what it refers to where it is a mere reference (pydantic writes a recursive model so)."""
    schema = root
    for _ in range(MOST_STEPS):
        ref = schema.get("$ref")
        target = resolve(ref, root) if isinstance(ref, str) and "properties" not in schema else None
        if not isinstance(target, Mapping):
            return schema
        schema = target
    return {}
