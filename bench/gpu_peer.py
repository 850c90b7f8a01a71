"""Decode of one stream beside stock exllamav3 1.5.1 and the newest exllamav3: same checkpoint, VRAM, machine and call.

usage: python bench/gpu_peer.py CHECKPOINT --out DIR --newest SITE --stages warm      (in an earlier call)
       python bench/gpu_peer.py CHECKPOINT --out DIR --newest SITE
       python bench/gpu_peer.py --report DIR --out FILE

SITE is a folder that `pip install --target` put a newer exllamav3 and what it imports into, with its compiled extension
(exllamav3_ext*.so); it goes before everything else on PYTHONPATH of the stages that run it. Stages, in order of
importance, each in a process of its own:
  probe                  what the newest exllamav3's calls about the processor's topology do here
  fast, exact            glm53 with --slots expert slots
  newest-N-T[-mcpa]      the newest exllamav3 with -mcs N -mct T: N experts of each layer on its CPU worker, T threads;
                         -mcpa keeps them page-locked and copies hot ones to 4 spare slots a layer
  stock-N-T              the same of exllamav3 1.5.1, which has no -mcpa
  warm                   a short newest-257-12 and -mcpa that leave compiled and autotuned Triton kernels behind
Of 288 experts 31 a layer stay in VRAM with 257 on the CPU, as in glm53 with --slots 31 times the MoE layers; with
-mcpa the spare slots come on top, so 261 is the same VRAM and 257 a gift. A block of VRAM is held so that --vram-gb
remain for each. Protocol: 300-token prompts, three answers to settle, then --runs greedy answers and --runs at
temperature 1 (random weights may loop when greedy, which flatters a cache). The bar takes the smaller ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from common import save
from exact_process import peak_ram, run_limited
from exact_run import drawing

PROMPT, VOCAB = 300, 2000
STAGES = "probe,fast,exact,newest-257-12,newest-257-12-mcpa,newest-261-12-mcpa,newest-257-15,stock-257-12"
LIMITS = {"probe": 60.0, "fast": 150.0, "exact": 110.0, "newest": 140.0, "stock": 110.0, "warm": 200.0}
SHORTEST_S = 25.0
GB = 1e9
WANTED = 1.5
TOPOLOGY = "GLM53_PEER_TOPOLOGY"
"""Set for stages whose exllamav3 must not ask the processor: the number of CPUs to tell it instead."""


def stand_in_topology() -> None:
    """Answers exllamav3's question for the order of cores: every logical CPU a core of its own. Its own answer ends the
    process in some virtual machines. Its worker is a spawned process: it imports this file first, so it is told too."""
    count = int(os.environ[TOPOLOGY])
    import torch  # noqa: F401  (the extension needs its libraries)
    import exllamav3_ext  # isort: skip

    exllamav3_ext.exl3_moe_cpu_core_order = lambda: (list(range(count)), count)


if TOPOLOGY in os.environ:
    stand_in_topology()


def hold_vram(leave: float) -> Any:
    """A block of VRAM that leaves `leave` bytes free, or None where less is free anyway."""
    import torch

    torch.cuda.init()
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(int(free - leave), dtype=torch.uint8, device="cuda") if free > leave else None


class Decoder:
    """Asks an exllamav3 generator for one answer at a time; the same for every version."""

    def __init__(self, exllamav3: Any, generator: Any) -> None:
        self.exl, self.generator = exllamav3, generator

    def answer(self, seed: int, new: int, *, greedy: bool) -> tuple[float, list[int]]:
        """tok/s after the first token, and the tokens."""
        import torch

        ids = torch.randint(0, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(seed))
        sampler = self.exl.GreedySampler() if greedy else drawing(self.exl)
        self.generator.enqueue(self.exl.Job(input_ids=ids, max_new_tokens=new, sampler=sampler, seed=seed))
        tokens: list[int] = []
        first = last = 0.0
        while self.generator.num_remaining_jobs():
            for result in self.generator.iterate():
                if result["stage"] == "error":
                    raise result["error"]
                if result.get("token_ids") is not None:
                    last = time.perf_counter()
                    first = first or last
                    tokens += result["token_ids"].reshape(-1).tolist()
        return (len(tokens) - 1) / (last - first) if last > first else 0.0, tokens

    def measure(self, new: int, runs: int) -> dict[str, Any]:
        """Rates of --runs answers of each kind after three to settle."""
        for i in range(3):
            self.answer(10 + i, new, greedy=False)
        out: dict[str, Any] = {}
        for name, greedy in (("greedy", True), ("sampled", False)):
            answers = [self.answer(50 + i, new, greedy=greedy) for i in range(runs)]
            out[f"{name}_tok_s"] = [rate for rate, _ in answers]
            out[f"{name}_distinct"] = [len(set(tokens)) for _, tokens in answers]
        return out


def work_exllamav3(args: argparse.Namespace, on_cpu: int, threads: int, pinned: bool) -> dict[str, Any]:
    """A process of exllamav3's own, of whichever version PYTHONPATH has first."""
    import exllamav3 as exl
    import exllamav3.version
    import torch

    config = exl.Config.from_directory(args.checkpoint)
    config.infer_params.moe_cpu_split, config.infer_params.moe_cpu_threads = on_cpu, threads
    if pinned:
        config.infer_params.moe_cpu_pinned_arena = True
    model = exl.Model.from_config(config)
    cache = exl.Cache(model, max_num_tokens=16384, max_batch_size=1)
    start = time.perf_counter()
    model.load(progressbar=False)
    load_s = time.perf_counter() - start
    generator = exl.Generator(model, cache, exl.Tokenizer.from_config(config), max_batch_size=1)
    return {
        "exllamav3": exllamav3.version.__version__, "on_cpu": on_cpu, "threads": threads, "pinned_arena": pinned,
        "load_s": load_s, "vram_allocated": torch.cuda.memory_allocated(), "topology_replaced": TOPOLOGY in os.environ,
        **Decoder(exl, generator).measure(args.new, args.runs),
    }  # fmt: skip


def work_ours(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    """glm53 in one mode."""
    import tempfile

    import exllamav3 as exl
    import torch

    from glm53.config import Settings
    from glm53.engine.exllama.ahead import run_ahead
    from glm53.engine.exllama.loader import LoadOptions, load

    state = Path(tempfile.mkdtemp())
    settings = Settings(model_dir=Path(args.checkpoint), mode=mode, state_dir=state, cache_tokens=16384)
    start = time.perf_counter()
    loaded = load(settings, lambda stage, fraction: None, LoadOptions(max_slots=args.slots))
    load_s = time.perf_counter() - start
    generator = exl.Generator(loaded.model, loaded.cache, loaded.tokenizer, max_batch_size=1)
    ahead = run_ahead(generator, loaded)
    out = Decoder(exl, generator).measure(args.new, args.runs)
    out["steps_ahead"] = ahead.steps if ahead else 0
    if fault := loaded.passes.fault():
        raise RuntimeError(f"the CPU lane failed, so these are not figures of {mode}: {fault}")
    return {
        "mode": mode, "slots": loaded.slots, "load_s": load_s, "vram_allocated": torch.cuda.memory_allocated(),
        "stats": loaded.runtime.stats(0), "split": loaded.tier.stats() if loaded.tier else None, **out,
    }  # fmt: skip


def work(args: argparse.Namespace) -> dict[str, Any]:
    """One stage's figures, with the VRAM and RAM it took."""
    import torch

    name, *details = args.worker.split("-")
    held = hold_vram(args.vram_gb * GB)
    ballast = 0 if held is None else held.numel()
    if name in ("fast", "exact"):
        out = work_ours(args, name)
    else:
        out = work_exllamav3(args, int(details[0]), int(details[1]), details[2:] == ["mcpa"])
    free, _ = torch.cuda.mem_get_info()
    out["vram_allocated"] -= ballast
    out["vram_peak"] = torch.cuda.max_memory_allocated() - ballast
    return {**out, "ballast": ballast, "vram_free_at_the_end": free, "ram": peak_ram(), "new": args.new}


class Stages:
    """Runs the stages of one call within its seconds; what each did is in DIR."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder, self.end_s = args, Path(args.out), time.monotonic() + args.budget
        self.folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        from gpu_exact import machine, versions

        meta = {"machine": machine(), "versions": versions(), "command": " ".join(["python", *sys.argv])}
        (self.folder / "meta.json").write_text(json.dumps(meta))
        for stage in self.args.stages.split(","):
            if stage == "probe":
                self.probe()
            elif stage == "warm":
                self.probe()
                for name in ("newest-257-12", "newest-257-12-mcpa"):
                    self.worker(name, f"warm-{name}", "--new", "16", "--runs", "1")
            else:
                self.worker(stage, stage, "--new", str(self.args.new), "--runs", str(self.args.runs))

    def probe(self) -> None:
        """What the topology's order and pinned workers do, each tried in a process of its own, for it may end it."""
        tries = {"core_order": "exl3_moe_cpu_core_order()", "pinned_workers": "exl3_moe_cpu_pool_stress(4, 8, 2, 10)"}
        found: dict[str, Any] = {}
        for name, call in tries.items():
            code = f"import torch, exllamav3_ext as e; print(e.{call})"
            status, output = run_limited([sys.executable, "-c", code], LIMITS["probe"], env=self.environment())
            found[name] = {"rc": status, "output": output[-300:]}
        (self.folder / "probe.json").write_text(json.dumps(found))
        print(f"probe: {found}", flush=True)

    def environment(self, newest: bool = True) -> dict[str, str]:
        """Of a stage: the newest exllamav3 first, with what the probe says about it."""
        env = dict(os.environ)
        if not newest:
            return env
        env["PYTHONPATH"] = os.pathsep.join([str(Path(self.args.newest).resolve()), env.get("PYTHONPATH", "")])
        path = self.folder / "probe.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        if found.get("core_order", {}).get("rc", 0) != 0:
            env[TOPOLOGY] = str(os.cpu_count())
        if found.get("pinned_workers", {}).get("rc", 0) != 0:
            env["EXL3_MOE_CPU_PIN"] = "0"
        return env

    def worker(self, stage: str, record: str, *extra: str) -> None:
        """A stage's process; its JSON, error or the note that it ran over its limit goes to DIR."""
        kind = stage.partition("-")[0]
        if kind not in LIMITS:
            raise SystemExit(f"no stage is called {stage}")
        args, path = self.args, self.folder / f"{record}.json"
        limit = min(LIMITS["warm" if record.startswith("warm") else kind], self.end_s - time.monotonic())
        if limit < SHORTEST_S:
            path.write_text(json.dumps({"skipped": True, "seconds_left": round(max(limit, 0.0), 1)}))
            print(f"{record}: skipped, the call's time is used up", flush=True)
            return
        command = [sys.executable, __file__, args.checkpoint, "--out", str(path), "--worker", stage]
        command += ["--slots", str(args.slots), "--vram-gb", str(args.vram_gb), *extra]
        start = time.perf_counter()
        code, output = run_limited(command, limit, env=self.environment(kind == "newest"))
        seconds = round(time.perf_counter() - start, 1)
        print(f"{record}: {'over its limit of' if code is None else f'rc {code},'} {seconds} s", flush=True)
        if code is None and not path.exists():
            path.write_text(json.dumps({"timed_out": True, "limit_s": round(limit, 1)}))
        if code != 0:
            path.with_suffix(".error").write_text(output[-12000:])
            print(output[-3000:], flush=True)


def best(raw: dict[str, Any], kind: str, start: str) -> tuple[float, str]:
    """Best median rate of the stages whose name begins so, and which it was."""
    rates = {name: statistics.median(r[f"{kind}_tok_s"]) for name, r in raw.items()
             if name.startswith(start) and f"{kind}_tok_s" in r}  # fmt: skip
    return max(((rate, name) for name, rate in rates.items()), default=(0.0, ""))


def bars(raw: dict[str, Any]) -> dict[str, Any]:
    """The bar, the smaller of the greedy and the sampled ratio, and the rates behind it."""
    out: dict[str, Any] = {}
    for mode in ("fast", "exact"):
        pairs = [(best(raw, kind, mode)[0], best(raw, kind, "newest-")[0]) for kind in ("greedy", "sampled")]
        if all(ours and theirs for ours, theirs in pairs):
            value = min(ours / theirs for ours, theirs in pairs)
            says = f"decode of one stream in {mode} mode over the best of the newest exllamav3 on the same VRAM"
            limit = {"want": f">= {WANTED}", "ok": value >= WANTED} if mode == "fast" else {}
            out[f"peer.{mode}_vs_newest_exllamav3"] = {"value": value, "unit": "x", "says": says, **limit}
    sides = (("fast", "fast", "fast mode"), ("exact", "exact", "exact mode"),
             ("newest", "newest-", "best of the newest exllamav3"), ("stock", "stock-", "exllamav3 1.5.1"))  # fmt: skip
    for name, start, told in sides:
        for kind in ("greedy", "sampled"):
            rate, _ = best(raw, kind, start)
            if rate:
                says = f"decode of one stream, {'temperature 1' if kind == 'sampled' else kind}, {told}"
                out[f"peer.{name}_{kind}_tok_s"] = {"value": rate, "unit": "tokens/s", "says": says}
    return out


def plot(raw: dict[str, Any]) -> dict[str, Any]:
    """Decode of every model that was run, for the results page."""
    ran = {name: r for name, r in raw.items() if "greedy_tok_s" in r and not name.startswith("warm")}
    labels = {name: f"glm53 {name}" if "-" not in name else f"{r['exllamav3']}\n{name.partition('-')[2]}"
              for name, r in ran.items()}  # fmt: skip
    series = {words: [statistics.median(r[f"{kind}_tok_s"]) for r in ran.values()]
              for kind, words in (("greedy", "greedy"), ("sampled", "temperature 1"))}  # fmt: skip
    note = "exllamav3: its version, then experts of a layer on its CPU worker, threads, page-locked arena"
    return {"kind": "bars", "title": "Decode of one stream on the same VRAM", "unit": "tokens/s",
            "x": list(labels.values()), "series": series, "note": note}  # fmt: skip


def report(folder: Path, out: Path) -> None:
    """Write the result file and print its bars."""
    meta = json.loads((folder / "meta.json").read_text())
    raw = {p.stem: json.loads(p.read_text()) for p in folder.glob("*.json") if p.stem != "meta"}
    raw = dict(sorted(raw.items()))
    newest = {r["exllamav3"] for name, r in raw.items() if name.startswith("newest-") and "exllamav3" in r}
    meta["versions"]["newest exllamav3"] = ", ".join(sorted(newest)) or "did not run"
    settings = {"prompt_tokens": PROMPT, **{k: raw.get("fast", {}).get(k) for k in ("slots", "new", "ballast")}}
    document = {
        "what": "decode of one stream beside stock exllamav3 1.5.1 and the newest exllamav3, same checkpoint and VRAM",
        **meta, "settings": settings, "raw": raw, "bars": bars(raw), "plots": [plot(raw)],
    }  # fmt: skip
    save(document, out)
    for name, bar in document["bars"].items():
        verdict = {True: "ok  ", False: "MISS", None: "    "}[bar.get("ok")]
        print(f"{verdict} {name} {bar['value']:.4g}{' (want ' + bar['want'] + ')' if 'want' in bar else ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="")
    parser.add_argument("--out", required=True)
    parser.add_argument("--newest", default="", help="folder of the newest exllamav3 and its extension")
    parser.add_argument("--stages", default=STAGES)
    parser.add_argument("--budget", type=float, default=520, help="seconds this call may take in all")
    parser.add_argument("--slots", type=int, default=248, help="expert slots of glm53: 31 a MoE layer")
    parser.add_argument("--vram-gb", type=float, default=12.0, help="VRAM left to each (the rest is held)")
    parser.add_argument("--new", type=int, default=96, help="tokens an answer")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.report:
        report(args.report, Path(args.out))
    elif args.worker:
        result = work(args)
        Path(args.out).write_text(json.dumps(result))
    else:
        Stages(args).run()


if __name__ == "__main__":  # exllamav3's CPU worker is a spawned process
    main()
