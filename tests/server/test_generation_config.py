"""generation_config.json of the checkpoint: what requests get that do not say, and what else ends an answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import HELLO, MODEL_DIR, LiveServer, start_server, user

from glm53.engine.protocol import GenerationRequest, SamplingParams
from glm53.engine.scripted import ScriptedEngine
from glm53.errors import ConfigError
from glm53.server.app import ServerOptions
from glm53.server.generation_config import read_generation_config
from glm53.tokenizer import Tokenizer

GIVEN = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.05, "repetition_penalty": 1.1}


def write(folder: Path, config: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_values_of_the_file_and_without_one_those_of_the_model_card(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path, 100).sampling == SamplingParams(temperature=1.0, top_p=0.95)
    found = read_generation_config(write(tmp_path, {**GIVEN, "do_sample": False, "eos_token_id": 7}), 100)
    assert found.sampling == SamplingParams(0.6, 0.9, 50, 0.05, repetition_penalty=1.1)
    assert found.eos_ids == {7}
    found = read_generation_config(write(tmp_path, {"temperature": None, "eos_token_id": [7, 9]}), 100)
    assert (found.sampling, found.eos_ids) == (SamplingParams(), {7, 9})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"eos_token_id": 100}, "eos_token_id"),
        ([], "holds an array, not a JSON object"),
    ],
)
def test_a_broken_file_is_a_configuration_error_that_names_it(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as e:
        read_generation_config(write(tmp_path, config), 100)
    assert "generation_config.json" in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("text", ['{"top_p": 0.9', "", "\xff"])
def test_a_damaged_file_is_told_as_a_file_and_not_as_a_request(tmp_path: Path, text: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"it is not JSON .*download it again") as e:
        read_generation_config(tmp_path, 100)
    assert "request" not in str(e.value)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_generation_config(tmp_path, 100)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[LiveServer, list[GenerationRequest]]]:
    """A server on a checkpoint with a generation_config.json of its own, and what it asked its engine for."""
    for path in MODEL_DIR.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, tmp_path)
    tokenizer = Tokenizer(write(tmp_path, {**GIVEN, "eos_token_id": tokenizer_id("<think>")}))
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps(HELLO) + "\n", encoding="utf-8")
    engine, asked = ScriptedEngine(script, tokenizer, max_streams=4, context=4096), list[GenerationRequest]()
    submit = engine.submit
    engine.submit = lambda r: (asked.append(r), submit(r))[1]  # type: ignore[method-assign]
    live = start_server(ServerOptions(port=0), lambda p: engine, tokenizer)
    live.until(lambda s: s["status"] == "ready")
    yield live, asked
    live.stop()


def tokenizer_id(name: str) -> int:
    return Tokenizer(MODEL_DIR).special_id(name)


def test_requests_get_them_unless_they_say_otherwise(served: tuple[LiveServer, list[GenerationRequest]]) -> None:
    live, asked = served
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": user("x")},
        "/v1/completions": {"prompt": "x"},
        "/v1/messages": {"messages": user("x"), "max_tokens": 5},
        "/v1/responses": {"input": "x"},
        "/generate": {"text": "x"},
    }
    for path, body in bodies.items():
        assert live.post(path, body).status == 200
        sampling = asked[-1].sampling
        assert {name: getattr(sampling, name) for name in GIVEN} == GIVEN
        assert tokenizer_id("<think>") in asked[-1].stop_ids
    live.chat(temperature=0.1, top_k=0, ignore_eos=True)
    assert (asked[-1].sampling.temperature, asked[-1].sampling.top_k, asked[-1].sampling.top_p) == (0.1, 0, 0.9)
    assert asked[-1].stop_ids == frozenset()
    assert live.get("/server_info").json["sampling_defaults"] == GIVEN
