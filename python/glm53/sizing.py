"""How much fits and how fast it runs: VRAM to expert slots, RAM, and the cost model of decode and prefill.

The cost model is the one the CPU/GPU split uses: a layer with n misses, c of them on the CPU, takes
min over c of max(A + c B, g + (n - c) T). Its constants are fitted to public measurements of one host (RTX 3090,
PCIe 4.0 x16, EPYC 7443P, 8-channel DDR4) and reproduce that host; for any other machine the result is an estimate.
All bytes are bytes, GB is 10^9, times are milliseconds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import comb, floor
from typing import Any, Literal

GB = 10**9
GIB = 2**30
FIRMWARE_SHARE = 0.06
"""Installed memory that firmware and kernel keep, so that "128 GiB" of modules or "24 GB" of VRAM still pass."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What sizing needs to know of a checkpoint; the defaults are GLM-5.3-Flash EXL3 3.05 bpw."""

    moe_layers: int = 42
    experts: int = 288
    picks: int = 8
    expert_bytes: int = 3 * 4096 * 2048 * 3 // 8
    kv_bytes_per_token: int = 11 * (512 + 128 + 1) * 2
    """11 MLA layers, fp16: 512 latent, 128 indexer key, 1 gate."""
    stream_state_bytes: int = 156 * 10**6
    """KDA and convolution state of one stream (34 layers of 64 heads x 128 x 128, fp32)."""
    checkpoint_bytes: int = 125_300_000_000

    @property
    def slot_bytes(self) -> int:
        """One expert with its scales (suh, svh: fp16 of 3 matrices). The GPU engine keeps the scales apart from
        arenas and slots, in VRAM and in fast mode also in RAM, so its slots are 0.4 % smaller than this."""
        return self.expert_bytes + 36_864

    @property
    def routed_bytes(self) -> int:
        """All routed experts with their scales: what host RAM holds of them."""
        return self.moe_layers * self.experts * self.slot_bytes


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of the cost model, in ms unless named otherwise, each with where it comes from."""

    handoff_ms: float = 0.11
    """A: giving a layer's cold misses to the CPU and taking the sum back (reference host)."""
    cpu_expert_ms: float = 0.104
    """B: one expert on `cpu_threads` CPU threads (reference host, 22 threads)."""
    cpu_threads: int = 22
    pcie_expert_ms: float = 0.40
    """T: one expert read over PCIe at `pcie_gb_s` (reference host: 9.44 MB at about 25 GB/s, with launch cost)."""
    pcie_gb_s: float = 25.0
    cached_ms: float = 0.10
    """g: the cached experts of one layer (reference host)."""
    fixed_ms: float = 12.4
    """Everything that is not routed experts, per token (reference host, fitted 12 to 12.8)."""
    hit_rate: float = 0.3635
    """Share of picks found in the cache in fast mode at `hit_share` (reference host)."""
    hit_share: float = 1312 / (42 * 288)
    """Share of all experts that fits the reference card: 1,312 slots."""
    exact_hit_rate: float = 0.53
    """Inferred, not measured: the rate at which PCIe alone gives the measured 12.57 tok/s in exact mode."""
    hit_exponent: float = 0.4556
    """Assumed: hit rate = share ** this, through the reference point and through 1 at share 1."""
    dram_gb_s: float = 136.0
    """Read bandwidth of the reference host; bounds B where it is lower."""
    prefill_compute_tok_s: float = 1075.0
    """Prefill rate of the reference GPU when transfers are hidden (fitted to 710 and 951 tok/s at 8k and 32k)."""
    resident_bytes: int = 9_324_000_000
    """VRAM for dense weights, CUDA context and workspaces: what the reference card has left beside its slots."""
    host_overhead_bytes: int = 5 * GB
    """Host RAM beside the experts (exact mode measured: 119 GB in all)."""


REFERENCE = Constants()
SHAPE = ModelShape()


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a machine or a build and replaces what the model would assume; None keeps the assumption."""

    handoff_ms: float | None = None
    """A."""
    kernel_share: float | None = None
    """Expert bytes per second of the CPU lane, all workers together, as a share of the DRAM read rate. It gives B."""
    hit_rate: float | None = None
    """Share of picks found in the cache."""
    fixed_ms: float | None = None
    """Everything that is not routed experts, per token."""

    def apply(self, constants: Constants, shape: ModelShape = SHAPE) -> Constants:
        """`constants` with what was measured in place of A, B and the fixed part. Raises ValueError."""
        for name, value in (("handoff_ms", self.handoff_ms), ("fixed_ms", self.fixed_ms)):
            if value is not None and value < 0:
                raise ValueError(f"{name} must be 0 or more, not {value}")
        for name, value in (("kernel_share", self.kernel_share), ("hit_rate", self.hit_rate)):
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, not {value}")
        if self.handoff_ms is not None:
            constants = replace(constants, handoff_ms=self.handoff_ms)
        if self.fixed_ms is not None:
            constants = replace(constants, fixed_ms=self.fixed_ms)
        if self.kernel_share is not None:
            rate = self.kernel_share * constants.dram_gb_s
            constants = replace(constants, cpu_expert_ms=shape.expert_bytes / GB / rate * 1000)
        return constants


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine to plan for. `gpu_bytes` is the card's VRAM, `ram_bytes` installed RAM, `cores` physical cores."""

    gpu_bytes: int
    ram_bytes: int
    cores: int = 24
    pcie_gb_s: float = 25.0
    dram_gb_s: float = 136.0
    disk_free_bytes: int | None = None
    avx2: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """What `plan` answers. Rates are tok/s for one stream; `constants` are those the numbers were computed with."""

    fits: bool
    reasons: tuple[str, ...]
    mode: Literal["fast", "exact"]
    slots: int
    slots_per_layer: float
    hit_rate: float
    vram_needed_bytes: int
    ram_needed_bytes: int
    implied_hit_rate: float | None
    """The hit rate at which this machine and mode would decode at the rate that was asked about."""
    kernel_share: float
    """Rate of the CPU lane as a share of DRAM's, from B."""
    decode_tok_s: float
    prefill_8k_tok_s: float
    prefill_32k_tok_s: float
    cpu_threads: int
    constants: Constants

    def as_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return asdict(self)


def worker_threads(cores: int) -> int:
    """Threads of the CPU tier on a machine with this many physical cores: the first two stay free (see `Host`)."""
    return cores - 2 if cores > 4 else max(1, cores - 1)


def cpu_expert_ms(threads: int, dram_gb_s: float, constants: Constants = REFERENCE, shape: ModelShape = SHAPE) -> float:
    """B for `threads` threads: scaled from the reference, never below the time DRAM needs for the bytes."""
    scaled = constants.cpu_expert_ms * constants.cpu_threads / threads
    return max(scaled, shape.expert_bytes / GB / dram_gb_s * 1000)


def expert_slots(free_bytes: int, reserve_bytes: int, slot_bytes: int, experts: int) -> int:
    """Cache slots in `free_bytes` of VRAM after load; at most one an expert. The GPU engine calls this too."""
    return max(0, min((free_bytes - reserve_bytes) // slot_bytes, experts))


def resident_bytes(cache_tokens: int, streams: int, constants: Constants = REFERENCE, shape: ModelShape = SHAPE) -> int:
    """VRAM taken before the expert cache: dense weights and workspaces, KV cache, the recurrent states of all `streams`
    that may decode together (the loader makes `autosplit_max_batch_size` of them at once)."""
    return constants.resident_bytes + cache_tokens * shape.kv_bytes_per_token + streams * shape.stream_state_bytes


def hit_rate(slots: int, mode: str, constants: Constants = REFERENCE, shape: ModelShape = SHAPE) -> float:
    """Expected share of picks found in the cache with `slots` slots."""
    share = slots / (shape.moe_layers * shape.experts)
    if share <= 0:
        return 0.0
    exponent = constants.hit_exponent
    if mode == "exact":  # same curve, through the exact mode's own point
        exponent *= _log_ratio(constants.exact_hit_rate, constants.hit_rate)
    return float(min(1.0, share**exponent))


def _log_ratio(a: float, b: float) -> float:
    from math import log

    return log(a) / log(b)


def layer_ms(misses: int, constants: Constants, cpu: bool) -> float:
    """Time of one layer's routed experts: the best split of `misses` over both lanes, or PCIe alone."""
    pcie_only = constants.cached_ms + misses * constants.pcie_expert_ms
    if not cpu:
        return pcie_only
    splits = (
        max(
            constants.handoff_ms + c * constants.cpu_expert_ms,
            constants.cached_ms + (misses - c) * constants.pcie_expert_ms,
        )
        for c in range(1, misses + 1)
    )
    return min([pcie_only, *splits])


def decode_tok_s(hits: float, constants: Constants, *, cpu: bool, shape: ModelShape = SHAPE) -> float:
    """Tokens per second of one stream at hit rate `hits`, each pick hitting independently."""
    p = 1.0 - hits
    layer = sum(
        comb(shape.picks, n) * p**n * hits ** (shape.picks - n) * layer_ms(n, constants, cpu)
        for n in range(shape.picks + 1)
    )
    return 1000.0 / (constants.fixed_ms + shape.moe_layers * layer)


def implied_hit_rate(tok_s: float, constants: Constants, *, cpu: bool, shape: ModelShape = SHAPE) -> float:
    """The hit rate at which one stream decodes at `tok_s`, to 1e-6. Raises ValueError for a rate out of reach."""
    low, high = 0.0, 1.0
    slowest, fastest = (decode_tok_s(h, constants, cpu=cpu, shape=shape) for h in (low, high))
    if not slowest <= tok_s <= fastest:
        raise ValueError(f"no hit rate gives {tok_s:g} tok/s: it is {slowest:.2f} without hits, {fastest:.2f} at most")
    while high - low > 1e-7:
        middle = (low + high) / 2
        if decode_tok_s(middle, constants, cpu=cpu, shape=shape) < tok_s:
            low = middle
        else:
            high = middle
    return high


def prefill_tok_s(tokens: int, slots: int, chunk: int, constants: Constants, shape: ModelShape = SHAPE) -> float:
    """Prompt tokens per second: per chunk the slower of compute and staging, then one more pass for the tail page."""
    missing = (shape.moe_layers * shape.experts - slots) * shape.expert_bytes
    staging_s = missing / GB / constants.pcie_gb_s
    whole, rest = divmod(tokens, chunk)
    chunks = [chunk] * whole + ([rest] if rest else [])
    seconds = sum(max(staging_s, n / constants.prefill_compute_tok_s) for n in chunks) + staging_s
    return tokens / seconds


def fitted(machine: Machine, shape: ModelShape = SHAPE) -> Constants:
    """The reference constants with this machine's lanes: B from threads and DRAM, T from the PCIe rate."""
    threads = worker_threads(machine.cores)
    base = REFERENCE
    return replace(
        base,
        cpu_threads=threads,
        cpu_expert_ms=cpu_expert_ms(threads, machine.dram_gb_s, base, shape),
        pcie_expert_ms=base.pcie_expert_ms * base.pcie_gb_s / machine.pcie_gb_s,
        pcie_gb_s=machine.pcie_gb_s,
        dram_gb_s=machine.dram_gb_s,
    )


def _lacks(
    machine: Machine, shape: ModelShape, *, mode: str, vram: int, ram: int, cache_tokens: int
) -> tuple[str, ...]:
    """What the machine is short of for `mode`, given the bytes of VRAM and RAM it takes; empty where it fits."""
    reasons = []
    if machine.gpu_bytes < vram:
        reasons.append(
            f"VRAM: {vram / GIB:.1f} GiB needed with {cache_tokens} cache tokens, not {machine.gpu_bytes / GIB:.1f}; "
            "try a smaller -cs"
        )
    if machine.ram_bytes * (1 - FIRMWARE_SHARE) < ram:
        reasons.append(
            f"RAM: {ram / GIB:.0f} GiB needed free for the experts and the process, which "
            f"{machine.ram_bytes / GIB:.0f} GiB of modules do not leave; 128 GiB do"
        )
    if machine.disk_free_bytes is not None and machine.disk_free_bytes < shape.checkpoint_bytes:
        reasons.append(
            f"disk: {shape.checkpoint_bytes / GIB:.0f} GiB needed for the checkpoint, not "
            f"{machine.disk_free_bytes / GIB:.0f}"
        )
    if mode == "fast" and not machine.avx2:
        reasons.append("fast mode needs a CPU with AVX2, FMA and F16C; use --mode exact")
    return tuple(reasons)


def plan(
    machine: Machine,
    *,
    mode: Literal["fast", "exact"] | None = None,
    cache_tokens: int = 131072,
    streams: int = 4,
    chunk: int = 8192,
    reserve_gb: float | None = None,
    measured: Measured | None = None,
    tok_s: float | None = None,
    shape: ModelShape = SHAPE,
) -> Plan:
    """Mode, slots, RAM and expected speed on `machine`. `mode` None picks exact below 12 cores or without AVX2.

    `measured` replaces assumptions; `tok_s` asks which hit rate would give that decode rate. Raises ValueError for
    values out of range.
    """
    wanted = mode or ("fast" if machine.avx2 and machine.cores >= 12 else "exact")
    known = measured or Measured()
    constants = known.apply(fitted(machine, shape), shape)
    reserve = floor((reserve_gb if reserve_gb is not None else 1.5 if wanted == "fast" else 1.0) * GB)
    resident = resident_bytes(cache_tokens, streams, constants, shape)
    slots = expert_slots(machine.gpu_bytes - resident, reserve, shape.slot_bytes, shape.moe_layers * shape.experts)
    ram = shape.routed_bytes + constants.host_overhead_bytes
    hits = hit_rate(slots, wanted, constants, shape) if known.hit_rate is None else known.hit_rate
    cpu = wanted == "fast"
    least = resident + reserve + shape.picks * shape.expert_bytes
    reasons = _lacks(machine, shape, mode=wanted, vram=least, ram=ram, cache_tokens=cache_tokens)
    return Plan(
        fits=not reasons,
        reasons=reasons,
        mode=wanted,
        slots=slots,
        slots_per_layer=round(slots / shape.moe_layers, 1),
        hit_rate=round(hits, 4),
        vram_needed_bytes=least,
        ram_needed_bytes=ram,
        implied_hit_rate=None if tok_s is None else round(implied_hit_rate(tok_s, constants, cpu=cpu, shape=shape), 4),
        kernel_share=round(shape.expert_bytes / GB / constants.cpu_expert_ms * 1000 / constants.dram_gb_s, 3),
        decode_tok_s=round(decode_tok_s(hits, constants, cpu=cpu, shape=shape), 2),
        prefill_8k_tok_s=round(prefill_tok_s(8192, slots, chunk, constants, shape), 0),
        prefill_32k_tok_s=round(prefill_tok_s(32768, slots, chunk, constants, shape), 0),
        cpu_threads=constants.cpu_threads,
        constants=constants,
    )
