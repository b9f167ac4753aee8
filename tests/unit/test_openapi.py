"""The published document says what the gateway does, under the limits in force."""

from typing import Any

import pytest

from gateway import errors, openapi
from gateway.protocol import HOT_ROUTES, REFUSED_FIELDS, Kind, parse
from gateway.settings import Limits, Policy, Settings


def settings(**sections: Any) -> Settings:
    return Settings(engines=("http://127.0.0.1:1",), auth={"disabled": True}, **sections)


def body_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    schema: dict[str, Any] = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return schema


def test_every_way_to_fail_has_its_status_on_every_hot_route() -> None:
    ways = {str(kind.status) for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "status")}
    assert {"400", "429", "503"} < ways
    paths = openapi.document(settings())["paths"]
    assert [path for path in HOT_ROUTES if not ways <= paths[path]["post"]["responses"].keys()] == []


def test_limits_are_those_in_force() -> None:
    document = openapi.document(settings(limits={"max_n": 3, "max_prompts": 7, "max_answer_tokens": 11}))
    fields = body_of(document, "/v1/completions")["properties"]
    assert fields["n"]["maximum"] == 3
    assert fields["max_tokens"]["maximum"] == 11
    assert [form["maxItems"] for form in fields["prompt"]["anyOf"] if "maxItems" in form] == [7, 7]


def test_what_clients_may_not_set_is_null_and_what_the_policy_allows_is_not() -> None:
    usual = body_of(openapi.document(settings()), "/v1/chat/completions")["properties"]
    for name in (*REFUSED_FIELDS, "truncate_prompt_tokens", "chat_template"):
        assert usual[name]["type"] == "null", name
    policy = {"allow_truncation": True, "allow_chat_template": True}
    open_ones = body_of(openapi.document(settings(policy=policy)), "/v1/chat/completions")["properties"]
    assert "truncate_prompt_tokens" not in open_ones
    assert "chat_template" not in open_ones


@pytest.mark.parametrize("kind", Kind)
def test_what_the_document_requires_the_gateway_requires(kind: Kind) -> None:
    required = body_of(openapi.document(settings()), kind.value)["required"]
    assert "model" in required
    with pytest.raises(errors.BadRequestError):
        parse(kind, b"{}", Limits(), Policy())
