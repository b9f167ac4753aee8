"""OpenAI's Python client against the gateway: what it returns, and which of its typed errors it raises."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel

from tests.conformance.conftest import Front

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "strict": True,  # without it the engine holds the arguments to any JSON, not to this schema
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class Place(BaseModel):
    """What the model is made to fill in; a 135M model would not bound its texts by itself."""

    continent: str
    population_millions: int
    is_capital: bool


SCHEMA = {
    "type": "object",
    "properties": {
        "continent": {"type": "string", "enum": ["Africa", "America", "Asia", "Europe", "Oceania"]},
        "population_millions": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_capital": {"type": "boolean"},
    },
    "required": ["continent", "population_millions", "is_capital"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=front.openai_url, api_key=front.key, max_retries=0, timeout=120) as made:
        yield made


def test_a_chat_answers_with_text_finish_reason_and_usage(client: openai.OpenAI, front: Front) -> None:
    answer = client.chat.completions.create(model=front.model, messages=QUESTION, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_stream_is_the_same_answer_in_pieces_without_usage(client: openai.OpenAI, front: Front) -> None:
    whole = client.chat.completions.create(model=front.model, messages=QUESTION, temperature=0)
    with client.chat.completions.create(model=front.model, messages=QUESTION, temperature=0, stream=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    assert len(chunks) > 3


def test_a_stream_with_usage_ends_in_one_chunk_that_has_it_and_no_choice(client: openai.OpenAI, front: Front) -> None:
    whole = client.chat.completions.create(model=front.model, messages=QUESTION, temperature=0)
    with client.chat.completions.create(
        model=front.model, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *before, last = stream
    assert [chunk for chunk in before if chunk.usage or not chunk.choices] == []
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


def test_the_clients_own_stream_helper_gathers_the_final_completion(client: openai.OpenAI, front: Front) -> None:
    with client.chat.completions.stream(model=front.model, messages=QUESTION, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text
    assert "Paris" in text


def test_a_prompt_list_with_n_answers_in_order_and_its_usage_is_the_sum(client: openai.OpenAI, front: Front) -> None:
    prompts = ["The capital of France is", "One, two, three,", "The opposite of hot is"]
    sampling = {"model": front.model, "max_tokens": 6, "temperature": 0}
    alone = [client.completions.create(prompt=prompt, **sampling) for prompt in prompts]
    answer = client.completions.create(prompt=prompts, **{**sampling, "temperature": 1e-5}, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [one.choices[0].text for one in alone for _ in range(2)]
    assert answer.usage is not None
    # An engine counts a prompt once, however many answers are asked for.
    assert answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)
    assert answer.usage.completion_tokens == 2 * sum(one.usage.completion_tokens for one in alone if one.usage)


def test_a_completion_streams(client: openai.OpenAI, front: Front) -> None:
    sampling = {"model": front.model, "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}
    with client.completions.create(stream=True, **sampling) as stream:
        text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == client.completions.create(**sampling).choices[0].text


def test_a_named_tool_is_called_with_arguments_that_fit_its_schema(client: openai.OpenAI, front: Front) -> None:
    answer = client.chat.completions.create(
        model=front.model,
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
        max_tokens=128,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert len(calls) == 1
    call = calls[0]
    assert call.type == "function"
    assert call.id
    _fits(call.function.name, call.function.arguments)


def test_a_streamed_tool_call_adds_up_to_the_whole_one(client: openai.OpenAI, front: Front) -> None:
    with client.chat.completions.stream(
        model=front.model,
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
        max_tokens=128,
    ) as stream:
        for _ in stream:
            pass
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert calls is not None
    assert len(calls) == 1
    _fits(calls[0].function.name, calls[0].function.arguments)


def _fits(name: str, arguments: str) -> None:
    assert name == "get_weather"
    read = json.loads(arguments)
    assert read.keys() == {"city", "unit"}
    assert isinstance(read["city"], str)
    assert read["unit"] in ("celsius", "fahrenheit")


def test_tools_left_to_the_models_choice_are_accepted(client: openai.OpenAI, front: Front) -> None:
    answer = client.chat.completions.create(
        model=front.model, messages=QUESTION, tools=[WEATHER], tool_choice="auto", temperature=0, max_tokens=64
    )
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def test_an_answer_by_json_schema_validates(client: openai.OpenAI, front: Front) -> None:
    answer = client.chat.completions.create(
        model=front.model,
        messages=QUESTION,
        temperature=0,
        max_tokens=128,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}},
    )
    place = Place.model_validate_json(answer.choices[0].message.content or "", strict=True)
    assert place.continent in SCHEMA["properties"]["continent"]["enum"]
    assert 0 <= place.population_millions <= 99


def test_models_are_listed_and_one_can_be_asked_for(client: openai.OpenAI, front: Front) -> None:
    assert sorted(model.id for model in client.models.list()) == sorted((front.model, front.llama))
    assert client.models.retrieve(front.llama).id == front.llama
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_responses_answer_and_stream_the_same_text(client: openai.OpenAI, front: Front) -> None:
    asked = {"model": front.model, "input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 32}
    whole = client.responses.create(**asked)
    assert "Paris" in whole.output_text
    assert whole.status == "completed"
    assert whole.usage is not None
    assert whole.usage.output_tokens > 0
    with client.responses.create(**asked, stream=True) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == whole.output_text
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens


def test_embeddings_of_a_model_that_has_none_are_a_typed_4xx(client: openai.OpenAI, front: Front) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
        client.embeddings.create(model=front.model, input="hello")
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"]


def test_a_wrong_key_is_an_authentication_error_and_is_not_repeated_back(front: Front) -> None:
    wrong = "sk-a-key-that-nobody-made"
    with (
        openai.OpenAI(base_url=front.openai_url, api_key=wrong, max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        stranger.chat.completions.create(model=front.model, messages=QUESTION)
    assert caught.value.code == "invalid_api_key"
    assert wrong not in str(caught.value)


def test_an_unknown_model_is_a_not_found_error_that_names_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "no-such-model" in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_a_too_long_prompt_is_a_bad_request_that_names_the_limit(
    client: openai.OpenAI, front: Front, stream: bool
) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=front.model, messages=messages, stream=stream)
    assert "2048" in caught.value.message


def test_a_request_id_comes_with_every_answer_and_error_and_is_the_clients_own_where_it_sent_one(
    client: openai.OpenAI, front: Front
) -> None:
    answer = client.chat.completions.create(model=front.model, messages=QUESTION, max_tokens=1)
    assert answer._request_id
    own = client.chat.completions.create(
        model=front.model, messages=QUESTION, max_tokens=1, extra_headers={"X-Request-Id": "from-the-client"}
    )
    assert own._request_id == "from-the-client"
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert caught.value.request_id


async def test_the_asynchronous_client_chats_and_streams(front: Front) -> None:
    async with openai.AsyncOpenAI(base_url=front.openai_url, api_key=front.key, max_retries=0) as client:
        whole = await client.chat.completions.create(model=front.model, messages=QUESTION, temperature=0)
        stream = await client.chat.completions.create(model=front.model, messages=QUESTION, temperature=0, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content
