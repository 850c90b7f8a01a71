"""POST /v1/responses (OpenAI): stateless but for items a client may refer to, which is what agents use of it."""

from __future__ import annotations

import time
from dataclasses import replace

from aiohttp import web

from ..chat_work import ChatWork, chat_work, constrain
from ..errors import ErrorReply
from ..generation import Choice, StreamFormat, gather, stream, submit
from ..jobs import admit
from ..protocol.body import parse_body
from ..protocol.events import Event
from ..protocol.json_parts import Finished
from ..protocol.responses import ResponsesCall, parse_responses
from ..protocol.responses_reply import ResponsesReply
from ..whole import whole_reply
from ..wire import counts, token_logprobs


async def responses(request: web.Request) -> web.StreamResponse:
    """Answer a list of items, streamed or whole."""
    async with admit(request) as job:
        state = job.state

        def prepare(raw: bytes) -> tuple[ResponsesCall, ChatWork]:
            call = parse_responses(parse_body(raw), state.defaults(), state.items.get)
            work = chat_work(state, job.engine, call.chat)
            return replace(call, echo={name: Finished(value) for name, value in call.echo.items()}), work

        call, work = await job.prepare(prepare)
        await constrain(job, work)
        choices = await submit(job, work.works, work.call.decoding)
        reply = ResponsesReply(
            state.options.served_name, int(time.time()), call, lambda tokens: [*token_logprobs(tokens, state.tokenizer)]
        )

        def keep() -> None:
            if call.keep:
                state.items.put(reply.items)

        if not work.call.decoding.stream:
            [answer] = await gather(job, choices)
            response = await whole_reply(job, lambda: reply.whole(answer, counts(choices[0])))
            keep()
            return response

        def write(choice: Choice, events: list[Event]) -> bytes:
            return reply.events(events)

        def failed(error: ErrorReply) -> bytes:
            return reply.failed(error.code or "server_error", error.message)

        def end() -> bytes:
            last = reply.end(counts(choices[0]))
            keep()
            return last

        form = StreamFormat(reply.begin, write, end, failed, done=b"")
        return await stream(job, choices, form)
