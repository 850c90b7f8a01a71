"""A checkpoint's or a user's own Jinja chat template, sandboxed, rendered into segments.

Special tokens are recognised only where the template itself wrote them: before rendering, the characters that tokens
are made of (`<`, `>`, `[`, `]`, `|`, `/`) are replaced by stand-ins in every string of the client, and put back after
the output has been split at the names of special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from glm53.errors import ConfigError, RequestError

from .messages import Message, Tool
from .render import ChatOptions, open_turn
from .segments import SPECIAL_NAMES, Segment, opens_thinking, plain, special

TOKEN_CHARS = "<>[]|/"
FIRST = 0xFDD0  # U+FDD0..U+FDEF are noncharacters: legal in strings, never meant for interchange
ESCAPE = chr(FIRST + len(TOKEN_CHARS))  # before a stand-in the client typed, and before a letter of a bare token name
_STAND_INS = {ord(c): chr(FIRST + i) for i, c in enumerate(TOKEN_CHARS)}
_HIDE = {**_STAND_INS, **{ord(c): ESCAPE + c for c in (*_STAND_INS.values(), ESCAPE)}}
_SHOW = re.compile(f"{ESCAPE}(.?)|([{chr(FIRST)}-{chr(FIRST + len(TOKEN_CHARS) - 1)}])", re.DOTALL)
_NAMES = re.compile("|".join(re.escape(n) for n in sorted(SPECIAL_NAMES, key=len, reverse=True)))
_BARE = frozenset(re.sub(r"[^A-Za-z_]", "", n) for n in SPECIAL_NAMES)


def _hide(text: str) -> str:
    hidden = text.translate(_HIDE)
    return ESCAPE + hidden if hidden in _BARE else hidden  # "think" between a template's own < and >


def _hide_all(value: Any) -> Any:
    if isinstance(value, str):
        return _hide(value)
    if isinstance(value, Mapping):
        return {_hide(k) if isinstance(k, str) else k: _hide_all(v) for k, v in value.items()}
    return [_hide_all(v) for v in value] if isinstance(value, list | tuple) else value


def _show(text: str) -> str:
    return _SHOW.sub(lambda m: m[1] if m[2] is None else TOKEN_CHARS[ord(m[2]) - FIRST], text)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which templates for models do not want; stand-ins pass through unescaped."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
    return re.sub(r"\\u(fd[de][0-9a-f])", lambda m: chr(int(m[1], 16)), text) if ensure_ascii else text


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class JinjaRenderer:
    """Renders with the template `source`. Raises ConfigError if it is not a template."""

    def __init__(self, source: str, name: str = "chat template") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as e:
            raise ConfigError(f"{name}: not a Jinja template: {e}") from e

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        options: ChatOptions,
        extra: Mapping[str, Any] | None = None,
    ) -> list[Segment]:
        """The prompt as segments; `extra` are further template variables. Raises RequestError if the template fails."""
        body = messages[:-1] if options.continue_final else messages
        variables = {
            **_hide_all(dict(extra or {})),
            "messages": [_hide_all(_as_dict(m)) | {"role": m.role} for m in body],
            "tools": [{"type": "function", "function": _hide_all(t.definition)} for t in tools] if tools else None,
            "enable_thinking": options.thinking,
            "thinking": options.thinking,
            "reasoning_effort": options.effort,
            "clear_thinking": options.clear_thinking,
            "add_generation_prompt": options.add_generation_prompt and not options.continue_final,
        }
        try:
            text = self._template.render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as e:
            reason = _show(str(e))[:200]
            message = f"The chat template cannot render these messages: {reason}"
            raise RequestError(message, param="messages", code="template_error") from e
        out = _split(text)
        if options.continue_final:
            return out + open_turn(messages[-1], thinking=options.thinking)
        if not options.thinking and options.add_generation_prompt and opens_thinking(out):
            out.append(special("</think>"))  # the template does not know the switch
        return out


def _as_dict(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"content": message.content}
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
            for c in message.tool_calls
        ]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    return out


def _split(text: str) -> list[Segment]:
    out: list[Segment] = []
    at = 0
    for match in _NAMES.finditer(text):
        if match.start() > at:
            out.append(plain(_show(text[at : match.start()])))
        out.append(special(match[0]))
        at = match.end()
    if at < len(text):
        out.append(plain(_show(text[at:])))
    return out
