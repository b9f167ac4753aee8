"""Streams: bytes as they came, when they came, with an honest end."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.fakes.dialects import named
from tests.fakes.engine import MODEL, OUT_OF_LUCK, RESET, FakeEngine, Script, events_of
from tests.wire.conftest import Running, renewed, serve, until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
DONE = b"data: [DONE]\n\n"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello there"}]},
    COMPLETIONS: {"prompt": "hello there"},
    RESPONSES: {"input": "hello there"},
    MESSAGES: {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 16},
}
EVERY_DIALECT = pytest.mark.parametrize("path", list(BODIES))
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def up(shared: tuple[FakeEngine, Running]) -> AsyncIterator[Running]:
    async for running in renewed(shared):
        yield running


@pytest.fixture
def engine(up: Running, shared: tuple[FakeEngine, Running]) -> FakeEngine:
    return shared[0]


def open_stream(up: Running, path: str = CHAT, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"model": MODEL, "stream": True, **BODIES[path], **fields}
    return up.client.stream("POST", path, json=body, headers=headers)


async def text_of(up: Running, path: str = CHAT, **fields: Any) -> bytes:
    """A whole stream's bytes."""
    async with open_stream(up, path, **fields) as answer:
        assert answer.status_code == 200, await answer.aread()
        return b"".join([chunk async for chunk in answer.aiter_raw()])


def delta(text: str, **fields: Any) -> bytes:
    """One event of a chat stream, as vLLM writes it."""
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None, **fields}
    document = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
    }
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


FINISH = delta("", finish_reason="stop")


class Reader:
    """A client that takes a stream piece by piece."""

    def __init__(self, answer: Any) -> None:
        self._raw = answer.aiter_raw()
        self.text = b""

    async def until(self, wanted: bytes) -> None:
        """Read on until `wanted` has come; fails where the stream ends or stands still first."""
        async with asyncio.timeout(10):
            while wanted not in self.text:
                self.text += await anext(self._raw)

    async def rest(self) -> bytes:
        async with asyncio.timeout(10):
            async for chunk in self._raw:
                self.text += chunk
        return self.text


def official(up: Running, **settings: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{up.url}/v1", api_key="sk-none", max_retries=0, http_client=up.client, **settings)


# -- usage and the end (B1) --------------------------------------------------------------------------------------------


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
    whole = await up.client.post(path, json={"model": MODEL, **BODIES[path]})
    assert whole.status_code == 200
    usage = whole.json()["usage"]
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    assert await up.metric("gateway_tokens_total", kind="prompt") == 2 * prompt
    generated = await up.metric("gateway_tokens_total", kind="generation")
    assert generated >= usage.get("completion_tokens", usage.get("output_tokens"))
    assert await up.metric("gateway_time_to_first_token_seconds_count", route=path) == 1
    assert await up.metric("gateway_inter_token_latency_seconds_count") > 0


# -- failures after the first byte (B2) --------------------------------------------------------------------------------


def error_of(text: bytes) -> dict[str, Any]:
    """The one error event, which must be the last of its stream."""
    events = [event for event in text.split(b"\n\n") if b'"error"' in event]
    assert len(events) == 1, text
    assert text.endswith(events[0] + b"\n\n"), text
    error: dict[str, Any] = json.loads(events[0].partition(b"data: ")[2])["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("script", "code", "label"),
    [
        pytest.param(Script(reset_after=4), "engine_failed", "broken_stream", id="reset"),
        pytest.param(Script(stall_after=4), "engine_timeout", "timeout_in_stream", id="silence"),
        pytest.param(Script(end_after=4), "engine_failed", "broken_stream", id="an end without its last event"),
    ],
)
@EVERY_DIALECT
async def test_a_broken_stream_tells_its_client_and_is_never_asked_again(
    path: str, script: Script, code: str, label: str, engine: FakeEngine
) -> None:
    async with serve([engine.url], timeouts={"idle_s": 0.3}) as up:
        engine.script(path, script)
        text = await text_of(up, path, ignore_eos=True)
        assert error_of(text)["code"] == code
        assert b'"finish_reason":"' not in text and b"[DONE]" not in text
        assert b"message_stop" not in text and b"response.completed" not in text
        assert (b"event: error" in text and b'{"type":"error"' in text) is (path == MESSAGES)
        assert await up.metric("gateway_upstream_failures_total") == 1
        assert await up.metric("gateway_upstream_failures_total", cause=label) == 1
        assert len(engine.asked(path)) == 1
        await up.settled()


async def test_the_engines_own_error_event_is_passed_on_as_the_only_one(up: Running, engine: FakeEngine) -> None:
    engine.script(CHAT, Script(error_event_after=3))
    text = await text_of(up, ignore_eos=True)
    assert text.endswith(b"data: " + OUT_OF_LUCK + b"\n\n")
    assert text.count(b'"error"') == 1
    assert await up.metric("gateway_upstream_failures_total", cause="engine_error_event") == 1
    assert await up.metric("gateway_upstream_failures_total") == 1
    assert len(engine.asked(CHAT)) == 1


@pytest.mark.parametrize("then", [[], [DONE], [RESET], [asyncio.Event()]], ids=["end", "done", "reset", "silence"])
async def test_after_the_engines_own_error_no_second_one_follows(then: list[Any], engine: FakeEngine) -> None:
    failed = b"data: " + OUT_OF_LUCK + b"\n\n"
    async with serve([engine.url], timeouts={"idle_s": 0.3}) as up:
        engine.script(CHAT, Script(pieces=[delta("a"), failed, *then]))
        expected = delta("a") + failed + (DONE if then == [DONE] else b"")
        assert await text_of(up) == expected
        assert await up.metric("gateway_upstream_failures_total") == 1
        await up.settled()


async def test_half_an_event_is_not_sent_before_the_error(up: Running, engine: FakeEngine) -> None:
    whole, half = delta("a"), delta("half of this")[:-30]
    engine.script(CHAT, Script(pieces=[whole, half, RESET]))
    text = await text_of(up)
    assert text.startswith(whole + b"data: {")
    assert b"half of" in half and b"half of" not in text
    assert error_of(text)["code"] == "engine_failed"


async def test_the_official_client_raises_on_a_broken_stream(up: Running, engine: FakeEngine) -> None:
    client = official(up)
    engine.script(CHAT, Script(reset_after=4))
    heard = []
    with pytest.raises(openai.APIError, match="broke the connection off"):
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True, extra_body={"ignore_eos": True}
        )
        async for chunk in stream:
            heard.append(chunk)  # noqa: PERF401  # a comprehension would lose what came before the error
    assert len(heard) == 4


async def test_an_endless_event_is_an_error_not_a_growing_buffer(up: Running, engine: FakeEngine) -> None:
    engine.script(CHAT, Script(pieces=[delta("a"), *[b"x" * 2**20] * 20]))
    text = await text_of(up)
    assert len(text) < 1000
    assert "an event of more than" in error_of(text)["message"]


# -- failures before the first byte (B3) -------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "retry_after"), [(400, None), (422, None), (429, "7"), (500, None), (503, "3")])
@EVERY_DIALECT
async def test_a_failure_before_the_first_byte_keeps_its_status(
    path: str, status: int, retry_after: str | None, up: Running, engine: FakeEngine
) -> None:
    headers = {"Content-Type": "application/json"} | ({"Retry-After": retry_after} if retry_after else {})
    engine.script(path, Script(status=status, body=OUT_OF_LUCK, headers=headers))
    async with open_stream(up, path) as answer:
        document = json.loads(await answer.aread())
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers.get("retry-after") == (retry_after or {503: "1"}.get(status))
    assert document["error"]["message"] == "out of luck"
    assert (document.get("type") == "error") is (path == MESSAGES)
    assert len(engine.asked(path)) == 1


# -- framing (B4) ------------------------------------------------------------------------------------------------------

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


# -- no buffering (B6) -------------------------------------------------------------------------------------------------


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


# -- silence (B7) ------------------------------------------------------------------------------------------------------


async def test_comments_keep_a_silent_stream_open_and_count_for_nothing(engine: FakeEngine) -> None:
    async with serve([engine.url], timeouts={"keepalive_s": 0.1}) as up:
        gate = asyncio.Event()
        engine.script(CHAT, Script(pieces=[gate, delta("a"), FINISH, DONE]))
        async with open_stream(up) as answer:
            reader = Reader(answer)
            await reader.until(b": waiting for the engine\n\n" * 3)
            assert b"data" not in reader.text
            assert await up.metric("gateway_time_to_first_token_seconds_count") == 0
            gate.set()
            text = await reader.rest()
        assert text.replace(b": waiting for the engine\n\n", b"") == delta("a") + FINISH + DONE
        assert await up.metric("gateway_time_to_first_token_seconds_count") == 1
        assert await up.metric("gateway_time_to_first_token_seconds_sum") > 0.3, "a comment was taken for a token"
        await up.settled()


@contextlib.asynccontextmanager
async def idle_hop(up: Running, idle_s: float) -> AsyncIterator[str]:
    """A proxy that cuts a connection on which nothing came from the gateway for `idle_s`. Yields its URL."""
    host, port = up.url.removeprefix("http://").split(":")

    async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter, limit_s: float | None) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            while data := await asyncio.wait_for(source.read(65536), limit_s):
                sink.write(data)
        sink.transport.abort()

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pass_on(reader, back, None), pass_on(there, writer, idle_s))

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("keepalive_s", [0.1, 60], ids=["with comments", "without"])
async def test_a_hop_that_cuts_idle_connections_lets_a_silent_prefill_live_by_its_comments(
    keepalive_s: float, engine: FakeEngine
) -> None:
    async with serve([engine.url], timeouts={"keepalive_s": keepalive_s}) as up, idle_hop(up, idle_s=1) as url:
        engine.script(CHAT, Script(first_token_s=2.5))
        body = {"model": MODEL, "stream": True, **BODIES[CHAT]}
        try:
            async with up.client.stream("POST", f"{url}{CHAT}", json=body) as answer:
                text = await answer.aread()
        except httpx.RemoteProtocolError:
            assert keepalive_s == 60, "cut in spite of the comments"
        else:
            assert text.endswith(DONE) and keepalive_s == 0.1
        await until(lambda: up.gateway.edge.open == 0)


async def test_a_comment_never_comes_between_the_parts_of_an_event(engine: FakeEngine) -> None:
    async with serve([engine.url], timeouts={"keepalive_s": 0.05}) as up:
        halves, gate = (delta("a")[:30], delta("a")[30:]), asyncio.Event()
        engine.script(CHAT, Script(pieces=[halves[0], gate, halves[1], FINISH, DONE]))
        async with open_stream(up) as answer:
            reader = Reader(answer)
            await reader.until(b": waiting")
            gate.set()
            text = await reader.rest()
        assert delta("a") + FINISH + DONE in text


async def test_the_official_client_does_not_notice_comments(engine: FakeEngine) -> None:
    async with serve([engine.url], timeouts={"keepalive_s": 0.05}) as up:
        engine.script(CHAT, Script(first_token_s=0.3))
        stream = await official(up).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")


async def test_before_the_engines_headers_nothing_is_sent_so_that_a_refusal_keeps_its_status(
    engine: FakeEngine,
) -> None:
    async with serve([engine.url], timeouts={"keepalive_s": 0.05}) as up:
        engine.script(CHAT, Script(status=429, body=OUT_OF_LUCK, headers={"Retry-After": "7"}, delay_s=0.3))
        async with open_stream(up) as answer:
            assert answer.status_code == 429
            assert json.loads(await answer.aread())["error"]["message"] == "out of luck"


async def test_while_queued_nothing_is_sent(engine: FakeEngine) -> None:
    """A queued stream sends no comment: its refusal can still be a 429."""
    settings = {"timeouts": {"keepalive_s": 0.05}, "admission": {"max_in_flight": 1, "max_wait_s": 0.4}}
    async with serve([engine.url], **settings) as up:
        gate = asyncio.Event()
        engine.script(CHAT, Script(pieces=[gate, DONE]))
        async with open_stream(up) as first:
            async with open_stream(up) as second:
                assert second.status_code == 429
                assert second.headers["content-type"] == "application/json"
                assert int(second.headers["retry-after"]) >= 1
                await second.aread()
            gate.set()
            await Reader(first).rest()
        assert len(engine.asked(CHAT)) == 1


# -- meaning (B11) -----------------------------------------------------------------------------------------------------


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


# -- measuring beside the stream ---------------------------------------------------------------------------------------


@EVERY_DIALECT
async def test_the_first_token_is_the_first_event_with_content(path: str, up: Running, engine: FakeEngine) -> None:
    gate = asyncio.Event()
    opening = {
        CHAT: delta("", delta={"role": "assistant", "content": ""}),
        COMPLETIONS: b'data: {"choices":[{"index":0,"text":"","finish_reason":null}]}\n\n',
        RESPONSES: named("response.created", response={"usage": None}) + b"\n\n",
        MESSAGES: named("message_start", message={"usage": {"input_tokens": 3, "output_tokens": 0}}) + b"\n\n",
    }[path]
    content = {
        CHAT: delta("a") + delta("b"),
        COMPLETIONS: b'data: {"choices":[{"index":0,"text":"a"}]}\n\n',
        RESPONSES: named("response.output_text.delta", delta="a") + b"\n\n",
        MESSAGES: named("content_block_delta", delta={"type": "text_delta", "text": "a"}) + b"\n\n",
    }[path]
    end = {RESPONSES: named("response.completed", response={}), MESSAGES: named("message_stop")}.get(path, DONE.strip())
    engine.script(path, Script(pieces=[opening, gate, content, end + b"\n\n"]))
    async with open_stream(up, path) as answer:
        reader = Reader(answer)
        await reader.until(opening)
        await asyncio.sleep(0.3)
        gate.set()
        await reader.rest()
    assert await up.metric("gateway_time_to_first_token_seconds_count", route=path) == 1
    assert await up.metric("gateway_time_to_first_token_seconds_sum", route=path) > 0.3


async def test_a_stream_without_content_has_no_first_token(up: Running, engine: FakeEngine) -> None:
    engine.script(CHAT, Script(pieces=[delta("", delta={"role": "assistant"}), FINISH, DONE]))
    await text_of(up)
    assert await up.metric("gateway_time_to_first_token_seconds_count") == 0
    assert await up.metric("gateway_requests_total", route=CHAT, status="200") == 1


async def test_inter_token_latency_is_what_passed_between_reads(up: Running, engine: FakeEngine) -> None:
    gate = asyncio.Event()
    engine.script(CHAT, Script(pieces=[delta("a"), gate, delta("b"), FINISH + DONE]))
    async with open_stream(up) as answer:
        reader = Reader(answer)
        await reader.until(b'"a"')
        await asyncio.sleep(0.3)
        gate.set()
        await reader.rest()
    assert await up.metric("gateway_inter_token_latency_seconds_count") == 1, "the end is no token"
    assert 0.25 < await up.metric("gateway_inter_token_latency_seconds_sum") < 2


# -- deadlines ---------------------------------------------------------------------------------------------------------


async def test_a_deadline_before_the_answer_is_a_504(up: Running, engine: FakeEngine) -> None:
    engine.script(CHAT, Script(hang=True))
    async with open_stream(up, headers={"X-Request-Timeout-S": "0.3"}) as answer:
        assert answer.status_code == 504
        assert json.loads(await answer.aread())["error"]["code"] == "engine_timeout"
    await until(lambda: engine.asked(CHAT)[0].aborted_s is not None)


@pytest.mark.parametrize("before", [[], [delta("a")]], ids=["before the first token", "after it"])
async def test_a_deadline_in_mid_stream_is_an_error_event(before: list[bytes], up: Running, engine: FakeEngine) -> None:
    engine.script(CHAT, Script(pieces=[*before, asyncio.Event()]))
    async with open_stream(up, headers={"X-Request-Timeout-S": "0.3"}) as answer:
        text = await Reader(answer).rest()
    assert answer.status_code == 200
    assert error_of(text)["code"] == "engine_timeout"
    assert "deadline" in error_of(text)["message"]
    await until(lambda: engine.asked(CHAT)[0].aborted_s is not None)
    assert await up.metric("gateway_upstream_failures_total", cause="deadline") == 1


async def test_a_stream_longer_than_idle_and_first_byte_limits_goes_on_while_tokens_flow(engine: FakeEngine) -> None:
    async with serve([engine.url], timeouts={"idle_s": 1, "first_byte_s": 1, "keepalive_s": 0.2}) as up:
        engine.script(CHAT, Script(token_s=0.3))
        text = await text_of(up, max_tokens=5)
        assert text.endswith(DONE) and b'"error"' not in text


async def test_silence_before_the_first_token_has_its_own_limit(engine: FakeEngine) -> None:
    async with serve([engine.url], timeouts={"idle_s": 0.1, "first_byte_s": 5}) as up:
        engine.script(CHAT, Script(first_token_s=0.5))
        assert (await text_of(up)).endswith(DONE)
    async with serve([engine.url], timeouts={"idle_s": 5, "first_byte_s": 0.2}) as up:
        engine.script(CHAT, Script(pieces=[asyncio.Event()]))
        assert error_of(await text_of(up))["code"] == "engine_timeout"
