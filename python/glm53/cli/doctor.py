"""`glm53 doctor`: the preflight list of this host, its measured lanes, and the speed to expect of them."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from ..config import Settings
from ..console import put
from ..host import GIB, Host
from ..requirements import Check, requirements
from ..sizing import Machine, Measured, Plan, plan
from .common import add_settings, check_cpu_tier, settings_from

WITHOUT = (
    *("model_repo", "model_revision", "download", "chat_template", "state_dir", "device", "triton_pin"),
    *("max_batch_size", "mtp", "run_ahead", "ct_a", "ct_b", "ct_t", "ct_g", "ec_elastic_gb", "ec_stage_gb"),
)
"""Settings of its groups that change nothing in the report."""
MARK = {"ok": "ok", "advice": "advice", "failed": "FAILED"}


def add(commands: Any) -> None:
    """Register the subcommand."""
    text = "check this machine and measure its lanes"
    parser = commands.add_parser("doctor", help=text, description=text)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--no-measure", action="store_true", help="only check, measure nothing")
    add_settings(parser, "model", "engine", "CPU tier", "expert cache", without=WITHOUT)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 1 if a requirement has failed."""
    settings = settings_from(args)
    if settings.mode == "fast":
        check_cpu_tier(settings)
    host = Host()
    checks = check_host(settings, host)
    lanes: dict[str, Any] = {}
    if not args.no_measure:
        from .lanes import measure

        lanes = measure(settings, host)
    expected = expectation(settings, host, lanes)
    if args.json:
        report = {"checks": [asdict(c) for c in checks], "lanes": lanes, "plan": expected and expected.as_json()}
        put(json.dumps(report, indent=2) + "\n")
    else:
        put(render(checks, lanes, expected))
    return 1 if any(c.verdict == "failed" for c in checks) else 0


def check_host(settings: Settings, host: Host) -> list[Check]:
    """The requirements under these settings."""
    try:
        from .. import _core

        built = _core.cuda_built()
    except ImportError:
        built = False
    return requirements(host, settings.mode, settings.model_dir, settings.gpu, cuda_built=built)


def expectation(settings: Settings, host: Host, lanes: dict[str, Any]) -> Plan | None:
    """What the plan says for this host with its measured lanes; None without a GPU."""
    gpus, _ = host.gpus()
    if settings.gpu >= len(gpus):
        return None
    machine = Machine(
        gpu_bytes=gpus[settings.gpu].vram_bytes,
        ram_bytes=host.ram_bytes(),
        cores=len(host.physical_cores()),
        pcie_gb_s=lanes.get("pcie", {}).get("gb_s") or 25.0,
        dram_gb_s=lanes.get("dram", {}).get("gb_s") or 136.0,
    )
    kernel = lanes.get("cpu kernel", {}).get("gb_s")
    # numpy's reading, the rate of DRAM, is a lower bound
    share = min(1.0, kernel / machine.dram_gb_s) if kernel else None
    return plan(
        machine,
        mode=settings.mode,
        cache_tokens=settings.cache_tokens,
        streams=settings.autosplit_max_batch_size,
        chunk=settings.chunk_size,
        reserve_gb=settings.reserve_gb(),
        measured=Measured(kernel_share=share),
    )


def render(checks: list[Check], lanes: dict[str, Any], expected: Plan | None) -> str:
    """The report for a person."""
    lines = []
    for c in checks:
        lines.append(f"{MARK[c.verdict]:6}  {c.name}: {c.found} (needed: {c.needed})")
        if c.fix:
            lines.append(f"        -> {c.fix}")
    for name, lane in lanes.items():
        lines.append(f"lane    {name}: {lane['text']}")
    if expected is not None:
        lines.append(
            f"expect  {expected.mode} mode, {expected.slots} slots ({expected.slots_per_layer} a layer), decode about "
            f"{expected.decode_tok_s:.0f} tok/s, prefill {expected.prefill_8k_tok_s:.0f} tok/s at 8k, "
            f"{expected.ram_needed_bytes / GIB:.0f} GiB of RAM (an estimate from lanes and cost model)"
        )
    failed = sum(c.verdict == "failed" for c in checks)
    lines.append(f"{failed} of {len(checks)} requirements failed" if failed else "all requirements are met")
    if any(c.name == "gpu" and c.verdict == "failed" for c in checks):
        lines.append("to try glm53 here without a GPU: glm53 serve --demo --device cpu")
    return "\n".join(lines) + "\n"
