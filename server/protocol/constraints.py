"""The constraint a request puts on its answer: format, forced tool call, reasoning budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm53.engine.protocol import Constraint
from glm53.errors import RequestError
from glm53.grammar import Grammars, ThinkingConstraint

from .requests import ChatCall
from .sampling import ResponseFormat


def text_constraint(
    grammars: Grammars, response_format: ResponseFormat | None, stop_ids: frozenset[int]
) -> Constraint | None:
    """For plain completions, from the first token on. Raises RequestError for an unsupported schema."""
    if response_format is None:
        return None
    if response_format.kind == "regex":
        return grammars.regex(str(response_format.schema), stop_ids)
    return grammars.json_schema(_schema(response_format), stop_ids)


def chat_constraint(
    grammars: Grammars, call: ChatCall, *, thinking_open: bool, stop_ids: frozenset[int]
) -> Constraint | None:
    """For one answer to a conversation; others get a copy. Raises RequestError for an unsupported schema."""
    inner = _answer_constraint(grammars, call, stop_ids)
    if inner is not None and call.chat.continue_final and not call.tool_choice.forced:
        _accept_prefill(grammars, inner, call.messages[-1].content)
    if inner is None and call.thinking_budget is None:
        return None
    return ThinkingConstraint(
        grammars.tokenizer,
        inner,
        thinking_open=thinking_open,
        stop_ids=stop_ids,
        budget=call.thinking_budget,
        call_ends=bool(call.tools),
    )


def _accept_prefill(grammars: Grammars, constraint: Constraint, text: str) -> None:
    """The message to be continued is the beginning of what the grammar describes."""
    for token_id in grammars.tokenizer.encode(text):
        constraint.accept(token_id)
    if constraint.failure:
        message = "The message to be continued does not begin an answer in the 'response_format'."
        raise RequestError(message, param="response_format", code="invalid_value")


def _answer_constraint(grammars: Grammars, call: ChatCall, stop_ids: frozenset[int]) -> Constraint | None:
    fmt = call.decoding.response_format
    if call.tool_choice.forced:
        tools = [t for t in call.tools if call.tool_choice.name in (None, t.name)]
        parallel = call.parallel_tool_calls and call.tool_choice.mode == "required"
        return grammars.tool_calls(tools, stop_ids, parallel=parallel)
    if fmt is not None and fmt.kind != "regex" and call.tools:
        return grammars.tool_calls(call.tools, stop_ids, parallel=call.parallel_tool_calls, or_schema=_schema(fmt))
    return text_constraint(grammars, fmt, stop_ids)


def _schema(fmt: ResponseFormat) -> Mapping[str, Any]:
    return fmt.schema if isinstance(fmt.schema, Mapping) else {"type": "object"}
