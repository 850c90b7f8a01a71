"""The preflight list: each thing a host needs, what was found, what is needed, and what to do about it.

`failed` means the server will not run in this mode; `advice` means it runs, slower or with less margin. Bars come from
the reference host and from the sizes of the checkpoint; RAM is the same for both modes because `fast` keeps one copy.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .host import CUDA_13_DRIVER, GIB, Host
from .sizing import FIRMWARE_SHARE, REFERENCE, SHAPE

Verdict = Literal["ok", "advice", "failed"]
RAM_GIB = 128
RAM_RECOMMENDED_GIB = 160
VRAM_GIB = 24
FAST_CORES = 12
GOOD_CORES = 24
GOOD_CHANNELS = 8


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement. `fix` is empty when nothing is to be done."""

    name: str
    verdict: Verdict
    found: str
    needed: str
    fix: str = ""


def _check(  # noqa: PLR0917  (a row of the table, in its columns' order)
    name: str, good: bool, found: str, needed: str, fix: str, otherwise: Verdict = "failed"
) -> Check:
    return Check(name, "ok" if good else otherwise, found, needed, "" if good else fix)


def requirements(
    host: Host,
    mode: str,
    model_dir: Path,
    gpu: int = 0,
    *,
    cuda_built: bool,
    has_module: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None,
    checkpoint_there: bool | None = None,
) -> list[Check]:
    """Every requirement for serving GLM-5.3-Flash on GPU number `gpu` of `host` in `mode`."""
    return [
        *_gpu(host, gpu),
        *_software(host, cuda_built, has_module),
        *_memory(host),
        *_cpu(host, mode),
        *_disk(host, model_dir, checkpoint_there),
    ]


def _gpu(host: Host, index: int) -> Iterator[Check]:
    gpus, why = host.gpus()
    needed = f"one NVIDIA GPU with {VRAM_GIB} GB"
    if index >= len(gpus):
        found = why or f"no GPU {index}: this machine has {len(gpus)}, counted from 0"
        fix = "install the NVIDIA driver and load nvidia-uvm (sudo modprobe nvidia-uvm)"
        yield Check("gpu", "failed", found, needed, "name another --gpu" if gpus else fix)
    else:
        card = gpus[index]
        yield _check(
            "gpu",
            card.vram_bytes >= VRAM_GIB * GIB * (1 - FIRMWARE_SHARE),
            f"{card.name}, {card.vram_bytes / GIB:.1f} GiB, sm_{card.sm[0]}{card.sm[1]}",
            needed,
            "use a larger card; `glm53 plan --gpu N` says what a card of N GB does",
        )
    yield _driver(host)
    yield _link(host, gpus[index].pci if index < len(gpus) else "")


def _driver(host: Host) -> Check:
    version = host.driver_version()
    major = int(version.split(".")[0]) if version else 0
    fix = f"install NVIDIA driver {CUDA_13_DRIVER} or newer and reboot"
    return _check("driver", major >= CUDA_13_DRIVER, version or "none", f"{CUDA_13_DRIVER} (CUDA 13)", fix)


def _link(host: Host, pci: str) -> Check:
    links = host.pcie_links()
    link = next((k for k in links if pci and k.device.lower().endswith(pci[-12:])), links[0] if links else None)
    needed = "PCIe 4.0 x16 recommended"
    if link is None and not pci:
        return Check("pcie", "advice", "unknown without a GPU", needed, "run `glm53 doctor` again once the GPU is seen")
    if link is None:
        return Check("pcie", "advice", "unknown", needed, "check the slot with `sudo lspci -vv | grep LnkSta`")
    good = link.max_generation >= 4 and link.width >= 16
    found = f"{link.max_generation}.0 x{link.width} (now at {link.generation}.0)"
    fix = "move the card to a x16 slot of the CPU and set it to PCIe 4.0 or newer; misses are read over this link"
    return _check("pcie", good, found, needed, fix, "advice")


def _software(host: Host, cuda_built: bool, has_module: Callable[[str], bool]) -> Iterator[Check]:
    fix = "install a wheel that was built where nvcc is found (packaging/build.sh)"
    yield _check("cuda objects", cuda_built, "in this build" if cuda_built else "not in this build", "built in", fix)
    installed = has_module("exllamav3")
    fix = "pip install 'glm53[cuda]' into the environment of glm53"
    yield _check("exllamav3", installed, "installed" if installed else "not installed", "1.5.1", fix)
    missing = [name for name in ("g++", "nvcc") if host.program(name) is None]
    found = "g++ and nvcc" if not missing else f"no {' and no '.join(missing)}"
    fix = "install g++ (Debian: apt install g++) and the CUDA 13 toolkit; exllamav3 compiles its extension once"
    yield _check("compiler", not missing, found, "g++ and nvcc", fix)


def _memory(host: Host) -> Iterator[Check]:
    ram = host.ram_bytes()
    need = RAM_GIB * GIB * (1 - FIRMWARE_SHARE)
    found = f"{ram / GIB:.0f} GiB"
    if ram < need:
        yield Check("ram", "failed", found, f"{RAM_GIB} GiB", "add memory: the experts alone take 107 GiB")
    else:
        fix = "close other programs before starting; there is little room beside the experts"
        good = ram >= RAM_RECOMMENDED_GIB * GIB * (1 - FIRMWARE_SHARE)
        yield _check("ram", good, found, f"{RAM_GIB} GiB, {RAM_RECOMMENDED_GIB} recommended", fix, "advice")
    limit = host.cgroup_limit_bytes()
    process = SHAPE.routed_bytes + REFERENCE.host_overhead_bytes
    yield _check(
        "memory limit",
        limit is None or limit >= process,
        "none" if limit is None else f"{limit / GIB:.0f} GiB",
        f"none, or {process / GIB:.0f} GiB",
        "raise MemoryMax of the unit or slice (systemctl edit glm53), or the container's limit",
    )
    memlock = host.memlock_bytes()
    yield _check(
        "memlock",
        memlock is None or memlock >= SHAPE.routed_bytes,
        "unlimited" if memlock is None else f"{memlock / GIB:.2f} GiB",
        "unlimited",
        "the service unit sets LimitMEMLOCK=infinity; in a shell run `ulimit -l unlimited` as root first",
        "advice",
    )
    pages = host.huge_pages()
    fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled; page-locking is about 4x faster"
    yield _check("huge pages", pages in {"always", "madvise"}, pages, "madvise or always", fix, "advice")


def _cpu(host: Host, mode: str) -> Iterator[Check]:
    missing = [flag for flag in ("avx2", "fma", "f16c") if flag not in host.cpu_flags()]
    yield _check(
        "instructions",
        mode == "exact" or not missing,
        f"no {', '.join(missing)}" if missing else "AVX2, FMA, F16C",
        "AVX2, FMA, F16C in fast mode",
        "use --mode exact, which has no CPU tier",
    )
    cores = len(host.physical_cores())
    slow = mode == "fast" and cores < FAST_CORES
    fix = "use --mode exact: with this few cores most misses go over PCIe anyway"
    if not slow:
        fix = "expect less than the reference speed; `glm53 plan` says how much"
    good = mode == "exact" or cores >= GOOD_CORES
    yield _check("cores", good, f"{cores} physical", f"about {GOOD_CORES} recommended in fast mode", fix, "advice")
    channels = host.memory_channels()
    yield _check(
        "memory channels",
        channels is None or channels >= GOOD_CHANNELS,
        "unknown (readable by root)" if channels is None else f"{channels} modules",
        f"{GOOD_CHANNELS} recommended",
        "fit a module in every channel: the CPU tier and the PCIe lane both read this memory",
        "advice",
    )


def _disk(host: Host, model_dir: Path, there: bool | None) -> Iterator[Check]:
    need = SHAPE.checkpoint_bytes
    try:
        there = (model_dir / "config.json").exists() if there is None else there
        free = host.disk_free_bytes(model_dir)
    except OSError as e:
        fix = "let this user read it, or name another folder with --model-dir"
        yield Check("disk", "failed", f"{model_dir} cannot be read ({e.strerror})", "a folder to read", fix)
        return
    if there:
        yield Check("disk", "ok", f"checkpoint in {model_dir}", "the checkpoint, or room for it")
        return
    fix = f"free space, or put the model elsewhere with --model-dir (now {model_dir})"
    yield _check("disk", free >= need, f"{free / GIB:.0f} GiB free", f"{need / GIB:.0f} GiB", fix)
