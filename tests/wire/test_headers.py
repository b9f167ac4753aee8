"""Headers: none of a client's reaches an engine, none of an engine's a client, and lengths agree."""

import asyncio
import gzip
import json
import zlib

import pytest

from tests.fakes.engine import FakeEngine, Script
from tests.wire.conftest import Running, renewing
from tests.wire.talking import (
    BODIES,
    CHAT,
    connected,
    envelope,
    raw,
    read_answer,
    request_bytes,
)

up, engine = renewing()
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("accept", ["identity", "gzip", "br;q=1.0, gzip;q=0.5", ""])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_compressed_engine_answer_is_whole_and_its_length_agrees(
    coding: str, accept: str, up: Running, engine: FakeEngine
) -> None:
    plain = json.dumps({"object": "chat.completion", "choices": [{"message": {"content": "x" * 2000}}]}).encode()
    packed = gzip.compress(plain) if coding == "gzip" else zlib.compress(plain)
    headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
    engine.script(CHAT, Script(body=packed, headers=headers))
    status, got, document = await raw(up, request_bytes(BODIES[CHAT], CHAT, accept_encoding=accept))
    assert status == 200
    assert document == json.loads(plain)
    assert int(got["content-length"]) == len(plain)
    assert "content-encoding" not in got
    assert engine.asked(CHAT)[0].headers["Accept-Encoding"] == "identity"


async def test_an_answer_that_claims_a_coding_it_has_not_is_502(up: Running, engine: FakeEngine) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    engine.script(CHAT, Script(body=b'{"object": "chat.completion"}', headers=headers))
    answer = await up.chat()
    assert answer.status_code == 502
    assert envelope(answer.json())["code"] == "engine_failed"


async def test_of_a_clients_headers_none_reaches_the_engine(up: Running, engine: FakeEngine) -> None:
    """An allow-list: hop-by-hop ones, those that Connection names, credentials and inventions alike stay here."""
    sent = {
        "Connection": "keep-alive, X-Foo",
        "X-Foo": "canary",
        "TE": "trailers",
        "Keep-Alive": "timeout=5, canary",
        "Proxy-Authorization": "Basic canary",
        "Proxy-Connection": "canary",
        "Authorization": "Bearer canary",
        "X-Api-Key": "",
        "Cookie": "canary=1",
        "X-Data-Parallel-Rank": "7",
        "X-Forwarded-For": "canary",
        "Forwarded": "for=canary",
        "User-Agent": "canary",
        "Accept": "canary/canary",
        "Accept-Language": "canary",
        "Origin": "http://canary",
        "OpenAI-Organization": "canary",
        "X-Request-Timeout-S": "60",
    }
    status, _, _ = await raw(up, request_bytes(BODIES[CHAT], CHAT, **sent))
    assert status == 200
    got = {name.lower(): value for name, value in engine.asked(CHAT)[0].headers.items()}
    assert not [value for value in got.values() if "canary" in value]
    assert set(got) <= {
        "host", "accept", "accept-encoding", "user-agent", "content-type", "content-length", "x-request-id",
    }  # fmt: skip
    assert got["host"] == engine.url.removeprefix("http://")


async def test_of_an_engines_headers_only_retry_after_reaches_the_client(up: Running, engine: FakeEngine) -> None:
    theirs = {"Server": "canary", "Set-Cookie": "canary=1", "X-Internal": "canary", "Connection": "close"}
    engine.script(CHAT, Script(body=b'{"object": "chat.completion"}', headers=theirs))
    status, headers, _ = await raw(up, request_bytes(BODIES[CHAT], CHAT))
    assert status == 200
    assert set(headers) == {"date", "content-type", "content-length", "x-request-id"}
    assert (await up.chat()).status_code == 200


@pytest.mark.parametrize(
    "sent",
    ["a\tb", "two words", "x" * 65, "-a", "../etc", "a\x80", "é", "", "a;b", 'a"b', "<script>"],
)
async def test_a_request_id_that_is_not_fit_is_replaced(sent: str, up: Running, engine: FakeEngine) -> None:
    async with connected(up) as (reader, writer), asyncio.timeout(10):
        head = b"x-request-id: " + sent.encode("latin-1") + b"\r\nhost:"
        writer.write(request_bytes(BODIES[CHAT], CHAT).replace(b"host:", head))
        status, headers, _ = await read_answer(reader)
    assert status == 200
    assert len(headers["x-request-id"]) == 32 and headers["x-request-id"].isalnum()
    assert engine.asked(CHAT)[0].headers["x-request-id"] == headers["x-request-id"]


async def test_a_fit_request_id_comes_back_on_every_answer(up: Running) -> None:
    for path, body in ((CHAT, BODIES[CHAT]), (CHAT, {}), ("/v1/nothing", {})):
        answer = await up.client.post(path, json=body, headers={"X-Request-Id": "my-id_1.2"})
        assert answer.headers["x-request-id"] == "my-id_1.2"


async def test_messages_answers_and_errors_have_the_request_id_where_anthropics_clients_look(up: Running) -> None:
    for body in (BODIES["/v1/messages"], {}):
        answer = await up.client.post("/v1/messages", json=body)
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert "request-id" not in (await up.client.post(CHAT, json=BODIES[CHAT])).headers


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e9", "soon", "", "1 2"])
async def test_a_deadline_that_is_none_is_400(value: str, up: Running, engine: FakeEngine) -> None:
    answer = await up.client.post(CHAT, json=BODIES[CHAT], headers={"X-Request-Timeout-S": value})
    assert answer.status_code == 400
    assert "X-Request-Timeout-S" in envelope(answer.json())["message"]
    assert not engine.asked(CHAT)
