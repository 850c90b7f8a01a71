"""POST /v1/messages and /v1/messages/count_tokens (Anthropic)."""

from __future__ import annotations

from aiohttp import web

from ..chat_work import ChatWork, chat_work, constrain, render_prompt
from ..errors import ErrorReply
from ..generation import Choice, StreamFormat, gather, stream, submit
from ..jobs import Job, admit
from ..middleware import json_response
from ..protocol.anthropic import parse_messages
from ..protocol.anthropic_reply import MessagesReply, new_tool_use_id
from ..protocol.body import parse_body
from ..protocol.events import Event
from ..protocol.sse import frame
from ..protocol.usage import TokenCounts
from ..whole import whole_reply
from ..wire import counts


async def messages(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, streamed or whole."""
    async with admit(request) as job:
        work = await job.prepare(lambda raw: _work(job, raw))
        await constrain(job, work)
        choices = await submit(job, work.works, work.call.decoding)
        reply = MessagesReply(job.state.options.served_name)
        if not work.call.decoding.stream:
            [answer] = await gather(job, choices)
            return await whole_reply(job, lambda: reply.whole(answer, counts(choices[0])))

        def write(choice: Choice, events: list[Event]) -> bytes:
            return reply.events(events)

        form = StreamFormat(
            begin=lambda: reply.begin(TokenCounts(prompt=len(work.prompt.ids))),
            events=write,
            end=lambda: reply.end(counts(choices[0])),
            error=_error,
            done=b"",
        )
        return await stream(job, choices, form)


def _work(job: Job, raw: bytes) -> ChatWork:
    call = parse_messages(parse_body(raw), job.state.defaults())
    return chat_work(job.state, job.engine, call, new_id=new_tool_use_id)


def _error(reply: ErrorReply) -> bytes:
    return frame(reply.anthropic(), "error")


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """How many tokens the same request would read."""
    async with admit(request) as job:
        state = job.state

        def count(raw: bytes) -> int:
            return len(render_prompt(state, parse_messages(parse_body(raw), state.defaults())).ids)

        return json_response({"input_tokens": await job.prepare(count)})
