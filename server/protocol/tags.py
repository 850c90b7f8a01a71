"""The tags of GLM-5.3's output, and what may stand between them."""

from __future__ import annotations

import re

from glm53.chat.segments import SPECIAL_NAMES

VISIBLE_NAMES = frozenset(
    n for n in SPECIAL_NAMES if "think" in n or "tool_" in n or "arg_" in n
)  # the rest, role tokens above all, is never part of an answer
BLANK = re.compile(r"\s+")
NAME = re.compile(r"\s{0,100}([^\s<>]{1,256})\s{0,100}(<arg_key>|</tool_call>|<tool_call>)")
NAME_PREFIX = re.compile(r"\s{0,100}(?:([^\s<>]{1,256})\s{0,100}(<[/a-z_]*)?)?")
NAME_WINDOW = 600  # more than the longest text NAME matches


class Tags:
    """A set of tags to look for. None contains a `<` but its first character, so only the last `<` can be cut."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.longest = max((len(n) for n in names), default=0)
        self.pattern = re.compile("|".join(re.escape(n) for n in names) or r"(?!)")

    def may_start(self, text: str) -> bool:
        """True if `text` is a proper beginning of a tag."""
        return any(n.startswith(text) for n in self.names)


THINK_START = Tags("<think>")
THINK_END = Tags("</think>")
THINK_END_OR_CALL = Tags("</think>", "<tool_call>")
LEAD = Tags("<think>", "</think>")
LEAD_OR_CALL = Tags("<think>", "</think>", "<tool_call>")
CALL = Tags("<tool_call>")
AFTER_NAME = Tags("<arg_key>", "</tool_call>", "<tool_call>")
IN_KEY = Tags("</arg_key>", "<arg_value>", "</tool_call>")
AFTER_KEY = Tags("<arg_value>", "<arg_key>", "</tool_call>")
IN_VALUE = Tags("</arg_value>", "</tool_call>")
AFTER_VALUE = {"</arg_value>": Tags("<arg_key>", "</tool_call>"), "</tool_call>": Tags()}


def is_name_prefix(text: str) -> bool:
    """True if `text` (what follows `<tool_call>` so far) may still become a function name and its next tag."""
    match = NAME_PREFIX.fullmatch(text)
    return match is not None and (match[2] is None or AFTER_NAME.may_start(match[2]))
