"""Identical deterministic requests in flight share one engine call, and nobody can tell."""

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.engine import MODEL, FakeEngine, Script
from tests.wire.conftest import Running, serve
from tests.wire.test_overload import keys_file

CHAT = "/v1/chat/completions"
IDENTITY = re.compile(rb"(chatcmpl|cmpl)-([0-9a-f]{32})")


async def asked(engine: FakeEngine, count: int = 1) -> None:
    while len(engine.asked(CHAT)) < count:
        await asyncio.sleep(0.001)


async def together(up: Running, engine: FakeEngine, count: int, **fields: Any) -> list[httpx.Response]:
    """`count` equal chats, all under way before the engine answers the first."""
    engine.gate = None
    engine.script(CHAT, *[Script(delay_s=0.2)] * count)
    tasks = [asyncio.create_task(up.chat("same", **fields)) for _ in range(count)]
    return await asyncio.gather(*tasks)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.0}, {"temperature": 1, "seed": 5}], ids=str)
async def test_equal_deterministic_chats_are_one_engine_call(
    up: Running, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    answers = await together(up, engine, 5, **fields)
    assert len(engine.asked(CHAT)) == 1
    alone = (await up.chat("same", **fields)).json()
    for answer in answers:
        document = answer.json()
        assert {**document, "id": ""} == {**alone, "id": ""}
        assert document["id"] == f"chatcmpl-{answer.headers['x-request-id']}"
    assert len({answer.json()["id"] for answer in answers}) == 5
    assert await up.metric("gateway_coalesced_requests_total") == 4
    # Each pays for its own, as it would have alone.
    usage = alone["usage"]["prompt_tokens"]
    assert await up.metric("gateway_tokens_total", kind="prompt") == usage * 6


@pytest.mark.parametrize("fields", [{}, {"temperature": 1}, {"temperature": 0.7, "seed": None}], ids=str)
async def test_what_is_sampled_is_never_shared(up: Running, engine: FakeEngine, fields: dict[str, Any]) -> None:
    await together(up, engine, 3, **fields)
    assert len(engine.asked(CHAT)) == 3


async def test_a_difference_of_one_byte_is_another_request(up: Running, engine: FakeEngine) -> None:
    engine.script(CHAT, Script(delay_s=0.2), Script(delay_s=0.2))
    await asyncio.gather(up.chat("same", temperature=0), up.chat("same ", temperature=0))
    assert len(engine.asked(CHAT)) == 2


async def test_keys_never_share(engine: FakeEngine, tmp_path: Path) -> None:
    headers = keys_file(tmp_path / "keys.json", one={}, two={})
    async with serve([engine.url], auth={"disabled": False, "keys_file": str(tmp_path / "keys.json")}) as up:
        engine.script(CHAT, Script(delay_s=0.2), Script(delay_s=0.2))
        body = {"model": MODEL, "messages": [{"role": "user", "content": "same"}], "temperature": 0}
        await asyncio.gather(*(up.client.post(CHAT, json=body, headers=headers[name]) for name in ("one", "two")))
        assert len(engine.asked(CHAT)) == 2


async def test_switched_off_each_asks_for_itself(engine: FakeEngine) -> None:
    async with serve([engine.url], batching={"coalesce": False}) as up:
        await together(up, engine, 3, temperature=0)
        assert len(engine.asked(CHAT)) == 3


async def test_a_stream_joined_midway_is_byte_for_byte_the_whole_stream(up: Running, engine: FakeEngine) -> None:
    engine.script(CHAT, Script(token_s=0.05))
    fields = {"temperature": 0, "max_tokens": 12, "stream_options": {"include_usage": True}}

    async def read(joined: asyncio.Event) -> tuple[bytes, bytes]:
        async with up.stream("same", **fields) as answer:
            chunks = []
            async for chunk in answer.aiter_raw():
                chunks.append(chunk)
                joined.set()
            return b"".join(chunks), answer.headers["x-request-id"].encode()

    under_way, late = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(read(under_way))
    await under_way.wait()
    (one, one_id), (other, other_id) = await asyncio.gather(first, read(late))
    assert len(engine.asked(CHAT)) == 1
    assert {found[1] for found in IDENTITY.findall(one)} == {one_id}
    assert {found[1] for found in IDENTITY.findall(other)} == {other_id}
    assert IDENTITY.sub(b"ID", one) == IDENTITY.sub(b"ID", other)
    assert other.endswith(b"data: [DONE]\n\n")


async def test_everybody_aboard_hears_of_the_failure(up: Running, engine: FakeEngine) -> None:
    engine.script(CHAT, Script(delay_s=0.2, reset_before_answer=True))
    answers = await asyncio.gather(*(up.chat("same", temperature=0) for _ in range(3)))
    assert [answer.status_code for answer in answers] == [502] * 3
    assert len(engine.asked(CHAT)) == 1
    assert (await up.chat("same", temperature=0)).status_code == 200


async def test_a_request_with_its_own_deadline_flies_alone(up: Running, engine: FakeEngine) -> None:
    engine.script(CHAT, Script(delay_s=0.2), Script(delay_s=0.2))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "same"}], "temperature": 0}
    hurried = up.client.post(CHAT, json=body, headers={"X-Request-Timeout-S": "5"})
    await asyncio.gather(up.chat("same", temperature=0), hurried)
    assert len(engine.asked(CHAT)) == 2


async def test_the_first_to_come_may_leave_without_harm_to_those_who_joined(up: Running, engine: FakeEngine) -> None:
    engine.script(CHAT, Script(delay_s=0.3))
    first = asyncio.create_task(up.chat("same", temperature=0))
    await asked(engine)
    second = asyncio.create_task(up.chat("same", temperature=0))
    while await up.metric("gateway_coalesced_requests_total") < 1:
        await asyncio.sleep(0.001)
    first.cancel()
    assert (await second).status_code == 200
    assert len(engine.asked(CHAT)) == 1


async def test_nobody_joins_a_flight_that_is_being_called_off(up: Running, engine: FakeEngine) -> None:
    engine.script(CHAT, Script(hang=True))
    first = asyncio.create_task(up.chat("same", temperature=0))
    await asked(engine)
    first.cancel()
    while engine.asked(CHAT)[0].aborted_s is None:
        await asyncio.sleep(0.001)
    assert (await up.chat("same", temperature=0)).status_code == 200


async def test_who_shares_a_call_is_still_held_to_its_keys_limits(engine: FakeEngine, tmp_path: Path) -> None:
    headers = keys_file(tmp_path / "keys.json", limited={"concurrent": 2})
    async with serve([engine.url], auth={"disabled": False, "keys_file": str(tmp_path / "keys.json")}) as up:
        engine.script(CHAT, Script(delay_s=0.4))
        body = {"model": MODEL, "messages": [{"role": "user", "content": "same"}], "temperature": 0}
        answers = await asyncio.gather(*(up.client.post(CHAT, json=body, headers=headers["limited"]) for _ in range(6)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429, 429]
        assert (await up.client.post(CHAT, json=body, headers=headers["limited"])).status_code == 200
        await up.settled()


async def test_a_flight_with_little_time_left_is_not_joined(engine: FakeEngine) -> None:
    async with serve([engine.url], timeouts={"total_s": 2.0}) as up:
        engine.script(CHAT, Script(delay_s=1.5))
        first = asyncio.create_task(up.chat("same", temperature=0))
        await asyncio.sleep(1.1)  # the claim is about time: more than half of total_s has passed
        second = await up.chat("same", temperature=0)
        assert (second.status_code, (await first).status_code) == (200, 200)
        assert len(engine.asked(CHAT)) == 2
