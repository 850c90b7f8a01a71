"""Asserts what is inside a wheel and that its native module says what was asked for (standard library only)."""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NEEDED = (
    "glm53/_core.pyi",
    "glm53/py.typed",
    "glm53/cli/serve.py",
    "glm53/config.py",
    "glm53/engine/cpu/engine.py",
    "glm53/models/tiny/config.json",
    "glm53/models/tiny/model.safetensors",
    "glm53/server/app.py",
    "glm53/systemd/glm53.service",
    "glm53/systemd/config.toml",
)
DATA = ("lib/systemd/system/glm53.service", "lib/modules-load.d/glm53.conf")
FORBIDDEN = ("tests/", "core/", "glm53.libs/", "glm53/server/__pycache__", ".cpp", ".cu")
IMPORT = "import sys; sys.path.insert(0, sys.argv[1]); from glm53 import _core; print(_core.cuda_built())"


def problems(names: list[str]) -> list[str]:
    """What is missing from, or too much in, a wheel with these files."""
    found = [f"missing: {name}" for name in NEEDED if name not in names]
    found += [f"missing: {d}" for d in DATA if not any(n.endswith(f".data/data/{d}") for n in names)]
    native = [n for n in names if n.startswith("glm53/_core.") and n.endswith(".so")]
    found += [] if len(native) == 1 else [f"native modules: {native or 'none'}"]
    found += [] if any(n.startswith("glm53/server/web/") for n in names) else ["missing: glm53/server/web"]
    return found + [f"not wanted: {n}" for n in names for bad in FORBIDDEN if n.startswith(bad) or n.endswith(bad)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--cuda", choices=("on", "off"), required=True, help="what cuda_built() must say")
    args = parser.parse_args()
    with zipfile.ZipFile(args.wheel) as wheel, tempfile.TemporaryDirectory() as folder:
        found = problems(wheel.namelist())
        if not found:
            wheel.extractall(folder)
            done = subprocess.run(
                [sys.executable, "-c", IMPORT, folder], capture_output=True, text=True, check=False, cwd=folder
            )
            if done.stdout.strip() != str(args.cuda == "on"):
                found = [f"cuda_built() is {done.stdout.strip() or done.stderr.strip()}, {args.cuda} expected"]
    for problem in found:
        sys.stderr.write(f"error: {args.wheel.name}: {problem}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
