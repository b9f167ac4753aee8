"""What of an engine's response goes further, read from real sockets."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.errors import UpstreamFailedError
from gateway.settings import Timeouts
from gateway.upstream import Answer, Upstream

MOST = 100_000


class RawEngine:
    """Answers every request with `response`, followed by `endless` for as long as somebody reads."""

    def __init__(self) -> None:
        self.response = b""
        self.endless = b""
        self.sent_bytes = 0
        self.left = asyncio.Event()
        self.url = ""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(self.response)
        try:
            while self.endless:
                writer.write(self.endless)
                await writer.drain()
                self.sent_bytes += len(self.endless)
            await reader.read()
        except ConnectionError:
            pass
        self.left.set()
        writer.close()


@pytest.fixture
async def engine() -> AsyncIterator[RawEngine]:
    engine = RawEngine()
    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server:
        yield engine


async def answer_to(engine: RawEngine, upstream: Upstream, head: bytes) -> Answer:
    engine.response = head + b"\r\n"
    return await upstream.post(engine.url, b"{}", {})


@pytest.mark.parametrize(
    ("sent", "passed_on"),
    [
        (b"7", "7"),
        (b" 120 ", "120"),
        (b"Fri, 31 Dec 2027 23:59:59 GMT", "Fri, 31 Dec 2027 23:59:59 GMT"),
        (b"\xff", None),
        (b"7\xc3\xbf", None),
        (b"\xd9\xa3", None),  # a digit, in Arabic
        (b"soon", None),
        (b"-1", None),
        (b"1.5", None),
        (b"9" * 40, None),
        (b"", None),
    ],
)
async def test_retry_after_is_passed_on_as_seconds_or_a_date_and_nothing_else(
    engine: RawEngine, sent: bytes, passed_on: str | None
) -> None:
    async with Upstream(Timeouts(), MOST) as upstream:
        answer = await answer_to(engine, upstream, b"HTTP/1.1 429 x\r\nRetry-After: " + sent + b"\r\n")
        assert answer.retry_after == passed_on
        answer.close()


async def test_the_content_type_is_compared_in_lower_case(engine: RawEngine) -> None:
    async with Upstream(Timeouts(), MOST) as upstream:
        answer = await answer_to(engine, upstream, b"HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream\r\n")
        assert answer.content_type == "text/event-stream"
        answer.close()


@pytest.mark.parametrize("status", [600, 700, 999])
async def test_a_status_that_is_none_is_a_failed_engine_and_the_connection_is_closed(
    engine: RawEngine, status: int
) -> None:
    async with Upstream(Timeouts(), MOST) as upstream:
        with pytest.raises(UpstreamFailedError, match=f"with the status {status}"):
            await answer_to(engine, upstream, b"HTTP/1.1 %d x\r\n" % status)
        await asyncio.wait_for(engine.left.wait(), 5)


async def test_an_answer_without_an_end_is_broken_off_at_the_limit(engine: RawEngine) -> None:
    engine.endless = b"x" * 10_000
    async with Upstream(Timeouts(), MOST) as upstream:
        answer = await answer_to(engine, upstream, b"HTTP/1.1 200 OK\r\n")
        with pytest.raises(UpstreamFailedError, match="more than 100000 bytes"):
            await answer.read()
        await asyncio.wait_for(engine.left.wait(), 5)


@pytest.mark.parametrize(("size", "fits"), [(MOST, True), (MOST + 1, False)])
async def test_the_limit_is_exact(engine: RawEngine, size: int, fits: bool) -> None:
    async with Upstream(Timeouts(), MOST) as upstream:
        engine.response = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (size, b"x" * size)
        answer = await upstream.post(engine.url, b"{}", {})
        if fits:
            assert await answer.read() == b"x" * size
        else:
            with pytest.raises(UpstreamFailedError):
                await answer.read()
        answer.close()
