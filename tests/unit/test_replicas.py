"""The models list of an engine, as far as it can be believed."""

import pytest

from gateway.replica import served_models


def test_models_and_their_lengths_are_read() -> None:
    body = b'{"data": [{"id": "a", "max_model_len": 8192}, {"id": "b"}]}'
    assert served_models(body) == {"a": 8192, "b": None}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"null",
        b'{"data": null}',
        b'{"data": ["a"]}',
        b'{"data": [{"name": "a"}]}',
        b'{"data": [{"id": 5}]}',
        b'{"data": [{"id": "a", "max_model_len": "8k"}]}',
        b'{"data": [{"id": ["a"]}]}',
    ],
)
def test_what_is_no_list_of_models_is_none(body: bytes) -> None:
    assert served_models(body) is None


def test_an_empty_list_names_no_model() -> None:
    assert served_models(b'{"data": []}') == {}
