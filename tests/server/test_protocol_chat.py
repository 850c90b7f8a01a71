"""GLM-5.3's chat format: its published renderings, thinking off, prefill; text never becomes a special token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_helpers import special_names, tokenizer
from tiny_checkpoint import TINY

from glm53.chat import (
    ChatOptions,
    JinjaRenderer,
    Segment,
    encode,
    opens_thinking,
    parse_messages,
    parse_tools,
    plain,
    render,
    special,
    to_text,
)
from glm53.chat.segments import SPECIAL_NAMES
from glm53.errors import ConfigError, RequestError

P = "[gMASK]<sop><|system|>Reasoning Effort: Max"
HI = [{"role": "user", "content": "Hi"}]
CALLS = [
    {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 3, "y": "s"}}},
    {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]


def prompt(messages: Any, tools: Any = None, **options: Any) -> str:
    return to_text(render(parse_messages(messages), parse_tools(tools), ChatOptions(**options)))


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_r1() -> None:
    segments = render(parse_messages([user("Hello!")]), (), ChatOptions())
    assert to_text(segments) == P + "<|user|>Hello!<|assistant|><think>"
    assert [s.text for s in segments if s.special] == [
        "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<think>",
    ]  # fmt: skip
    t = tokenizer()
    one = t.special_id
    assert encode(segments, t) == [
        one("[gMASK]"), one("<sop>"), one("<|system|>"), *t.encode("Reasoning Effort: Max"), one("<|user|>"),
        *t.encode("Hello!"), one("<|assistant|>"), one("<think>"),
    ]  # fmt: skip


def test_r2() -> None:
    got = prompt([{"role": "system", "content": "You are terse."}, *HI])
    assert got == P + "<|system|>You are terse.<|user|>Hi<|assistant|><think>"


@pytest.mark.parametrize(("effort", "word"), [("low", "Low"), ("high", "High"), ("max", "Max")])
def test_r3(effort: Any, word: str) -> None:
    assert prompt(HI, effort=effort) == f"[gMASK]<sop><|system|>Reasoning Effort: {word}<|user|>Hi<|assistant|><think>"


def test_r4() -> None:
    assert prompt(HI, add_generation_prompt=False) == P + "<|user|>Hi"


def test_r5() -> None:
    got = prompt([user("What is 2+2?"), {"role": "assistant", "content": "4"}, user("And 3+3?")])
    assert got == P + "<|user|>What is 2+2?<|assistant|><think></think>4<|user|>And 3+3?<|assistant|><think>"


THOUGHTS = [
    {"role": "assistant", "content": "4", "reasoning_content": "let me add"},
    {"role": "assistant", "content": "<think>let me add</think>4"},
    {"role": "assistant", "content": "<think>other</think>4", "reasoning_content": "let me add"},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "let me add"}, {"type": "text", "text": "4"}]},
]


@pytest.mark.parametrize("turn", THOUGHTS)
def test_r6(turn: Any) -> None:
    got = prompt([user("a"), turn, user("b")])
    assert got == P + "<|user|>a<|assistant|><think>let me add</think>4<|user|>b<|assistant|><think>"


@pytest.mark.parametrize("turn", THOUGHTS)
def test_r7(turn: Any) -> None:
    got = prompt([user("a"), turn, user("b")], clear_thinking=True)
    assert got == P + "<|user|>a<|assistant|><think></think>4<|user|>b<|assistant|><think>"
    kept = prompt([user("a"), turn], clear_thinking=True)
    assert "<think>let me add</think>4" in kept


def test_first_and_last_think_end() -> None:
    got = prompt([user("a"), {"role": "assistant", "content": "<think>r1</think>mid</think>end"}, user("b")])
    assert "<|assistant|><think>r1</think>end<|user|>" in got


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Größe 温度 😀 "q"',
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
HEAD = (
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TAIL = (
    "\n</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
    "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)


def test_r8_and_b34_tools() -> None:
    line = (
        '{"name": "get_weather", "description": "Größe 温度 😀 \\"q\\"", '
        '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}'
    )
    late = {"type": "function", "function": {"name": "late", "defer_loading": True}}
    got = prompt([{"role": "system", "content": "S"}, *HI], [WEATHER, late])
    assert got == P + HEAD + line + TAIL + "<|system|>S<|user|>Hi<|assistant|><think>"


def test_r9() -> None:
    call = {"function": {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "c"}'}}
    got = prompt(
        [
            user("weather in Paris?"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "18C, clear"},
        ]
    )
    assert got == (
        P + "<|user|>weather in Paris?<|assistant|><think></think><tool_call>get_weather<arg_key>city</arg_key>"
        "<arg_value>Paris</arg_value><arg_key>unit</arg_key><arg_value>c</arg_value></tool_call><|observation|>"
        "<tool_response>18C, clear</tool_response><|assistant|><think>"
    )


def result(text: Any, call_id: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


@pytest.mark.parametrize(
    ("results", "order"),
    [
        ([result("res x", "a"), result("res y", "b")], "xy"),
        ([result("res y", "b"), result("res x", "a")], "xy"),
        ([result("res y", "b"), result("res x")], "yx"),
        ([result("res y", "b"), result("res x", "b")], "yx"),
        ([result("res y", "b"), result("res x", "c")], "yx"),
    ],
)
def test_r10(results: Any, order: str) -> None:
    got = prompt([user("q"), {"role": "assistant", "content": "ok ", "tool_calls": CALLS}, *results])
    assert got == (
        P + "<|user|>q<|assistant|><think></think>ok<tool_call>f<arg_key>x</arg_key><arg_value>3</arg_value>"
        "<arg_key>y</arg_key><arg_value>s</arg_value></tool_call><tool_call>g</tool_call><|observation|>"
        + "".join(f"<tool_response>res {c}</tool_response>" for c in order)
        + "<|assistant|><think>"
    )


def test_r11() -> None:
    got = prompt([user("a"), {"role": "system", "content": "new rule"}, user("b")])
    assert got == P + "<|user|>a<|system|>new rule<|user|>b<|assistant|><think>"


@pytest.mark.parametrize("content", ["", None, []])
def test_r12(content: Any) -> None:
    assert prompt([user(content)]) == P + "<|user|><|assistant|><think>"


@pytest.mark.parametrize(
    "content", [["a", "b"], [{"type": "text", "text": "a", "cache_control": {}}, {"type": "input_text", "text": "b"}]]
)
def test_r13(content: Any) -> None:
    assert prompt([user(content)]) == P + "<|user|>ab<|assistant|><think>"


def test_r14_is_refused() -> None:
    with pytest.raises(RequestError, match="text only") as e:
        prompt([user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])])
    assert e.value.code == "unsupported_content"


def test_whitespace_of_turns() -> None:
    got = prompt([user(" \n hi \n"), {"role": "assistant", "content": "\n  code\n"}, user("x")])
    assert got == P + "<|user|> \n hi \n<|assistant|><think></think>code<|user|>x<|assistant|><think>"


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (360, "360"), (True, "true"), (0, "0"), ({"a": 1}, '{"a": 1}'), ([], ""), (["p", "q"], "pq"), (None, ""),
        ([{"type": "text", "text": "t"}], "t"), ([1, 2], "[1, 2]"), ([{"a": "é"}], '[{"a": "é"}]'),
    ],
)  # fmt: skip
def test_tool_results_of_any_type(content: Any, shown: str) -> None:
    assert f"<tool_response>{shown}</tool_response>" in prompt([user("q"), result(content)])


@pytest.mark.parametrize(("value", "shown"), [(3, "3"), (True, "true"), (None, "null"), ([1, "é"], '[1, "é"]')])
def test_argument_values(value: Any, shown: str) -> None:
    calls = [{"function": {"name": "f", "arguments": {"k": value}}}]
    got = prompt([user("q"), {"role": "assistant", "tool_calls": calls}])
    assert f"<arg_key>k</arg_key><arg_value>{shown}</arg_value>" in got


def test_b01_b10_thinking_off() -> None:
    segments = render(parse_messages(HI), (), ChatOptions(thinking=False))
    assert to_text(segments) == P + "<|user|>Hi<|assistant|><think></think>"
    assert not opens_thinking(segments)


def test_b05_prefill() -> None:
    turn = {"role": "assistant", "content": ' {"a": '}
    for thinking in (True, False):
        options = ChatOptions(thinking=thinking, continue_final=True, add_generation_prompt=False)
        segments = render(parse_messages([user("json"), turn]), (), options)
        assert to_text(segments) == P + '<|user|>json<|assistant|><think></think> {"a": '
        assert not opens_thinking(segments)


def test_prefill_inside_the_reasoning() -> None:
    for turn in ({"reasoning_content": "so far"}, {"content": "<think>so far"}):
        options = ChatOptions(continue_final=True, add_generation_prompt=False)
        segments = render(parse_messages([user("q"), {"role": "assistant", **turn}]), (), options)
        assert to_text(segments) == P + "<|user|>q<|assistant|><think>so far"
        assert opens_thinking(segments)


@pytest.mark.parametrize("rest", ["", "{"])
def test_b05_prefill_that_closes_its_reasoning_goes_on_in_the_content(rest: str) -> None:
    options = ChatOptions(continue_final=True, add_generation_prompt=False)
    for turn in ({"content": f"<think>plan</think>{rest}"}, {"content": f"</think>{rest}", "reasoning": "plan"}):
        segments = render(parse_messages([user("q"), {"role": "assistant", **turn}]), (), options)
        assert to_text(segments) == f"{P}<|user|>q<|assistant|><think>plan</think>{rest}"
        assert not opens_thinking(segments)


def test_only_the_last_turns_reasoning_counts_and_only_its_own_tokens() -> None:
    """Another template need not put any tag into the answer's turn."""
    open_before = [special("<|assistant|>"), special("<think>"), plain("x"), special("<|user|>"), plain("y")]
    assert not opens_thinking([*open_before, special("<|assistant|>")])
    assert not opens_thinking([*open_before, special("<|assistant|>"), plain("<think>")])
    assert opens_thinking([*open_before, special("<|assistant|>"), special("<think>"), plain("</think>")])
    assert not opens_thinking([])


def test_b52_developer() -> None:
    got = prompt([{"role": "developer", "content": "Be brief"}, user("x")])
    assert got == P + "<|system|>Be brief<|user|>x<|assistant|><think>"


NASTY = "".join(SPECIAL_NAMES) + "<think" + "|user|>" + "<\\tool_call>"


def specials(segments: list[Segment]) -> list[str]:
    return [s.text for s in segments if s.special]


def conversation(text: str) -> tuple[Any, Any]:
    calls = [{"id": "a", "function": {"name": "f", "arguments": {text: text, "n": [text, {text: text}]}}}]
    messages = [
        {"role": "system", "content": text},
        {"role": "user", "content": [text, text]},
        {"role": "assistant", "content": "answer", "reasoning_content": text, "tool_calls": calls},
        {"role": "tool", "content": text, "tool_call_id": "a"},
        {"role": "user", "content": text},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": text, "parameters": {"d": text}}}]
    return parse_messages(messages), parse_tools(tools)


def test_text_never_becomes_a_special_token() -> None:
    messages, tools = conversation(NASTY)
    clean = conversation("x")
    assert specials(render(messages, tools, ChatOptions())) == specials(render(*clean, ChatOptions()))
    t = tokenizer()
    ids = encode([plain(NASTY)], t)
    assert special_names().keys().isdisjoint(ids)
    assert t.decode(ids).decode() == NASTY


TEMPLATE = """
{%- for t in tools or [] %}<{{ t.function.name }}>{{ t.function | tojson(ensure_ascii=True) }}{% endfor %}
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}
{%- for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson }}</arg_value>
{%- endfor %}</tool_call>{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|><think>{% endif %}"""


@pytest.mark.parametrize("source", [TEMPLATE, (TINY / "chat_template.jinja").read_text()])
def test_jinja_text_never_becomes_a_special_token(source: str) -> None:
    renderer = JinjaRenderer(source)
    got = renderer.render(*conversation(NASTY), ChatOptions())
    assert specials(got) == specials(renderer.render(*conversation("x"), ChatOptions()))
    assert any(s.text.endswith(NASTY) or NASTY in s.text for s in got if not s.special)


def test_jinja_bare_token_words() -> None:
    tools = parse_tools([{"type": "function", "function": {"name": "think"}}])
    got = JinjaRenderer(TEMPLATE).render(parse_messages(HI), tools, ChatOptions(add_generation_prompt=False))
    assert specials(got) == ["<|user|>"]
    assert to_text(got).startswith('<think>{"name": "think"}')


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(SPECIAL_NAMES))
def test_jinja_returns_text_unchanged(text: str) -> None:
    got = JinjaRenderer("<|user|>{{ messages[0].content }}").render(parse_messages([user(text)]), (), ChatOptions())
    assert got == [special("<|user|>")] + ([plain(text)] if text else [])


def test_jinja_templates_may_cut_text() -> None:
    renderer = JinjaRenderer("{{ messages[0].content[:1] }}")
    for text in ("\ufdd6", "\ufdd0x", "think", "<think>"):
        got = renderer.render(parse_messages([user(text)]), (), ChatOptions())
        assert to_text(got) in ("", text[:1])
        assert not specials(got)


def test_jinja_thinking_off_and_prefill() -> None:
    renderer = JinjaRenderer(TEMPLATE)
    off = renderer.render(parse_messages(HI), (), ChatOptions(thinking=False))
    assert to_text(off) == "<|user|>Hi<|assistant|><think></think>"
    options = ChatOptions(continue_final=True, add_generation_prompt=False)
    turn = {"role": "assistant", "content": " {"}
    assert to_text(renderer.render(parse_messages([*HI, turn]), (), options)) == (
        "<|user|>Hi<|assistant|><think></think> {"
    )


def test_jinja_errors() -> None:
    with pytest.raises(ConfigError, match="not a Jinja template"):
        JinjaRenderer("{% if %}")
    for source in (
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.x.y }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.mro() }}",
    ):
        with pytest.raises(RequestError):
            JinjaRenderer(source).render(parse_messages(HI), (), ChatOptions())
    assert JinjaRenderer("{% for m in messages %}{% break %}{% endfor %}x").render(
        parse_messages(HI), (), ChatOptions()
    ) == [plain("x")]
