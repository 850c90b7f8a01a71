"""The nano checkpoint's result in the form of bench/results: what run_all and cpu_check recorded, and its bars."""

from __future__ import annotations

import math
import os
import platform
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

LIMITS = {
    "nano.questions": ">= 20",
    "nano.tools": ">= 90",
    "nano.kl_stock_vs_cpu": "<= 0.002",
    "nano.top1_stock_vs_cpu": ">= 0.99",
    "nano.ppl_ratio": "<= 1.25",
    "nano.wheel_mb": "<= 10",
    "nano.cpu_tok_s": ">= 40",
}
LIMITED = (
    "stock rounds KDA and its matrix products to bfloat16 and float16, the CPU engine keeps float32: "
    "nano.kl_float32_vs_bfloat16_kda is how far rounding like KDA's moves transformers' own model on this text, "
    "..._same_picks how far where the routers' picks are held fixed. It is noise of the reference, which counts where "
    "it exchanges a router's last pick for the next, not an offset that the same rounding here would remove. Stock's "
    "logits were kept in float16."
)
WARM_UP = 8
"""Decode steps whose times are not counted."""


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.machine())


def start(run: dict[str, Any], command: str, threads: int) -> dict[str, Any]:
    """The record that cpu_check adds to, from the results.json of run_all without folders and logs of that machine."""
    kept = {k: v for k, v in run["settings"].items() if k not in ("out", "work", "resume", "smoke")}
    raw = {k: v for k, v in run["raw"].items() if not k.startswith("tools.nano.")}
    raw["training"] = {**raw["training"], "ops": raw["training"]["ops"].split("\n")[0]}
    trained = f"python -m tools.nano.run_all --out DIR --seconds {kept['seconds']:g} --budget {kept['budget']:g}"
    gpu = run["machine"].split(",")[0]
    return {
        "what": "nano checkpoint: trained, quantised and asked by stock exllamav3 on a GPU, then by the CPU engine",
        "machine": {
            "gpu": f"{gpu} (training, quantisation, stock)",
            "cpu": f"{cpu_name()} (CPU engine)",
            "cpus": os.cpu_count(),
            "load_average": [round(x, 2) for x in os.getloadavg()],
        },
        "versions": {**run["versions"], "glm53": version("glm53"), "torch of the CPU engine": version("torch")},
        "command": f"{trained} && {command}",
        "settings": {**kept, "threads": threads},
        "raw": raw,
        "limits": LIMITED,
        "bars": {},
    }


def distance(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """(mean KL, top-1 agreement) over the positions of all documents."""
    count = sum(r["positions"] for r in rows)
    return sum(r["kl"] * r["positions"] for r in rows) / count, sum(r["same"] for r in rows) / count


def figures(raw: dict[str, Any]) -> dict[str, float]:
    """What the raw figures give; a stage that is missing gives nothing."""
    found: dict[str, float] = {}
    if "nll" in raw.get("stock", {}):
        found["nano.ppl_ratio"] = math.exp(raw["stock"]["nll"] - raw["fp32_nll"])
    for key in ("stock_vs_cpu", "float32_vs_cpu"):
        if key in raw:
            found[f"nano.kl_{key}"], found[f"nano.top1_{key}"] = distance(raw[key])
    for name, running in (("chat", False), ("text", True)):
        rows = [r for r in raw.get("stock_vs_cpu", []) if r.get("text") is running]
        if rows:
            found[f"nano.kl_{name}"], found[f"nano.top1_{name}"] = distance(rows)
    for key in ("stock_vs_float32", "float32_vs_bfloat16_kda", "float32_vs_bfloat16_kda_same_picks"):
        if key in raw:
            found[f"nano.kl_{key}"] = distance(raw[key])[0]
    if "cpu_step_s" in raw:
        found["nano.cpu_tok_s"] = 1 / median(raw["cpu_step_s"][WARM_UP:])
    if "deflated_bytes" in raw:
        found["nano.wheel_mb"] = sum(raw["deflated_bytes"].values()) / 1e6
    for key in ("questions", "tools"):
        if f"cpu_{key}" in raw:
            found[f"nano.{key}"] = sum(row["right"] for row in raw[f"cpu_{key}"])
    drafts = raw.get("stock", {}).get("drafts", {})
    if drafts.get("accepted") or drafts.get("refused"):
        found["nano.drafts_accepted"] = drafts["accepted"] / (drafts["accepted"] + drafts["refused"])
    if "clamp_share_of_active_units" in raw:
        found["nano.clamp_share"] = raw["clamp_share_of_active_units"]
    if "picks_kept" in raw:
        found["nano.picks_kept"] = raw["picks_kept"]
    return found


def met(value: float, limit: str) -> bool:
    sign, number = limit.split()
    return value >= float(number) if sign == ">=" else value <= float(number)


def bars(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every figure, those with a limit with their verdict."""
    out: dict[str, dict[str, Any]] = {}
    for name, value in figures(raw).items():
        limit = LIMITS.get(name)
        out[name] = {"value": value} if limit is None else {"value": value, "want": limit, "ok": met(value, limit)}
    return out
