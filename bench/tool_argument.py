#!/usr/bin/env python3
"""What parsing one tool call with an argument of a megabyte costs, in pieces of four characters, and how it flows.

    python bench/tool_argument.py --out bench/results/DATE-tool-argument.json

Feeds the server's own output parser (glm53 must be installed) with the text a model would write: a string, a string
full of angle brackets, and a nested object (whose type is known only at its end: it comes in one fragment). Figures are
CPU seconds of this process, best of three. Bars: each argument below 2 s, and at least 99 of 100 pieces of the string
are passed on at once. Exit code 0: all held; 1: not.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import glm53
from glm53.chat import parse_tools
from glm53.engine.protocol import Finish, Token
from glm53.server.protocol.events import ToolCallArgs, ToolCallEnd
from glm53.server.protocol.output import OutputParser
from glm53.tokenizer import Tokenizer

BAR_S = 2.0
BAR_FLOW = 0.99
PIECE = 4
TOOL = {
    "type": "function",
    "function": {
        "name": "write_file",
        "parameters": {
            "type": "object",
            "properties": {"content": {"type": "string"}, "data": {"type": "object"}},
        },
    },
}
ARGUMENTS: dict[str, tuple[str, str]] = {
    "string": ("content", "The lighthouse keeper mends a clock. "),
    "markup": ("content", "<div class='a'><b>x</b> &lt; </arg_ </div>\n"),
    "object": ("data", '{"key": [1, true, null, "text"]}, '),
}


def argument(kind: str, size: int) -> tuple[str, str]:
    """(name, text of `size` characters or a little less) of an argument."""
    name, unit = ARGUMENTS[kind]
    body = unit * (size // len(unit))
    return name, body if name == "content" else '{"all": [' + body.rstrip(", ") + "]}"


def parse(tokenizer: Tokenizer, kind: str, size: int) -> dict[str, Any]:
    """One parse of the whole call: seconds, and the fragments for the client."""
    name, text = argument(kind, size)
    whole = f"</think><tool_call>write_file<arg_key>{name}</arg_key><arg_value>{text}</arg_value></tool_call>"
    tokens = [Token(7, whole[i : i + PIECE].encode()) for i in range(0, len(whole), PIECE)]
    parser = OutputParser(tokenizer, thinking_open=True, tools=parse_tools([TOOL]))
    fragments: list[str] = []
    complete = False
    started = time.process_time()
    for token in tokens:
        for event in parser.feed([token]):
            if isinstance(event, ToolCallArgs):
                fragments.append(event.fragment)
            complete = isinstance(event, ToolCallEnd)
    seconds = time.process_time() - started
    parser.finish(Finish("stop", tokenizer.special_id("<|observation|>")))
    value = json.loads("".join(fragments))[name]
    assert complete
    assert value == (text if name == "content" else json.loads(text))
    return {"pieces": len(tokens), "seconds": round(seconds, 3), "fragments": len(fragments)}


def result(argv: list[str], size: int, raw: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """In the form that bench/results keeps and bench/report.py reads."""
    models = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    bars = {
        f"server.tool_argument_{kind}_s": {
            "value": figures["seconds"],
            "want": f"<= {BAR_S:g}",
            "ok": figures["seconds"] <= BAR_S,
            "says": f"CPU time of parsing a tool argument of {size / 1e6:g} MB ({kind})",
            "unit": "s",
        }
        for kind, figures in raw.items()
    }
    flow = round(raw["string"]["fragments"] / raw["string"]["pieces"], 4)
    bars["server.tool_argument_flow"] = {
        "value": flow,
        "want": f">= {BAR_FLOW:g}",
        "ok": flow >= BAR_FLOW,
        "says": "share of the string's pieces that a client gets at once",
        "unit": "",
    }
    return {
        "what": "Server: parsing one tool call with a long argument, in pieces of four characters",
        "machine": {"cpu": models[0].partition(":")[2].strip() if models else platform.machine(), "cpus": len(models)},
        "versions": {"python": platform.python_version(), "glm53": importlib.metadata.version("glm53")},
        "command": " ".join(["python", "bench/tool_argument.py", *argv]),
        "settings": {"characters": size, "piece": PIECE, "runs": 3},
        "raw": raw,
        "bars": bars,
    }


def main(argv: list[str]) -> int:
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    cli.add_argument("--characters", type=int, default=1_000_000, help="of the argument (default: %(default)s)")
    cli.add_argument("--out", metavar="FILE", help="write a result in the form of bench/results to FILE")
    args = cli.parse_args(argv)
    tokenizer = Tokenizer(Path(glm53.__file__).parent / "models" / "nano")
    raw = {
        kind: min((parse(tokenizer, kind, args.characters) for _ in range(3)), key=lambda r: r["seconds"])
        for kind in ARGUMENTS
    }
    found = result(argv, args.characters, raw)
    for name, one in found["bars"].items():
        print(f"{name:32} {one['value']:>8g} {one['unit']:7} {one['want']:6} {'held' if one['ok'] else 'MISSED'}")
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if all(one["ok"] for one in found["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
