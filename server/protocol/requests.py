"""Request bodies of every endpoint to frozen calls: normalised, defaults filled in, every edge decided.

All functions are pure and raise RequestError (HTTP 400) in OpenAI's wording, naming the field. Unknown fields are
ignored and null counts as absent, because clients send both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from glm53.chat import ChatOptions, Message, Tool, parse_tools
from glm53.chat import parse_messages as parse_chat_messages
from glm53.engine.protocol import SamplingParams
from glm53.json_text import check_inner

from .body import parse_body
from .fields import Fields, missing, refuse, wrong_type
from .sampling import (
    MAX_LOGPROBS,
    ResponseFormat,
    json_schema_format,
    parse_ids,
    parse_max_tokens,
    parse_n,
    parse_response_format,
    parse_sampling,
    parse_stop,
    parse_stop_ids,
    refuse_other_servers,
)
from .thinking import Thinking, parse_thinking
from .tools import ToolChoice, choose_tools

COMPLETION_MAX_TOKENS = 16  # what the Completions API documents
GENERATE_MAX_TOKENS = 128  # SGLang's default
MAX_PROMPTS = 64

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """What a request gets for fields it leaves out. `vocab_size` bounds token ids that clients send."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    thinking: Thinking = field(default_factory=Thinking)
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class Decoding:
    """How to generate, common to all endpoints. `max_tokens` None = all that the context leaves, 0 = only read the
    prompt. `top_logprobs` None = no log-probabilities."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One conversation to answer. `tools` are those the model is shown; `template_kwargs` go to a Jinja template."""

    messages: tuple[Message, ...]
    decoding: Decoding = field(default_factory=Decoding)
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    chat: ChatOptions = field(default_factory=ChatOptions)
    thinking_budget: int | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """Plain text completion of each prompt."""

    prompts: tuple[Prompt, ...]
    decoding: Decoding
    echo: bool = False


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """SGLang's /generate. `batch`: answer with a list. `logprob_start`: prompt position scores start at, -1 = none."""

    prompts: tuple[Prompt, ...]
    batch: bool
    decoding: Decoding
    return_logprob: bool = False
    logprob_start: int = -1
    text_in_logprobs: bool = False
    show_special: bool = False
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """Texts to encode (`batch`: answer with lists), or a conversation to render and encode."""

    texts: tuple[str, ...] = ()
    batch: bool = False
    chat: ChatCall | None = None


def _stream(f: Fields) -> tuple[bool, bool]:
    """(stream, include_usage)"""
    stream = f.boolean("stream")
    return stream, stream and f.fields("stream_options").boolean("include_usage")


def parse_chat(body: Mapping[str, Any], defaults: RequestDefaults) -> ChatCall:
    """/v1/chat/completions."""
    f = Fields(body)
    messages = parse_chat_messages(f.get("messages"))
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if f.get(old) not in (None, [], "none", "auto"):
            refuse(old, f"'{old}' is not supported; use '{new}'.", "unsupported_parameter")
    refuse_other_servers(f, "'response_format'")
    modalities = f.raw.get("modalities")
    if isinstance(modalities, list) and any(m != "text" for m in modalities):
        refuse("modalities", "Invalid 'modalities': this model writes text only.", "unsupported_parameter")
    tools, choice = choose_tools(parse_tools(f.get("tools")), f)
    thinking = parse_thinking(f, defaults.thinking)
    stream, include_usage = _stream(f)
    decoding = Decoding(
        sampling=parse_sampling(f, defaults.sampling, defaults.vocab_size),
        max_tokens=parse_max_tokens(f, "max_completion_tokens", "max_tokens"),
        stop=parse_stop(f),
        stop_ids=parse_stop_ids(f),
        ignore_eos=f.boolean("ignore_eos"),
        n=parse_n(f),
        stream=stream,
        include_usage=include_usage,
        top_logprobs=_chat_logprobs(f),
        response_format=parse_response_format(f),
    )
    return ChatCall(
        messages=messages,
        decoding=decoding,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=f.boolean("parallel_tool_calls", True),
        chat=_chat_options(f, messages, thinking),
        thinking_budget=thinking.budget,
        template_kwargs=f.fields("chat_template_kwargs").raw,
    )


def _chat_options(f: Fields, messages: tuple[Message, ...], thinking: Thinking) -> ChatOptions:
    continue_final = f.boolean("continue_final_message")
    prompt = f.boolean("add_generation_prompt", not continue_final)
    if continue_final and prompt:
        message = "'continue_final_message' and 'add_generation_prompt' cannot both be true."
        refuse("continue_final_message", message)
    if continue_final and (messages[-1].role != "assistant" or messages[-1].tool_calls):
        refuse(
            "continue_final_message", "'continue_final_message' needs an assistant message at the end, without calls."
        )
    return ChatOptions(
        thinking=thinking.enabled,
        effort=thinking.effort,
        clear_thinking=thinking.clear,
        add_generation_prompt=prompt,
        continue_final=continue_final,
    )


def _chat_logprobs(f: Fields) -> int | None:
    wanted = f.boolean("logprobs")
    top = f.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        refuse("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
    return (top or 0) if wanted else None


def _prompts(raw: object, param: str, vocab_size: int | None) -> tuple[tuple[Prompt, ...], bool]:
    """(prompts, given as a list of prompts) of a string, a list of strings, ids, or a list of lists of ids."""
    if isinstance(raw, str):
        items: list[Any] = [raw]
    elif not isinstance(raw, list):
        wrong_type(param, "a string, an array of strings, or token ids", raw)
    elif raw and not isinstance(raw[0], str | list):
        items = [raw]
    else:
        items = raw
    batch = items is raw
    if not items or len(items) > MAX_PROMPTS:
        refuse(param, f"Invalid '{param}': expected 1 to {MAX_PROMPTS} prompts, but got {len(items)}.")
    prompts: list[Prompt] = []
    for i, item in enumerate(items):
        where = f"{param}[{i}]" if batch else param
        if not isinstance(item, str | list):
            wrong_type(where, "a string or an array of token ids", item)
        if not item:
            refuse(where, f"Invalid '{where}': the prompt is empty.")
        prompts.append(item if isinstance(item, str) else parse_ids(item, where, vocab_size))
    return tuple(prompts), batch


def parse_completion(body: Mapping[str, Any], defaults: RequestDefaults) -> CompletionCall:
    """/v1/completions."""
    f = Fields(body)
    if f.get("prompt") is None:
        missing("prompt")
    if f.get("suffix"):
        refuse("suffix", "'suffix' is not supported by this model.", "unsupported_parameter")
    refuse_other_servers(f, "'response_format'")
    prompts, _ = _prompts(f.get("prompt"), "prompt", defaults.vocab_size)
    stream, include_usage = _stream(f)
    given = f.given("max_tokens", "max_completion_tokens")
    decoding = Decoding(
        sampling=parse_sampling(f, defaults.sampling, defaults.vocab_size),
        max_tokens=parse_max_tokens(f, "max_tokens", "max_completion_tokens") if given else COMPLETION_MAX_TOKENS,
        stop=parse_stop(f),
        stop_ids=parse_stop_ids(f),
        ignore_eos=f.boolean("ignore_eos"),
        n=parse_n(f),
        stream=stream,
        include_usage=include_usage,
        top_logprobs=f.integer("logprobs", 0, MAX_LOGPROBS),
        response_format=parse_response_format(f),
    )
    return CompletionCall(prompts, decoding, f.boolean("echo"))


def parse_generate(body: Mapping[str, Any], defaults: RequestDefaults) -> GenerateCall:
    """/generate: `text` or `input_ids`, with `sampling_params`."""
    f = Fields(body)
    if (f.get("text") is None) == (f.get("input_ids") is None):
        refuse("text", "Exactly one of 'text' and 'input_ids' must be given.")
    key = f.given("text", "input_ids") or "text"
    raw = f.get(key)
    if key == "text" and not (isinstance(raw, str) or (isinstance(raw, list) and all(isinstance(t, str) for t in raw))):
        wrong_type("text", "a string or an array of strings", raw)
    if key == "input_ids" and isinstance(raw, str):
        wrong_type("input_ids", "an array of integers", raw)
    prompts, batch = _prompts(raw, key, defaults.vocab_size)
    refuse_other_servers(f, "'sampling_params.json_schema'")
    sampling = f.fields("sampling_params")
    given = sampling.given("max_new_tokens", "max_tokens")
    wanted = f.boolean("return_logprob")
    decoding = Decoding(
        sampling=parse_sampling(sampling, defaults.sampling, defaults.vocab_size),
        max_tokens=parse_max_tokens(sampling, "max_new_tokens", "max_tokens") if given else GENERATE_MAX_TOKENS,
        stop=parse_stop(sampling),
        stop_ids=parse_stop_ids(sampling),
        ignore_eos=sampling.boolean("ignore_eos"),
        n=parse_n(sampling),
        stream=f.boolean("stream"),
        top_logprobs=(f.integer("top_logprobs_num", 0, MAX_LOGPROBS) or 0) if wanted else None,
        response_format=_generate_format(sampling),
    )
    start = f.integer("logprob_start_len", -1)
    return GenerateCall(
        prompts,
        batch,
        decoding,
        return_logprob=wanted,
        logprob_start=-1 if start is None else start,
        text_in_logprobs=f.boolean("return_text_in_logprobs"),
        show_special=not sampling.boolean("skip_special_tokens", True),
        request_id=f.text("rid"),
    )


def _generate_format(f: Fields) -> ResponseFormat | None:
    refuse_other_servers(f, "'json_schema' or 'regex'", known=("json_schema", "regex"))
    schema = f.get("json_schema")
    if isinstance(schema, str):
        data = schema.encode("utf-8", "replace")
        check_inner(data, f.name("json_schema"))
        schema = parse_body(data)
    if schema is not None:
        return json_schema_format(schema, f.name("json_schema"))
    regex = f.text("regex")
    return ResponseFormat("regex", regex) if regex else None


def parse_tokenize(body: Mapping[str, Any], defaults: RequestDefaults) -> TokenizeCall:
    """/tokenize: `prompt` or `text` (a string or a list), or `messages` as for chat."""
    f = Fields(body)
    if f.get("messages") is not None:
        return TokenizeCall(chat=parse_chat(body, defaults))
    key = f.given("prompt", "text")
    if key is None:
        missing("prompt")
    raw = f.get(key)
    texts = raw if isinstance(raw, list) else [raw]
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            wrong_type(f"{key}[{i}]" if texts is raw else key, "a string", text)
    return TokenizeCall(tuple(texts), batch=texts is raw)


def parse_detokenize(body: Mapping[str, Any], defaults: RequestDefaults) -> tuple[list[tuple[int, ...]], bool]:
    """/detokenize: (each list of ids in `tokens`, given as a list of lists)."""
    raw = body.get("tokens")
    if raw is None:
        missing("tokens")
    if isinstance(raw, list) and raw and isinstance(raw[0], list):
        return [parse_ids(ids, f"tokens[{i}]", defaults.vocab_size) for i, ids in enumerate(raw)], True
    return [parse_ids(raw, "tokens", defaults.vocab_size)], False
