"""The model's tokens to reasoning, content and tool calls.

Output shape: `{reasoning}</think>{content}<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>...</tool_call>`.
Tags are found in the text, whether the model emitted the special token or spelled it, so the result does not depend on
how the text was cut; only text that may still become a tag is held back.

States (`_step`, one method each): reasoning_start -> reasoning -> lead -> content; from reasoning, lead or content to
name -> key -> after_key -> value -> after_value -> key again or lead. "lead" is the blank space where content may
start: it is dropped before a tag, and content before text. Text after `<tool_call>` that is no function name goes back
to where it came from. Only feed() and finish() change the state; one thread; time and memory linear in the text.
"""

from __future__ import annotations

import codecs
import uuid
from collections.abc import Callable, Sequence

from glm53.chat import Tool
from glm53.chat.segments import SPECIAL_NAMES
from glm53.engine.protocol import Finish, Token
from glm53.tokenizer import Tokenizer

from .calls import CallBuilder
from .channels import Channels
from .events import Done, DoneReason, Event
from .scanner import Scanner
from .tags import (
    AFTER_KEY,
    AFTER_VALUE,
    CALL,
    IN_KEY,
    IN_VALUE,
    LEAD,
    LEAD_OR_CALL,
    NAME,
    NAME_PREFIX,
    NAME_WINDOW,
    THINK_END,
    THINK_END_OR_CALL,
    THINK_START,
    VISIBLE_NAMES,
    is_name_prefix,
)


def new_call_id() -> str:
    """An id no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


class OutputParser:
    """Feed tokens, get events; see the module text for the states.

    `thinking_open`: the prompt ended inside `<think>`. `tools` None or empty: `<tool_call>` is plain text. `raw`: no
    tags at all, everything is content. `stop` applies to content only. `single_call`: stop after one call.
    `show_special`: deliver the text of role and other special tokens too. `keep_tokens`: put tokens into ContentText.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        thinking_open: bool,
        tools: Sequence[Tool] | None = None,
        stop: Sequence[str] = (),
        raw: bool = False,
        show_special: bool = False,
        single_call: bool = False,
        keep_tokens: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self.stopped = False
        """True once nothing further can show (a stop string was met, or the one allowed call is complete): cancel."""
        self.tokens = 0
        """Tokens fed, without those behind the place where the answer `stopped`."""
        hidden = frozenset() if show_special else tokenizer.special_ids(SPECIAL_NAMES)
        self._hidden = hidden - tokenizer.special_ids(sorted(VISIBLE_NAMES))
        self._tools = {t.name: t.parameters for t in tools or ()}
        self._single_call = single_call
        self._new_id = new_id
        self._out = Channels(stop, keep_tokens)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._undecoded: list[Token] = []
        self._text = Scanner()
        self._key: list[str] = []
        self._candidate = ""
        self._calls = 0
        self._call: CallBuilder | None = None
        self._thought = False  # the reasoning was closed, by tag or by a call
        self._in_reasoning_tags = THINK_END_OR_CALL if self._tools else THINK_END
        self._lead_tags = LEAD_OR_CALL if self._tools else LEAD
        self._content_tags = CALL if self._tools else None
        self._return: Callable[[], bool] = self._content
        self._step: Callable[[], bool] = self._raw if raw else self._reasoning_start if thinking_open else self._lead

    @property
    def reasoning_tokens(self) -> int:
        """How many of `tokens` were reasoning, its tags included."""
        return self._out.reasoning_tokens

    # -- in and out ----------------------------------------------------------------------------------------------

    def feed(self, tokens: Sequence[Token]) -> list[Event]:
        """Events of these tokens; nothing once `stopped`."""
        if self.stopped or self._text.final:
            return []
        pieces: list[str] = []
        for token in tokens:
            piece = self._decode(b"" if token.id in self._hidden else token.data)
            self._undecoded.append(token)
            if piece:
                self._out.spans.place(self._undecoded, len(piece))
                self._undecoded.clear()
                pieces.append(piece)
        self.tokens += len(tokens)
        if pieces:
            self._text.extend("".join(pieces))
            self._run()
        return self._out.take()

    def finish(self, finish: Finish) -> list[Event]:
        """The rest, and Done. Nothing when called again."""
        if self._text.final:
            return []
        self._text.final = True
        if not self.stopped:
            tail = self._decode(b"", True)
            self._out.spans.place(self._undecoded, len(tail))
            self._text.extend(tail)
            self._run()
        natural = self.stopped or finish.reason == "stop"
        if not self.stopped:
            self._end_of_text(natural)
        step = self._return if self._step == self._name else self._step
        in_reasoning = step in (self._reasoning_start, self._reasoning)
        if in_reasoning:
            self._out.reasoning("", self._out.spans.end)
        self._out.emit(
            Done(
                self._reason(finish, natural),
                self._out.stop_sequence,
                finish.stop_id,
                finish.error,
                natural and in_reasoning and not self._thought and not self._calls,
            )
        )
        return self._out.take()

    def _reason(self, finish: Finish, natural: bool) -> DoneReason:
        if natural:
            return "tool_calls" if self._calls else "stop"
        return finish.reason

    def _run(self) -> None:
        while self._text.more and not self.stopped and self._step():
            pass
        self._text.compact()

    def _stop(self, offset: int) -> None:
        """Nothing behind `offset` shows or counts."""
        self.stopped = True
        self.tokens -= self._out.spans.count_from(offset) + len(self._undecoded)

    def _emit_content(self, text: str) -> None:
        """Content that ends at the position."""
        self._out.content(text, self._text.offset)
        if self._out.stopped_at is not None:
            self._stop(self._out.stopped_at)

    # -- states: each consumes from `_text`; False = wait for more text ------------------------------------------

    def _raw(self) -> bool:
        self._emit_content(self._text.rest())
        return True

    def _reasoning_start(self) -> bool:
        """A `<think>` that repeats the prompt's own is dropped."""
        tag = self._text.here(THINK_START)
        if tag is None:
            return False
        blank = self._text.take_blank()
        self._out.reasoning("" if tag else blank, self._text.offset)
        self._step = self._reasoning
        return True

    def _reasoning(self) -> bool:
        text, tag = self._text.find(self._in_reasoning_tags)
        self._out.reasoning(text, self._text.offset)
        self._text.position += len(tag)
        if tag == "</think>":
            self._close_thinking()
        elif tag:
            self._open_call(self._reasoning)
        return bool(tag)

    def _close_thinking(self) -> None:
        self._out.reasoning("", self._text.offset)
        self._thought = True
        self._step = self._lead

    def _lead(self) -> bool:
        tag = self._text.here(self._lead_tags)
        if tag is None:
            return False
        if tag == "<think>":
            self._text.drop_blank()
            self._out.reasoning("", self._text.offset)
            self._step = self._reasoning
        elif tag == "</think>":
            self._text.drop_blank()
            self._out.skip(self._text.offset)
        elif tag:
            self._open_call(self._lead)
        else:
            self._emit_content(self._text.take_blank())
            self._step = self._content
        return True

    def _content(self) -> bool:
        if self._content_tags is None:
            return self._raw()
        text, tag = self._text.find(self._content_tags)
        self._emit_content(text)
        if tag and not self.stopped:
            self._out.flush(self._text.offset)
            self._text.position += len(tag)
            self._open_call(self._content)
        return bool(tag)

    def _open_call(self, back: Callable[[], bool]) -> None:
        self._return = back
        self._step = self._name

    def _name(self) -> bool:
        match = NAME.match(self._text.buffer, self._text.position)
        if match and self._is_callable(match[1]):
            self._text.position = match.end()
            self._begin_call(match[1])
            self._after_argument(match[2])
        elif not match and is_name_prefix(self._text.buffer[self._text.position : self._text.position + NAME_WINDOW]):
            return False
        else:
            self._not_a_call()
        return True

    def _is_callable(self, name: str) -> bool:
        """In the reasoning only the request's own functions count: a model may talk about the format there."""
        return name in self._tools or self._return != self._reasoning

    def _not_a_call(self) -> None:
        """`<tool_call>` was just text; go on behind it."""
        self._step = self._return
        if self._return == self._reasoning:
            self._out.reasoning("<tool_call>", self._text.offset)
        else:
            self._step = self._content
            self._emit_content(self._text.take_blank() + "<tool_call>")

    def _begin_call(self, name: str) -> None:
        self._thought = True
        self._text.drop_blank()
        self._out.skip(self._text.offset)
        self._call = CallBuilder(self._out.emit, self._calls, self._new_id(), name, self._tools.get(name))

    def _after_argument(self, tag: str) -> None:
        """What follows a name or a value."""
        if tag == "<arg_key>":
            self._step = self._key_text
        else:
            self._end_call()
            if tag == "<tool_call>" and not self.stopped:  # the model forgot to close the one before
                self._open_call(self._lead)

    def _end_call(self) -> None:
        assert self._call is not None
        self._call.end()
        self._call = None
        self._calls += 1
        self._out.skip(self._text.offset)
        self._step = self._lead
        if self._single_call:
            self._stop(self._text.offset)

    def _key_text(self) -> bool:
        text, tag = self._text.find(IN_KEY)
        self._key.append(text)
        self._text.position += len(tag)
        if tag:
            self._out.skip(self._text.offset)
            self._after_key_tag(tag)
        return bool(tag)

    def _after_key_tag(self, tag: str) -> None:
        if tag == "</arg_key>":
            self._step = self._after_key
        elif tag == "<arg_value>":
            self._begin_value()
        else:
            self._key.clear()
            self._after_argument(tag)

    def _after_key(self) -> bool:
        tag = self._text.here(AFTER_KEY)
        if tag is None:
            return False
        blank = self._text.take_blank()
        if tag in ("<arg_key>", "</tool_call>"):  # a key without a value
            self._key.clear()
            self._after_argument(tag)
        else:
            self._begin_value()
            if not tag:
                self._value_text(blank)
        return True

    def _begin_value(self) -> None:
        assert self._call is not None
        self._call.begin_value("".join(self._key).strip())
        self._key.clear()
        self._step = self._value

    def _value_text(self, text: str) -> None:
        assert self._call is not None
        self._call.text(text)
        self._out.skip(self._text.offset)

    def _value(self) -> bool:
        text, tag = self._text.find(IN_VALUE)
        self._value_text(text)
        self._text.position += len(tag)
        if tag:
            self._candidate = tag
            self._step = self._after_value
        return bool(tag)

    def _after_value(self) -> bool:
        """`</arg_value>` ends a value only before `<arg_key>`, `</tool_call>` or the end; else it belongs to it."""
        tag = self._text.here(AFTER_VALUE[self._candidate])
        if tag is None:
            return False
        blank = self._text.take_blank()
        if tag:
            self._end_value()
            self._after_argument(tag)
        else:
            self._step = self._value
            self._value_text(self._candidate + blank)
        return True

    def _end_value(self) -> None:
        assert self._call is not None
        self._call.end_value()

    # -- the end of the text -------------------------------------------------------------------------------------

    def _end_of_text(self, natural: bool) -> None:
        """Held text finds its place; a call that the model left open counts if it stopped by itself."""
        if self._step == self._reasoning_start:
            self._out.reasoning(self._text.take_blank(), self._text.offset)
        elif self._step == self._lead and not self._calls:
            self._emit_content(self._text.take_blank())
        elif self._step == self._name and natural:
            match = NAME_PREFIX.match(self._text.buffer, self._text.position)
            if match and match[1] and self._is_callable(match[1]):
                self._begin_call(match[1])
                self._end_call()
            elif self._return == self._reasoning:
                self._out.reasoning("<tool_call>" + self._text.buffer[self._text.position :], self._text.offset)
        elif self._call and natural:
            if self._step in (self._value, self._after_value):
                self._end_value()
            self._end_call()
        if not self.stopped:
            self._out.flush(self._text.offset)
