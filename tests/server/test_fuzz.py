"""Requests made up from our own OpenAPI document: whatever is sent, the answer is never a 5xx and is well-formed."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from typing import Any

import pytest
from conftest import Start
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "8"))  # of each operation and kind; 140 makes more than 2,000 requests
ANSWER = {"pieces": ["hm", "</think>", "ok"], "end": "user"}


def test_schemathesis_finds_no_server_error(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    caplog.set_level(logging.ERROR, "glm53.server")
    live = start(ANSWER, max_streams=8)
    schema = schemathesis.openapi.from_url(live.url + "/openapi.json")
    seen: Counter[int] = Counter()
    modes = schemathesis.GenerationMode
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in (modes.POSITIVE, modes.NEGATIVE):
            if mode is modes.NEGATIVE and operation.method != "post":
                continue

            @settings(
                max_examples=EXAMPLES if operation.method == "post" else 1,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                reply = case.call(base_url=live.url, timeout=20)
                seen[reply.status_code] += 1
                assert reply.status_code < 500, f"{case.method} {case.path} {case.body!r}: {reply.text[:300]}"
                if "json" in reply.headers.get("Content-Type", ""):
                    body = json.loads(reply.text)
                    assert reply.status_code < 400 or body["error"]["message"]

            send()
    assert seen[200] > 20, seen
    assert seen[400] > 20, seen
    assert "Traceback" not in caplog.text
    live.until(lambda s: s["running"] == 0 and not s["requests"])
    print(f"{sum(seen.values())} requests: {dict(seen)}")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=6,
)
FIELDS = """
    messages prompt text input_ids input tools tool_choice temperature top_p top_k min_p seed stop max_tokens n stream
    stream_options logprobs top_logprobs logit_bias response_format reasoning_effort thinking chat_template_kwargs
    continue_final_message add_generation_prompt sampling_params system thinking_budget echo return_logprob tokens
""".split()  # noqa: SIM905
ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/tokenize",
    "/detokenize",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
)


@pytest.mark.parametrize("route", ROUTES)
def test_any_json_value_in_any_field(start: Start, route: str) -> None:
    """A good request of which one or two fields hold something else."""
    live = start(ANSWER)
    good = {"messages": [{"role": "user", "content": "x"}], "input": "x", "tokens": [1]}
    good["text" if route == "/generate" else "prompt"] = "x"
    connection = live.connect()

    @settings(max_examples=6 * EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(changes=st.dictionaries(st.sampled_from(FIELDS), json_values, min_size=1, max_size=2))
    def send(changes: dict[str, Any]) -> None:
        data = json.dumps({**good, **changes}).encode()
        connection.request("POST", route, data, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        body = reply.read()
        assert reply.status < 500, (changes, body[:300])
        if reply.status != 200:
            assert json.loads(body)["error"]["message"]

    send()
    connection.close()
