"""Anthropic's Python client against /v1/messages."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from tests.conformance.conftest import Front

QUESTION: list[anthropic.types.MessageParam] = [{"role": "user", "content": "What is the capital of France?"}]

GREEDY = {"temperature": 0}  # the client has no such parameter any more; the API still has


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=front.url, api_key=front.key, max_retries=0, timeout=120) as made:
        yield made


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def read_tokens(message: anthropic.types.Message) -> int:
    """All of the prompt: this API counts what came from the prefix cache, and what went into it, apart."""
    usage = message.usage
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


def test_a_message_answers_and_its_usage_is_counted(client: anthropic.Anthropic, front: Front) -> None:
    kinds = ("prompt", "generation")
    before = [front.metric("gateway_tokens_total", kind=kind) for kind in kinds]
    message = client.messages.create(model=front.model, messages=QUESTION, max_tokens=32, extra_body=GREEDY)
    assert "Paris" in text_of(message)
    assert message.stop_reason == "end_turn"
    gained = [front.metric("gateway_tokens_total", kind=kind) - was for kind, was in zip(kinds, before, strict=True)]
    assert gained == [read_tokens(message), message.usage.output_tokens]


def test_a_streamed_message_is_the_same_text_and_usage(client: anthropic.Anthropic, front: Front) -> None:
    whole = client.messages.create(model=front.model, messages=QUESTION, max_tokens=32, extra_body=GREEDY)
    with client.messages.stream(model=front.model, messages=QUESTION, max_tokens=32, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(whole) == text_of(final)
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_raw_events_begin_with_message_start_and_end_with_message_stop(
    client: anthropic.Anthropic, front: Front
) -> None:
    with client.messages.create(
        model=front.model, messages=QUESTION, max_tokens=8, extra_body=GREEDY, stream=True
    ) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert "content_block_delta" in kinds


def test_max_tokens_ends_a_message_and_says_so(client: anthropic.Anthropic, front: Front) -> None:
    counting: list[anthropic.types.MessageParam] = [{"role": "user", "content": "Count from one to one hundred."}]
    message = client.messages.create(model=front.model, messages=counting, max_tokens=5, extra_body=GREEDY)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 5


def test_a_system_prompt_is_part_of_what_the_model_reads(client: anthropic.Anthropic, front: Front) -> None:
    plain = client.messages.create(model=front.model, messages=QUESTION, max_tokens=1)
    longer = client.messages.create(model=front.model, messages=QUESTION, max_tokens=1, system="You are terse. " * 20)
    assert read_tokens(longer) > read_tokens(plain) + 40


def test_a_wrong_key_is_an_authentication_error(front: Front) -> None:
    with (
        anthropic.Anthropic(base_url=front.url, api_key="sk-a-key-that-nobody-made", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError) as caught,
    ):
        stranger.messages.create(model=front.model, messages=QUESTION, max_tokens=8)
    assert caught.value.request_id
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "authentication_error"


def test_an_unknown_model_is_a_not_found_error(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="no-such-model", messages=QUESTION, max_tokens=8)


def test_a_too_long_prompt_is_a_bad_request_error(client: anthropic.Anthropic, front: Front) -> None:
    long: list[anthropic.types.MessageParam] = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model=front.model, messages=long, max_tokens=8)
    assert "2048" in caught.value.message
