"""Llama 3 on the real engine: its chat format by Meta's own code, exactly one BOS, and both of its end tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llama_models.datatypes import RawMessage
from llama_models.llama3.chat_format import ChatFormat
from llama_models.llama3.tokenizer import Tokenizer

from tests.conformance.conftest import Front

META = Tokenizer.get_instance()
ENDS = [META.special_tokens["<|end_of_text|>"], META.special_tokens["<|eot_id|>"]]
DIALOGS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Antworte auf Deutsch."},
        {"role": "user", "content": "Grüß Gott! 你好 👋🏽\n\n  def f(x):\n\treturn 1234567"},
        {"role": "assistant", "content": "Hallo."},
        {"role": "user", "content": "it's   the end…"},
    ],
]
TEXTS = ["The capital of France is", " leading space", "naïve Ünïcode 数字 12345678 🦙", "a\n\n\nb\r\n"]


def chat(front: Front, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    body = {"model": front.llama, "messages": messages, "max_tokens": 4, "return_token_ids": True, **fields}
    return _answer(front, "/v1/chat/completions", body)


def completion(front: Front, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": front.llama, "prompt": prompt, "max_tokens": 4, "return_token_ids": True, **fields}
    return _answer(front, "/v1/completions", body)


def _answer(front: Front, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = front.http.post(path, json=body)
    assert response.status_code == 200, response.text
    read: dict[str, Any] = response.json()
    return read


@pytest.mark.parametrize("dialog", DIALOGS)
def test_a_chats_prompt_is_token_for_token_what_metas_own_code_makes(
    front: Front, dialog: list[dict[str, str]]
) -> None:
    expected = ChatFormat(META).encode_dialog_prompt([RawMessage.model_validate(message) for message in dialog]).tokens
    answer = chat(front, dialog)
    assert answer["prompt_token_ids"] == expected
    assert answer["usage"]["prompt_tokens"] == len(expected)
    assert expected.count(META.bos_id) == 1
    assert expected[0] == META.bos_id


def test_a_completions_prompt_has_exactly_one_bos_and_metas_own_tokens(front: Front) -> None:
    expected = [META.encode(text, bos=True, eos=False) for text in TEXTS]
    assert all(ids.count(META.bos_id) == 1 for ids in expected)
    for text, ids in zip(TEXTS, expected, strict=True):
        answer = completion(front, text)
        assert answer["choices"][0]["prompt_token_ids"] == ids
        assert answer["usage"]["prompt_tokens"] == len(ids)
    together = completion(front, TEXTS)
    assert [choice["prompt_token_ids"] for choice in together["choices"]] == expected
    assert together["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_a_prompt_of_token_ids_gets_no_second_bos(front: Front) -> None:
    ids = META.encode("The capital of France is", bos=True, eos=False)
    assert completion(front, ids)["choices"][0]["prompt_token_ids"] == ids


@pytest.mark.parametrize("end", ENDS, ids=["end_of_text", "eot_id"])
def test_either_end_token_stops_a_chat_and_shows_in_no_text(front: Front, end: int) -> None:
    said = META.encode(" Paris", bos=False, eos=False)
    assert len(said) == 1
    forced = {"allowed_token_ids": [*said, end], "logit_bias": {str(end): 100}, "min_tokens": 3, "max_tokens": 16}
    choice = chat(front, DIALOGS[0], **forced)["choices"][0]
    assert choice["token_ids"] == [*said * 3, end]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == " Paris Paris Paris"
    lines = []
    body = {"model": front.llama, "messages": DIALOGS[0], "stream": True, **forced}
    with front.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    pieces = [json.loads(line)["choices"][0] for line in lines]
    assert "".join(piece["delta"].get("content") or "" for piece in pieces) == " Paris Paris Paris"
    assert pieces[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("end", ENDS, ids=["end_of_text", "eot_id"])
def test_either_end_token_stops_a_completion(front: Front, end: int) -> None:
    answer = completion(front, "The capital", allowed_token_ids=[end], max_tokens=8)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == ""
    assert answer["usage"]["completion_tokens"] == 1


def test_another_special_token_is_no_end(front: Front) -> None:
    other = META.special_tokens["<|start_header_id|>"]
    answer = chat(front, DIALOGS[0], allowed_token_ids=[other], max_tokens=4)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 4
