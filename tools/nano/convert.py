"""Run exllamav3's own converter on a checkpoint without vision tower and MTP layer.

usage: python -m tools.nano.convert IN OUT WORK CALIBRATION BITS ROWS COLS

The converter takes every component its model class names; this one has the text model alone, so the other two are
taken off the list before it starts. Nothing else is changed.
"""

from __future__ import annotations

import sys
from typing import Any

from . import kernels


def text_only() -> None:
    """Make exllamav3's Glm5NextConfig name the text component only."""
    from exllamav3.architecture.glm5_next import Glm5NextConfig

    original = Glm5NextConfig.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.model_classes = {"text": self.model_classes["text"]}

    Glm5NextConfig.__init__ = init


def main() -> int:
    source, out, work, calibration, bits, rows, cols = sys.argv[1:8]
    text_only()
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
