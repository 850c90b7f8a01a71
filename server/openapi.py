"""The OpenAPI document: what each route takes, kept by hand next to the parsers it describes.

Every optional parameter may be null, and unknown keys are ignored: schemas say only what is looked at.
"""

from __future__ import annotations

from typing import Any

from glm53 import __version__

Schema = dict[str, Any]


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _number(low: float | None = None, high: float | None = None) -> Schema:
    return _maybe({"type": "number"} | _bounds(low, high))


def _integer(low: float | None = None, high: float | None = None) -> Schema:
    return _maybe({"type": "integer"} | _bounds(low, high))


def _bounds(low: float | None, high: float | None) -> Schema:
    out: Schema = {}
    if low is not None:
        out["minimum"] = low
    if high is not None:
        out["maximum"] = high
    return out


STRING: Schema = {"type": "string"}
FLAG = _maybe({"type": "boolean"})
OBJECT: Schema = {"type": "object"}
TEXTS: Schema = {"anyOf": [STRING, {"type": "array", "items": STRING}, {"type": "null"}]}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}

FORMAT = _maybe({"type": "object", "properties": {"type": STRING}, "required": ["type"]})
EFFORT = _maybe({"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max"]})
TOOL_CHOICE: Schema = {"anyOf": [{"enum": ["auto", "none", "required"]}, OBJECT, {"type": "null"}]}

DRAW: Schema = {
    "temperature": _number(0, 100),
    "top_p": _number(0, 1),
    "top_k": _integer(-1),
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0.01, 100),
    "seed": _integer(),
    "sampling_seed": _integer(),
    "logit_bias": _maybe({"type": "object", "additionalProperties": {"type": "number"}}),
    "stop_token_ids": _maybe(IDS),
    "ignore_eos": FLAG,
}
"""How tokens are drawn and which end the answer: every endpoint that generates takes these."""

REASONING: Schema = {"effort": EFFORT, "enabled": FLAG, "max_tokens": _integer(0)}
THINKING: Schema = {
    "reasoning_effort": EFFORT,
    "enable_thinking": FLAG,
    "thinking": {"anyOf": [{"type": "boolean"}, OBJECT, {"type": "null"}]},
    "reasoning": _maybe({"type": "object", "properties": REASONING}),
    "thinking_budget": _integer(0),
    "clear_thinking": FLAG,
    "chat_template_kwargs": _maybe(OBJECT),
}

STREAM: Schema = {
    "stream": FLAG,
    "stream_options": _maybe({"type": "object", "properties": {"include_usage": FLAG}}),
}

OPENAI: Schema = {
    **DRAW,
    **STREAM,
    "stop": TEXTS,
    "max_tokens": _integer(-1),
    "max_completion_tokens": _integer(-1),
    "n": _integer(1),
    "response_format": FORMAT,
}

PARTS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": STRING},
        "required": ["type", "text"],
    },
}
CONTENT: Schema = {"anyOf": [STRING, PARTS]}

MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": CONTENT,
        "reasoning_content": _maybe(STRING),
        "tool_calls": _maybe({"type": "array", "items": OBJECT}),
        "tool_call_id": _maybe(STRING),
    },
    "required": ["role", "content"],
}

TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": STRING, "description": STRING, "parameters": OBJECT},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}

CHAT: Schema = {
    "type": "object",
    "properties": {
        "model": STRING,
        "messages": {"type": "array", "items": MESSAGE, "minItems": 1},
        "tools": _maybe({"type": "array", "items": TOOL}),
        "tool_choice": TOOL_CHOICE,
        "parallel_tool_calls": FLAG,
        "logprobs": FLAG,
        "top_logprobs": _integer(0, 20),
        "add_generation_prompt": FLAG,
        "continue_final_message": FLAG,
        "prompt_progress": FLAG,
        **THINKING,
        **OPENAI,
    },
    "required": ["messages"],
}

COMPLETION: Schema = {
    "type": "object",
    "properties": {
        "model": STRING,
        "prompt": {"anyOf": [STRING, {"type": "array", "items": {"anyOf": [STRING, {"type": "integer"}, IDS]}}]},
        "echo": FLAG,
        "logprobs": _integer(0, 20),
        **OPENAI,
    },
    "required": ["prompt"],
}

SAMPLING_PARAMS: Schema = {
    "type": "object",
    "properties": {
        **DRAW,
        "stop": TEXTS,
        "max_new_tokens": _integer(-1),
        "max_tokens": _integer(-1),
        "n": _integer(1),
        "json_schema": {"anyOf": [STRING, OBJECT, {"type": "boolean"}, {"type": "null"}]},
        "regex": _maybe(STRING),
        "skip_special_tokens": FLAG,
    },
}

GENERATE: Schema = {
    "type": "object",
    "properties": {
        "text": TEXTS,
        "input_ids": _maybe(IDS),
        "sampling_params": _maybe(SAMPLING_PARAMS),
        "return_logprob": FLAG,
        "logprob_start_len": _integer(-1),
        "top_logprobs_num": _integer(0, 20),
        "return_text_in_logprobs": FLAG,
        "rid": _maybe(STRING),
        "stream": FLAG,
    },
}

MESSAGES: Schema = {
    "type": "object",
    "properties": {
        "model": STRING,
        "max_tokens": {"type": "integer", "minimum": 0},
        "system": _maybe(CONTENT),
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {"role": {"enum": ["user", "assistant"]}, "content": CONTENT},
                "required": ["role", "content"],
            },
        },
        "tools": _maybe({"type": "array", "items": OBJECT}),
        "tool_choice": _maybe(OBJECT),
        "stop_sequences": _maybe({"type": "array", "items": STRING}),
        "output_config": _maybe({"type": "object", "properties": {"effort": EFFORT, "format": FORMAT}}),
        "output_format": FORMAT,
        "stream": FLAG,
        **THINKING,
        **DRAW,
    },
    "required": ["messages", "max_tokens"],
}

SUMMARY = _maybe({"type": "string", "enum": ["auto", "concise", "detailed", "none"]})
RESPONSES: Schema = {
    "type": "object",
    "properties": {
        "model": STRING,
        "input": {"anyOf": [STRING, {"type": "array", "items": OBJECT}]},
        "instructions": _maybe(STRING),
        "tools": _maybe({"type": "array", "items": OBJECT}),
        "tool_choice": TOOL_CHOICE,
        "parallel_tool_calls": FLAG,
        "text": _maybe({"type": "object", "properties": {"format": FORMAT}}),
        "max_output_tokens": _integer(-1),
        "top_logprobs": _integer(0, 20),
        "include": _maybe({"type": "array", "items": STRING}),
        "metadata": _maybe(OBJECT),
        "store": FLAG,
        "stream": FLAG,
        **THINKING,
        "reasoning": _maybe({"type": "object", "properties": {**REASONING, "summary": SUMMARY}}),
        **DRAW,
    },
    "required": ["input"],
}

TOKENIZE: Schema = {
    "type": "object",
    "properties": {**CHAT["properties"], "prompt": TEXTS, "text": TEXTS},
}
DETOKENIZE: Schema = {
    "type": "object",
    "properties": {"tokens": {"anyOf": [IDS, {"type": "array", "items": IDS}]}},
    "required": ["tokens"],
}

POSTS: dict[str, tuple[str, Schema]] = {
    "/v1/chat/completions": ("Chat completion (OpenAI)", CHAT),
    "/v1/completions": ("Text completion (OpenAI)", COMPLETION),
    "/v1/responses": ("Response (OpenAI, minimal: stateless)", RESPONSES),
    "/v1/messages": ("Message (Anthropic)", MESSAGES),
    "/v1/messages/count_tokens": ("Tokens of a message request (Anthropic)", MESSAGES),
    "/generate": ("Completion (SGLang)", GENERATE),
    "/tokenize": ("Text or messages to token ids", TOKENIZE),
    "/detokenize": ("Token ids to text", DETOKENIZE),
}
GETS: dict[str, str] = {
    "/v1/models": "The served model",
    "/v1/models/{id}": "One model",
    "/health": "200 when ready; ?deep=1 generates a token",
    "/health_generate": "Generates a token (SGLang)",
    "/stats": "Live requests and counters",
    "/server_info": "What is loaded, and warnings",
    "/model_info": "Short description (SGLang)",
    "/metrics": "Prometheus metrics",
}
STREAMING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate")
ERRORS = {
    "400": "The request is malformed or cannot be served as asked",
    "401": "No valid API key",
    "403": "From a web page that may not call",
    "404": "No such model",
    "413": "Body too large",
    "415": "Not JSON",
    "503": "Loading, draining or the queue is full; see Retry-After",
}


def _responses(path: str) -> Schema:
    content: Schema = {"text/plain" if path == "/metrics" else "application/json": {"schema": {}}}
    if path in STREAMING:
        content["text/event-stream"] = {"schema": STRING}
    errors = {s: {"description": d, "content": {"application/json": {"schema": OBJECT}}} for s, d in ERRORS.items()}
    return {"200": {"description": "OK", "content": content}, **errors}


def document(served_name: str) -> Schema:
    """The OpenAPI 3.1 document."""
    paths: Schema = {}
    for path, title in GETS.items():
        get: Schema = {"summary": title, "responses": _responses(path)}
        if "{id}" in path:
            get["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {**STRING, "minLength": 1}}]
        paths[path] = {"get": get}
    for path, (title, schema) in POSTS.items():
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"summary": title, "requestBody": body, "responses": _responses(path)}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "glm53", "version": __version__, "description": f"Serves {served_name}"},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
        "paths": paths,
    }
