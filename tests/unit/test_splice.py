"""Setting members of a JSON object without touching the rest."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import splice

_LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
_JSON = st.recursive(
    _LEAF, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)
_OBJECT = st.dictionaries(st.text(), _JSON, max_size=6)


@given(_OBJECT, _OBJECT, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_for_any_object_it_equals_writing_the_whole_again(
    document: dict[str, object], fields: dict[str, object], indent: int | str | None, ascii_only: bool
) -> None:
    body = json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    try:
        orjson.loads(body)
        orjson.dumps(fields)
    except (orjson.JSONDecodeError, TypeError):  # lone surrogates, integers beyond 64 bits: refused before
        return
    assert json.loads(splice.set_members(body, fields)) == {**document, **json.loads(orjson.dumps(fields))}


def test_everything_else_keeps_its_bytes() -> None:
    body = (
        b'{"seed": 123456789012345678901234567890, "model" :"a" , "temperature":1e2,\n'
        b'"x":"\\u00e9\\/", "x": [1, {"model": 1}],\n'
        b'"ids":[1,2,3], "words":["a,b]","}"], "e":{}, "l":[] }'
    )
    assert splice.set_members(body, {"model": "b", "new": None}) == body.replace(b'"a" ', b'"b"').replace(
        b"[] }", b'[] ,"new":null}'
    )


@pytest.mark.parametrize("body", [b'{"model":"a","model":"c"}', b'{"mo\\u0064el":"a", "model":"c"}'])
def test_a_member_named_twice_is_set_twice_so_that_no_parser_reads_the_old_value(body: bytes) -> None:
    spliced = splice.set_members(body, {"model": "b"})
    assert json.loads(spliced, object_pairs_hook=list) == [("model", "b"), ("model", "b")]


@pytest.mark.parametrize("body", [b"{}", b" { }\n"])
def test_an_empty_object_gets_its_first_member(body: bytes) -> None:
    assert json.loads(splice.set_members(body, {"a": 1})) == {"a": 1}


def test_adding_leaves_the_bytes_before_as_they_are() -> None:
    assert splice.add_members(b'{"a": 1e2 }\r\n', {"b": [1]}) == b'{"a": 1e2 ,"b":[1]}'
