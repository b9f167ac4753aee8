"""Streams: bytes as they came, when they came, with usage and an end exactly where they belong."""

import asyncio
import json
from typing import Any

import pytest

from tests.fakes.dialects import named
from tests.fakes.engine import MODEL, RESET, FakeEngine, Script
from tests.wire.conftest import Running, renewing
from tests.wire.streams import (
    DONE,
    EVERY_DIALECT,
    FINISH,
    QUESTIONS,
    Reader,
    delta,
    events_of,
    open_stream,
    text_of,
)
from tests.wire.talking import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    official,
)

up, engine = renewing()
pytestmark = pytest.mark.asyncio(loop_scope="module")


# -- usage and the end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream_options": None},
        {"stream_options": {}},
        {"stream_options": {"include_usage": False}},
        {"stream_options": {"include_usage": False, "continuous_usage_stats": True}},
        {"stream_options": {"continuous_usage_stats": True}},
    ],
)
async def test_usage_never_reaches_who_did_not_ask_and_is_counted_all_the_same(
    path: str, options: dict[str, Any], up: Running, engine: FakeEngine
) -> None:
    text = await text_of(up, path, temperature=0.5, seed=1, **options)
    assert b'"usage"' not in text
    assert text.count(DONE) == 1 and text.endswith(DONE)
    assert engine.asked(path)[0].json["stream_options"]["include_usage"] is True
    assert await up.metric("gateway_tokens_total", kind="prompt") == engine.counters["prompt"]
    assert await up.metric("gateway_tokens_total", kind="generation") > 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_comes_once_and_last_to_who_asked(path: str, up: Running) -> None:
    text = await text_of(up, path, stream_options={"include_usage": True})
    *events, usage, done = text.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    document = json.loads(usage.removeprefix(b"data: "))
    assert document["choices"] == []
    assert document["usage"]["total_tokens"] == sum(
        document["usage"][name] for name in ("prompt_tokens", "completion_tokens")
    )
    assert not any(b'"usage"' in event for event in events)
    assert await up.metric("gateway_tokens_total", kind="prompt") == document["usage"]["prompt_tokens"]
    assert await up.metric("gateway_tokens_total", kind="generation") == document["usage"]["completion_tokens"]


async def test_continuous_usage_comes_with_every_event_to_who_asked_for_both(up: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    text = await text_of(up, stream_options=options)
    assert all(b'"usage"' in event for event in text.split(b"\n\n") if event.startswith(b"data: {"))


async def test_the_stream_options_a_client_sent_stay_beside_the_one_the_gateway_sets(
    up: Running, engine: FakeEngine
) -> None:
    await text_of(up, stream_options={"include_usage": False, "future_option": [1]}, seed=2**63)
    seen = engine.asked(CHAT)[0]
    assert seen.json["stream_options"] == {"include_usage": True, "future_option": [1]}
    assert seen.json["seed"] == 2**63


async def test_nothing_goes_out_after_the_end_even_if_the_engine_goes_on(up: Running, engine: FakeEngine) -> None:
    engine.script(CHAT, Script(pieces=[delta("a"), DONE + delta("late"), delta("later"), DONE]))
    assert await text_of(up) == delta("a") + DONE
    assert await up.metric("gateway_upstream_failures_total") == 0


async def test_an_engine_that_never_closes_after_the_end_does_not_hold_its_client(
    up: Running, engine: FakeEngine
) -> None:
    engine.script(CHAT, Script(pieces=[delta("a"), DONE, asyncio.Event()]))
    async with asyncio.timeout(10):
        assert await text_of(up) == delta("a") + DONE
    assert await up.metric("gateway_upstream_failures_total") == 0


async def test_a_connection_that_breaks_after_the_end_harms_nothing(up: Running, engine: FakeEngine) -> None:
    gate = asyncio.Event()
    engine.script(CHAT, Script(pieces=[delta("a"), DONE, gate, RESET]))
    async with open_stream(up) as answer:
        reader = Reader(answer)
        await reader.until(DONE)
        gate.set()
        assert await reader.rest() == delta("a") + DONE
    assert await up.metric("gateway_upstream_failures_total") == 0


# Each text looks like an end to a reader that searches bytes.
@pytest.mark.parametrize(
    "text", ["[DONE]", "data: [DONE]", "event: message_stop", "event: response.completed", '"error"', 'data: {"error"']
)
@EVERY_DIALECT
async def test_an_answer_that_speaks_of_ends_and_errors_does_not_end(
    path: str, text: str, up: Running, engine: FakeEngine
) -> None:
    pieces = {
        CHAT: [delta(text), delta("more"), DONE],
        COMPLETIONS: [
            f"data: {json.dumps({'choices': [{'index': 0, 'text': t}]})}\n\n".encode() for t in (text, "more")
        ]
        + [DONE],
        RESPONSES: [
            *(named("response.output_text.delta", delta=t) + b"\n\n" for t in (text, "more")),
            named("response.completed", response={}) + b"\n\n",
        ],
        MESSAGES: [
            *(named("content_block_delta", delta={"text": t}) + b"\n\n" for t in (text, "more")),
            named("message_stop") + b"\n\n",
        ],
    }[path]
    engine.script(path, Script(pieces=list(pieces)))
    assert await text_of(up, path) == b"".join(pieces)
    assert await up.metric("gateway_upstream_failures_total") == 0


@EVERY_DIALECT
async def test_every_dialects_tokens_are_counted_from_its_usage(path: str, up: Running, engine: FakeEngine) -> None:
    engine.script(path, Script(token_s=0.01))
    streamed = await text_of(up, path, ignore_eos=True)
    assert b"error" not in streamed
    whole = await up.client.post(path, json={"model": MODEL, **QUESTIONS[path]})
    assert whole.status_code == 200
    usage = whole.json()["usage"]
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    assert await up.metric("gateway_tokens_total", kind="prompt") == 2 * prompt
    generated = await up.metric("gateway_tokens_total", kind="generation")
    assert generated >= usage.get("completion_tokens", usage.get("output_tokens"))
    assert await up.metric("gateway_time_to_first_token_seconds_count", route=path) == 1
    assert await up.metric("gateway_inter_token_latency_seconds_count") > 0


# -- framing -----------------------------------------------------------------------------------------------------------

# Everything that has broken a reader: an emoji and a flag of several code points, CJK, separators that are none to SSE.
HARD_TEXT = 'é漢字🎉👩‍👩‍👧\u2028\u2029\u0085\u00a0\ufeff "quoted" \\n data: x'


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(lambda data: [data[i : i + 1] for i in range(len(data))], id="byte by byte"),
        pytest.param(lambda data: [data], id="all in one write"),
        pytest.param(lambda data: [data[i : i + 7] for i in range(0, len(data), 7)], id="seven bytes a write"),
        pytest.param(lambda data: [b"".join(part) for part in _between_cr_and_lf(data)], id="between CR and LF"),
    ],
)
async def test_events_split_anywhere_arrive_whole_and_unchanged(
    cut: Any, newline: bytes, up: Running, engine: FakeEngine
) -> None:
    wire = b"".join(delta(char) for char in HARD_TEXT).replace(b"\n\n", newline * 2)
    wire += (
        FINISH.replace(b"\n\n", newline * 2)
        + b": a comment of the engine"
        + newline * 2
        + b"data: [DONE]"
        + newline * 2
    )
    engine.script(CHAT, Script(pieces=cut(wire)))
    text = await text_of(up)
    assert text == wire
    events = [json.loads(event) for event in await events_of(_one(text)) if event != b"[DONE]"]
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == HARD_TEXT
    assert "\ufffd" not in text.decode()


def _between_cr_and_lf(data: bytes) -> list[list[bytes]]:
    parts = data.replace(b"\r\n", b"\r\0\n").replace(b"\n\n", b"\n\0\n").split(b"\0")
    return [[part] for part in parts]


async def _one(data: bytes) -> Any:
    yield data


async def test_an_event_of_40_kb_arrives_whole(up: Running, engine: FakeEngine) -> None:
    large = delta("漢🎉" * 6000)
    assert len(large) > 40_000
    engine.script(CHAT, Script(pieces=[large[:39_999], large[39_999:] + delta("b"), FINISH, DONE]))
    assert await text_of(up) == large + delta("b") + FINISH + DONE


async def test_the_official_client_reads_the_same_text_from_any_split(up: Running, engine: FakeEngine) -> None:
    wire = delta(HARD_TEXT[:9]) + delta(HARD_TEXT[9:]) + FINISH + DONE
    engine.script(CHAT, Script(pieces=[wire[i : i + 1] for i in range(len(wire))]))
    stream = await official(up).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == HARD_TEXT


# -- no buffering ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", ["gzip", "gzip, deflate, br, zstd", "identity", "*"])
async def test_each_delta_arrives_before_the_next_is_made(accept: str, up: Running, engine: FakeEngine) -> None:
    gates = [asyncio.Event() for _ in range(6)]
    deltas = [delta(f"word {i}") for i in range(5)]
    pieces: list[Any] = [gates[0]]
    for gate, event in zip(gates[1:], deltas, strict=True):
        pieces += [event, gate]
    engine.script(CHAT, Script(pieces=[*pieces, DONE]))
    async with asyncio.timeout(10), open_stream(up, headers={"Accept-Encoding": accept}) as answer:
        # The response's headers are here although the engine has made nothing yet.
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in answer.headers and "content-length" not in answer.headers
        reader = Reader(answer)
        for gate, event in zip(gates, deltas, strict=False):
            gate.set()
            await reader.until(event)
        gates[-1].set()
        assert await reader.rest() == b"".join(deltas) + DONE


async def test_the_gateway_adds_no_delay_of_its_own(up: Running, engine: FakeEngine) -> None:
    """Ten deltas, each made only after the one before was read: with any delay a delta this would be ten delays."""
    gates = [asyncio.Event() for _ in range(10)]
    engine.script(
        CHAT, Script(pieces=[piece for i, gate in enumerate(gates) for piece in (delta(f"{i};"), gate)] + [DONE])
    )
    loop = asyncio.get_running_loop()
    async with open_stream(up) as answer:
        reader = Reader(answer)
        begin = loop.time()
        for i, gate in enumerate(gates):
            await reader.until(f"{i};".encode())
            gate.set()
        assert loop.time() - begin < 1.0
        await reader.rest()


# -- meaning -----------------------------------------------------------------------------------------------------------


async def test_tool_calls_reasons_and_ids_pass_unchanged(up: Running, engine: FakeEngine) -> None:
    def call(index: int, arguments: str, **start: Any) -> bytes:
        fragment = {"index": index, "function": {"arguments": arguments}, **start}
        return delta("", delta={"tool_calls": [fragment]})

    name = {"name": "f", "arguments": ""}
    wire = (
        delta("", delta={"role": "assistant", "content": ""})
        + call(0, "", id="call-0", type="function", function=name)
        + call(0, '{"a":')
        + call(1, "", id="call-1", type="function", function={**name, "name": "g"})
        + call(0, "1}")
        + call(1, "{}")
        + delta("", delta={}, finish_reason="length", stop_reason=128009)
        + DONE
    )
    engine.script(CHAT, Script(pieces=[wire]), Script(pieces=[wire[i : i + 11] for i in range(0, len(wire), 11)]))
    assert await text_of(up) == wire
    stream = await official(up).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "length"
    joined = {0: "", 1: ""}
    for chunk in chunks:
        for fragment in chunk.choices[0].delta.tool_calls or []:
            assert fragment.function is not None
            joined[fragment.index] += fragment.function.arguments or ""
    assert joined == {0: '{"a":1}', 1: "{}"}


@pytest.mark.parametrize("temperature", [0, 1], ids=["shared", "alone"])
async def test_a_stream_has_one_id_and_no_two_streams_share_one(
    temperature: int, up: Running, engine: FakeEngine
) -> None:
    engine.default = Script(first_token_s=0.1)
    texts = await asyncio.gather(*(text_of(up, temperature=temperature) for _ in range(4)))
    ids = []
    for text in texts:
        documents = [json.loads(line[6:]) for line in text.split(b"\n\n") if line.startswith(b"data: {")]
        assert len({(d["id"], d["created"], d["model"]) for d in documents}) == 1
        assert documents[0]["choices"][0]["delta"]["role"] == "assistant"
        ids.append(documents[0]["id"])
    assert len(set(ids)) == 4
    assert len(engine.asked(CHAT)) == (1 if temperature == 0 else 4)


async def test_two_clients_with_the_same_request_id_do_not_meet_at_the_engine(up: Running, engine: FakeEngine) -> None:
    for _ in range(2):
        async with open_stream(up, headers={"X-Request-Id": "same"}) as answer:
            assert answer.headers["x-request-id"] == "same"
            await answer.aread()
    first, second = (seen.headers["X-Request-Id"] for seen in engine.asked(CHAT))
    assert first != second and first.startswith("same-") and second.startswith("same-")
