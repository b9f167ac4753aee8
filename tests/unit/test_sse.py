"""Framing and reading of server-sent events."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import sse

# Text that has misled readers of event streams: line separators that are none to SSE, emoji, quotes, carriage returns.
_TEXT = st.text(st.sampled_from('ab \\"{}\u2028\u2029\u0085\u00e9漢🎉\r\n\x0b\x0c:'), max_size=30)
_EVENT = st.one_of(
    _TEXT.map(lambda text: b"data: " + json.dumps({"t": text}, ensure_ascii=False).encode()),
    _TEXT.map(lambda text: b"event: x\ndata: " + json.dumps(text).encode()),
    st.sampled_from([b": comment", b"data: [DONE]", b"data:", b"data: a\ndata: b", b"id: 7\nretry: 9"]),
)


def framed(stream: bytes, cuts: list[int]) -> tuple[bytes, list[bytes]]:
    """The stream fed in pieces: what came out altogether, and event by event."""
    framer, out, events = sse.Framer(), b"", []
    edges = [0, *sorted({min(cut, len(stream)) for cut in cuts}), len(stream)]
    for start, end in itertools.pairwise(edges):
        part = framer.feed(stream[start:end])
        assert not part or part.endswith((b"\n\n", b"\n\r\n")), "half an event came out"
        out += part
        events += sse.split(part)
    assert out + bytes(framer.tail) == stream, "bytes were lost, added or moved"
    return out, events


@given(
    st.lists(st.tuples(_EVENT, st.booleans()), max_size=6),
    st.lists(st.integers(0, 400), max_size=12),
    st.binary(max_size=5),
)
def test_any_split_of_any_events_gives_the_same_events(
    events: list[tuple[bytes, bool]], cuts: list[int], rest: bytes
) -> None:
    wire = [event.replace(b"\n", b"\r\n") + b"\r\n\r\n" if crlf else event + b"\n\n" for event, crlf in events]
    stream = b"".join(wire) + rest.replace(b"\n", b"")
    out, found = framed(stream, cuts)
    assert out == b"".join(wire)
    assert found == wire
    assert framed(stream, list(range(len(stream)))) == (out, found), "byte by byte"


def test_an_event_leaves_as_soon_as_its_blank_line_is_there() -> None:
    framer = sse.Framer()
    assert framer.feed(b"data: 1") == b""
    assert framer.feed(b"\n") == b""
    assert framer.feed(b"\ndata: 2\r\n\r") == b"data: 1\n\n"
    assert framer.feed(b"\n") == b"data: 2\r\n\r\n"
    assert framer.feed(b"data: 3\n\r\n") == b"data: 3\n\r\n", "a proxy that rewrites some line ends only"


def test_an_event_beyond_the_limit_is_an_error_and_one_at_it_is_not() -> None:
    framer = sse.Framer(max_bytes=10)
    assert framer.feed(b"0123456789") == b""
    with pytest.raises(ValueError, match="more than 10 bytes"):
        framer.feed(b"x")


def test_line_separators_of_unicode_do_not_end_a_line() -> None:
    text = "a\u2028b\u2029c\u0085d\x0be\x0cf"
    event = b"data: " + json.dumps({"t": text}, ensure_ascii=False).encode() + b"\n\n"
    assert sse.split(event) == [event]
    assert sse.json_of(event) == {"t": text}


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: x\n\n", b"x"),
        (b"data:x\n\n", b"x"),
        (b"data:  x\n\n", b" x"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"event: e\r\ndata: x\r\n\r\n", b"x"),
        (b": data: x\n\n", b""),
        (b"database: x\n\n", b""),
    ],
)
def test_data_is_read_as_the_format_says(event: bytes, data: bytes) -> None:
    assert sse.data_of(event) == data


@pytest.mark.parametrize("event", [b"data: [DONE]\n\n", b": c\n\n", b"data: {broken\n\n", b'data: "text"\n\n', b"\n"])
def test_what_is_no_json_object_reads_as_none(event: bytes) -> None:
    assert sse.json_of(event) is None


def chat(**delta: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta}]}


@pytest.mark.parametrize(
    "document",
    [
        chat(content="x"),
        chat(content=" "),
        chat(reasoning="x"),
        chat(reasoning_content="x"),
        chat(refusal="no"),
        chat(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]),
        {"choices": [{"text": "x"}]},
        {"choices": [{"delta": {}}, {"delta": {"content": "x"}}]},
        {"type": "response.output_text.delta", "delta": "x"},
        {"type": "response.function_call_arguments.delta", "delta": "{"},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}},
        {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "x"}},
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}},
    ],
)
def test_generated_output_is_content(document: dict[str, object]) -> None:
    assert sse.has_content(document)


@pytest.mark.parametrize(
    "document",
    [
        chat(role="assistant", content=""),
        chat(),
        chat(content=None),
        {"choices": []},
        {"choices": None},
        {"choices": 5},
        {"choices": {"text": "x"}},
        {"choices": [None, 5, "text", []]},
        {"choices": [{"delta": None}]},
        {"choices": [{"text": "", "finish_reason": "stop"}]},
        {"usage": {"prompt_tokens": 1}},
        {"type": "response.created", "response": {}},
        {"type": "response.output_text.delta", "delta": ""},
        {"type": "response.output_text.done", "text": "x"},
        {"type": "message_start", "message": {}},
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": ""}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        {"type": "ping"},
        {},
    ],
)
def test_roles_frames_and_statistics_are_no_content(document: dict[str, object]) -> None:
    assert not sse.has_content(document)


@pytest.mark.parametrize(
    ("document", "usage"),
    [
        ({"usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}}, (5, 7)),
        ({"usage": {"prompt_tokens": 5, "total_tokens": 5}}, (5, 0)),
        ({"usage": {"prompt_tokens": 5, "completion_tokens": None}}, (5, 0)),
        ({"type": "response.completed", "response": {"usage": {"input_tokens": 5, "output_tokens": 7}}}, (5, 7)),
        ({"type": "message_start", "message": {"usage": {"input_tokens": 5, "output_tokens": 0}}}, (5, 0)),
        ({"type": "message_delta", "usage": {"input_tokens": 5, "output_tokens": 7}}, (5, 7)),
        ({"usage": {"input_tokens": 2, "cache_read_input_tokens": 3, "output_tokens": 7}}, (5, 7)),
        ({"usage": {"input_tokens": 1, "cache_creation_input_tokens": 4, "cache_read_input_tokens": None}}, (5, 0)),
        ({"usage": None}, None),
        ({"type": "response.created", "response": {"usage": None}}, None),
        ({"response": "text", "message": "text"}, None),
        ({"usage": {"prompt_tokens": "5"}}, None),
        ({"usage": {"prompt_tokens": True}}, None),
        ({"usage": {"prompt_tokens": -1, "completion_tokens": 7}}, None),
        ({"usage": {"prompt_tokens": 5, "completion_tokens": -7}}, None),
        ({"usage": {"prompt_tokens": 2**63 - 1, "completion_tokens": 7}}, None),
        ({"usage": {"prompt_tokens": 5, "completion_tokens": 2**31 + 1}}, None),
        ({"usage": {"prompt_tokens": 5.5, "completion_tokens": 7}}, None),
        ({"usage": {"input_tokens": 2, "cache_read_input_tokens": -3, "output_tokens": 7}}, None),
        ({"usage": [5]}, None),
        ({}, None),
    ],
)
def test_usage_is_read_in_every_dialect(document: dict[str, object], usage: tuple[int, int] | None) -> None:
    assert sse.usage_of(document) == usage


def test_errors_are_told_from_events() -> None:
    assert sse.is_error({"error": {"message": "x"}})
    assert sse.is_error({"type": "error", "code": "server_error", "message": "x"})
    assert sse.is_error({"type": "response.failed", "response": {}})
    assert not sse.is_error({"error": None, "choices": []})
    assert not sse.is_error({"type": "message_stop"})


def test_a_comment_and_an_error_event_are_events_of_their_own() -> None:
    assert sse.split(sse.comment("wait") + sse.error_event(b"{}", anthropic=True)) == [
        b": wait\n\n",
        b"event: error\ndata: {}\n\n",
    ]


def chunk(answer_id: str, text: str = "a", spaced: bool = False) -> bytes:
    separators = (", ", ": ") if spaced else (",", ":")
    document = {"id": answer_id, "choices": [{"index": 0, "delta": {"content": text}}]}
    return b"data: " + json.dumps(document, separators=separators).encode() + b"\n\n"


@pytest.mark.parametrize("spaced", [False, True])
def test_only_an_event_of_another_id_is_of_another_answer(spaced: bool) -> None:
    ids = sse.SameId()
    own, other = chunk("cmpl-1", spaced=spaced), chunk("cmpl-2", spaced=spaced)
    assert ids.of_another(own) is None
    assert ids.of_another(own + own + b": waiting\n\n" + b"data: [DONE]\n\n") is None
    assert ids.of_another(b'data: {"error":{"message":"x"}}\n\n') is None
    assert ids.of_another(own + other + own) == len(own)
    assert ids.of_another(other) == 0


@pytest.mark.parametrize("spaced", [False, True])
def test_a_text_that_quotes_an_id_is_no_chunk_of_that_id(spaced: bool) -> None:
    ids = sse.SameId()
    quoting = chunk("cmpl-1", 'it says "id":"cmpl-1" and data: {"id": "cmpl-1"', spaced=spaced)
    ids.of_another(quoting)
    assert ids.chunks(quoting * 3) == 3
    assert ids.chunks(chunk("cmpl-2", "cmpl-1")) == 0
    assert ids.chunks(chunk("cmpl-12")) == 0
    assert ids.of_another(chunk("cmpl-12")) == 0


OWN, CRLF = chunk("cmpl-1"), chunk("cmpl-1").replace(b"\n", b"\r\n")
OTHERS = (chunk("cmpl-2"), b"data: [DONE]\n\n", b": ping\n\n", b'data: {"error":{"message":"x"}}\n\n', b"\n",
          b"event: chunk\n" + OWN, b"data: [DONE]\r\n\r\n")  # fmt: skip


@given(st.lists(st.sampled_from([OWN, CRLF, *OTHERS]), max_size=12))
def test_a_read_counts_as_chunks_only_where_it_is_nothing_else(events: list[bytes]) -> None:
    ids = sse.SameId()
    ids.of_another(OWN)
    plain = all(event in (OWN, CRLF) for event in events)
    assert ids.chunks(b"".join(events)) == (len(events) if plain else 0)


def test_before_an_id_was_seen_every_read_is_looked_at() -> None:
    ids = sse.SameId()
    for events in (b"data: {}\n\n", b": x\n\n", b"data: [DONE]\n\n"):
        assert ids.chunks(events) == 0
        assert ids.of_another(events) is None
    assert ids.of_another(chunk("cmpl-1") + chunk("cmpl-2")) == len(chunk("cmpl-1"))


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"id":"caf\\u00e9","choices":[]}\n\n',
        b'data: {"id":"a\\/b","choices":[]}\n\n',
        b'data: {"object":"chunk","id":"cmpl-1","choices":[{"delta":{"tool_calls":[{"id":"cmpl-1"}]}}]}\n\n',
    ],
)
def test_an_id_that_is_spelled_with_escapes_or_comes_later_is_looked_for_in_every_event(event: bytes) -> None:
    ids = sse.SameId()
    assert ids.of_another(event) is None
    assert ids.chunks(event) == ids.chunks(event + b"data: [DONE]\n\n") == 0
    assert ids.of_another(event + chunk("cmpl-2")) == len(event)
