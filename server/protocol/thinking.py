"""The many switches by which clients turn reasoning on and off, set its effort and limit it."""

from __future__ import annotations

from dataclasses import dataclass

from glm53.chat import Effort

from .fields import Fields, refuse, wrong_type

EFFORTS: dict[str, Effort | None] = {
    "none": None,
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}
"""The model knows low, high and max; "none" turns reasoning off."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """`budget`: most reasoning tokens before the reasoning is closed, None = no limit."""

    enabled: bool = True
    effort: Effort = "max"
    clear: bool = False
    budget: int | None = None


def parse_thinking(f: Fields, default: Thinking) -> Thinking:
    """Reads reasoning_effort, enable_thinking, thinking, reasoning and chat_template_kwargs. Any "off" wins."""
    template = f.fields("chat_template_kwargs")
    reasoning = f.fields("reasoning")
    effort = _first(_effort(f, "reasoning_effort"), _effort(reasoning, "effort"), _effort(template, "reasoning_effort"))
    switches = [
        _switch(template, "enable_thinking"),
        _switch(template, "thinking"),
        _switch(f, "enable_thinking"),
        _switch(f, "thinking"),
        _switch(reasoning, "enabled"),
        None if effort is None else effort != "none",
    ]
    given = [s for s in switches if s is not None]
    thinking = f.fields("thinking") if isinstance(f.get("thinking"), dict) else Fields({}, f.name("thinking."))
    budgets = [
        f.integer("thinking_budget", 0),
        thinking.integer("budget_tokens", 0),
        reasoning.integer("max_tokens", 0),
        template.integer("thinking_budget", 0),
    ]
    return Thinking(
        enabled=all(given) if given else default.enabled,
        effort=(EFFORTS[effort] if effort else None) or default.effort,
        clear=template.boolean("clear_thinking", f.boolean("clear_thinking", default.clear)),
        budget=next((b for b in budgets if b is not None), default.budget),
    )


def _first(*values: str | None) -> str | None:
    return next((v for v in values if v is not None), None)


def _effort(f: Fields, key: str) -> str | None:
    return f.choice(key, tuple(EFFORTS))


def _switch(f: Fields, key: str) -> bool | None:
    """A boolean, or z.ai's and Anthropic's {"type": "enabled" | "adaptive" | "disabled"}."""
    value = f.get(key)
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, dict) or key != "thinking":
        wrong_type(f.name(key), "a boolean", value)
    kind = value.get("type")
    if kind not in (None, "enabled", "adaptive", "disabled"):
        where = f"{f.name(key)}.type"
        refuse(where, f"Invalid value for '{where}'. Supported values are: 'enabled', 'adaptive', 'disabled'.")
    return None if kind is None else kind != "disabled"
