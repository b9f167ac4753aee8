"""LangChain's ChatOpenAI against the gateway."""

from __future__ import annotations

import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.conformance.conftest import Front
from tests.conformance.test_openai_python import SCHEMA, Place

QUESTION = "What is the capital of France?"


@tool
def get_weather(city: str, days: int) -> str:
    """The weather of a city for some days."""
    raise NotImplementedError


@pytest.fixture(scope="module")
def model(front: Front) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=front.openai_url, api_key=front.key, model=front.model, temperature=0, max_retries=0, max_tokens=128
    )


def test_invoke_answers_with_usage(model: ChatOpenAI) -> None:
    answer = model.invoke(QUESTION)
    assert "Paris" in answer.text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] == "stop"


def test_stream_is_the_same_text_in_pieces(model: ChatOpenAI) -> None:
    pieces = [chunk.text for chunk in model.stream(QUESTION)]
    assert "".join(pieces) == model.invoke(QUESTION).text
    assert len([piece for piece in pieces if piece]) > 3


def test_stream_usage_is_that_of_the_whole_answer(model: ChatOpenAI) -> None:
    chunks = list(model.stream(QUESTION, stream_usage=True))
    seen = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    whole = model.invoke(QUESTION).usage_metadata
    assert whole is not None
    assert [usage["output_tokens"] for usage in seen] == [whole["output_tokens"]]


async def test_ainvoke_answers(model: ChatOpenAI) -> None:
    assert "Paris" in (await model.ainvoke(QUESTION)).text


def test_with_structured_output_returns_what_the_schema_says(model: ChatOpenAI) -> None:
    schema = {"title": "place", "description": "A place.", **SCHEMA}
    found = model.with_structured_output(schema, method="json_schema", strict=True).invoke(QUESTION)
    assert isinstance(found, dict)
    assert Place.model_validate(found, strict=True).continent in SCHEMA["properties"]["continent"]["enum"]


def test_a_bound_tool_that_is_forced_is_called_with_arguments_of_its_types(model: ChatOpenAI) -> None:
    forced = model.bind_tools([get_weather], tool_choice="get_weather", strict=True)
    answer = forced.invoke("What will the weather be in Oslo for 3 days?")
    assert [call["name"] for call in answer.tool_calls] == ["get_weather"]
    arguments = answer.tool_calls[0]["args"]
    assert isinstance(arguments["city"], str)
    assert isinstance(arguments["days"], int)
