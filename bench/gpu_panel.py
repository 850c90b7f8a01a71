"""The reference panel on a GPU: made from stock exllamav3, met by both modes over HTTP, not met with a fault; one call.

usage: python bench/gpu_panel.py --out DIR --flash CHECKPOINT
       python bench/gpu_panel.py --report DIR --out FILE

CHECKPOINT is one of real layer shapes whose experts reach the SwiGLU clamp; the bundled one is scored beside it.
Stages, in order of importance, each in processes of its own:
  panel-flash, panel-bundled       8 prompts, 2,000 positions and more, from stock; the Triton picks it ran with
  exact-flash, fast-flash, exact-bundled, fast-bundled
                                   `glm53 serve` in that mode with those picks, scored by score_ref_panel.py as a user
                                   runs it; --vram-gb are left to it, so that most experts are read from host RAM
  no-clamp                         exact on the same weights with a limit in config.json that nothing reaches
  wrong-picks                      exact with other legal Triton picks than stock ran with
  kl                               decode_kl.py: fast against exact beside the distance between stock's own paths
The score is met at top-1 1 and a mean KL of at most 1e-6 (log-probabilities are rounded to 1e-7); a fault is found when
it is not. A panel says nothing about decoding: that is what `kl` is for.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import print_bars, save
from exact_process import run_limited

HERE = Path(__file__).resolve().parent
BUNDLED = HERE.parent / "python/glm53/models/nano"
STAGES = "panel-flash,exact-flash,fast-flash,no-clamp,wrong-picks,panel-bundled,exact-bundled,fast-bundled,kl"
LIMITS = {"panel": 120.0, "exact": 100.0, "fast": 120.0, "no": 100.0, "wrong": 160.0, "kl": 260.0}
SHORTEST_S = 25.0
MIN_TOP1, MAX_KL = 1.0, 1e-6
TOKENS = 250
"""A window: scored in one piece, and above the size from which exllamav3 dequantises a matrix before multiplying."""
NO_LIMIT = 60000.0
"""A clamp that float16 can hold and no activation reaches."""
WRONG_SETS = 3
GB = 1e9


def without_clamp(checkpoint: Path, folder: Path) -> Path:
    """The same checkpoint with another SwiGLU limit. Raises ValueError if its configuration has none."""
    folder.mkdir(parents=True)
    for path in checkpoint.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path.resolve())
    content = json.loads((checkpoint / "config.json").read_text())
    limits = [c for c in (content, content.get("text_config", {})) if c.get("swiglu_limit")]
    if not limits:
        raise ValueError(f"{checkpoint}/config.json has no swiglu_limit to leave out")
    for part in limits:
        part["swiglu_limit"] = NO_LIMIT
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def other_picks(document: dict[str, Any], legal: dict[str, list[dict[str, Any]]], seed: int) -> dict[str, Any]:
    """Picks of which every one that has an alternative is another legal one. legal: kernel -> its configurations."""
    rng = random.Random(seed)
    picks: dict[str, list[dict[str, Any]]] = {}
    for kernel, rows in document["picks"].items():
        picks[kernel] = []
        for row in rows:
            now = {k: row[k] for k in ("kwargs", "num_warps", "num_stages")}
            others = [c for c in legal.get(kernel, []) if c["kwargs"] != now["kwargs"]]
            others = others or [c for c in legal.get(kernel, []) if c != now]
            picks[kernel].append({**row, **(rng.choice(others) if others else now)})
    return {**document, "picks": picks}


def legal_picks() -> dict[str, list[dict[str, Any]]]:
    """Configurations that each autotuned kernel may run with here."""
    from glm53.engine.exllama import pins

    return {
        name: [{"kwargs": dict(c.kwargs), "num_warps": c.num_warps, "num_stages": c.num_stages} for c in tuner.configs]
        for name, tuner in pins.autotuners().items()
    }


@dataclass(frozen=True)
class Case:
    """What is served, how, and which panel it is held to. pins: Triton picks other than the panel's."""

    stage: str
    checkpoint: Path
    mode: str
    panel: str
    pins: Path | None = None


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """`glm53 serve` in a process of its own; within `with` it answers."""

    def __init__(self, case: Case, pins: Path, args: argparse.Namespace, end_s: float) -> None:
        self.port, self.end_s, self.folder = free_port(), end_s, Path(tempfile.mkdtemp())
        command = [sys.executable, "-m", "glm53", "serve", "--model-dir", str(case.checkpoint), "--mode", case.mode]
        command += ["--port", str(self.port), "-cs", "8192", "--state-dir", str(self.folder)]
        command += shlex.split(args.serve_options)
        command += ["--triton-pin", str(pins)] if pins.exists() else []
        command += ["--ec-reserve-gb", str(reserve_gb(args.vram_gb))] if args.vram_gb else []
        self.log = (self.folder / "log").open("w+")
        env = {k: v for k, v in os.environ.items() if not k.startswith("GLM53_")}
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, env=env)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Server:
        try:
            while True:
                if self.process.poll() is not None or time.monotonic() > self.end_s:
                    raise RuntimeError(f"the server did not become ready:\n{self.told()}")
                try:
                    with urllib.request.urlopen(self.url + "/health", timeout=5):
                        return self
                except OSError:  # not listening yet, or 503 while it loads
                    time.sleep(0.2)
        except BaseException:
            self.__exit__()
            raise

    def told(self) -> str:
        self.log.seek(0)
        return self.log.read()[-3000:]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            return json.loads(reply.read())

    def __exit__(self, *exc: Any) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def reserve_gb(leave: float) -> float:
    """VRAM to keep free so that about `leave` GB are used."""
    import torch

    return max(1.0, torch.cuda.mem_get_info()[0] / GB - leave)


class Stages:
    """Runs the stages of one call within its seconds; what each did is in DIR."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder, self.end_s = args, Path(args.out).resolve(), time.monotonic() + args.budget
        self.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints = {"bundled": args.bundled, "flash": args.flash}

    def run(self) -> None:
        for stage in self.args.stages.split(","):
            kind, _, name = stage.partition("-")
            if kind not in LIMITS:
                raise SystemExit(f"no stage is called {stage}")
            limit = min(LIMITS[kind], self.end_s - time.monotonic())
            start, path = time.monotonic(), self.folder / f"{stage}.json"
            if limit < self.args.shortest:
                path.write_text(json.dumps({"skipped": True, "seconds_left": round(max(limit, 0.0), 1)}))
                print(f"{stage}: skipped, the call's time is used up", flush=True)
                continue
            try:
                self.stage(stage, kind, name, limit)
                told = "done"
            except (RuntimeError, OSError, ValueError, KeyError) as e:
                told = f"FAILED: {e}"
                (self.folder / f"{stage}.error").write_text(str(e))
            print(f"{stage}: {told} ({time.monotonic() - start:.1f} s)", flush=True)

    def stage(self, stage: str, kind: str, name: str, limit: float) -> None:
        if kind == "panel":
            self.panel(name, limit)
        elif kind in ("exact", "fast"):
            self.score(Case(stage, self.checkpoints[name], kind, name), limit)
        elif stage == "no-clamp":
            with tempfile.TemporaryDirectory() as folder:
                self.score(Case(stage, without_clamp(self.args.flash, Path(folder) / "m"), "exact", "flash"), limit)
        elif stage == "wrong-picks":
            self.wrong_picks(stage, limit)
        elif stage == "kl":
            out = self.folder / "kl.json"
            command = [sys.executable, str(HERE / "decode_kl.py"), str(self.args.flash), "--out", str(out)]
            self.command([*command, "--slots", str(self.args.slots)], limit, "kl")

    def command(self, command: list[str], limit: float, stage: str, fine: tuple[int, ...] = (0,)) -> str:
        """Output of a process. Raises RuntimeError with its end if it fails or runs over its limit."""
        code, output = run_limited(command, limit)
        if code not in fine:
            (self.folder / f"{stage}.error").write_text(output[-12000:])
            raise RuntimeError(f"{'over its limit' if code is None else f'exit {code}'}: {output.strip()[-400:]}")
        return output

    def panel(self, name: str, limit: float) -> None:
        command = [sys.executable, str(HERE / "make_ref_panel.py"), "--model", str(self.checkpoints[name])]
        command += ["--out", str(self.folder / f"{name}.panel"), "--tokens", str(TOKENS), "--model-name", name]
        self.command([*command, "--write-pins", str(self.folder / f"{name}.pins")], limit, f"panel-{name}")
        content = json.loads((self.folder / f"{name}.panel").read_text())
        shown = {k: content[k] for k in ("positions", "versions", "command")} | {"prompts": len(content["prompts"])}
        (self.folder / f"panel-{name}.json").write_text(json.dumps(shown))

    def score(self, case: Case, limit: float) -> None:
        """Serve and score; the record says whether the panel was met."""
        end_s = time.monotonic() + limit
        out, panel = self.folder / f"{case.stage}.json", self.folder / f"{case.panel}.panel"
        if not panel.exists():
            raise RuntimeError(f"there is no panel of {case.panel}")
        scorer = [sys.executable, "-S", "-I", str(HERE / "score_ref_panel.py"), "--panel", str(panel)]
        scorer += [
            "--out",
            str(out),
            "--min-top1",
            str(MIN_TOP1),
            "--max-kl",
            str(MAX_KL),
            "--bars",
            f"panel.{case.mode}",
        ]
        with Server(case, case.pins or self.folder / f"{case.panel}.pins", self.args, end_s) as server:
            limit = max(end_s - time.monotonic(), 1.0)
            self.command([*scorer, "--url", server.url], limit, case.stage, fine=(0, 1))
            record = json.loads(out.read_text())
            record["stats"] = server.get("/stats")
        score = record["score"]
        record["met"] = score["top1"] >= MIN_TOP1 and score["kl_mean"] <= MAX_KL
        out.write_text(json.dumps(record))

    def wrong_picks(self, stage: str, limit: float) -> None:
        """Scores with picks other than stock's. Some do not run on this GPU and some change no sum: then others are
        tried, and the last score stays."""
        end_s, told, tries = time.monotonic() + limit, "", 0
        document, legal = json.loads((self.folder / "flash.pins").read_text()), legal_picks()
        out = self.folder / f"{stage}.json"
        for seed in range(WRONG_SETS):
            path = self.folder / f"wrong-{seed}.pins"
            path.write_text(json.dumps(other_picks(document, legal, seed)))
            left = end_s - time.monotonic()
            if left < self.args.shortest:
                break
            tries += 1
            try:
                self.score(Case(stage, self.args.flash, "exact", "flash", path), left)
            except RuntimeError as e:
                told = str(e)
                continue
            if not json.loads(out.read_text())["met"]:
                break
        if not out.exists():
            raise RuntimeError(f"no other picks ran: {told}")
        out.write_text(json.dumps({**json.loads(out.read_text()), "sets_tried": tries}))


def worst(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The lowest top-1 and the highest KL of several scores."""
    return {"top1": min(r["score"]["top1"] for r in records), "kl": max(r["score"]["kl_mean"] for r in records)}


def bars(raw: dict[str, Any]) -> dict[str, Any]:
    """Both modes over all panels, each fault by whether it was found, and the bars of decode_kl.py."""
    out: dict[str, Any] = {}
    for mode in ("exact", "fast"):
        records = [r for name, r in raw.items() if name.startswith(f"{mode}-") and "score" in r]
        if "score" in raw.get(f"{mode}-flash", {}):
            figures = worst(records)
            ok = figures["top1"] >= MIN_TOP1, figures["kl"] <= MAX_KL
            out[f"panel.{mode}_top1"] = {"value": figures["top1"], "want": f">= {MIN_TOP1}", "ok": ok[0]}
            out[f"panel.{mode}_kl"] = {"value": figures["kl"], "want": f"<= {MAX_KL}", "ok": ok[1]}
    for stage, name in (("no-clamp", "panel.missing_clamp_found"), ("wrong-picks", "panel.wrong_picks_found")):
        if "met" in raw.get(stage, {}):
            found = not raw[stage]["met"]
            out[name] = {"value": found, "want": True, "ok": found}
    return out | raw.get("kl", {}).get("bars", {})


def report(folder: Path, out: Path) -> None:
    """Write the result file and print its bars."""
    meta = json.loads((folder / "meta.json").read_text())
    raw = {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json")) if p.stem != "meta"}
    document = {
        "what": "reference panels from stock exllamav3, met by both modes over HTTP and not met with a fault",
        **meta, "raw": raw, "bars": bars(raw),
    }  # fmt: skip
    save(document, out)
    print_bars(document["bars"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--flash", type=Path, help="checkpoint of real layer shapes")
    parser.add_argument("--bundled", type=Path, default=BUNDLED)
    parser.add_argument("--stages", default=STAGES)
    parser.add_argument("--budget", type=float, default=520, help="seconds this call may take in all")
    parser.add_argument("--vram-gb", type=float, default=6.0, help="VRAM the servers may use, about (0: all of it)")
    parser.add_argument("--slots", type=int, default=124, help="expert slots in decode_kl.py: 31 a MoE layer")
    parser.add_argument("--serve-options", default="", help="more options of glm53 serve, as one word")
    parser.add_argument("--shortest", type=float, default=SHORTEST_S, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    if args.report:
        report(args.report, Path(args.out))
        return
    from gpu_exact import machine, versions

    stages = Stages(args)
    settings = {"vram_gb": args.vram_gb, "slots": args.slots, "tokens": TOKENS, "stages": args.stages}
    meta = {
        "machine": machine(),
        "versions": versions(),
        "command": " ".join(["python", *sys.argv]),
        "settings": settings,
    }
    (stages.folder / "meta.json").write_text(json.dumps(meta))
    stages.run()


if __name__ == "__main__":
    main()
