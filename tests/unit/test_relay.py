"""The relay's ear: how long it listens, and that nothing is lost where a limit and the next bytes meet."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import cast

import pytest

from gateway.relay import _Ear
from gateway.settings import Timeouts
from gateway.upstream import Answer, Upstream


@pytest.fixture
async def answer() -> AsyncIterator[Answer]:
    """A real engine's answer whose body has no end; the tests put bytes into it in the step they choose."""

    left = asyncio.Event()

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await reader.read()
        writer.close()
        await writer.wait_closed()
        left.set()

    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server, Upstream(Timeouts(), 2**20) as upstream:
        answer = await upstream.post(url, b"{}", {})
        yield answer
        answer.close()
        await left.wait()


def feed(answer: Answer, data: bytes) -> None:
    answer._response.content.feed_data(data)


def listening(answer: Answer, until_s: float) -> _Ear:
    ear = _Ear(answer, time.monotonic)
    ear.until_s = until_s
    return ear


async def test_bytes_that_come_in_time_are_returned_and_then_the_end(answer: Answer) -> None:
    ear = listening(answer, time.monotonic() + 60)
    feed(answer, b"a")
    assert await ear.chunk() == b"a"
    asyncio.get_running_loop().call_later(0.01, feed, answer, b"b")
    assert await ear.chunk() == b"b"
    answer._response.content.feed_eof()
    assert await ear.chunk() == b""
    ear.close()


async def test_silence_until_the_limit_is_none_and_the_next_call_hears_on(answer: Answer) -> None:
    ear = listening(answer, time.monotonic() + 0.02)
    assert await ear.chunk() is None
    assert await ear.chunk() is None, "a limit that has passed stays passed"
    ear.until_s = time.monotonic() + 60
    feed(answer, b"a")
    assert await ear.chunk() == b"a"
    ear.close()


async def test_a_limit_may_move_to_a_later_and_to_an_earlier_time(answer: Answer) -> None:
    begin = time.monotonic()
    ear = listening(answer, begin + 0.02)
    feed(answer, b"a")
    await ear.chunk()
    ear.until_s = begin + 0.2
    assert await ear.chunk() is None
    assert time.monotonic() >= begin + 0.2
    ear.until_s = time.monotonic() + 60
    feed(answer, b"b")
    await ear.chunk()
    ear.until_s = time.monotonic() + 0.02
    async with asyncio.timeout(5):
        assert await ear.chunk() is None


async def test_bytes_that_come_in_the_very_step_of_the_limit_are_not_lost(answer: Answer) -> None:
    ear = listening(answer, time.monotonic() + 60)
    for order in ("bytes first", "limit first"):
        waiting = asyncio.create_task(_hear(ear))
        await asyncio.sleep(0)
        ear.until_s = 0.0
        if order == "bytes first":
            feed(answer, b"a")
            ear._ring()
        else:
            ear._ring()
            feed(answer, b"a")
        heard = await waiting
        ear.until_s = time.monotonic() + 60
        if heard is None:
            heard = await _hear(ear)
        assert heard == b"a", order
    ear.close()


async def _hear(ear: _Ear) -> bytes | None:
    ear._task = cast("asyncio.Task[None]", asyncio.current_task())
    return await ear.chunk()


@pytest.mark.parametrize("also_rings", [False, True])
async def test_who_cancels_the_listener_is_obeyed_even_in_the_step_of_the_limit(
    also_rings: bool, answer: Answer
) -> None:
    ear = listening(answer, time.monotonic() + 60)
    waiting = asyncio.create_task(_hear(ear))
    await asyncio.sleep(0)
    if also_rings:
        ear.until_s = 0.0
        ear._ring()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_limit_does_not_ring_while_nobody_listens(answer: Answer) -> None:
    ear = listening(answer, time.monotonic() + 0.01)
    feed(answer, b"a")
    assert await ear.chunk() == b"a"
    async with asyncio.timeout(5):
        while ear._timer_s < math.inf:  # a slow client takes its time: the timer rings meanwhile
            await asyncio.sleep(0.001)
    ear.until_s = time.monotonic() + 60
    feed(answer, b"b")
    assert await ear.chunk() == b"b"
    ear.close()


async def test_a_timer_that_rings_long_after_its_time_gives_what_has_come_meanwhile_the_time_to_be_read(
    answer: Answer,
) -> None:
    ear = listening(answer, time.monotonic() + 0.02)
    waiting = asyncio.create_task(_hear(ear))
    await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251  # the whole loop stands still
    asyncio.get_running_loop().call_later(0.03, feed, answer, b"a")
    assert await waiting == b"a"
    begin = time.monotonic()
    ear.until_s = begin + 0.02
    waiting = asyncio.create_task(_hear(ear))
    await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251
    assert await waiting is None, "once more, and no longer"
    assert time.monotonic() - begin < 1
    ear.close()
