"""The published document says what the gateway does, under the limits in force."""

from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from gateway import errors, openapi
from gateway.fields import REFUSED_FIELDS, Media
from gateway.protocol import HOT_ROUTES, INTEGERS, Kind, parse
from gateway.settings import Limits, Policy, Settings
from tests.unit.least_requests import LEAST


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


# -- the document and the checks, on the same requests -----------------------------------------------------------------

LIMITS = {"max_n": 3, "max_logprobs": 4, "max_prompts": 2, "max_answer_tokens": 50}
OPEN = {"allow_truncation": True, "allow_chat_template": True, "allow_media_urls": True}
POLICIES = {"as shipped": Policy(), "open": Policy(**OPEN)}
PROMPTS = ("messages", "prompt", "input", "system")
READ = {
    *("model", "stream", "stream_options", "truncate_prompt_tokens", "chat_template", "chat_template_kwargs", "tools"),
    *(*PROMPTS, *REFUSED_FIELDS, *(name for rules in INTEGERS.values() for name in rules)),
}
NUMBERS = [-2, -1, 0, 1, 2, 3, 4, 5, 50, 51, 2**31 - 1, 2**31, 2**70, 1.0, 1.5, -1.0, 60.0, 1e30]
SCALARS = st.sampled_from([None, True, False, "", "m", "text", *NUMBERS])
KINDS = st.sampled_from(
    [None, "text", "input_text", "tool_result", "image_url", "input_audio", "a new one", 5, ["text"]]
)


def parts(below: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Messages, parts and whatever else a client may put in their place."""
    values = st.one_of(SCALARS, below, st.lists(below, max_size=2))
    names = st.sampled_from(
        ["role", "text", "content", "output", "chat_template", "include_usage", *sorted(Media.KEYS)]
    )
    typed = st.builds(lambda kind, rest: {"type": kind, **rest}, KINDS, st.dictionaries(names, values, max_size=2))
    return st.one_of(st.dictionaries(names, values, max_size=2), typed)


VALUES = st.recursive(SCALARS, lambda below: st.one_of(st.lists(below, max_size=3), parts(below)), max_leaves=8)
CHANGES = st.dictionaries(st.sampled_from(sorted(READ)), VALUES, max_size=3)
MISSING = st.sets(st.sampled_from(["model", *PROMPTS]), max_size=1)


def validator(kind: Kind, policy: str) -> Draft202012Validator:
    document = openapi.document(settings(limits=LIMITS, policy=OPEN if policy == "open" else {}))
    whole = {"components": document["components"], **body_of(document, kind.value)}
    Draft202012Validator.check_schema(whole)
    return Draft202012Validator(whole)


VALIDATORS = {(kind, policy): validator(kind, policy) for kind in Kind for policy in POLICIES}


def gateway_takes(kind: Kind, policy: str, body: bytes) -> bool:
    try:
        parse(kind, body, Limits(**LIMITS), POLICIES[policy])
    except errors.BadRequestError:
        return False
    return True


def differs(kind: Kind, policy: str, request: dict[str, Any]) -> str | None:
    """What the two say, where they don't say the same."""
    allowed = VALIDATORS[kind, policy].is_valid(request)
    taken = gateway_takes(kind, policy, orjson.dumps(request))
    verbs = {True: "allows", False: "forbids"}
    return None if allowed is taken else f"the document {verbs[allowed]} and the gateway {verbs[taken]} {request}"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", Kind)
@given(changes=CHANGES, missing=MISSING)
@example(changes={"prompt": [1.0, 2], "input": [[1.0], [2]]}, missing=set())
@example(changes={"input": {"role": "user"}}, missing=set())
@example(changes={"input": 5, "messages": [{"role": "user", "content": "x"}]}, missing=set())
@example(changes={"input": None, "messages": "x"}, missing=set())
@example(changes={"messages": [{"content": [{"type": None}, {"type": "reasoning_text"}]}]}, missing=set())
@example(changes={"chat_template_kwargs": {"chat_template": "x"}}, missing=set())
@example(changes={"messages": [{"content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]}, missing=set())
@example(changes={"messages": [{"content": {"type": "text", "content": [{"video": "x"}]}}]}, missing=set())
@example(changes={"input": [{"type": "input_image"}, {"output": [{"type": "input_image"}]}]}, missing=set())
def test_the_document_allows_what_the_gateway_takes_and_nothing_else(
    kind: Kind, policy: str, changes: dict[str, Any], missing: set[str]
) -> None:
    changed = {**LEAST[kind], **changes}
    request = {name: value for name, value in changed.items() if name not in missing}
    try:
        orjson.dumps(request)
    except TypeError:  # an integer beyond 64 bits, which JSON writers differ in
        return
    assert differs(kind, policy, request) is None


@pytest.mark.parametrize("kind", Kind)
def test_every_number_is_bounded_alike_at_both_ends(kind: Kind) -> None:
    for name in INTEGERS[kind]:
        for value in (*range(-3, 6), 49, 50, 51, 2**31 - 1, 2**31, 1.0, 1.5, True, None, "1", [1]):
            assert differs(kind, "as shipped", {**LEAST[kind], name: value}) is None


@pytest.mark.parametrize("key", sorted(Media.KEYS))
def test_every_key_of_media_is_forbidden_in_a_message_in_a_part_and_in_a_part_of_a_part(key: str) -> None:
    for message in ({key: "x"}, {"content": [{key: "x"}]}, {"content": [{"type": "text", "output": {key: "x"}}]}):
        request = {"model": "m", "messages": [message]}
        assert not VALIDATORS[Kind.CHAT, "as shipped"].is_valid(request)
        assert differs(Kind.CHAT, "as shipped", request) is None
        assert differs(Kind.CHAT, "open", request) is None


def test_a_token_id_written_as_1_0_is_sent_on_as_1_and_the_rest_of_the_body_as_it_was() -> None:
    envelope = parse(Kind.COMPLETIONS, b'{"model": "m", "prompt": [[1.0, 2], [3]], "seed": 1e2}', Limits(), Policy())
    assert envelope.body == b'{"model": "m", "prompt":[[1,2],[3]], "seed": 1e2}'
    assert envelope.document["prompt"] == [[1, 2], [3]]
    assert (envelope.size.prompts, envelope.size.ids) == (2, 3)
