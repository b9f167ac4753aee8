"""OpenAI's client for node: node/talk.mjs does the talking, these tests judge what it printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import Front

FOLDER = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def said(front: Front) -> dict[str, Any]:
    """Step -> what the client returned, or how it failed."""
    assert (FOLDER / "node_modules/openai").is_dir(), "node's client is not installed: make test-conformance"
    environment = {"BASE_URL": front.openai_url, "API_KEY": front.key, "MODEL": front.model}
    ran = subprocess.run(
        (str(Path(sys.executable).parent / "node"), "talk.mjs"),
        cwd=FOLDER,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [line for line in lines if "error" in line] == []
    return {line["step"]: line["result"] for line in lines}


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def test_a_chat_answers(said: dict[str, Any]) -> None:
    choice = said["chat"]["choices"][0]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


def test_a_stream_is_the_same_text_and_carries_usage_only_when_asked(said: dict[str, Any]) -> None:
    whole = said["chat"]
    assert text_of(said["stream"]) == text_of(said["stream_usage"]) == whole["choices"][0]["message"]["content"]
    assert [chunk for chunk in said["stream"] if chunk.get("usage")] == []
    *before, last = said["stream_usage"]
    assert [chunk for chunk in before if chunk.get("usage")] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_a_prompt_list_with_n_answers_in_order(said: dict[str, Any]) -> None:
    answer = said["completions"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 16


def test_a_named_tool_is_called_with_arguments_that_fit(said: dict[str, Any]) -> None:
    (call,) = said["tool"]["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments.keys() == {"city", "unit"}
    assert arguments["unit"] in ("celsius", "fahrenheit")


def test_an_answer_by_json_schema_validates(said: dict[str, Any]) -> None:
    place = json.loads(said["schema"]["choices"][0]["message"]["content"])
    assert place.keys() == {"continent", "capital"}
    assert place["continent"] in ("Africa", "Asia", "Europe")
    assert isinstance(place["capital"], bool)


def test_models_are_listed(said: dict[str, Any], front: Front) -> None:
    assert {model["id"] for model in said["models"]} == {front.model, front.llama}


def test_responses_answer_and_stream_the_same_text(said: dict[str, Any]) -> None:
    text = said["responses"]["output_text"]
    assert "Paris" in text
    deltas = [event["delta"] for event in said["responses_stream"] if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text
    assert said["responses_stream"][-1]["type"] == "response.completed"


def test_a_request_id_comes_with_answers_and_errors(said: dict[str, Any]) -> None:
    assert said["request_id"]["id"]
    assert said["unknown_model"]["requestID"]


@pytest.mark.parametrize(
    ("step", "name", "code"),
    [
        ("wrong_key", "AuthenticationError", "invalid_api_key"),
        ("unknown_model", "NotFoundError", "model_not_found"),
        ("too_long", "BadRequestError", None),
        ("embeddings", ("BadRequestError", "NotFoundError"), None),
    ],
)
def test_errors_are_the_clients_typed_ones(said: dict[str, Any], step: str, name: str, code: str | None) -> None:
    error = said[step]
    assert error["name"] in ((name,) if isinstance(name, str) else name)
    assert error["message"]
    if code is not None:
        assert error["code"] == code
