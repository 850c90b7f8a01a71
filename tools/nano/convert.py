"""Run exllamav3's own converter on a checkpoint without vision tower.

usage: python -m tools.nano.convert IN OUT WORK CALIBRATION BITS ROWS COLS

The converter takes every component its model class names; the one that is not there is taken off the list before it
starts. Nothing else is changed: the MTP layer gets the converter's own 4 bits.
"""

from __future__ import annotations

import sys
from typing import Any

from . import kernels


def without_vision() -> None:
    """Make exllamav3's Glm5NextConfig name no vision component, and the MTP layer only where there is one."""
    from exllamav3.architecture.glm5_next import Glm5NextConfig

    original = Glm5NextConfig.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        kept = ("text", "mtp") if self.num_mtp_layers else ("text",)
        self.model_classes = {name: self.model_classes[name] for name in kept}

    Glm5NextConfig.__init__ = init


def main() -> int:
    source, out, work, calibration, bits, rows, cols = sys.argv[1:8]
    without_vision()
    kernels.prepare()
    from exllamav3.conversion import convert_model as converter

    args = converter.parser.parse_args(
        [
            "-i",
            source,
            "-o",
            out,
            "-w",
            work,
            "-b",
            bits,
            "-hq",
            "-hb",
            "6",
            "-vb",
            "16",
            "-cb",
            "mul1",
            "-cd",
            calibration,
            "-cr",
            rows,
            "-cc",
            cols,
        ]
    )
    settings, state, ok, error = converter.prepare(args)
    if not ok:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    converter.main(settings, state)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
