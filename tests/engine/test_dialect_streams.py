"""Streams of the dialects beside chat, on the real engine: passed on as they are, ended where they end, counted."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from tests.engine.conftest import Stack

QUESTION = "What is the capital of France?"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The capital of France is", "max_tokens": 12},
    "/v1/responses": {"input": QUESTION, "max_output_tokens": 12},
    "/v1/messages": {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12},
}
LAST = {"/v1/completions": "[DONE]", "/v1/responses": "response.completed", "/v1/messages": "message_stop"}
# What differs between any two answers: ids and times.
PASSING = re.compile(r'"(id|item_id|created|created_at|request_id)":("[^"]*"|\d+)')


def stream(client: httpx.Client, path: str, model: str, **fields: Any) -> str:
    body = {"model": model, "temperature": 0, "stream": True, **BODIES[path], **fields}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return response.text


@pytest.mark.parametrize("path", list(BODIES))
def test_a_stream_is_what_the_engine_sends_and_ends_where_it_ends(stack: Stack, path: str) -> None:
    stream(stack.engine, path, stack.model)  # from here on the prefix cache holds the prompt, and usage says so
    asking = {"stream_options": {"include_usage": True}} if path == "/v1/completions" else {}
    through, direct = (stream(client, path, stack.model, **asking) for client in (stack.http, stack.engine))
    assert PASSING.sub(r'"\1":0', through) == PASSING.sub(r'"\1":0', direct)
    assert LAST[path] in through.strip().split("\n\n")[-1]
    assert '"error":{' not in through


@pytest.mark.parametrize("path", list(BODIES))
def test_a_streams_tokens_are_counted_though_its_client_did_not_ask(stack: Stack, path: str) -> None:
    before = {name: _count(stack, name) for name in ("tokens_total", "time_to_first_token_seconds_count")}
    text = stream(stack.http, path, stack.model)
    if path == "/v1/completions":
        assert '"usage"' not in text
    whole = stack.http.post(path, json={"model": stack.model, "temperature": 0, **BODIES[path]}).json()["usage"]
    # A message's input leaves out what came from the prefix cache, which stands beside it.
    total = whole.get("total_tokens") or sum(count for name, count in whole.items() if name.endswith("put_tokens"))
    assert _count(stack, "tokens_total") - before["tokens_total"] == 2 * total
    assert _count(stack, "time_to_first_token_seconds_count") - before["time_to_first_token_seconds_count"] == 1


def _count(stack: Stack, name: str) -> float:
    try:
        return stack.gateway_metric(f"gateway_{name}")
    except KeyError:
        return 0.0


def test_a_bad_message_is_an_error_of_the_anthropic_shape(stack: Stack) -> None:
    body = {"model": stack.model, "messages": [{"role": "nobody", "content": "x"}], "max_tokens": 4}
    response = stack.http.post("/v1/messages", json=body)
    assert response.status_code == 400, response.text
    document = json.loads(response.text)
    assert document["type"] == "error"
    assert document["error"].keys() == {"message", "type", "param", "code"}
