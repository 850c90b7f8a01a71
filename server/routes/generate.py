"""SGLang-shaped routes: POST /generate, /tokenize, /detokenize."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from glm53.engine.protocol import Token, TokenScore

from ..chat_work import render_prompt
from ..errors import ErrorReply
from ..generation import Choice, Frames, StreamFormat, gather, stream, submit
from ..jobs import Job, admit
from ..protocol.body import parse_body
from ..protocol.events import Answer, ContentText, Done, Event
from ..protocol.json_parts import JsonList
from ..protocol.requests import GenerateCall, parse_detokenize, parse_generate, parse_tokenize
from ..protocol.sse import frame, frame_parts
from ..text_work import TextWork, constrain, scores, text_work
from ..whole import whole_reply
from ..wire import finite


async def generate(request: web.Request) -> web.StreamResponse:
    """Continue text or token ids; with `return_logprob` also score the prompt from `logprob_start_len` on."""
    async with admit(request) as job:
        state = job.state

        def prepare(raw: bytes) -> tuple[GenerateCall, TextWork]:
            call = parse_generate(parse_body(raw), state.defaults())
            special = call.show_special
            return call, text_work(
                state, job.engine, call.prompts, call.decoding, show_special=special, keep_tokens=True
            )

        call, work = await job.prepare(prepare)
        await constrain(job, work, call.decoding)
        scored = await scores(job, work.prompts, call.decoding.top_logprobs or 0) if _wants_scores(call) else None
        reply = _Reply(job, call, work)
        if scored is not None:
            await job.on_thread(lambda: reply.add_scores(scored))
        if scored is not None and call.decoding.max_tokens == 0 and not call.decoding.stream:
            return await whole_reply(job, reply.scores_only)
        choices = await submit(job, work.works, call.decoding)
        if call.decoding.stream:
            return await stream(job, choices, StreamFormat(lambda: b"", reply.events, lambda: b"", reply.error))
        answers = await gather(job, choices)
        return await whole_reply(job, lambda: reply.whole(choices, answers))


def _wants_scores(call: GenerateCall) -> bool:
    return call.return_logprob and call.logprob_start >= 0


class _Logprobs:
    """Scores of the tokens of a prompt or an answer, and of their alternatives, as every event repeats them."""

    def __init__(self) -> None:
        self.tokens = JsonList()
        self.top = JsonList()


class _Reply:
    """Builds SGLang's objects; a stream repeats the whole text so far in each event, as SGLang does by default."""

    def __init__(self, job: Job, call: GenerateCall, work: TextWork) -> None:
        self._job = job
        self._tokenizer = job.state.tokenizer
        self._call = call
        self._work = work
        self._texts = [""] * len(work.works)
        self._ids: list[list[int]] = [[] for _ in work.works]
        self._outputs = [_Logprobs() for _ in work.works]
        self._inputs = [_Logprobs() for _ in work.prompts]

    def add_scores(self, scored: Sequence[Sequence[TokenScore]]) -> None:
        """Scores of each prompt. Long prompts take long: call it on a thread."""
        for logprobs, scores_ in zip(self._inputs, scored, strict=True):
            wanted = scores_[self._call.logprob_start :]
            logprobs.tokens.extend(self._entry(s.id, s.logprob) for s in wanted)
            if self._call.decoding.top_logprobs:
                logprobs.top.extend(
                    None if s.logprob is None else [self._entry(i, v) for i, v in s.top] for s in wanted
                )

    def _add(self, index: int, text: str, tokens: Sequence[Token]) -> None:
        self._texts[index] += text
        self._ids[index] += [t.id for t in tokens]
        if self._call.return_logprob:
            self._outputs[index].tokens.extend(self._entry(t.id, finite(t.logprob)) for t in tokens)
            if self._call.decoding.top_logprobs:
                self._outputs[index].top.extend([self._entry(i, v) for i, v in t.top] for t in tokens)

    def whole(self, choices: Sequence[Choice], answers: Sequence[Answer]) -> Any:
        out = []
        for choice, answer in zip(choices, answers, strict=True):
            self._add(choice.index, answer.content, answer.tokens)
            out.append(self._object(choice, answer.done))
        return out if self._call.batch or len(out) > 1 else out[0]

    def scores_only(self) -> Any:
        """For `max_new_tokens` 0: nothing is generated, so no stream is needed beside the scores."""
        out = [
            {"text": "", "output_ids": [], "meta_info": self._meta(i, len(ids), 0, 0, Done("length"))}
            for i, ids in enumerate(self._work.prompts)
        ]
        return out if self._call.batch else out[0]

    def events(self, choice: Choice, events: list[Event]) -> Frames:
        done = None
        for event in events:
            if isinstance(event, ContentText):
                self._add(choice.index, event.text, event.tokens)
            elif isinstance(event, Done):
                done = event
        return frame_parts(self._object(choice, done) | ({"index": choice.index} if len(self._texts) > 1 else {}))

    def error(self, reply: ErrorReply) -> bytes:
        return frame(reply.openai())

    def _object(self, choice: Choice, done: Done | None) -> dict[str, Any]:
        prompt = len(self._work.works[choice.index].prompt_ids)
        cached = choice.stream.usage.cached_tokens
        meta = self._meta(choice.index, prompt, choice.parser.tokens, cached, done)
        return {
            "text": self._texts[choice.index],
            "output_ids": self._ids[choice.index],
            "meta_info": meta,
        }

    def _meta(self, index: int, prompt: int, completion: int, cached: int, done: Done | None) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self._call.request_id or self._job.id,
            "finish_reason": _finish(done, completion),
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "cached_tokens": cached,
            "e2e_latency": round(time.monotonic() - self._job.started_s, 6),
        }
        if self._call.return_logprob:
            self._add_logprobs(meta, index)
        return meta

    def _add_logprobs(self, meta: dict[str, Any], index: int) -> None:
        sides = {"input": self._inputs[index // self._call.decoding.n], "output": self._outputs[index]}
        for side, logprobs in sides.items():
            meta[f"{side}_token_logprobs"] = logprobs.tokens
            if self._call.decoding.top_logprobs:
                meta[f"{side}_top_logprobs"] = logprobs.top

    def _entry(self, token_id: int, logprob: float | None) -> list[Any]:
        """[logprob, id, text or null]; the first token of a prompt has no logprob."""
        text = self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return [
            None if logprob is None else finite(logprob),
            token_id,
            text if self._call.text_in_logprobs else None,
        ]


def _finish(done: Done | None, completion: int) -> dict[str, Any] | None:
    if done is None:
        return None
    if done.reason == "length":
        return {"type": "length", "length": completion}
    return {"type": "stop", "matched": done.stop_id if done.stop_sequence is None else done.stop_sequence}


async def tokenize(request: web.Request) -> web.StreamResponse:
    """Token ids of texts, or of a conversation as the chat route would send it to the model."""
    async with admit(request) as job:
        state = job.state

        def work(raw: bytes) -> dict[str, Any]:
            call = parse_tokenize(parse_body(raw), state.defaults())
            limit = {"max_model_len": job.engine.info.context}
            if call.chat is not None:
                ids = render_prompt(state, call.chat).ids
                return {"tokens": ids, "count": len(ids), **limit}
            tokens = state.prompts.count_only(call.texts)
            if call.batch:
                return {"tokens": tokens, "count": [len(t) for t in tokens], **limit}
            return {"tokens": tokens[0], "count": len(tokens[0]), **limit}

        result = await job.prepare(work)
        return await whole_reply(job, lambda: result)


async def detokenize(request: web.Request) -> web.StreamResponse:
    """The text of token ids."""
    async with admit(request) as job:
        state = job.state

        def work(raw: bytes) -> dict[str, Any]:
            lists, batch = parse_detokenize(parse_body(raw), state.defaults())
            texts = [state.tokenizer.decode(ids).decode("utf-8", "replace") for ids in lists]
            return {"text": texts if batch else texts[0]}

        result = await job.prepare(work)
        return await whole_reply(job, lambda: result)
