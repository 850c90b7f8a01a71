"""What this machine is: CPU, RAM, limits, GPU, driver, PCIe link; read from /proc, /sys and libcuda only. And which of
its CPUs the workers of the CPU tier take.

Every reader takes its files below `root`, so that tests can describe machines that are not there. Sources: proc(5),
cgroup v2 memory.max / v1 memory.limit_in_bytes, PCI sysfs (Documentation/ABI/testing/sysfs-bus-pci), SMBIOS type 17.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ConfigError

if TYPE_CHECKING:
    from .config import Settings

GIB = 2**30
CUDA_13_DRIVER = 580
"""Oldest NVIDIA driver branch that runs CUDA 13 programs (CUDA 13.0 release notes)."""
NVIDIA_VENDOR = "0x10de"
CUINIT_HINTS = {
    100: ": no device",
    304: ": /proc is hidden from the process",
    999: ": is /dev/nvidia-uvm there and open to this user?",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver reports it. `vram_bytes` is the card's total."""

    index: int
    name: str
    vram_bytes: int
    sm: tuple[int, int]
    pci: str = ""


@dataclass(frozen=True, slots=True)
class PcieLink:
    """Link of a GPU: its generation now and at most (links idle at a lower one), and its lanes now."""

    device: str
    generation: int
    width: int
    max_generation: int


def cuda_gpus() -> tuple[tuple[Gpu, ...], str]:
    """GPUs the CUDA driver shows, and why there is none ("" if there is one). Creates no context."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return (), "no NVIDIA driver (libcuda.so.1 not found)"
    status = cuda.cuInit(0)
    if status != 0:
        return (), f"the CUDA driver does not start (cuInit {status}{CUINIT_HINTS.get(status, '')})"
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    gpus = tuple(_describe(cuda, i) for i in range(count.value))
    return gpus, "" if gpus else "the CUDA driver shows no GPU (CUDA_VISIBLE_DEVICES?)"


def _describe(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, pci, total = ctypes.create_string_buffer(128), ctypes.create_string_buffer(32), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, 128, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    cuda.cuDeviceGetPCIBusId(pci, 32, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    return Gpu(index, name.value.decode(), total.value, (major.value, minor.value), pci.value.decode().lower())


class Host:
    """Readings of one machine below `root`. `gpus` is the driver query, replaceable like the files are."""

    def __init__(self, root: Path = Path("/"), gpus: Callable[[], tuple[tuple[Gpu, ...], str]] = cuda_gpus) -> None:
        self.root = root
        self.gpus = gpus

    def _read(self, path: str) -> str | None:
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def _meminfo(self, key: str) -> int:
        match = re.search(rf"^{key}:\s+(\d+) kB", self._read("proc/meminfo") or "", re.MULTILINE)
        return int(match[1]) * 1024 if match else 0

    def ram_bytes(self) -> int:
        """Installed RAM that the kernel manages."""
        return self._meminfo("MemTotal")

    def _cgroup_dirs(self) -> list[str]:
        """cgroup v2 directories from this process's own up to the root, as paths below `root`."""
        match = re.search(r"^0::(/.*)$", self._read("proc/self/cgroup") or "", re.MULTILINE)
        own = Path(match[1].lstrip("/")) if match else Path()
        return [str(Path("sys/fs/cgroup") / p) for p in (own, *own.parents)]

    def cgroup_limit_bytes(self) -> int | None:
        """Tightest memory limit of the enclosing control groups, or None."""
        files = [f"{d}/memory.max" for d in self._cgroup_dirs()] + ["sys/fs/cgroup/memory/memory.limit_in_bytes"]
        limits = [int(text) for text in map(self._read, files) if text and text.isdigit()]
        return min((n for n in limits if n < 2**60), default=None)

    def cpu_flags(self) -> frozenset[str]:
        """Instruction-set flags of the first CPU, as /proc/cpuinfo names them."""
        match = re.search(r"^flags\s*:\s*(.*)$", self._read("proc/cpuinfo") or "", re.MULTILINE)
        return frozenset(match[1].split()) if match else frozenset()

    def cpu_name(self) -> str:
        """Model name of the first CPU."""
        match = re.search(r"^model name\s*:\s*(.*)$", self._read("proc/cpuinfo") or "", re.MULTILINE)
        return match[1] if match else "unknown CPU"

    def physical_cores(self) -> list[int]:
        """One logical CPU (the lowest) per physical core, in order of number."""
        seen: dict[str, int] = {}
        base = self.root / "sys/devices/system/cpu"
        cpus = sorted(int(p.name[3:]) for p in base.glob("cpu[0-9]*") if p.name[3:].isdigit())
        for cpu in cpus:
            topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
            siblings = self._read(f"{topology}/thread_siblings_list") or self._read(f"{topology}/core_cpus_list")
            seen.setdefault(siblings or str(cpu), cpu)
        return sorted(seen.values())

    def memory_channels(self) -> int | None:
        """Memory modules fitted (SMBIOS type 17, root only): as good a count of channels as software gets, or None."""
        fitted, readable = 0, False
        for raw in (self.root / "sys/firmware/dmi/entries").glob("17-*/raw"):
            try:
                record = raw.read_bytes()
            except OSError:
                continue
            readable = True
            size = int.from_bytes(record[12:14], "little") if len(record) >= 14 else 0
            fitted += size not in (0, 0xFFFF)
        return fitted if readable else None

    def memlock_bytes(self) -> int | None:
        """Soft limit on locked memory of this process, or None for unlimited."""
        match = re.search(r"^Max locked memory\s+(\S+)", self._read("proc/self/limits") or "", re.MULTILINE)
        return int(match[1]) if match and match[1].isdigit() else None

    def driver_version(self) -> str | None:
        """Version of the loaded NVIDIA kernel module, e.g. 580.65.06."""
        version = self._read("sys/module/nvidia/version")
        if version:
            return version
        match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", self._read("proc/driver/nvidia/version") or "")
        return match[1] if match else None

    def pcie_links(self) -> list[PcieLink]:
        """PCIe links of the NVIDIA display and 3D controllers."""
        links = []
        for device in sorted((self.root / "sys/bus/pci/devices").glob("*")):
            path = f"sys/bus/pci/devices/{device.name}"
            display = (self._read(f"{path}/class") or "").startswith("0x03")
            if not display or self._read(f"{path}/vendor") != NVIDIA_VENDOR:
                continue
            speed, top = (self._read(f"{path}/{which}_link_speed") for which in ("current", "max"))
            width = _int(self._read(f"{path}/current_link_width"))
            links.append(PcieLink(device.name, _generation(speed), width, _generation(top)))
        return links

    def disk_free_bytes(self, path: Path) -> int:
        """Free bytes for an ordinary user on the file system that holds `path` or its nearest existing parent."""
        path = path.absolute()
        while not path.exists() and path != path.parent:
            path = path.parent
        info = os.statvfs(path)
        return info.f_bavail * info.f_frsize

    def huge_pages(self) -> str:
        """Transparent huge pages: always, madvise, never, or unknown."""
        match = re.search(r"\[(\w+)\]", self._read("sys/kernel/mm/transparent_hugepage/enabled") or "")
        return match[1] if match else "unknown"

    def program(self, name: str) -> str | None:
        """Path of a program on PATH; below `root`, in its usr/bin and usr/local/cuda/bin."""
        if self.root == Path("/"):
            return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
        places = (self.root / "usr/bin" / name, self.root / "usr/local/cuda/bin" / name)
        return next((str(p) for p in places if p.exists()), None)

    def worker_cpus(self) -> list[int]:
        """CPUs for the CPU tier: one per physical core this process may use, the first two cores left free.

        With four usable cores or fewer only the first is left free (with one, none), so that small machines still work.
        """
        allowed = os.sched_getaffinity(0) if self.root == Path("/") else None
        cores = [c for c in self.physical_cores() if allowed is None or c in allowed] or sorted(allowed or {0})
        free = 2 if len(cores) > 4 else 1 if len(cores) > 1 else 0
        return cores[free:]


@dataclass(frozen=True, slots=True)
class Workers:
    """Threads of the CPU lane and the CPUs they are pinned to (None: not pinned)."""

    threads: int
    cpus: tuple[int, ...] | None

    @classmethod
    def of(cls, settings: Settings, host: Host | None = None) -> Workers:
        """What the settings say, else one worker on each of `Host.worker_cpus`. Raises ConfigError."""
        wanted = settings.ct_threads
        if settings.ct_cpus is not None:
            if wanted is not None and wanted > len(settings.ct_cpus):
                raise ConfigError(
                    f"ct_threads = {wanted}, but ct_cpus names {len(settings.ct_cpus)} CPUs: one a thread"
                )
            cpus = settings.ct_cpus[:wanted]
            return cls(len(cpus), cpus)
        free = tuple((host or Host()).worker_cpus())
        if wanted is not None and wanted > len(free):
            return cls(wanted, None)
        return cls(wanted or len(free), free[:wanted])

    def require_cpus(self) -> None:
        """Raise ConfigError where this process may not use one of them."""
        foreign = sorted(set(self.cpus or ()) - os.sched_getaffinity(0))
        if foreign:
            raise ConfigError(
                f"ct_cpus: CPU {foreign[0]} is none that this process may use; name others, or leave ct_cpus out"
            )


def _generation(speed: str | None) -> int:
    """PCIe generation of a link speed like "16.0 GT/s PCIe"; 0 if unknown."""
    match = re.match(r"([\d.]+) GT/s", speed or "")
    return {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}.get(float(match[1]), 0) if match else 0


def _int(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


def version_lines(version: str) -> list[str]:
    """Lines of `glm53 --version`."""
    host = Host()
    gpus, why = host.gpus()
    try:
        from . import _core

        built = f"built in ({_core.cuda_architectures})" if _core.cuda_built() else "not in this build"
        isa = str(_core.cpu_features()["isa"])
    except ImportError as e:
        built, isa = f"native module missing ({e})", "none"
    lines = [f"glm53 {version}", f"CUDA objects: {built}"]
    lines += [f"GPU {g.index}: {g.name}, {g.vram_bytes / GIB:.1f} GiB, sm_{g.sm[0]}{g.sm[1]}" for g in gpus]
    lines += [] if gpus else [f"GPU: none seen ({why})"]
    return [*lines, f"CPU kernels: {isa} ({host.cpu_name()})"]
