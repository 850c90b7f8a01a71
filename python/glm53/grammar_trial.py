"""Grammars that may never finish compiling, tried first in a process of their own with little time and memory.

llguidance's limits do not hold where several patterns apply to one string, or properties have patterns for names: it
looks for a text that matches all of them, in steps that double with each, and neither time nor memory ends that. A
thread cannot be ended, a process can. Run as a program, this file reads a grammar and writes why it is refused.

Cost of a trial: 0.1 s of another process. Only grammars that `is_risky` finds have one, and one at a time.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# A tenth of llguidance's own limits: a mask must cost the engine's thread milliseconds, whatever a client sends.
LIMITS = LLParserLimits(initial_lexer_fuel=100_000, step_lexer_fuel=20_000)
MOST_CHARS = 1 << 18  # half a second and 100 MB to compile, at worst
FEW_PATTERNS = 8  # compiled within milliseconds even if all of them apply to one string
PATTERN = re.compile(r'"(pattern|format|patternProperties)":')
CPU_S = 1
MEMORY_BYTES = 1 << 30
_PATIENCE_S = 60.0  # for CPU_S of a busy machine
_one_at_a_time = threading.Lock()


def is_risky(grammar: str) -> bool:
    """Whether patterns in the JSON schemas of `grammar` may meet in a number that matters."""
    found = PATTERN.findall(grammar)
    return len(found) > FEW_PATTERNS or "patternProperties" in found


def too_big(chars: int) -> str:
    """What a client is told of a grammar, or a source of one, of more than MOST_CHARS."""
    return f"it is too big: {chars:,} characters as a grammar; at most {MOST_CHARS:,} are compiled"


def refusal(grammar: str, tokenizer: LLTokenizer) -> str:
    """Why llguidance cannot enforce `grammar`, or should not try; "" if it can."""
    if len(grammar) > MOST_CHARS:
        return too_big(len(grammar))
    if is_risky(grammar) and (reason := _trial(grammar)):
        return reason
    return str(LLMatcher.validate_grammar(grammar, tokenizer, limits=LIMITS))


def _trial(grammar: str) -> str:
    command = [sys.executable, "-I", __file__]
    with _one_at_a_time:
        try:
            done = subprocess.run(
                command,
                input=grammar.encode("utf-8", "replace"),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "it takes too long to compile"
        except OSError as e:
            return f"it has many patterns, and they cannot be tried here ({e.strerror})"
    if done.returncode:
        return f"its patterns take more than {CPU_S} s or {MEMORY_BYTES >> 30} GiB to compile together; use fewer"
    return done.stdout.decode("utf-8", "replace")


def main() -> None:
    """Read a grammar from standard input, write the reason against it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    grammar = sys.stdin.buffer.read().decode()
    sys.stdout.write(LLMatcher.validate_grammar(grammar, LLTokenizer("byte"), limits=LIMITS))


if __name__ == "__main__":
    main()
