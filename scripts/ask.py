"""Ask a running server one question over HTTP and print the answer as it streams (standard library only)."""

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request


def wait_ready(url: str, seconds: float, pid: int | None) -> None:
    """Poll /health until 200. Ends the program if the server process dies or the time is over."""
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        if pid is not None and not _alive(pid):
            sys.exit("error: the server ended before it was ready (its message is above)")
        if time.monotonic() > end:
            sys.exit(f"error: {url}/health did not answer 200 within {seconds:.0f} s")
        time.sleep(0.2)


def _alive(pid: int) -> bool:
    """True while the process runs; an ended child that nobody has waited for (state Z) does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return not os.path.isdir("/proc/self")


def events(url: str, body: dict[str, object]):  # type: ignore[no-untyped-def]
    """The JSON events of one streamed POST, up to [DONE]."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        reply = urllib.request.urlopen(request, timeout=300)
    except urllib.error.HTTPError as e:
        sys.exit(f"error: HTTP {e.code}: {e.read().decode(errors='replace')[:500]}")
    with reply:
        for raw in reply:
            line = raw.decode().strip()
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--wait", type=float, default=0, help="seconds to wait for the server to be ready")
    parser.add_argument("--pid", type=int, help="stop waiting when this process ends")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    if args.wait:
        wait_ready(args.url, args.wait, args.pid)
    sys.stdout.write(f"\n> {args.question}\n\n")
    body = {
        "model": "glm-5.3-flash",
        "messages": [{"role": "user", "content": args.question}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": args.max_tokens,
    }
    channel, usage, started = "", None, time.monotonic()
    for event in events(f"{args.url}/v1/chat/completions", body):
        if "error" in event:
            sys.exit(f"\nerror: {event['error'].get('message')}")
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            for name in ("reasoning_content", "content"):
                piece = choice["delta"].get(name)
                if piece:
                    if name != channel:
                        sys.stdout.write(("\n\n" if channel else "") + f"[{name}] ")
                    sys.stdout.write(piece)
                    sys.stdout.flush()
                    channel = name
    if not channel or not usage or not usage.get("completion_tokens"):
        sys.exit("\nerror: the stream ended without an answer")
    seconds = time.monotonic() - started
    sys.stdout.write(f"\n\n{usage['completion_tokens']} tokens in {seconds:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
