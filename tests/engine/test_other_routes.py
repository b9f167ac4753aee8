"""The other public routes on the real engine: what the model can do works, what it can't is an error of one shape."""

from __future__ import annotations

import pytest

from tests.engine.conftest import Stack


def test_responses_answers_the_question(stack: Stack) -> None:
    body = {"model": stack.model, "input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 32}
    response = stack.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert "Paris" in answer["output"][-1]["content"][0]["text"]
    assert answer["usage"]["output_tokens"] > 0


def test_messages_answers_the_question(stack: Stack) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": stack.model, "messages": messages, "temperature": 0, "max_tokens": 32}
    response = stack.http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert "Paris" in response.json()["content"][0]["text"]


def test_embeddings_of_a_chat_model_are_a_4xx_of_the_one_shape(stack: Stack) -> None:
    response = stack.http.post("/v1/embeddings", json={"model": stack.model, "input": "hello"})
    assert 400 <= response.status_code < 500, response.text
    assert response.json()["error"].keys() >= {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/invocations", "/tokenize", "/metrics", "/v1/chat/completions/batch"])
def test_the_engines_other_routes_are_not_reachable_through_the_gateway(stack: Stack, path: str) -> None:
    response = stack.http.post(path, json={"model": stack.model, "prompt": "x"})
    assert response.status_code == 404
    assert response.json()["error"].keys() >= {"message", "type", "param", "code"}
