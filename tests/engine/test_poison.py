"""Single requests that have killed engines: each is refused or answered, and the next one is served."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import Stack

SCHEMA_TOO_LARGE = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 20_000_000_000}}}
CHATS: dict[str, dict[str, Any]] = {
    "a logit bias outside the vocabulary": {"logit_bias": {"191222": -100}},
    "a logit bias for a token that is no number": {"logit_bias": {"x": 1}},
    "a stop token outside the vocabulary": {"stop_token_ids": [999_999]},
    "an allowed token outside the vocabulary": {"allowed_token_ids": [999_999]},
    "a schema with a large maximum": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA_TOO_LARGE}}
    },
    "a regular expression that is none": {"structured_outputs": {"regex": "["}},
    "a grammar that is none": {"structured_outputs": {"grammar": "root ::= "}},
    "an empty choice": {"structured_outputs": {"choice": []}},
    "a json_schema format without its schema": {"response_format": {"type": "json_schema"}},
    "a schema that is no object": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 1}}
    },
    "a temperature below zero": {"temperature": -1},
    "a top_p of zero": {"top_p": 0},
    "a repetition penalty of zero": {"repetition_penalty": 0},
    "more minimum than maximum tokens": {"min_tokens": 50, "max_tokens": 2},
    "a seed beyond 64 bits": {"seed": 2**70},
    "an unknown role": {"messages": [{"role": "nobody", "content": "x"}]},
    "a message without content": {"messages": [{"role": "user"}]},
    "tools that are none": {"tools": [{"type": "function"}]},
    "a tool choice without tools": {"tool_choice": "required"},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "echo of nothing new": {"echo": True, "max_tokens": 0, "logprobs": 1},
    "echo of nothing new, streamed": {"echo": True, "max_tokens": 0, "logprobs": 1, "stream": True},
    "an empty prompt": {"prompt": ""},
    "an empty prompt in a list": {"prompt": ["a", ""]},
    "an empty list": {"prompt": []},
    "a negative id": {"prompt": [-1]},
    "an id beyond the vocabulary": {"prompt": [2**31 - 1]},
    "an id beyond 32 bits": {"prompt": [5279552648203111001]},
    "a mixture": {"prompt": ["a", 1]},
    "a prompt list with a number": {"prompt": [["a"], [1]]},
    "a suffix": {"suffix": "x"},
    "a beam search": {"use_beam_search": True, "n": 2, "max_tokens": 2},
    "prompt logprobs": {"prompt_logprobs": 1},
    "a bad word that is empty": {"bad_words": [""]},
    "only control characters": {"prompt": "\x00\x01\x02"},
}


def served(stack: Stack) -> bool:
    answer = stack.chat("Say yes.", max_tokens=2)
    return answer.status_code == 200 and bool(answer.json()["choices"])


@pytest.mark.parametrize("fields", CHATS.values(), ids=CHATS.keys())
def test_a_poisonous_chat_is_no_5xx_and_the_next_request_is_served(stack: Stack, fields: dict[str, Any]) -> None:
    answer = stack.chat("hello", **{"max_tokens": 4, **fields})
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]
    assert served(stack)


@pytest.mark.parametrize("fields", COMPLETIONS.values(), ids=COMPLETIONS.keys())
def test_a_poisonous_completion_is_no_5xx_and_the_next_request_is_served(stack: Stack, fields: dict[str, Any]) -> None:
    request = {"prompt": "hello", "max_tokens": 4, **fields}
    answer = stack.completion(request.pop("prompt"), **request)
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]
    assert served(stack)


def test_a_chat_is_not_given_a_second_beginning_of_text(stack: Stack) -> None:
    """The gateway forwards a chat as a chat, so the engine counts what it counts without it."""
    body = {"model": stack.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "temperature": 0}
    through, direct = (client.post("/v1/chat/completions", json=body) for client in (stack.http, stack.engine))
    assert through.json()["usage"]["prompt_tokens"] == direct.json()["usage"]["prompt_tokens"]
    told = stack.engine.post("/tokenize", json={key: body[key] for key in ("model", "messages")}).json()
    assert through.json()["usage"]["prompt_tokens"] == told["count"]
