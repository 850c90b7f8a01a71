"""A parsed conversation as work for the engine: rendered, encoded, fitted into the context, one stream a choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from glm53.engine.protocol import Engine
from glm53.errors import RequestError

from .generation import Work, give_each, stop_ids
from .jobs import Job
from .prompt import Prompt, fit
from .protocol.constraints import chat_constraint
from .protocol.output import OutputParser, new_call_id
from .protocol.requests import ChatCall
from .state import ServerState


@dataclass(frozen=True, slots=True)
class ChatWork:
    """A conversation ready for `generation.submit`."""

    call: ChatCall
    prompt: Prompt
    works: list[Work]


def render_prompt(state: ServerState, call: ChatCall, context: int | None = None) -> Prompt:
    """Token ids of the conversation, for a `context` or only to be counted. Raises RequestError if a Jinja template
    refuses it, PromptTooLong where it exceeds the context by far."""
    return state.prompts.chat(call.messages, call.tools, call.chat, call.template_kwargs, context=context)


def chat_work(state: ServerState, engine: Engine, call: ChatCall, new_id: Callable[[], str] = new_call_id) -> ChatWork:
    """Everything that can be refused is refused here. Raises RequestError or PromptTooLong. May run on any thread."""
    decoding = call.decoding
    check_choices(state, decoding.n)
    prompt = render_prompt(state, call, engine.info.context)
    max_tokens = fit(len(prompt.ids), decoding.max_tokens, engine.info.context)
    works = [
        Work(
            prompt_ids=prompt.ids,
            max_tokens=max_tokens,
            parser=OutputParser(
                state.tokenizer,
                thinking_open=prompt.thinking,
                tools=call.tools,
                stop=decoding.stop,
                single_call=not call.parallel_tool_calls,
                keep_tokens=decoding.top_logprobs is not None,
                new_id=new_id,
            ),
            seed_offset=index,
        )
        for index in range(decoding.n)
    ]
    return ChatWork(call, prompt, works)


async def constrain(job: Job, work: ChatWork) -> None:
    """Compile what the answer must look like, if anything, for each choice. Raises RequestError."""
    state = job.state
    call, stops = work.call, stop_ids(work.call.decoding, state)
    if call.decoding.response_format is None and call.thinking_budget is None and not call.tool_choice.forced:
        return

    def compile_all() -> None:
        first = chat_constraint(state.grammars, call, thinking_open=work.prompt.thinking, stop_ids=stops)
        give_each(work.works, first)

    await state.run_compiling(compile_all)


def check_choices(state: ServerState, n: int) -> None:
    """Raise RequestError if one request asks for more answers than this server allows."""
    limit = state.options.max_n
    if n > limit:
        message = f"Invalid 'n': this server answers at most {limit} times per request (setting max_n), not {n}."
        raise RequestError(message, param="n", code="integer_above_max_value")
