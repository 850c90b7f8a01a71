"""Conversations to prompts: normalised messages, GLM-5.3's chat format, and sandboxed Jinja templates."""

from .jinja import JinjaRenderer
from .messages import Message, Tool, ToolCall, parse_messages, parse_tools
from .render import ChatOptions, Effort, render
from .segments import Segment, encode, opens_thinking, plain, special, to_text

__all__ = [
    "ChatOptions",
    "Effort",
    "JinjaRenderer",
    "Message",
    "Segment",
    "Tool",
    "ToolCall",
    "encode",
    "opens_thinking",
    "parse_messages",
    "parse_tools",
    "plain",
    "render",
    "special",
    "to_text",
]
