#!/usr/bin/env python3
"""Score a server against a reference panel: does it compute what stock exllamav3 computed? Standard library only.

    python3 bench/score_ref_panel.py --url http://127.0.0.1:30000 --panel PANEL.json [--out score.json]

The panel (made by make_ref_panel.py) holds prompts as token ids and, for every position, the 20 likeliest next tokens
of stock exllamav3 with their log-probabilities. The server scores the same prompts teacher-forced. Reported: the share
of positions whose likeliest token is the same (any of them where the reference has a tie), and the mean KL divergence
(nats) over the reference's 20 tokens and the rest taken as one. This looks at the prefill path alone: it says nothing
about decoding. --bars NAME records the limits as NAME_top1 and NAME_kl in the form of bench/results.

Exit code 0: top-1 and KL are within --min-top1 and --max-kl; 1: not; 2: no verdict (the server failed or cannot score).
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import platform
import shlex
import sys
import time
from typing import Any
from urllib.parse import urlsplit

TINY = 1e-12
Top = dict[Any, float]


def web_address(text: str) -> str:
    """A server's address: host:port alone means http, and the /v1 at the end of a client's base URL is not part of it.

    Raises ArgumentTypeError."""
    address = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(address)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise argparse.ArgumentTypeError(f"{text!r} is no address of a server; http://127.0.0.1:30000 is one")
    return address.rstrip("/").removesuffix("/v1")


def out_file(text: str) -> str:
    """A file that can be written, which is better known before the measurement. Raises ArgumentTypeError."""
    if os.path.isdir(text) or not os.path.isdir(os.path.dirname(text) or "."):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: its folder is missing, or it is one")
    return text


def reason(status: int, data: bytes) -> str:
    """An answer that is no success, on one line: its status, what it says, and what to do."""
    try:
        words = json.loads(data)
        words = words.get("error", words)
        words = words.get("message", words)
    except (ValueError, AttributeError):
        words = data.decode(errors="replace")
    key, path = "give its key with --api-key", "check --url and --model"
    hint = {301: path, 302: path, 307: path, 308: path, 401: key, 403: key, 404: path, 503: "try later"}.get(status)
    return f"{status}: {' '.join(str(words).split())[:300]}" + (f" ({hint})" if hint else "")


def trouble(url: str, error: Exception) -> str:
    """A connection that failed, on one line with what to do."""
    hint = "is the server running there?" if isinstance(error, ConnectionRefusedError) else ""
    hint = "--timeout waits longer" if isinstance(error, TimeoutError) else hint
    hint = "does it speak http, not https?" if "SSL" in str(error) else hint
    return f"{url}: {' '.join(str(error).split()) or type(error).__name__}" + (f" ({hint})" if hint else "")


class NoVerdict(Exception):
    """The panel could not be scored; the text says why."""


class Client:
    """JSON over one server's HTTP."""

    def __init__(self, url: str, api_key: str, timeout: float) -> None:
        self.url, self.timeout = url, timeout
        self.missing = ""
        """What the last route that is not there answered."""
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"

    def post(self, path: str, body: Any) -> dict[str, Any] | None:
        """The reply to a JSON body; None where there is no such route. Raises NoVerdict."""
        status, data = self.ask("POST", path, json.dumps(body).encode())
        if status in (404, 405):
            self.missing = f"{path} answered {reason(status, data)}"
            return None
        if status != 200:
            raise NoVerdict(f"{path} answered {reason(status, data)}")
        try:
            reply = json.loads(data)
            return dict(reply[0] if isinstance(reply, list) else reply)
        except (ValueError, TypeError, IndexError):
            words = data[:100].decode(errors="replace")
            raise NoVerdict(f"{path} answered what is no JSON object: {words!r}") from None

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """(status, body of the reply). Raises NoVerdict if there is no reply."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "127.0.0.1", parts.port, timeout=self.timeout)
        try:
            connection.request(method, parts.path.rstrip("/") + path, body, self.headers)
            reply = connection.getresponse()
            data = reply.read()
        except (OSError, http.client.HTTPException) as e:
            raise NoVerdict(trouble(self.url, e)) from None
        finally:
            connection.close()
        return reply.status, data


def from_generate(client: Client, ids: list[int], count: int) -> list[Top] | None:
    """SGLang's /generate: {token id: log-probability} for each position but the first; None without that route."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": count,
    }
    reply = client.post("/generate", body)
    if reply is None:
        return None
    tops = reply["meta_info"].get("input_top_logprobs") or []
    if len(tops) != len(ids):
        raise NoVerdict(f"/generate scored {len(tops)} of {len(ids)} prompt positions: it gives no scores of prompts")
    return [{entry[1]: entry[0] for entry in top or ()} for top in tops[1:]]


def from_completions(client: Client, model: str, ids: list[int], count: int) -> list[Top]:
    """OpenAI's /v1/completions with echo: the same, keyed by token text."""
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": count}
    reply = client.post("/v1/completions", body)
    if reply is None:
        raise NoVerdict(client.missing)
    tops = (reply["choices"][0].get("logprobs") or {}).get("top_logprobs") or []
    if len(tops) < len(ids):
        raise NoVerdict(f"/v1/completions scored {len(tops)} of {len(ids)} prompt positions: it does not echo scores")
    return [top or {} for top in tops[1 : len(ids)]]


def divergence(reference: Top, measured: Top) -> float:
    """KL(reference || measured) over the reference's tokens and everything else as one outcome.

    A reference token the server did not list gets its smallest listed probability, which can only understate the KL.
    """
    floor = min(measured.values())
    p = {t: math.exp(v) for t, v in reference.items()}
    q = {t: math.exp(measured.get(t, floor)) for t in reference}
    rest_p, rest_q = max(0.0, 1 - sum(p.values())), max(TINY, 1 - sum(q.values()))
    total = sum(p[t] * (reference[t] - math.log(max(TINY, q[t]))) for t in p)
    return total + (rest_p * math.log(max(TINY, rest_p) / rest_q) if rest_p > TINY else 0.0)


def agrees(reference: Top, measured: Top) -> bool:
    """Whether the measured best token is a best one of the reference: which of equals comes first says nothing."""
    best = max(measured, key=lambda t: measured[t])
    return reference.get(best, -math.inf) >= max(reference.values())


def score_prompt(prompt: dict[str, Any], measured: list[Top], texts: dict[str, str] | None) -> dict[str, Any]:
    """Agreement and divergence at each position of one prompt; `texts` maps ids to texts if `measured` has texts."""
    same, kls, pairs = 0, [], zip(prompt["top"], measured[prompt["start"] :], strict=False)
    most, wanted_most = max(map(len, measured), default=0), max(map(len, prompt["top"]))
    if 0 < most < wanted_most:  # what it leaves out would be taken as likelier than it is
        raise NoVerdict(f"prompt {prompt['name']}: the server lists {most} log-probabilities of {wanted_most} at most")
    for reference, got in pairs:
        wanted: Top = dict(reference) if texts is None else {texts[str(t)]: v for t, v in reference}
        if not got:
            raise NoVerdict(f"prompt {prompt['name']}: the server left a position without log-probabilities")
        same += agrees(wanted, got)
        kls.append(divergence(wanted, got))
    if len(kls) != len(prompt["top"]):
        raise NoVerdict(f"prompt {prompt['name']}: {len(kls)} of {len(prompt['top'])} positions were scored")
    return {
        "name": prompt["name"],
        "positions": len(kls),
        "top1": same / len(kls),
        "kl": sum(kls) / len(kls),
        "kls": kls,
    }


def score(client: Client, model: str, panel: dict[str, Any]) -> list[dict[str, Any]]:
    """Every prompt of the panel, with progress on standard error."""
    rows = []
    for i, prompt in enumerate(panel["prompts"]):
        started = time.monotonic()
        try:
            measured, texts = from_generate(client, prompt["ids"], panel["top_k"]), None
            if measured is None:
                measured, texts = from_completions(client, model, prompt["ids"], panel["top_k"]), panel["texts"]
            rows.append(score_prompt(prompt, measured, texts))
        except (KeyError, IndexError, TypeError, AttributeError) as e:
            told = f"{type(e).__name__}: {e}"
            raise NoVerdict(
                f"prompt {prompt['name']}: the reply or the panel is not of the known shape ({told})"
            ) from None
        took = time.monotonic() - started
        print(f"{i + 1}/{len(panel['prompts'])} {prompt['name']}: {took:.1f} s", file=sys.stderr, flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    kls = sorted(k for r in rows for k in r["kls"])
    count = len(kls)
    return {
        "positions": count,
        "top1": sum(r["top1"] * r["positions"] for r in rows) / count,
        "kl_mean": sum(kls) / count,
        "kl_p50": kls[count // 2],
        "kl_p99": kls[min(count - 1, int(0.99 * count))],
        "kl_max": kls[-1],
    }


def table(rows: list[dict[str, Any]], total: dict[str, Any]) -> str:
    lines = [f"{'prompt':<24} {'positions':>9} {'top-1':>8} {'mean KL':>11}"]
    lines += [f"{r['name']:<24} {r['positions']:>9} {r['top1']:>8.4f} {r['kl']:>11.3e}" for r in rows]
    lines.append(f"{'all':<24} {total['positions']:>9} {total['top1']:>8.4f} {total['kl_mean']:>11.3e}")
    lines.append(f"KL p50 {total['kl_p50']:.3e}, p99 {total['kl_p99']:.3e}, largest {total['kl_max']:.3e}")
    return "\n".join(lines)


def load_panel(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as f:
            panel = json.load(f)
        if not panel["prompts"] or not panel["top_k"]:
            raise KeyError("prompts")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise NoVerdict(f"{path}: not a panel: {e}") from None
    return dict(panel)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--url", type=web_address, default="http://127.0.0.1:30000", help="server (default: %(default)s)"
    )
    parser.add_argument("--panel", required=True, help="panel made by make_ref_panel.py")
    parser.add_argument("--out", type=out_file, metavar="FILE", help="write the score as JSON")
    parser.add_argument("--model", default="glm-5.3-flash", help="model name to send (default: %(default)s)")
    parser.add_argument("--min-top1", type=float, default=0.0, help="least agreement for exit code 0")
    parser.add_argument("--max-kl", type=float, default=math.inf, help="largest mean KL for exit code 0")
    parser.add_argument("--bars", default="", metavar="NAME", help="record NAME_top1 and NAME_kl against the limits")
    parser.add_argument("--api-key", default="", help="sent as a bearer token")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds without a byte (default: %(default)s)")
    return parser.parse_args(argv)


def machine() -> dict[str, Any]:
    """This host; the server may be elsewhere."""
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            cpu = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), cpu)
    except OSError:
        pass
    return {"cpu": cpu, "cpus": os.cpu_count()}


def server_of(client: Client) -> dict[str, Any]:
    """What the server says of itself, where it has /server_info."""
    try:
        status, data = client.ask("GET", "/server_info")
        reply = json.loads(data)
    except (NoVerdict, ValueError):
        return {}
    wanted = ("version", "mode", "device", "model_path", "exllamav3", "torch", "triton")
    return {k: reply[k] for k in wanted if k in reply} if status == 200 and isinstance(reply, dict) else {}


def bars(name: str, total: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The two figures with the limits they were given."""
    top1, kl = total["top1"], total["kl_mean"]
    return {
        f"{name}_top1": {"value": top1, "want": f">= {args.min_top1}", "ok": top1 >= args.min_top1},
        f"{name}_kl": {"value": kl, "want": f"<= {args.max_kl}", "ok": kl <= args.max_kl},
    }


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    client = Client(args.url, args.api_key, args.timeout)
    try:
        panel = load_panel(args.panel)
        rows, server = score(client, args.model, panel), server_of(client)
    except NoVerdict as e:
        print(f"score_ref_panel: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("score_ref_panel: stopped before the end: nothing was scored", file=sys.stderr)
        return 130
    total = summary(rows)
    print(table(rows, total))
    if args.out:
        for row in rows:
            del row["kls"]
        record = {
            "what": "teacher-forced score against a reference panel",
            "panel": {k: panel.get(k) for k in ("what", "model", "versions", "machine")},
            "server": server,
            "machine": machine(),
            "versions": {"python": platform.python_version(), "glm53": server.get("version", "not told")},
            "command": shlex.join(["python3", "bench/score_ref_panel.py", *argv]),
            "settings": {"url": args.url, "top_k": panel["top_k"]},
            "raw": rows,
            "score": total,
            "bars": bars(args.bars, total, args) if args.bars else {},
        }
        with open(args.out, "w", encoding="utf-8") as f:
            json.dump(record, f, indent=1)
            f.write("\n")
    return 0 if total["top1"] >= args.min_top1 and total["kl_mean"] <= args.max_kl else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
