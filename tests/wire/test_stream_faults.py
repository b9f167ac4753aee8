"""Streams that fail, fall silent or take too long: an honest end, and nothing asked twice."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.engine import MODEL, OUT_OF_LUCK, RESET, FakeEngine, Script
from tests.wire.conftest import Running, renewing, serve, until
from tests.wire.streams import (
    DONE,
    EVERY_DIALECT,
    FINISH,
    QUESTIONS,
    Reader,
    delta,
    error_of,
    open_stream,
    text_of,
)
from tests.wire.talking import (
    CHAT,
    MESSAGES,
    official,
)

up, engine = renewing()
pytestmark = pytest.mark.asyncio(loop_scope="module")


# -- failures after the first byte -------------------------------------------------------------------------------------


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


async def test_an_error_event_that_carries_the_answers_id_is_a_failure_too(up: Running, engine: FakeEngine) -> None:
    own = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    failed = b'data: {"id":"x","choices":[],"error":{"message":"out of luck","code":500}}\n\n'
    engine.script(CHAT, Script(pieces=[own, own, own + failed + own]))
    assert (await text_of(up, ignore_eos=True)).count(b'"error"') == 1
    assert await up.metric("gateway_upstream_failures_total", cause="engine_error_event") == 1
    assert await up.metric("gateway_upstream_failures_total") == 1


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


# -- failures before the first byte ------------------------------------------------------------------------------------


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


# -- silence -----------------------------------------------------------------------------------------------------------


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
        body = {"model": MODEL, "stream": True, **QUESTIONS[CHAT]}
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
    settings: dict[str, Any] = {"timeouts": {"keepalive_s": 0.05}, "admission": {"max_in_flight": 1, "max_wait_s": 0.4}}
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


@pytest.mark.parametrize("together", [True, False], ids=["in one read", "in reads of their own"])
async def test_events_of_another_requests_answer_reach_nobody(together: bool, engine: FakeEngine) -> None:
    own = [chunk(f"own {number}", "chatcmpl-1") for number in range(3)]
    foreign = [chunk("secret", "chatcmpl-2"), b"data: [DONE]\n\n"]
    pieces = [b"".join([*own, *foreign])] if together else [*own, *foreign]
    async with serve([engine.url]) as up:
        engine.script(CHAT, Script(pieces=pieces))
        text = await text_of(up, CHAT)
        assert text.startswith(b"".join(own)), "what was its own goes out as it came"
        assert error_of(text)["message"] == "the engine sent events of another request's answer"
        assert b"secret" not in text and b"[DONE]" not in text
        assert await up.metric("gateway_upstream_failures_total", cause="broken_stream") == 1
        assert b"[DONE]" in await text_of(up, CHAT)


async def test_an_event_of_another_answer_is_seen_in_a_read_of_its_own_where_lines_end_in_crlf(
    engine: FakeEngine,
) -> None:
    read = asyncio.Event()
    own, foreign = (
        chunk(*words).replace(b"\n", b"\r\n") for words in (("own", "chatcmpl-1"), ("secret", "chatcmpl-2"))
    )
    async with serve([engine.url]) as up:
        engine.script(CHAT, Script(pieces=[own, read, foreign, b"data: [DONE]\r\n\r\n"]))
        text = b""
        async with up.stream() as answer:
            async for part in answer.aiter_raw():
                text += part
                read.set()
        assert text.startswith(own)
        assert b"secret" not in text
        assert error_of(text[len(own) :])["message"] == "the engine sent events of another request's answer"


def chunk(text: str, answer_id: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return (
        b"data: "
        + json.dumps({"id": answer_id, "object": "chat.completion.chunk", "choices": [choice]}).encode()
        + b"\n\n"
    )
