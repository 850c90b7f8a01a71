"""`glm53 plan`: what a machine that is not here would do, from the sizing code that the server uses."""

from __future__ import annotations

import argparse
import json
from math import isfinite
from typing import Any

from ..config import specs
from ..config_values import Spec
from ..console import put
from ..errors import ConfigError
from ..sizing import GB, GIB, Machine, Measured, Plan, plan


def add(commands: Any) -> None:
    """Register the subcommand."""
    text = "what fits and how fast, for a machine that is not here"
    parser = commands.add_parser("plan", help=text, description=text)
    parser.add_argument("--gpu", type=float, required=True, metavar="GIB", help="VRAM of the card, e.g. 24")
    parser.add_argument("--ram", type=float, required=True, metavar="GIB", help="installed RAM, e.g. 256")
    parser.add_argument("--cores", type=int, default=24, metavar="N", help="physical CPU cores (default 24)")
    parser.add_argument("--pcie", type=float, default=25.0, metavar="GB/S", help="PCIe rate (default 25: 4.0 x16)")
    parser.add_argument("--dram", type=float, default=136.0, metavar="GB/S", help="DRAM read rate (default 136)")
    parser.add_argument("--disk", type=float, metavar="GIB", help="free disk space")
    parser.add_argument("--no-avx2", action="store_true", help="the CPU lacks AVX2, FMA or F16C")
    parser.add_argument("--mode", choices=("fast", "exact"), help="default: what suits the machine")
    for name, metavar in (
        ("cache_tokens", "TOKENS"),
        ("autosplit_max_batch_size", "N"),
        ("chunk_size", "TOKENS"),
        ("ec_reserve_gb", "GB"),
    ):
        spec = _spec(name)
        default = "" if spec.default is None else f" (default {spec.default})"
        parser.add_argument(*spec.flags, dest=name, default=spec.default, metavar=metavar, help=spec.help + default)
    known = parser.add_argument_group("what you measured, in place of what the model assumes")
    known.add_argument("--handoff-ms", type=float, metavar="MS", help="giving a layer's misses to the CPU and back")
    known.add_argument("--kernel-share", type=float, metavar="0..1", help="CPU lane's expert bytes/s over DRAM's rate")
    known.add_argument("--hit-rate", type=float, metavar="0..1", help="share of picks found in the expert cache")
    known.add_argument("--fixed-ms", type=float, metavar="MS", help="a token's time outside the routed experts")
    known.add_argument("--tok-s", type=float, metavar="RATE", help="ask which hit rate would decode this fast")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def _spec(name: str) -> Spec:
    return next(s for s in specs() if s.name == name)


def run(args: argparse.Namespace) -> int:
    """Print the plan. Returns 1 if the model does not fit."""
    _check(args)
    machine = Machine(
        gpu_bytes=int(args.gpu * GIB),
        ram_bytes=int(args.ram * GIB),
        cores=args.cores,
        pcie_gb_s=args.pcie,
        dram_gb_s=args.dram,
        disk_free_bytes=None if args.disk is None else int(args.disk * GIB),
        avx2=not args.no_avx2,
    )
    try:
        answer = plan(
            machine,
            mode=args.mode,
            cache_tokens=args.cache_tokens,
            streams=args.autosplit_max_batch_size,
            chunk=args.chunk_size,
            reserve_gb=args.ec_reserve_gb,
            measured=Measured(args.handoff_ms, args.kernel_share, args.hit_rate, args.fixed_ms),
            tok_s=args.tok_s,
        )
    except ValueError as e:
        raise ConfigError(str(e)) from None
    put(json.dumps(answer.as_json(), indent=2) + "\n" if args.json else render(answer))
    return 0 if answer.fits else 1


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for a value out of range; the settings among them are read as `serve` reads them."""
    for name in ("cache_tokens", "autosplit_max_batch_size", "chunk_size", "ec_reserve_gb"):
        spec, value = _spec(name), getattr(args, name)
        try:
            setattr(args, name, spec.parse(value))
        except ValueError as e:
            raise ConfigError(f"{spec.flags[0]} {value}: {e}") from None
    for name in ("gpu", "ram", "cores", "pcie", "dram", "disk", "handoff_ms", "fixed_ms", "tok_s"):
        value, least = getattr(args, name), name in {"disk", "handoff_ms", "fixed_ms"}
        if value is not None and not (isfinite(value) and (value > 0 or (least and value == 0))):
            raise ConfigError(
                f"--{name.replace('_', '-')} {value:g}: must be {'at least' if least else 'above'} 0 and finite"
            )
    for name in ("kernel_share", "hit_rate"):
        value = getattr(args, name)
        if value is not None and not 0 < value <= 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be above 0 and at most 1")


def render(p: Plan) -> str:
    """The plan for a person, with the constants it was computed with; no speed of a machine that cannot run it."""
    c = p.constants
    lines = [
        "fits: yes" if p.fits else "fits: no",
        *(f"  {reason}" for reason in p.reasons),
        f"mode: {p.mode}",
        f"VRAM: at least {p.vram_needed_bytes / GIB:.1f} GiB; all that is left becomes slots",
        f"RAM: {p.ram_needed_bytes / GIB:.0f} GiB ({p.ram_needed_bytes / GB:.0f} GB), page-locked",
    ]
    if not p.fits:
        return "\n".join(lines) + "\n"
    lines += [
        f"expert slots: {p.slots} ({p.slots_per_layer} of 288 a layer), expected hit rate {p.hit_rate:.2f}",
        f"decode, one stream: about {p.decode_tok_s:.1f} tok/s",
        *([] if p.implied_hit_rate is None else [f"hit rate that gives --tok-s: {p.implied_hit_rate:.4f}"]),
        f"prefill: about {p.prefill_8k_tok_s:.0f} tok/s at 8k, {p.prefill_32k_tok_s:.0f} at 32k (RTX 3090 compute)",
        f"constants: A {c.handoff_ms} ms, B {c.cpu_expert_ms:.3f} ms on {p.cpu_threads} threads, "
        f"{p.kernel_share:.2f} of DRAM's rate, "
        f"T {c.pcie_expert_ms:.3f} ms at {c.pcie_gb_s:g} GB/s, g {c.cached_ms} ms, fixed {c.fixed_ms} ms a token",
        "an estimate: the constants are fitted to one host (RTX 3090, EPYC 7443P); `glm53 doctor` measures a real one",
        *(
            ["mode fast has been measured on a GPU with 8 of the 42 layers only: the whole is not measured yet"]
            if p.mode == "fast"
            else []
        ),
    ]
    return "\n".join(lines) + "\n"
