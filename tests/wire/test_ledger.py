"""The ledger of the running gateway, kill -9 included."""

import asyncio
import json
import signal
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from scripts import usage
from tests.fakes.engine import MODEL, FakeEngine, Script
from tests.wire.conftest import serve, until
from tests.wire.guarding import keys_file, with_key
from tests.wire.process import started

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "temperature": 1}


def rows(path: Path, tenant: str | None = None) -> list[usage.Row]:
    return usage.rows(path, None, None, tenant)


def total(path: Path, column: str) -> int:
    return sum(int(row[usage.COLUMNS.index(column)]) for row in rows(path))


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(trust_env=False, timeout=20, limits=limits) as client:
        yield client


async def test_kill_9_under_load_loses_the_last_second_at_most_and_invents_nothing(
    engine: FakeEngine, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    path = tmp_path / "usage.sqlite"
    async with started([engine.url], ledger__path=path) as gateway:
        await gateway.serving()

        async def is_ready() -> bool:
            return (await client.get(f"{gateway.url}/readyz")).status_code == 200

        await until(is_ready)
        received: list[tuple[float, int, int]] = []  # when, prompt and generation tokens
        sent = 0

        async def ask() -> None:
            nonlocal sent
            while True:
                sent += 1
                try:
                    answer = await client.post(f"{gateway.url}/v1/chat/completions", json=CHAT)
                except httpx.HTTPError:
                    return
                if answer.status_code == 200:
                    told = answer.json()["usage"]
                    received.append((time.monotonic(), told["prompt_tokens"], told["completion_tokens"]))

        clients = [asyncio.create_task(ask()) for _ in range(8)]
        await asyncio.sleep(3)
        killed_at = time.monotonic()
        gateway.signal(signal.SIGKILL)
        await asyncio.gather(*clients)
        await gateway.ended()
    safe = [entry for entry in received if entry[0] < killed_at - 1]
    assert len(safe) > 50
    assert len(safe) <= total(path, "requests") <= sent
    assert sum(entry[1] for entry in safe) <= total(path, "prompt_tokens")
    assert sum(entry[2] for entry in safe) <= total(path, "generation_tokens")
    in_flight = sent - len(received)
    assert total(path, "requests") <= len(received) + in_flight
    assert total(path, "prompt_tokens") <= sum(entry[1] for entry in received) + in_flight * received[0][1]
    # And the next gateway goes on where this one stopped.
    before = total(path, "requests")
    async with started([engine.url], ledger__path=path) as gateway:
        await gateway.serving()
        await until(is_ready)
        assert (await client.post(f"{gateway.url}/v1/chat/completions", json=CHAT)).status_code == 200
        gateway.signal(signal.SIGTERM)
        assert await gateway.ended() == 0
    assert total(path, "requests") == before + 1


async def test_each_tenant_is_billed_exactly_what_its_answers_said_merged_streamed_or_alone(
    engine: FakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "usage.sqlite"
    auth = {"disabled": False, "keys_file": keys_file(tmp_path / "keys.json", red={}, blue={})}
    engine.service_s = 0.02
    expected = {"red": [0, 0, 0], "blue": [0, 0, 0]}
    async with serve([engine.url], auth=auth, ledger={"path": path}, aliases={"alias": MODEL}) as up:

        async def ask(name: str, number: int) -> None:
            headers = with_key(name)
            if number % 3 == 0:
                body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
                answer = await up.client.post("/v1/chat/completions", json=body, headers=headers)
                told = next(
                    json.loads(line[6:])["usage"]
                    for line in answer.text.splitlines()
                    if line.startswith("data: {") and json.loads(line[6:]).get("usage")
                )
            else:
                body = {"model": MODEL, "prompt": f"{name} " * (number + 1), "max_tokens": 4, "temperature": 1}
                answer = await up.client.post("/v1/completions", json=body, headers=headers)
                told = answer.json()["usage"]
            assert answer.status_code == 200
            sums = expected[name]
            sums[0] += 1
            sums[1] += told["prompt_tokens"]
            sums[2] += told["completion_tokens"]

        await asyncio.gather(*(ask(name, number) for number in range(12) for name in expected))
        assert await up.metric("gateway_merged_requests_total") > 0
    for name, sums in expected.items():
        ((_, _, model, requests, refusals, failures, prompt, generation),) = rows(path, name)
        assert (model, [requests, prompt, generation], refusals, failures) == (MODEL, sums, 0, 0)


async def test_a_stream_whose_client_asked_for_no_usage_is_billed_all_the_same(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with serve([engine.url], ledger={"path": tmp_path / "u"}) as up, up.stream(max_tokens=4) as answer:
        await answer.aread()
        assert b'"usage"' not in answer.content
    ((_, tenant, _, requests, _, _, prompt, generation),) = rows(tmp_path / "u")
    assert (tenant, requests) == ("anonymous", 1)
    assert prompt > 0 < generation


async def test_refusals_failures_and_mistakes_are_told_apart_and_invented_models_have_no_row_of_their_own(
    engine: FakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "u"
    auth = {"disabled": False, "keys_file": keys_file(tmp_path / "keys.json", one={"requests_per_minute": 3})}
    async with serve([engine.url], auth=auth, ledger={"path": path}) as up:

        async def ask(model: str) -> int:
            body = {**CHAT, "model": model}
            return (await up.client.post("/v1/chat/completions", json=body, headers=with_key("one"))).status_code

        engine.script("/v1/chat/completions", Script(status=500, body=b'{"error":{"message":"x"}}'))
        assert await ask(MODEL) == 500
        for number in range(5):
            assert await ask(f"invented-{number}") == 404
        assert [await ask(MODEL) for _ in range(4)] == [200, 200, 429, 429]
        await up.client.post("/v1/chat/completions", json=CHAT)  # 401, nobody's
    found = {row[2]: row[3:6] for row in rows(path, "one")}
    assert found == {MODEL: (5, 2, 1), "": (5, 0, 0)}
    assert len(rows(path)) == 2


async def test_a_disk_that_fails_fails_no_request(engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "u"
    async with serve([engine.url], ledger={"path": path}) as up:
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN EXCLUSIVE")

        async def failing() -> bool:
            assert (await up.chat()).status_code == 200
            return await up.metric("gateway_ledger_failures_total") >= 1

        await until(failing)
        assert await up.metric("gateway_ledger_pending_rows") == 1
        holder.execute("ROLLBACK")
        holder.close()

        async def written() -> bool:
            return await up.metric("gateway_ledger_pending_rows") == 0

        await until(written)
        asked = len(engine.asked("/v1/chat/completions"))
    assert total(path, "requests") == asked


async def test_without_a_path_there_is_no_ledger(engine: FakeEngine, tmp_path: Path) -> None:
    async with serve([engine.url]) as up:
        assert (await up.chat()).status_code == 200
        assert up.gateway.ledger is None
