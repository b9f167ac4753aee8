"""Bodies that are too large, too deep, too slow or never end, and what they cost the others."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.engine import MODEL, FakeEngine
from tests.wire.conftest import Running, serve, until
from tests.wire.guarding import BEARER, keys_file
from tests.wire.process import GatewayProcess, started

MB = 1 << 20
LIMIT = 8 * MB
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
JSON = {"Content-Type": "application/json"}


async def pieces(size: int, piece: int = MB) -> AsyncIterator[bytes]:
    """A body without a length, so it goes out chunked."""
    for _ in range(size // piece):
        yield b"x" * piece


@contextlib.asynccontextmanager
async def process(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[tuple[GatewayProcess, httpx.AsyncClient]]:
    keys = keys_file(tmp_path / "keys.json", one={})
    settings = {"auth__disabled": None, "auth__keys_file": keys}
    async with started([engine.url], **settings) as gateway, httpx.AsyncClient(trust_env=False, timeout=30) as client:
        await gateway.serving()

        async def is_ready() -> bool:
            return (await client.get(f"{gateway.url}/readyz")).status_code == 200

        await until(is_ready)
        yield gateway, client


async def test_100_mb_is_413_and_never_buffered_with_a_length_or_chunked_with_a_key_or_without(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with process(engine, tmp_path) as (gateway, client):
        url = f"{gateway.url}/v1/chat/completions"
        await client.post(url, json=CHAT, headers=BEARER)
        before = gateway.memory_bytes()
        peak = before
        done = False

        async def watch() -> None:
            nonlocal peak
            while not done:
                peak = max(peak, gateway.memory_bytes())
                await asyncio.sleep(0.005)

        watcher = asyncio.create_task(watch())
        big = b"x" * (100 * MB)
        for content, headers, expected in (
            (big, BEARER, 413),
            (pieces(100 * MB), BEARER, 413),
            (big, {}, 401),
            (pieces(100 * MB), {}, 401),
        ):
            answer = await client.post(url, content=content, headers={**JSON, **headers})
            assert answer.status_code == expected, answer.text
            if expected == 413:
                assert answer.json()["error"]["code"] == "request_too_large"
        done = True
        await watcher
        assert (await client.post(url, json=CHAT, headers=BEARER)).status_code == 200
        assert peak - before < 3 * LIMIT, f"{(peak - before) / MB:.0f} MB"
        assert not [seen for seen in engine.seen if len(seen.raw) > 1000]


async def test_ten_clients_with_100_mb_each_do_not_slow_the_others_down(engine: FakeEngine, tmp_path: Path) -> None:
    async with process(engine, tmp_path) as (gateway, client):
        url = f"{gateway.url}/v1/chat/completions"
        uploads = [
            asyncio.create_task(client.post(url, content=pieces(100 * MB), headers={**JSON, **BEARER}))
            for _ in range(10)
        ]
        waits = []
        async with httpx.AsyncClient(trust_env=False, timeout=30) as other:
            while not all(upload.done() for upload in uploads):
                began = time.monotonic()
                assert (await other.post(url, json=CHAT, headers=BEARER)).status_code == 200
                waits.append(time.monotonic() - began)
        for upload in uploads:
            with contextlib.suppress(httpx.WriteError, httpx.ReadError):  # the server need not take it all
                assert (await upload).status_code == 413
        assert sorted(waits)[len(waits) // 2] < 0.5
        assert max(waits) < 5


async def test_many_bodies_that_arrive_slowly_are_bounded_together_and_small_requests_still_pass(
    engine: FakeEngine,
) -> None:
    limits = {"max_body_bytes": MB, "max_arriving_bytes": 3 * MB}
    async with serve([engine.url], limits=limits) as up:
        host, _, port = up.url.removeprefix("http://").partition(":")
        held = []
        for _ in range(5):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head(MB) + b"x" * (MB - 1))
            held.append((reader, writer))
        room = up.gateway.inference._room
        await until(lambda: room.used_bytes > 2 * MB)
        assert (await up.chat()).status_code == 200
        async with asyncio.timeout(10):
            done, waiting = await asyncio.wait(
                {asyncio.create_task(reader.readline()) for reader, _ in held}, timeout=3
            )
        assert {task.result() for task in done} == {b"HTTP/1.1 429 Too Many Requests\r\n"}
        assert len(done) >= 2
        assert room.used_bytes <= 3 * MB
        for _, writer in held:
            writer.close()
        await asyncio.gather(*waiting)
        await up.settled()
        assert room.used_bytes == 0


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model":"fake-8b","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        json.dumps({**CHAT, "metadata": json.loads("[" * 65 + "]" * 65)}).encode(),
        b'{"model":"fake-8b","messages":[{"role":"user","content":"x"}],"x":' + b'{"x":' * 70 + b"1" + b"}" * 70 + b"}",
    ],
    ids=["lists", "objects", "closed", "one too many", "below an unknown field"],
)
async def test_a_body_nested_too_deep_is_400(up: Running, engine: FakeEngine, body: bytes) -> None:
    answer = await up.client.post("/v1/chat/completions", content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"
    assert not engine.asked("/v1/chat/completions")


async def test_what_is_just_deep_enough_passes(up: Running, engine: FakeEngine) -> None:
    body = {**CHAT, "metadata": json.loads("[" * 60 + "]" * 60)}
    assert (await up.client.post("/v1/chat/completions", json=body)).status_code == 200


def head(length: int | None, *extra: bytes) -> bytes:
    framing = b"Transfer-Encoding: chunked" if length is None else b"Content-Length: %d" % length
    lines = [b"POST /v1/chat/completions HTTP/1.1", b"Host: x", b"Content-Type: application/json", framing, *extra]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def trickle(up: Running, request_head: bytes, chunk: bytes, within_s: float) -> tuple[bytes, float]:
    """Send a head, then a bit every 50 ms for as long as the gateway listens; what it answered, and after how long."""
    host, _, port = up.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    began = time.monotonic()
    writer.write(request_head)

    async def send() -> None:
        while True:
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(0.05)

    sender = asyncio.create_task(send())
    answer = b""
    try:
        async with asyncio.timeout(within_s):
            with contextlib.suppress(ConnectionError):
                while part := await reader.read(65536):
                    answer += part
        return answer, time.monotonic() - began
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
        writer.close()


@pytest.mark.parametrize(("length", "chunk"), [(100_000, b"x"), (None, b"1\r\nx\r\n")])
async def test_a_slow_body_is_408_after_body_s_and_others_do_not_wait_for_it(
    engine: FakeEngine, length: int | None, chunk: bytes
) -> None:
    async with serve([engine.url], timeouts={"body_s": 1}) as up:
        slow = [asyncio.create_task(trickle(up, head(length), chunk, 15)) for _ in range(20)]
        waits = []
        while not all(task.done() for task in slow):
            began = time.monotonic()
            assert (await up.chat()).status_code == 200
            waits.append(time.monotonic() - began)
            await asyncio.sleep(0.02)
        for answer, ended in await asyncio.gather(*slow):
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"code":"request_timeout"' in answer
            assert ended >= 1
        assert sorted(waits)[len(waits) // 2] < 0.3
        await up.settled()


async def test_a_client_refused_in_mid_body_can_not_hold_its_connection_by_trickling_on(
    engine: FakeEngine, tmp_path: Path
) -> None:
    """Without a key: the 401 goes out at once, and the rest of the body is not waited for forever."""
    auth = {"disabled": False, "keys_file": keys_file(tmp_path / "keys.json", one={})}
    async with serve([engine.url], auth=auth, timeouts={"body_s": 1, "head_s": 1}) as up:
        for target in (b"/v1/chat/completions", b"/healthz", b"/nowhere"):
            request_head = head(100_000).replace(b"/v1/chat/completions", target)
            answer, _ = await trickle(up, request_head, b"x", 15)
            assert answer.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 405 ")), answer


async def test_line_ends_between_requests_can_not_hold_a_connection(engine: FakeEngine) -> None:
    """HTTP lets a server skip them; they must not count as a request that is under way for ever."""
    async with serve([engine.url], timeouts={"head_s": 1}) as up:
        first = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        answer, ended = await trickle(up, first, b"\r\n", 15)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert ended >= 1


async def test_a_refused_client_may_go_on_on_its_connection_once_its_body_has_come(
    engine: FakeEngine, tmp_path: Path
) -> None:
    auth = {"disabled": False, "keys_file": keys_file(tmp_path / "keys.json", one={})}
    async with serve([engine.url], auth=auth, timeouts={"body_s": 1, "head_s": 1}) as up:
        host, _, port = up.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head(4) + b"x")
        assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 401 ")
        await asyncio.sleep(0.1)
        writer.write(b"xxx")
        await asyncio.sleep(1.5)  # longer than any of the limits: the body is complete, so none of them counts
        body = json.dumps(CHAT).encode()
        writer.write(head(len(body), b"Authorization: Bearer sk-canary-one") + body)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_an_expectation_is_answered_before_the_body_is_sent(engine: FakeEngine, tmp_path: Path) -> None:
    """curl asks first for bodies over 1 MB: with a key it is told to go on, without one it is refused at once."""
    auth = {"disabled": False, "keys_file": keys_file(tmp_path / "keys.json", one={})}
    async with serve([engine.url], auth=auth) as up:
        for key, expected in ((b"sk-canary-one", b"HTTP/1.1 100 "), (b"wrong", b"HTTP/1.1 401 ")):
            host, _, port = up.url.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head(1000, b"Expect: 100-continue", b"Authorization: Bearer " + key))
            async with asyncio.timeout(5):
                assert (await reader.readline()).startswith(expected)
            writer.close()


@pytest.mark.parametrize(
    ("limits", "fields"),
    [
        ({"max_n": 2}, {"n": 3}),
        ({"max_logprobs": 3}, {"logprobs": True, "top_logprobs": 4}),
        ({"max_answer_tokens": 10}, {"max_tokens": 11}),
        ({"max_answer_tokens": 10}, {"max_completion_tokens": 11}),
    ],
)
async def test_a_configured_limit_is_a_400_that_names_it(
    engine: FakeEngine, limits: dict[str, int], fields: dict[str, Any]
) -> None:
    async with serve([engine.url], limits=limits) as up:
        answer = await up.client.post("/v1/chat/completions", json={**CHAT, **fields})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] in fields
        assert not engine.asked("/v1/chat/completions")
