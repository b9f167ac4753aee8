"""Chat on the real engine: whole and streamed answers, their usage, and the openai client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.engine.conftest import Stack

QUESTION = "What is the capital of France?"


def events(stack: Stack, **fields: Any) -> list[str]:
    """The data of each server-sent event of one streamed chat."""
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": stack.model, "messages": messages, "temperature": 0, "stream": True, **fields}
    with stack.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = response.read().decode()
    return [block.removeprefix("data: ") for block in raw.split("\n\n") if block.startswith("data: ")]


def test_a_chat_answers_the_question_and_its_usage_adds_up(stack: Stack) -> None:
    response = stack.chat(QUESTION)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["model"] == stack.model
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_the_gateway_changes_neither_the_text_nor_the_usage_of_a_chat(stack: Stack) -> None:
    body = {"model": stack.model, "messages": [{"role": "user", "content": "Name a colour."}], "temperature": 0}
    through, direct = (client.post("/v1/chat/completions", json=body).json() for client in (stack.http, stack.engine))
    assert through["choices"][0]["message"] == direct["choices"][0]["message"]
    for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert through["usage"][field] == direct["usage"][field]


def test_a_stream_carries_the_whole_answers_text_and_ends_with_one_done(stack: Stack) -> None:
    *chunks, done = events(stack)
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in parsed)
    assert text == stack.chat(QUESTION).json()["choices"][0]["message"]["content"]
    assert len(parsed) > 3


def test_a_stream_has_usage_only_when_asked_and_then_once_right_before_done(stack: Stack) -> None:
    parsed = [json.loads(chunk) for chunk in events(stack)[:-1]]
    assert not [chunk for chunk in parsed if chunk.get("usage")]
    asked = [json.loads(chunk) for chunk in events(stack, stream_options={"include_usage": True})[:-1]]
    assert [bool(chunk.get("usage")) for chunk in asked] == [False] * (len(asked) - 1) + [True]
    assert asked[-1]["choices"] == []
    whole = stack.chat(QUESTION).json()["usage"]
    assert asked[-1]["usage"]["completion_tokens"] == whole["completion_tokens"]
    assert asked[-1]["usage"]["prompt_tokens"] == whole["prompt_tokens"]


def test_max_tokens_cuts_a_chat_with_finish_reason_length(stack: Stack) -> None:
    answer = stack.chat("Count from one to one hundred.", max_tokens=5).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_over_long_prompt_is_a_400_that_names_the_limit_and_generates_nothing(stack: Stack, path: str) -> None:
    stack.idle()
    before = stack.engine_metric("vllm:generation_tokens_total")
    text = "word " * 3000
    prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    response = stack.http.post(path, json={"model": stack.model, "max_tokens": 8, **prompt})
    assert response.status_code == 400
    error = response.json()["error"]
    assert "2048" in error["message"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert stack.engine_metric("vllm:generation_tokens_total") == before


def test_the_openai_client_chats_and_streams(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=stack.model, messages=[{"role": "user", "content": QUESTION}], temperature=0
        )
        text = answer.choices[0].message.content
        assert text is not None
        assert "Paris" in text
        with client.chat.completions.create(
            model=stack.model, messages=[{"role": "user", "content": QUESTION}], temperature=0, stream=True
        ) as stream:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
        assert [model.id for model in client.models.list()] == [stack.model]
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "x"}])
    assert "no-such-model" in caught.value.message
