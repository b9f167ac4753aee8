"""The request fields the gateway reads: what passes, what is refused, and how large a prompt is."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequestError
from gateway.protocol import Envelope, Kind, PromptSize, parse, route, with_fields
from gateway.settings import Limits, Policy
from tests.unit.least_requests import LEAST

LIMITS, POLICY = Limits(), Policy()
EVERY_KIND = pytest.mark.parametrize("kind", list(Kind))


def read(kind: Kind = Kind.COMPLETIONS, *, limits: Limits = LIMITS, policy: Policy = POLICY, **fields: Any) -> Envelope:
    return parse(kind, json.dumps({**LEAST[kind], **fields}).encode(), limits, policy)


def refused(kind: Kind = Kind.COMPLETIONS, **fields: Any) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        read(kind, **fields)
    return caught.value


# -- what passes -------------------------------------------------------------------------------------------------------

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('ab\u2028🎉\\"'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", min_size=1), inner, max_size=3),
    max_leaves=8,
)


@EVERY_KIND
@given(unknown=st.dictionaries(st.text("qwxyz_", min_size=4), _JSON, max_size=4), spaces=st.booleans())
def test_unknown_fields_of_any_shape_keep_their_bytes(kind: Kind, unknown: dict[str, Any], spaces: bool) -> None:
    body = json.dumps({**unknown, **LEAST[kind]}, indent=1 if spaces else None, ensure_ascii=spaces).encode()
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:  # a lone surrogate
        return
    envelope = parse(kind, body, LIMITS, POLICY)
    assert with_fields(envelope, {}) == body
    added = with_fields(envelope, {"cache_salt": "g"})
    assert added.startswith(body.rstrip()[:-1])
    assert json.loads(added) == {**json.loads(body), "cache_salt": "g"}
    replaced = with_fields(envelope, {"model": "served", "cache_salt": "g"})
    assert json.loads(replaced) == {**json.loads(body), "model": "served", "cache_salt": "g"}


@pytest.mark.parametrize(
    "field",
    [
        '"seed": 123456789012345678901234567890',
        '"temperature": 1e2',
        '"temperature": 0.10000000000000001',
        '"stop": "\\u00e9\\ud83c\\udf89\\/"',
        '"logit_bias": {"1": -1e-7, "2": {}}',
        '"structured_outputs": {"json": {"type": "object", "properties": {"a": {"enum": [1, 1.0, "1"]}}}}',
    ],
)
def test_spellings_survive_also_where_the_gateway_sets_a_field(field: str) -> None:
    body = f'{{"model": "alias", {field}, "prompt": "x"}}'.encode()
    envelope = parse(Kind.COMPLETIONS, body, LIMITS, POLICY)
    assert with_fields(envelope, {"model": "served"}) == body.replace(b' "alias"', b'"served"')


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"structured_outputs": {"regex": "a+"}},
        {"max_completion_tokens": 5},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"metadata": {"priority": 1, "cache_salt": "mine", "request_id": "mine"}},
        {"cache_salt": None, "priority": None, "chat_template": None, "truncate_prompt_tokens": None},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"image_url": {}}}}}]},
    ],
)
def test_fields_of_vllm_pass(fields: dict[str, Any]) -> None:
    assert read(Kind.CHAT, **fields).document == {**LEAST[Kind.CHAT], **fields}


# -- what is refused ---------------------------------------------------------------------------------------------------


@EVERY_KIND
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"1",
        b"{'model': 'm'}",
        b'{"model": "m",}',
        b'{"model": "m"} {}',
        b'{"model": NaN}',
        b'{"model": "\xff"}',
        b'\xff\xfe{\x00"\x00',
        b'{"model": "\\ud800"}',
        b"{" * 100_000,
        b"[" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"a":' + b"[" * 65 + b"]" * 65 + b"}",
    ],
)
def test_a_body_that_is_no_json_object_of_bounded_depth_is_refused(kind: Kind, body: bytes) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse(kind, body, LIMITS, POLICY)
    assert caught.value.code == "invalid_json"
    assert len(caught.value.message) < 300


def test_depth_at_the_limit_passes() -> None:
    nested: Any = 1
    for _ in range(LIMITS.max_depth - 1):
        nested = [nested]
    read(extra=nested)
    assert refused(extra=[nested]).code == "invalid_json"


@EVERY_KIND
@pytest.mark.parametrize("model", [None, "", 1, ["m"], {"m": 1}])
def test_a_model_must_be_named(kind: Kind, model: Any) -> None:
    assert refused(kind, model=model).param == "model"


@EVERY_KIND
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, [], 17])
def test_n_is_a_whole_number_within_its_limit(kind: Kind, value: Any) -> None:
    assert refused(kind, n=value).param == "n"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
@pytest.mark.parametrize("value", [-1, 0.5, "8", False, {}])
def test_an_answers_length_is_a_whole_number(name: str, value: Any) -> None:
    assert refused(Kind.CHAT, **{name: value}).param == name


@EVERY_KIND
@pytest.mark.parametrize("value", ["true", 1, 0, [], {}])
def test_stream_is_a_boolean(kind: Kind, value: Any) -> None:
    assert refused(kind, stream=value).param == "stream"


@pytest.mark.parametrize("value", [True, [], "x", 1])
def test_stream_options_are_an_object(value: Any) -> None:
    assert refused(Kind.CHAT, stream=True, stream_options=value).param == "stream_options"


@EVERY_KIND
@pytest.mark.parametrize(
    "name", ["cache_salt", "priority", "kv_transfer_params", "ec_transfer_params", "request_id", "prompt_embeds"]
)
@pytest.mark.parametrize("value", ["x", 0, "", {}, False])
def test_what_only_the_gateway_may_say_is_refused(kind: Kind, name: str, value: Any) -> None:
    error = refused(kind, **{name: value})
    assert (error.param, error.code) == (name, "unsupported_parameter")


@EVERY_KIND
@pytest.mark.parametrize("name", ["messages", "input", "prompt", "system", "tools", "instructions", "logprobs", "stop"])
@given(value=_JSON)
def test_no_value_of_any_field_is_more_than_a_bad_request(kind: Kind, name: str, value: Any) -> None:
    try:
        read(kind, **{name: value})
    except BadRequestError as error:
        assert error.message


@EVERY_KIND
@given(part=st.dictionaries(st.sampled_from(["type", "content", "text", "image_url", "source", "output"]), _JSON))
def test_no_content_part_is_more_than_a_bad_request(kind: Kind, part: dict[str, Any]) -> None:
    for content in (part, [part], [[part]]):
        try:
            read(kind, messages=[{"role": "user", "content": content}, part], input=[part])
        except BadRequestError as error:
            assert error.message


# -- prompts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", 1),
        ("", 1),
        (["a", "b", ""], 3),
        ([128000, 9906], 1),
        ([0], 1),
        ([[128000], [9906]], 2),
        ([[1, 2, 3]], 1),
    ],
)
@pytest.mark.parametrize("kind", [Kind.COMPLETIONS, Kind.EMBEDDINGS])
def test_token_ids_are_told_from_lists_of_prompts(kind: Kind, prompt: Any, prompts: int) -> None:
    name = "prompt" if kind is Kind.COMPLETIONS else "input"
    assert read(kind, **{name: prompt}).size.prompts == prompts


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        [],
        {},
        1,
        True,
        [-1],
        [5279552648203111001],
        [2**70],
        [1.5],
        [True],
        [None],
        ["a", 1],
        [1, "a"],
        ["a", ["b"]],
        [[]],
        [[1], []],
        [[1], [-1]],
        [[1], ["a"]],
        [[[1]]],
        [{}],
        ["a"] * 257,
        [[1]] * 257,
    ],
)
@pytest.mark.parametrize("kind", [Kind.COMPLETIONS, Kind.EMBEDDINGS])
def test_prompts_of_any_other_shape_are_refused(kind: Kind, prompt: Any) -> None:
    name = "prompt" if kind is Kind.COMPLETIONS else "input"
    assert refused(kind, **{name: prompt}).param == name


@pytest.mark.parametrize("kind", [Kind.CHAT, Kind.MESSAGES])
@pytest.mark.parametrize("messages", [None, [], {}, "hello", ["hello"], [{"role": "user", "content": "x"}, 1]])
def test_messages_are_a_list_of_objects(kind: Kind, messages: Any) -> None:
    assert refused(kind, messages=messages).param == "messages"


def test_sizes_count_characters_bytes_and_ids() -> None:
    assert read(prompt="abc").size == PromptSize(1, 3, 0, 0)
    assert read(prompt=["ab", "漢字"]).size == PromptSize(2, 4, 4, 0)
    assert read(prompt=[[1, 2], [3]]).size == PromptSize(2, 0, 0, 3)
    chat = read(Kind.CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": "🎉"}]}])
    assert chat.size == PromptSize(1, len("user") + len("text") + 1, 3, 0)
    longer = read(Kind.CHAT, messages=[{"role": "user", "content": "x"}], tools=[{"name": "long name"}])
    assert longer.size.chars > len("user") + 1


@pytest.mark.parametrize(
    ("kind", "fields", "max_tokens"),
    [
        (Kind.COMPLETIONS, {}, 16),
        (Kind.COMPLETIONS, {"max_tokens": None}, None),
        (Kind.COMPLETIONS, {"max_tokens": 0}, 0),
        (Kind.COMPLETIONS, {"max_tokens": 5.0}, 5),
        (Kind.CHAT, {}, None),
        (Kind.CHAT, {"max_tokens": 7}, 7),
        (Kind.CHAT, {"max_completion_tokens": 5, "max_tokens": 7}, 5),
        (Kind.RESPONSES, {"max_output_tokens": 9}, 9),
        (Kind.MESSAGES, {}, 8),
        (Kind.EMBEDDINGS, {}, 0),
    ],
)
def test_the_answers_length_is_read_where_each_dialect_says_it(
    kind: Kind, fields: dict[str, Any], max_tokens: int | None
) -> None:
    assert read(kind, **fields).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("fields", "wants"),
    [
        ({}, False),
        ({"stream": True}, False),
        ({"stream": True, "stream_options": None}, False),
        ({"stream": True, "stream_options": {}}, False),
        ({"stream": True, "stream_options": {"include_usage": False}}, False),
        ({"stream": True, "stream_options": {"include_usage": None}}, False),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True),
        ({"stream": False, "stream_options": {"include_usage": True}}, False),
    ],
)
def test_usage_is_wanted_only_where_a_stream_asks_for_it(fields: dict[str, Any], wants: bool) -> None:
    assert read(Kind.CHAT, **fields).wants_usage is wants


# -- routes ------------------------------------------------------------------------------------------------------------


def test_hot_routes_are_compared_whole() -> None:
    for kind in Kind:
        assert route("POST", kind.value) is kind
        for other in (kind.value + "/", "/" + kind.value, kind.value.upper(), kind.value + "/x", kind.value + "?"):
            assert route("POST", other) is None
        for method in ("GET", "PUT", "HEAD", "OPTIONS", "DELETE", "post"):
            assert route(method, kind.value) is None
