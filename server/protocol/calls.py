"""One tool call on its way: the model's keys and values to the JSON text of its arguments, in order of arrival.

States of a call: held -> flowing -> ended. It is held until its first value is complete or has grown long, so that a
short call cut off by the token limit never shows; a flowing call that is cut off stays an incomplete JSON text.
String values flow as they arrive; all others wait for their end, because only then is their type known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from json.encoder import encode_basestring
from typing import Any

from .events import Event, ToolCallArgs, ToolCallEnd, ToolCallStart
from .schema import STRING, argument_types, convert, to_json

HOLD_CHARS = 256


class CallBuilder:
    """Feed it keys and value texts; events go to `emit`. `parameters` is the tool's JSON schema or None."""

    def __init__(
        self, emit: Callable[[Event], None], index: int, call_id: str, name: str, parameters: Mapping[str, Any] | None
    ) -> None:
        self._emit = emit
        self._index = index
        self._id = call_id
        self._name = name
        self._parameters = parameters
        self._held: list[str] | None = []
        self._held_chars = 0
        self._opened = False
        self._streams = False
        self._types = STRING
        self._value: list[str] = []

    def begin_value(self, key: str) -> None:
        """A value for `key` follows."""
        self._types = argument_types(self._parameters, key)
        self._streams = self._types == STRING
        self._write(("," if self._opened else "{") + to_json(key) + (':"' if self._streams else ":"))
        self._opened = True

    def text(self, text: str) -> None:
        """More of the value."""
        if not self._streams:
            self._value.append(text)
        elif text:
            self._write(encode_basestring(text)[1:-1])

    def end_value(self) -> None:
        """The value is complete."""
        if self._streams:
            self._write('"')
        else:
            self._write(to_json(convert("".join(self._value), self._types)))
            self._value = []
        self._flow()

    def end(self) -> None:
        """The call is complete."""
        self._flow()
        self._write("}" if self._opened else "{}")
        self._emit(ToolCallEnd(self._index))

    def _write(self, fragment: str) -> None:
        if self._held is None:
            self._emit(ToolCallArgs(self._index, fragment))
            return
        self._held.append(fragment)
        self._held_chars += len(fragment)
        if self._held_chars > HOLD_CHARS:
            self._flow()

    def _flow(self) -> None:
        if self._held is None:
            return
        self._emit(ToolCallStart(self._index, self._id, self._name))
        if self._held:
            self._emit(ToolCallArgs(self._index, "".join(self._held)))
        self._held = None
