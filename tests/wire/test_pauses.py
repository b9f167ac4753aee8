"""The gateway's process stands still for a while: a paused container, a suspended host, a debugger."""

import asyncio
import signal

import httpx

from tests.fakes.engine import FakeEngine, Script
from tests.wire.process import started
from tests.wire.test_shutdown import Reader, ready


async def test_a_pause_longer_than_idle_s_cuts_no_stream_whose_engine_went_on(engine: FakeEngine) -> None:
    engine.default = Script(token_s=0.25)
    async with (
        httpx.AsyncClient(trust_env=False, timeout=20) as client,
        started([engine.url], timeouts__idle_s=1) as gateway,
    ):
        await ready(gateway, client)
        streams = [Reader(client, gateway.url) for _ in range(10)]
        for stream in streams:
            await stream.began.wait()
        gateway.signal(signal.SIGSTOP)
        await asyncio.sleep(2.5)
        gateway.signal(signal.SIGCONT)
        for stream in streams:
            await stream.task
        assert [stream.events[-1] for stream in streams] == [b"[DONE]"] * 10
        gateway.assert_no_traceback()


async def test_after_a_pause_an_engine_that_has_said_nothing_is_still_found_silent(engine: FakeEngine) -> None:
    engine.default = Script(stall_after=2)
    async with (
        httpx.AsyncClient(trust_env=False, timeout=20) as client,
        started([engine.url], timeouts__idle_s=1) as gateway,
    ):
        await ready(gateway, client)
        stream = Reader(client, gateway.url)
        await stream.began.wait()
        gateway.signal(signal.SIGSTOP)
        await asyncio.sleep(2)
        gateway.signal(signal.SIGCONT)
        async with asyncio.timeout(1.5):
            await stream.task
        assert b'"code":"engine_timeout"' in stream.events[-1]
