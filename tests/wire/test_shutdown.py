"""Stopping: what is in flight finishes, what is new is told to go elsewhere, and it always ends."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.fakes.engine import FakeEngine, Script
from tests.wire.conftest import until
from tests.wire.process import GatewayProcess, started
from tests.wire.streams import events_of

CHAT = {"model": "fake-8b", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16, "seed": 1}
STREAM = {**CHAT, "stream": True}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
        yield client


async def ready(gateway: GatewayProcess, client: httpx.AsyncClient) -> None:
    await gateway.serving()

    async def is_ready() -> bool:
        return (await client.get(f"{gateway.url}/readyz")).status_code == 200

    await until(is_ready)


class Reader:
    """A client that reads one stream in the background."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self.events: list[bytes] = []
        self.began = asyncio.Event()
        self.task = asyncio.create_task(self._read(client, url))

    async def _read(self, client: httpx.AsyncClient, url: str) -> None:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=STREAM) as answer:
            assert answer.status_code == 200

            async def noted() -> AsyncIterator[bytes]:
                async for chunk in answer.aiter_bytes():
                    self.began.set()
                    yield chunk

            self.events = await events_of(noted())


async def test_at_sigterm_a_stream_finishes_new_requests_get_503_and_the_exit_code_is_0(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    engine.default = Script(token_s=0.1)
    async with started([engine.url]) as gateway:
        await ready(gateway, client)
        stream = Reader(client, gateway.url)
        await stream.began.wait()
        gateway.signal(signal.SIGTERM)
        await until(lambda: "draining" in gateway.events())
        readyz = await client.get(f"{gateway.url}/readyz")
        assert (readyz.status_code, readyz.json()["reason"]) == (503, "the gateway is shutting down")
        assert (await client.get(f"{gateway.url}/healthz")).status_code == 200
        # A connection of its own: the listener is still open.
        async with httpx.AsyncClient(trust_env=False) as fresh:
            refused = await fresh.post(f"{gateway.url}/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert int(refused.headers["retry-after"]) >= 1
        assert not stream.task.done()
        await stream.task
        assert stream.events[-1] == b"[DONE]"
        assert await gateway.ended(10) == 0
        assert gateway.events()[-1] == "stopped"
        gateway.assert_no_traceback()


async def test_an_idle_gateway_stops_at_once(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    async with started([engine.url]) as gateway:
        await ready(gateway, client)
        began = time.monotonic()
        gateway.signal(signal.SIGTERM)
        assert await gateway.ended() == 0
        assert time.monotonic() - began < 5
        gateway.assert_no_traceback()


async def test_drain_s_bounds_the_wait_and_the_cut_is_an_error_event_not_a_forged_end(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    engine.default = Script(stall_after=2)
    async with started([engine.url], timeouts__drain_s=1) as gateway:
        await ready(gateway, client)
        stream = Reader(client, gateway.url)
        await stream.began.wait()
        gateway.signal(signal.SIGTERM)
        await stream.task
        assert b'"code":"draining"' in stream.events[-1]
        assert b"[DONE]" not in stream.events
        assert not any(b'"finish_reason":"stop"' in event for event in stream.events)
        assert await gateway.ended(10) == 0
        await until(lambda: engine.asked("/v1/chat/completions")[0].aborted_s is not None)
        gateway.assert_no_traceback()


async def test_a_request_that_has_no_answer_yet_is_cut_with_503(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    async with started([engine.url], timeouts__drain_s=1) as gateway:
        await ready(gateway, client)
        engine.default = Script(hang=True)
        request = asyncio.create_task(client.post(f"{gateway.url}/v1/chat/completions", json=CHAT))
        await until(lambda: engine.asked("/v1/chat/completions"))
        gateway.signal(signal.SIGTERM)
        answer = await request
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "draining"
        assert await gateway.ended(10) == 0
        gateway.assert_no_traceback()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_stops_at_once(
    engine: FakeEngine, client: httpx.AsyncClient, second: signal.Signals
) -> None:
    engine.default = Script(stall_after=2)
    async with started([engine.url]) as gateway:
        await ready(gateway, client)
        stream = Reader(client, gateway.url)
        await stream.began.wait()
        gateway.signal(signal.SIGINT)
        await until(lambda: "draining" in gateway.events())
        assert gateway.process.returncode is None
        gateway.signal(second)
        assert await gateway.ended(10) == 0
        await stream.task
        gateway.assert_no_traceback()


async def test_a_client_that_does_not_read_can_not_keep_the_gateway_from_stopping(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    async with started([engine.url], timeouts__drain_s=1) as gateway:
        await ready(gateway, client)
        flood = b"data: " + b"x" * 65536 + b"\n\n"
        engine.script("/v1/chat/completions", Script(body=flood * 200, headers={"Content-Type": "text/event-stream"}))
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = b'{"model":"fake-8b","stream":true,"messages":[{"role":"user","content":"x"}]}'
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        await until(lambda: engine.asked("/v1/chat/completions"))
        gateway.signal(signal.SIGTERM)
        assert await gateway.ended(15) == 0
        gateway.assert_no_traceback()
        writer.close()


async def test_a_signal_while_it_starts_ends_it_quietly(engine: FakeEngine) -> None:
    async def stopped_after(delay_s: float) -> None:
        async with started([engine.url]) as gateway:
            await asyncio.sleep(delay_s)  # where in its start that is, is left to chance: every place must do
            gateway.signal(signal.SIGTERM)
            assert await gateway.ended() in (0, -signal.SIGTERM)  # before Python itself is up, nobody can catch it
            gateway.assert_no_traceback()

    await asyncio.gather(*(stopped_after(delay_s) for delay_s in (0.2, 0.6, 1.0, 1.4)))


async def test_it_starts_before_its_engine_and_serves_once_there_is_one(client: httpx.AsyncClient) -> None:
    engine = FakeEngine()
    async with engine:
        pass
    async with started([engine.url]) as gateway:
        await gateway.serving()
        assert (await client.get(f"{gateway.url}/healthz")).status_code == 200
        early = await client.post(f"{gateway.url}/v1/chat/completions", json=CHAT)
        assert (early.status_code, early.json()["error"]["type"]) == (503, "server_error")
        assert "retry-after" in early.headers
        async with engine:
            await ready(gateway, client)
            assert (await client.post(f"{gateway.url}/v1/chat/completions", json=CHAT)).status_code == 200
        gateway.signal(signal.SIGTERM)
        assert await gateway.ended() == 0
        gateway.assert_no_traceback()


async def test_an_unfinished_upload_gets_503_at_once_and_holds_up_nothing(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    engine.default = Script(token_s=0.1)
    async with started([engine.url]) as gateway:
        await ready(gateway, client)
        stream = Reader(client, gateway.url)
        await stream.began.wait()
        reader, writer = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 1000\r\nexpect: 100-continue\r\n\r\n"
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(b"{")
        gateway.signal(signal.SIGTERM)
        async with asyncio.timeout(1):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert not stream.task.done()
        await stream.task
        assert stream.events[-1] == b"[DONE]"
        assert await gateway.ended(5) == 0
        gateway.assert_no_traceback()
        writer.close()
