"""Keys while the gateway runs: added, rotated, revoked and expired without a restart."""

import asyncio
import datetime
import hashlib
import json
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gateway import auth, routes
from gateway.keys import Keyring
from scripts import keys
from tests.fakes.engine import FakeEngine
from tests.wire.conftest import Running, serve, until
from tests.wire.guarding import keys_file, raw, with_key
from tests.wire.process import started

QUICK_RELOAD = {"disabled": False, "reload_s": 0.05}


@pytest.fixture
async def file(tmp_path: Path) -> Path:
    return keys_file(tmp_path / "keys.json", first={})


@pytest.fixture
async def guarded(engine: FakeEngine, file: Path) -> AsyncIterator[Running]:
    async with serve([engine.url], auth={**QUICK_RELOAD, "keys_file": file}) as up:
        yield up


def run(file: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert keys.main([*words, "--file", str(file)]) == 0
    return capsys.readouterr().out.strip()


async def status(up: Running, key: str) -> int:
    return (await up.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status_code


async def becomes(up: Running, key: str, expected: int) -> None:
    async def holds() -> bool:
        return await status(up, key) == expected

    await until(holds)


async def test_a_key_lives_from_add_to_revoke_without_a_restart(
    guarded: Running, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = run(file, capsys, "add", "app1")
    await becomes(guarded, key, 200)
    new = run(file, capsys, "rotate", "app1", "--grace", "1h")
    await becomes(guarded, new, 200)
    assert await status(guarded, key) == 200
    run(file, capsys, "revoke", "app1")
    await becomes(guarded, key, 401)
    assert await status(guarded, new) == 401
    assert await status(guarded, "sk-canary-first") == 200


async def test_a_revoked_last_key_is_out_as_well(
    guarded: Running, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await status(guarded, "sk-canary-first") == 200
    run(file, capsys, "revoke", "first")
    await becomes(guarded, "sk-canary-first", 401)
    key = run(file, capsys, "add", "app1")
    await becomes(guarded, key, 200)


async def test_a_key_expires_while_the_gateway_runs_and_the_file_stays_as_it_is(
    engine: FakeEngine, tmp_path: Path
) -> None:
    moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=1.5)
    file = keys_file(tmp_path / "keys.json", first={"expires": moment.isoformat()})
    async with serve([engine.url], auth={"disabled": False, "keys_file": file}) as up:
        assert await status(up, "sk-canary-first") == 200
        await becomes(up, "sk-canary-first", 401)
        assert datetime.datetime.now(datetime.UTC) >= moment
        answer = await up.client.get("/v1/models", headers=with_key("first"))
        assert answer.json()["error"]["message"] == "this API key is unknown or expired"


async def test_a_file_that_turns_bad_keeps_the_old_keys_raises_the_metric_and_heals(
    guarded: Running, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def told(bad: int) -> None:
        async def holds() -> bool:
            return await guarded.metric("gateway_keys_file_bad") == bad

        await until(holds)

    good = content(file)
    for bad in (b"", good[: len(good) // 2], b'{"keys": [{"name": "sk-canary-first"}]}'):
        content(file, bad)
        await told(1)
        assert await status(guarded, "sk-canary-first") == 200
        content(file, good)
        await told(0)
    assert await guarded.metric("gateway_keys_reload_failures_total") >= 3
    assert any("the old keys stay in force" in record.message for record in caplog.records)
    assert "sk-canary" not in str([record.__dict__ for record in caplog.records])


async def test_while_a_large_keys_file_is_read_requests_are_answered(
    guarded: Running, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, answered, usual = threading.Event(), threading.Event(), auth.read_keyring

    def slowly(path: Path) -> Keyring:
        reads.set()
        assert answered.wait(10), "the event loop stood still"
        return usual(path)

    monkeypatch.setattr(auth, "read_keyring", slowly)
    keys_file(file, first={}, second={})
    await until(reads.is_set)
    assert await status(guarded, "sk-canary-first") == 200
    assert await status(guarded, "sk-canary-second") == 401
    answered.set()
    await becomes(guarded, "sk-canary-second", 200)


def content(file: Path, new: bytes | None = None) -> bytes:
    """Read it, or write it in place as an editor does."""
    if new is not None:
        file.write_bytes(new)
    return file.read_bytes()


CREDENTIALS = [
    (b"", 401),
    (b"Authorization: Bearer sk-canary-first\r\n", 200),
    (b"authorization: bearer   sk-canary-first  \r\n", 200),
    (b"X-API-KEY: sk-canary-first\r\n", 200),
    (b"Authorization: Bearer \r\n", 401),
    (b"Authorization: \r\n", 401),
    (b"Authorization:\r\n", 401),
    (b"Authorization: sk-canary-first\r\n", 401),
    (b"Authorization: Basic sk-canary-first\r\n", 401),
    (b"Authorization: Bearer schl\xc3\xbcssel\r\n", 401),
    (b"Authorization: Bearer \xff\xfe\r\n", 401),
    (b"Authorization: Bearer sk-canary-first\r\nAuthorization: Bearer sk-canary-first\r\n", 401),
    (b"Authorization: Bearer sk-canary-first\r\nX-Api-Key: sk-canary-first\r\n", 401),
    (b"X-Api-Key: \r\n", 401),
]


async def test_a_pipe_in_the_keys_files_place_is_refused_and_stops_nobody(engine: FakeEngine, file: Path) -> None:
    settings = {"auth__disabled": None, "auth__keys_file": file, "auth__reload_s": 0.05}
    async with started([engine.url], **settings) as gateway, httpx.AsyncClient(trust_env=False, timeout=3) as client:
        await gateway.serving()
        os.mkfifo(file.with_name("pipe"))
        file.with_name("pipe").replace(file)
        await until(lambda: "the keys file is unusable, the old keys stay in force" in gateway.events(), within_s=5)
        assert (await client.get(f"{gateway.url}/v1/models", headers=with_key("first"))).status_code == 200
    async with started([engine.url], **settings) as gateway:
        assert await gateway.ended(10) == 1
        assert "is no regular file; expected the file `make keys NAME=app1` writes" in "".join(gateway.unparsed)


async def test_odd_credentials_are_401_in_json_and_never_500(guarded: Running) -> None:
    for header, expected in CREDENTIALS:
        request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + header + b"\r\n"
        answered, body = await raw(guarded, request)
        assert answered == expected, (header, body)
        if expected == 401:
            error = json.loads(body)["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key"), header
            assert b"canary" not in body


async def test_requests_under_way_are_not_touched_by_a_reload_and_none_is_refused_meanwhile(
    guarded: Running, file: Path
) -> None:
    """Fifty rewrites while four clients keep asking: no request sees a moment without keys."""
    stop = False

    async def ask() -> int:
        asked = 0
        while not stop:
            assert await status(guarded, "sk-canary-first") == 200
            asked += 1
        return asked

    clients = [asyncio.create_task(ask()) for _ in range(4)]
    for number in range(50):
        entry = {"name": "first", "sha256": hashlib.sha256(b"sk-canary-first").hexdigest(), "priority": number}
        keys.write(file, keys.parse_keys(json.dumps({"keys": [entry]}).encode(), "x").keys)
        await asyncio.sleep(0.02)
    stop = True
    assert min(await asyncio.gather(*clients)) > 10


async def test_new_limits_of_a_key_count_at_once(guarded: Running, file: Path) -> None:
    keys_file(file, first={"requests_per_minute": 1})
    chat = {"model": "fake-8b", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}

    async def limited() -> bool:
        answer = await guarded.client.post("/v1/chat/completions", json=chat, headers=with_key("first"))
        return answer.status_code == 429

    await until(limited)


async def test_the_admin_routes_need_the_token_and_metrics_does_not(engine: FakeEngine, tmp_path: Path) -> None:
    token = "an-admin-token-of-some-length"
    (tmp_path / "token").write_text(token + "\n")
    settings = {"auth": {"disabled": True, "admin_token_file": tmp_path / "token"}}
    async with serve([engine.url], **settings) as up:
        admin = up.admin_url
        order = {"replica": engine.url}
        assert (await up.client.get(f"{admin}/metrics")).status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer"}, {"X-Api-Key": ""}):
            for answer in (
                await up.client.get(f"{admin}/status", headers=headers),
                await up.client.post(f"{admin}/drain", headers=headers, json=order),
                await up.client.post(f"{admin}/drain", headers=headers, content=b"\xff"),
            ):
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
        assert up.gateway.health.ready()[0]
        bearer = {"Authorization": f"Bearer {token}"}
        assert (await up.client.get(f"{admin}/status", headers=bearer)).json()["ready"] is True
        for bad in (b"", b"{", b"[]", b'{"replica": 5}', b'{"replica": "x", "off": true}', b"x" * 100_000):
            answer = await up.client.post(f"{admin}/drain", headers=bearer, content=bad)
            assert answer.status_code in (400, 413), bad
            assert answer.json()["error"]["message"]
        assert (
            await up.client.post(f"{admin}/drain", headers=bearer, json={"replica": "http://other:1"})
        ).status_code == 400
        assert (await up.client.get(f"{up.url}/status", headers=bearer)).status_code == 404
        assert (await up.client.get(f"{up.url}/metrics", headers=bearer)).status_code == 404


async def test_draining_a_replica_stops_new_requests_finishes_old_ones_and_can_be_lifted(
    engine: FakeEngine, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("an-admin-token-of-some-length")
    bearer = {"Authorization": "Bearer an-admin-token-of-some-length"}
    settings = {"auth": {"disabled": True, "admin_token_file": tmp_path / "token"}}
    async with FakeEngine() as other, serve([engine.url, other.url], **settings) as up:
        await until(lambda: len(up.gateway.replicas.ready()) == 2)
        engine.service_s = other.service_s = 0.5
        running = [asyncio.create_task(up.chat(f"{number}")) for number in range(6)]
        await until(lambda: engine.active and other.active)
        busy = len(engine.asked("/v1/chat/completions"))
        answer = await up.client.post(f"{up.admin_url}/drain", headers=bearer, json={"replica": engine.url})
        assert [replica["state"] for replica in answer.json()["replicas"]] == ["draining", "ready"]
        assert (await up.client.get("/readyz")).status_code == 200
        assert all(answer.status_code == 200 for answer in await asyncio.gather(*running))
        for number in range(4):
            assert (await up.chat(f"later {number}")).status_code == 200
        assert len(engine.asked("/v1/chat/completions")) == busy
        await up.client.post(f"{up.admin_url}/drain", headers=bearer, json={"replica": engine.url, "on": False})
        assert len(up.gateway.replicas.ready()) == 2


async def test_without_a_token_configured_the_admin_routes_are_off_whatever_is_sent(up: Running) -> None:
    for headers in ({}, {"Authorization": "Bearer"}, {"Authorization": "Bearer None"}, {"X-Api-Key": "x"}):
        assert (await up.client.get(f"{up.admin_url}/status", headers=headers)).status_code == 401
        drain = await up.client.post(f"{up.admin_url}/drain", headers=headers, json={"replica": "x"})
        assert drain.status_code == 401
    assert (await up.client.get(f"{up.admin_url}/docs")).status_code == 404
    assert (await up.client.post(f"{up.admin_url}/metrics")).status_code == 405
    refused = (await up.client.get(f"{up.admin_url}/status")).json()["error"]["message"]
    assert refused == "/status and /drain are off until auth.admin_token_file names a token's file"


async def test_an_order_that_breaks_off_or_does_not_end_is_no_failure_of_ours(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(routes, "ADMIN_BODY_S", 0.2)
    (tmp_path / "token").write_text("an-admin-token-of-some-length")
    half = b"POST /drain HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer an-admin-token-of-some-length\r\n"
    half += b'Content-Length: 100\r\n\r\n{"replica"'
    async with serve([engine.url], auth={"disabled": True, "admin_token_file": tmp_path / "token"}) as up:
        host, _, port = up.admin_url.removeprefix("http://").partition(":")
        for stays in (True, False):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(half)
            if stays:
                async with asyncio.timeout(5):
                    assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            writer.close()
            await writer.wait_closed()
        assert (await up.client.get(f"{up.admin_url}/metrics")).status_code == 200
    assert not [record for record in caplog.records if record.exc_info]
