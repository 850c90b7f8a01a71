"""Every requirement fails on a machine made to fail it, with its fix; a good machine passes them all."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from glm53.cli import lanes
from glm53.cli.doctor import expectation, render
from glm53.cli.lanes import cpu_kernel, disk, dram
from glm53.config import load_settings
from glm53.host import GIB, Gpu, Host
from glm53.requirements import Check, requirements
from glm53.sizing import worker_threads

GOOD_GPU = Gpu(0, "NVIDIA GeForce RTX 3090", 24 * GIB - 300 * 2**20, (8, 6), "0000:41:00.0")


@dataclass
class Fake:
    """A machine as files below a folder; the defaults meet every requirement."""

    root: Path
    gpus: tuple[Gpu, ...] = (GOOD_GPU,)
    why: str = ""
    driver: str | None = "580.65.06"
    ram_gib: float = 256
    memory_max: str = "max"
    memlock: str = "unlimited"
    huge_pages: str = "always [madvise] never"
    flags: str = "fpu avx2 fma f16c avx512f"
    cores: int = 24
    modules: int = 8
    link: tuple[str, str] = ("16.0 GT/s PCIe", "16")
    programs: tuple[str, ...] = ("g++", "nvcc")
    installed: tuple[str, ...] = ("exllamav3",)
    cuda_built: bool = True
    mode: str = "fast"
    checkpoint: bool = True
    extra: dict[str, str] = field(default_factory=dict)

    def _write(self, path: str, text: str | bytes) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode() if isinstance(text, str) else text)

    def build(self) -> Host:
        self._write("proc/meminfo", f"MemTotal: {int(self.ram_gib * 2**20)} kB\nMemAvailable: {2**20} kB\n")
        self._write("proc/cpuinfo", f"model name : Test CPU\nflags : {self.flags}\n")
        self._write("proc/self/limits", f"Limit\nMax locked memory         {self.memlock}   {self.memlock}   bytes\n")
        self._write("proc/self/cgroup", "0::/system.slice/glm53.service\n")
        self._write("sys/fs/cgroup/system.slice/memory.max", self.memory_max + "\n")
        self._write("sys/kernel/mm/transparent_hugepage/enabled", self.huge_pages)
        for cpu in range(self.cores * 2):
            pair = f"{cpu % self.cores},{cpu % self.cores + self.cores}"
            self._write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", pair)
        for slot in range(16):
            size = 32768 if slot < self.modules else 0
            self._write(f"sys/firmware/dmi/entries/17-{slot}/raw", bytes(12) + size.to_bytes(2, "little") + bytes(8))
        device = "sys/bus/pci/devices/0000:41:00.0"
        speed, width = self.link
        for name, text in (("vendor", "0x10de"), ("class", "0x030000"), ("current_link_speed", "2.5 GT/s PCIe")):
            self._write(f"{device}/{name}", text)
        for name, text in (("current_link_width", width), ("max_link_speed", speed)):
            self._write(f"{device}/{name}", text)
        for program in self.programs:
            self._write(f"usr/bin/{program}", "")
        if self.driver:
            self._write("sys/module/nvidia/version", self.driver + "\n")
        return Host(self.root, lambda: (self.gpus, self.why))

    def checks(self) -> dict[str, Check]:
        found = requirements(
            self.build(),
            self.mode,
            self.root / "model",
            cuda_built=self.cuda_built,
            has_module=lambda name: name in self.installed,
            checkpoint_there=self.checkpoint,
        )
        return {c.name: c for c in found}


def test_a_good_machine_meets_every_requirement(tmp_path: Path) -> None:
    checks = Fake(tmp_path).checks()
    assert {c.name: c.verdict for c in checks.values()} == dict.fromkeys(checks, "ok")
    assert all(c.fix == "" for c in checks.values())
    assert checks["gpu"].found == "NVIDIA GeForce RTX 3090, 23.7 GiB, sm_86"
    assert checks["cores"].found == "24 physical"
    assert checks["pcie"].found == "4.0 x16 (now at 1.0)"


@pytest.mark.parametrize(
    ("name", "change", "verdict", "found", "fix"),
    [
        ("gpu", {"gpus": (), "why": "no NVIDIA driver"}, "failed", "no NVIDIA driver", "modprobe nvidia-uvm"),
        ("gpu", {"gpus": (Gpu(0, "A2", 16 * GIB, (8, 6)),)}, "failed", "16.0 GiB", "larger card"),
        ("driver", {"driver": "570.86.10"}, "failed", "570.86.10", "install NVIDIA driver 580"),
        ("driver", {"driver": None}, "failed", "none", "install NVIDIA driver 580"),
        ("pcie", {"link": ("8.0 GT/s PCIe", "16")}, "advice", "3.0 x16", "PCIe 4.0"),
        ("pcie", {"link": ("16.0 GT/s PCIe", "8")}, "advice", "4.0 x8", "x16 slot"),
        ("cuda objects", {"cuda_built": False}, "failed", "not in this build", "packaging/build.sh"),
        ("exllamav3", {"installed": ()}, "failed", "not installed", "pip install 'glm53[cuda]'"),
        ("compiler", {"programs": ("g++",)}, "failed", "no nvcc", "CUDA 13 toolkit"),
        ("compiler", {"programs": ("nvcc",)}, "failed", "no g++", "apt install g++"),
        ("ram", {"ram_gib": 64}, "failed", "64 GiB", "add memory"),
        ("ram", {"ram_gib": 128}, "advice", "128 GiB", "close other programs"),
        ("memory limit", {"memory_max": str(100 * GIB)}, "failed", "100 GiB", "raise MemoryMax"),
        ("memlock", {"memlock": str(8 * 2**20)}, "advice", "0.01 GiB", "LimitMEMLOCK=infinity"),
        ("huge pages", {"huge_pages": "always madvise [never]"}, "advice", "never", "echo madvise"),
        ("instructions", {"flags": "fpu fma f16c"}, "failed", "no avx2", "--mode exact"),
        ("cores", {"cores": 8}, "advice", "8 physical", "--mode exact"),
        ("cores", {"cores": 16}, "advice", "16 physical", "glm53 plan"),
        ("memory channels", {"modules": 4}, "advice", "4 modules", "module in every channel"),
    ],
)
def test_each_requirement_fails_alone(  # noqa: PLR0917
    tmp_path: Path, name: str, change: dict[str, object], verdict: str, found: str, fix: str
) -> None:
    checks = Fake(tmp_path, **change).checks()  # type: ignore[arg-type]
    check = checks[name]
    assert (check.verdict, found in check.found, fix in check.fix) == (verdict, True, True), check
    others = {c.name: c.verdict for c in checks.values() if c.name != name and not (name == "gpu" and c.name == "pcie")}
    assert set(others.values()) == {"ok"}


def test_without_a_gpu_the_report_ends_with_what_runs_here(tmp_path: Path) -> None:
    fake = Fake(tmp_path / "none", gpus=())
    host = fake.build()
    host.pcie_links = list  # type: ignore[method-assign]
    checks = requirements(host, "fast", tmp_path, cuda_built=True, has_module=lambda _: True, checkpoint_there=True)
    link = next(c for c in checks if c.name == "pcie")
    assert (link.found, "lspci" in link.fix) == ("unknown without a GPU", False)
    assert render(checks, {}, None).splitlines()[-1].endswith("glm53 serve --demo --device cpu")
    good = list(Fake(tmp_path / "good").checks().values())
    assert render(good, {}, None).splitlines()[-1] == "all requirements are met"


def test_a_gpu_index_beyond_the_last_needs_no_driver(tmp_path: Path) -> None:
    gpu = requirements(Fake(tmp_path).build(), "fast", tmp_path, 3, cuda_built=True, checkpoint_there=True)[0]
    assert (gpu.verdict, gpu.fix) == ("failed", "name another --gpu")
    assert gpu.found == "no GPU 3: this machine has 1, counted from 0"


def test_one_thread_is_not_threads() -> None:
    assert dram(1)["text"].endswith("on 1 thread (at least)")
    assert dram(2)["text"].endswith("on 2 threads (at least)")


def test_disk_space_for_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "disk_free_bytes", lambda self, path: 100 * GIB)
    check = Fake(tmp_path, checkpoint=False).checks()["disk"]
    assert (check.verdict, check.found, check.needed) == ("failed", "100 GiB free", "117 GiB")
    assert "--model-dir" in check.fix
    monkeypatch.setattr(Host, "disk_free_bytes", lambda self, path: 200 * GIB)
    assert Fake(tmp_path, checkpoint=False).checks()["disk"].verdict == "ok"


def test_exact_mode_needs_no_avx2_and_no_cores(tmp_path: Path) -> None:
    checks = Fake(tmp_path, mode="exact", flags="fpu", cores=6).checks()
    assert checks["instructions"].verdict == checks["cores"].verdict == "ok"


def test_tightest_cgroup_limit_counts(tmp_path: Path) -> None:
    fake = Fake(tmp_path, memory_max=str(150 * GIB))
    host = fake.build()
    fake._write("sys/fs/cgroup/system.slice/glm53.service/memory.max", str(90 * GIB))
    assert host.cgroup_limit_bytes() == 90 * GIB


@pytest.mark.parametrize(("cores", "first"), [(24, 2), (5, 2), (4, 1), (3, 1), (2, 1), (1, 0)])
def test_workers_are_one_per_core_with_two_left_free_or_fewer_of_a_few(tmp_path: Path, cores: int, first: int) -> None:
    assert Fake(tmp_path, cores=cores).build().worker_cpus() == list(range(first, cores))
    assert worker_threads(cores) == cores - first, "what `glm53 plan` reckons with"


def test_lanes_give_rates_on_this_machine(tmp_path: Path) -> None:
    assert dram(2)["gb_s"] > 0
    kernel = cpu_kernel(load_settings({"ct_threads": 1}, env={}), Host())
    assert kernel["gb_s"] > 0
    assert kernel["ms_per_expert"] == pytest.approx(9.437184 / kernel["gb_s"], rel=0.2)
    assert disk(tmp_path)["gb_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_the_kernel_lane_is_that_of_the_fastest_kernels_as_serving_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    from glm53 import _core

    monkeypatch.setattr(_core, "cpu_features", lambda: {"isas": ["amx", "avx512", "avx512w", "avx2", "scalar"]})
    monkeypatch.setattr(_core, "CpuMoe", lambda threads, isa: SimpleNamespace(threads=threads, isa=isa))
    speeds = {"amx": 3e-4, "avx512": 2e-4, "avx512w": 1e-4}
    monkeypatch.setattr(lanes, "_random_experts", lambda: None)
    monkeypatch.setattr(lanes, "_expert_seconds", lambda moe, table: (speeds[moe.isa], moe))
    free = cpu_kernel(load_settings({"ct_threads": 2}, env={}), Host())
    assert (free["ms_per_expert"], free["text"].split(" on ")[1]) == (
        0.1,
        "2 threads (avx512w, the fastest of amx, avx512, avx512w)",
    )
    named = cpu_kernel(load_settings({"ct_threads": 2, "isa": "amx"}, env={}), Host())
    assert (named["ms_per_expert"], named["text"].split(" on ")[1]) == (0.3, "2 threads (amx)")


def test_the_expected_speed_is_that_of_the_measured_lanes(tmp_path: Path) -> None:
    host, settings = Fake(tmp_path).build(), load_settings(env={})
    measured = {"dram": {"gb_s": 100.0}, "pcie": {"gb_s": 20.0}, "cpu kernel": {"gb_s": 50.0}}
    answer = expectation(settings, host, measured)
    assert answer is not None
    assert answer.constants.cpu_expert_ms == pytest.approx(9.437184 / 50, rel=1e-3)
    assert answer.constants.pcie_expert_ms == pytest.approx(0.4 * 25 / 20)
    fast = expectation(settings, host, {**measured, "cpu kernel": {"gb_s": 120.0}})
    assert fast is not None
    assert fast.constants.cpu_expert_ms == pytest.approx(9.437184 / 100, rel=1e-3), "no faster than the memory"
    assert fast.decode_tok_s > answer.decode_tok_s


def test_the_command_reports_json_and_fails_here_without_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "glm53", "doctor", "--no-measure", "--json"], capture_output=True, text=True, check=False
    )
    report = json.loads(done.stdout)
    failed = [c["name"] for c in report["checks"] if c["verdict"] == "failed"]
    assert done.returncode == (1 if failed else 0)
    assert {"gpu", "driver", "ram", "memlock", "instructions", "pcie", "disk", "compiler"} <= {
        c["name"] for c in report["checks"]
    }
