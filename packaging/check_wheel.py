"""Asserts what is inside a wheel and that its native module says what was asked for (standard library only)."""

import argparse
import re
import shutil
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
    "glm53/models/nano/README.md",
    "glm53/models/nano/chat_template.jinja",
    "glm53/models/nano/config.json",
    "glm53/models/nano/generation_config.json",
    "glm53/models/nano/model.safetensors",
    "glm53/models/nano/tokenizer.json",
    "glm53/server/app.py",
    "glm53/systemd/glm53.service",
    "glm53/systemd/config.toml",
)
MODEL = "glm53/models/nano/"
DATA = ("lib/systemd/system/glm53.service", "lib/modules-load.d/glm53.conf")
FORBIDDEN = ("tests/", "core/", "glm53.libs/", "glm53/server/__pycache__", ".cpp", ".cu")
IMPORT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from glm53 import _core; "
    "print(_core.cuda_built(), _core.cuda_architectures, sep='|')"
)
TAG = re.compile(r"glm53-[\d.]+-cp(3\d+)-cp\1-manylinux[\w.]+_x86_64\.whl")


def problems(names: list[str]) -> list[str]:
    """What is missing from, or too much in, a wheel with these files."""
    found = [f"missing: {name}" for name in NEEDED if name not in names]
    found += [f"missing: {d}" for d in DATA if not any(n.endswith(f".data/data/{d}") for n in names)]
    native = [n for n in names if n.startswith("glm53/_core.") and n.endswith(".so")]
    found += [] if len(native) == 1 else [f"native modules: {native or 'none'}"]
    found += [] if any(n.startswith("glm53/server/web/") for n in names) else ["missing: glm53/server/web"]
    models = [n for n in names if n.startswith("glm53/models/") and not n.endswith("/")]
    found += [f"not wanted: {n}" for n in models if not n.startswith(MODEL)]
    return found + [f"not wanted: {n}" for n in names for bad in FORBIDDEN if n.startswith(bad) or n.endswith(bad)]


def wrong_tag(name: str) -> list[str]:
    """The file name must name this Python and an old enough glibc."""
    tag = TAG.fullmatch(name)
    python = f"{sys.version_info[0]}{sys.version_info[1]}"
    if tag is None or tag[1] != python:
        return [f"the name must be glm53-VERSION-cp{python}-cp{python}-manylinux..._x86_64.whl"]
    return []


def architectures(wanted: str) -> str:
    """What CMake makes of a TORCH_CUDA_ARCH_LIST: "8.6 9.0+PTX" -> "86-real 90"."""
    parts = [p for p in re.split(r"[ ,;]+", wanted) if p]
    return " ".join(p.replace(".", "").replace("+PTX", "") + ("" if p.endswith("+PTX") else "-real") for p in parts)


def wrong_build(folder: Path, cuda: bool, wanted: str) -> list[str]:
    """The unpacked module must import here and say what was asked for, and cuobjdump (where there is one) the same."""
    # -S: an editable install's import hook would answer instead
    command = [sys.executable, "-S", "-c", IMPORT, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    built, _, archs = done.stdout.strip().partition("|")
    if built != str(cuda):
        return [f"cuda_built() is {built or done.stderr.strip()}, {cuda} expected"]
    if cuda and wanted and archs != architectures(wanted):
        return [f"built for {archs}, TORCH_CUDA_ARCH_LIST={wanted} asks for {architectures(wanted)}"]
    cuobjdump = shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin")
    if not cuda or cuobjdump is None:
        return []
    native = next((folder / "glm53").glob("_core*.so"))
    listed = subprocess.run([cuobjdump, "--list-elf", str(native)], capture_output=True, text=True, check=True).stdout
    there, named = set(re.findall(r"\.sm_(\w+)\.cubin", listed)), {a.removesuffix("-real") for a in archs.split()}
    return [] if there == named else [f"machine code for sm {sorted(there)}, {sorted(named)} recorded"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--cuda", choices=("on", "off"), required=True, help="what cuda_built() must say")
    parser.add_argument("--arch", default="", help="the TORCH_CUDA_ARCH_LIST it was built with")
    args = parser.parse_args()
    with zipfile.ZipFile(args.wheel) as wheel, tempfile.TemporaryDirectory() as folder:
        found = wrong_tag(args.wheel.name) + problems(wheel.namelist())
        if not found:
            wheel.extractall(folder)
            found = wrong_build(Path(folder), args.cuda == "on", args.arch)
    for problem in found:
        sys.stderr.write(f"error: {args.wheel.name}: {problem}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
