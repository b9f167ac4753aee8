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


def test_a_chat_model_asked_to_embed_is_404_that_names_it(stack: Stack) -> None:
    response = stack.http.post("/v1/embeddings", json={"model": stack.model, "input": "hello"})
    assert response.status_code == 404, response.text
    told = f"the model '{stack.model}' is not served at /v1/embeddings; no model here is"
    assert response.json()["error"] == {
        "message": told,
        "type": "invalid_request_error",
        "param": "model",
        "code": "route_not_served",
    }


@pytest.mark.parametrize("path", ["/invocations", "/tokenize", "/metrics", "/v1/chat/completions/batch"])
def test_the_engines_other_routes_are_not_reachable_through_the_gateway(stack: Stack, path: str) -> None:
    response = stack.http.post(path, json={"model": stack.model, "prompt": "x"})
    assert response.status_code == 404
    assert response.json()["error"].keys() >= {"message", "type", "param", "code"}
