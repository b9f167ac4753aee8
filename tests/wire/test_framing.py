"""HTTP itself: what can be read in one way only is read, within bounds of size and time."""

import asyncio

import pytest

from gateway import sse
from tests.fakes.engine import MODEL, FakeEngine, Script
from tests.wire.conftest import Running, renewing, serve
from tests.wire.talking import (
    COMPLETIONS,
    SMALL,
    connected,
    envelope,
    raw,
    read_answer,
    request_bytes,
)

up, engine = renewing()
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(
            request_bytes(b"5\r\nhello\r\n0\r\n\r\n", transfer_encoding="chunked"), id="content-length beside chunked"
        ),
        pytest.param(
            request_bytes(SMALL).replace(b"content-length", b"content-length: 3\r\ncontent-length"),
            id="two content-lengths",
        ),
        pytest.param(request_bytes(SMALL, content_length="-5"), id="negative length"),
        pytest.param(request_bytes(SMALL, content_length="0x20"), id="hexadecimal length"),
        pytest.param(request_bytes(SMALL, content_length="99999999999999999999999"), id="length beyond 64 bits"),
        pytest.param(request_bytes(SMALL, content_length="", transfer_encoding="xchunked"), id="unknown coding"),
        pytest.param(
            request_bytes(SMALL, content_length="", transfer_encoding="chunked, identity"), id="chunked not last"
        ),
        pytest.param(
            request_bytes(b"zz\r\nhello\r\n0\r\n\r\n", content_length="", transfer_encoding="chunked"),
            id="bad chunk size",
        ),
        pytest.param(b"GET / HTTP/9.9\r\n\r\n", id="unknown version"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="a TLS hello"),
        pytest.param(b"{}\r\n\r\n", id="no request line"),
        pytest.param(b"POST /v1/completions HTTP/1.1\r\nhost : gateway\r\n\r\n", id="space before the colon"),
        pytest.param(b"POST /v1/completions HTTP/1.1\r\nx-a: 1\r\n folded\r\n\r\n", id="folded header"),
        pytest.param(b"POST /v1/completions HTTP/1.1\r\nx-a: 1\x00\r\n\r\n", id="NUL in a header"),
        pytest.param(b"POST /v1/\xff HTTP/1.1\r\nhost: gateway\r\n\r\n", id="path that is no ASCII"),
        pytest.param(b"GET /healthz HTTP/1.1\r\nx-a: 1\r\n\r\n", id="no host"),
        pytest.param(b"GET /healthz HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", id="two hosts"),
        pytest.param(b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com\r\n\r\n", id="CONNECT"),
    ],
)
async def test_framing_that_is_broken_or_ambiguous_is_400_json_and_the_end_of_the_connection(
    data: bytes, up: Running, engine: FakeEngine
) -> None:
    status, headers, document = await raw(up, data)
    assert status == 400
    assert headers["connection"] == "close"
    assert envelope(document)["code"] == "invalid_http"
    assert not engine.asked(COMPLETIONS)


async def test_a_chunked_body_is_a_body(up: Running, engine: FakeEngine) -> None:
    chunks = b"".join(b"%x\r\n%c\r\n" % (1, byte) for byte in SMALL) + b"0\r\n\r\n"
    status, _, _ = await raw(up, request_bytes(chunks, content_length="", transfer_encoding="chunked"))
    assert status == 200
    assert engine.asked(COMPLETIONS)[0].raw == SMALL


@pytest.mark.parametrize("head", [b"POST /v1/completions HTTP/1.1\r\nx-a: ", b"GET /", b"GET / HTTP/1.1\r\nx-"])
async def test_a_head_beyond_the_limit_is_431_and_is_not_buffered(head: bytes, up: Running) -> None:
    status, headers, document = await raw(up, head + b"a" * 2**20)
    assert status == 431
    assert headers["connection"] == "close"
    assert envelope(document)["code"] == "headers_too_large"


@pytest.mark.parametrize(("beyond", "expected"), [(0, 200), (1, 431), (5000, 431)])
@pytest.mark.parametrize("cut", [None, 1000, 60_000], ids=["one write", "cut early", "cut late"])
async def test_the_limit_of_the_head_is_exact_however_it_comes(
    beyond: int, expected: int, cut: int | None, up: Running
) -> None:
    begin, end = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-a: ", b"\r\n\r\n"
    head = begin + b"a" * (65536 + beyond - len(begin) - len(end)) + end
    async with connected(up) as (reader, writer), asyncio.timeout(10):
        writer.write(head[:cut])
        if cut is not None:
            await asyncio.sleep(0.02)  # so that it is likely to be read in two
            writer.write(head[cut:])
        assert (await read_answer(reader))[0] == expected


async def test_a_host_may_be_missing_in_http_1_0_and_its_answer_is_no_chunk(up: Running) -> None:
    async with connected(up) as (reader, writer), asyncio.timeout(10):
        writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"\r\ncontent-length: 15" in head
    assert body == b'{"status":"ok"}'


@pytest.mark.parametrize("script", [Script(), Script(reset_after=2)], ids=["whole", "broken"])
async def test_a_stream_to_an_http_1_0_client_has_no_chunks_and_ends_with_the_connection(
    script: Script, up: Running, engine: FakeEngine
) -> None:
    engine.script(COMPLETIONS, script)
    request = request_bytes({"model": MODEL, "prompt": "hello", "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0")
    async with connected(up) as (reader, writer), asyncio.timeout(10):
        writer.write(request)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    assert b"connection: close" in head
    events = sse.split(body)
    assert all(event.startswith((b"data: {", b"data: [DONE]")) for event in events)
    assert events[-1] == b"data: [DONE]\n\n" if script.reset_after is None else b'"error"' in events[-1]


async def test_many_small_headers_beyond_the_limit_are_431(up: Running) -> None:
    status, _, _ = await raw(up, b"GET / HTTP/1.1\r\n" + b"x-a: b\r\n" * 100_000)
    assert status == 431


async def test_a_trailer_is_bounded_and_never_a_header(engine: FakeEngine) -> None:
    async with serve([engine.url], timeouts={"body_s": 5}) as up:
        chunked = request_bytes(
            b"%x\r\n%s\r\n0\r\n" % (len(SMALL), SMALL), content_length="", transfer_encoding="chunked"
        )
        # Were it a header, this deadline would be refused with 400.
        status, _, _ = await raw(up, chunked + b"x-request-timeout-s: never\r\n\r\n")
        assert status == 200
        status, _, document = await raw(up, chunked + b"x-a: " + b"a" * 2**20)
        assert status == 431, document
        assert len(engine.asked(COMPLETIONS)) == 1
        await up.settled()


@pytest.mark.parametrize("begun", [b"POST /v1/completions HTTP/1.1\r\nhost: gate", b"P"])
async def test_a_head_that_never_ends_is_408_in_its_time(begun: bytes, engine: FakeEngine) -> None:
    async with serve([engine.url], timeouts={"head_s": 0.2}) as up:
        status, headers, document = await raw(up, begun)
        assert status == 408
        assert headers["connection"] == "close"
        assert envelope(document)["code"] == "request_timeout"


async def test_the_head_of_a_second_request_has_its_time_too(engine: FakeEngine) -> None:
    async with (
        serve([engine.url], timeouts={"head_s": 0.2}) as up,
        connected(up) as (reader, writer),
        asyncio.timeout(10),
    ):
        writer.write(request_bytes(SMALL))
        assert (await read_answer(reader))[0] == 200
        await asyncio.sleep(0.3)  # an idle connection between requests is no slow head
        writer.write(b"POST /v1/com")
        assert (await read_answer(reader))[0] == 408


async def test_a_connection_that_says_nothing_is_closed_in_its_time(engine: FakeEngine) -> None:
    async with serve([engine.url], timeouts={"head_s": 0.2}) as up, connected(up) as (reader, _), asyncio.timeout(10):
        assert await reader.read() == b""


async def test_a_pipelined_request_does_not_disturb_the_one_being_answered(up: Running, engine: FakeEngine) -> None:
    engine.script(COMPLETIONS, Script(delay_s=0.2))
    async with connected(up) as (reader, writer), asyncio.timeout(10):
        writer.write(request_bytes(SMALL) + request_bytes(SMALL) + b"\x00 garbage")
        status, headers, _ = await read_answer(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert await reader.read() == b""
    assert len(engine.asked(COMPLETIONS)) == 1


async def test_an_upgrade_offer_is_declined_by_answering(up: Running, engine: FakeEngine) -> None:
    """Java's HTTP client offers h2c on every first request."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABk"}
    async with connected(up) as (reader, writer), asyncio.timeout(10):
        for count in (1, 2):
            writer.write(request_bytes(SMALL, **offer))
            assert (await read_answer(reader))[0] == 200
            assert len(engine.asked(COMPLETIONS)) == count
