"""What a client that leaves has cost: its key's account, the queue's tokens, and a beginning it had in common."""

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

from tests.fakes.engine import MODEL, FakeEngine, Script
from tests.wire.conftest import serve, until
from tests.wire.guarding import keys_file, with_key
from tests.wire.leaving import client, reached
from tests.wire.talking import CHAT

BEGINNING = "What everybody here begins with. " * 200


def asking(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """A chat that nothing coalesces."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 1, **fields}


def sent_with(key: str) -> str:
    return f"authorization: Bearer sk-canary-{key}\r\n"


async def test_who_leaves_the_queue_costs_its_key_no_tokens_and_who_leaves_a_stream_does(
    engine: FakeEngine, tmp_path: Path
) -> None:
    keys = keys_file(tmp_path / "keys.json", few={"tokens_per_minute": 1000}, ahead={})
    settings: dict[str, Any] = {"admission": {"max_in_flight": 1}, "auth": {"disabled": False, "keys_file": keys}}
    async with serve([engine.url], **settings) as up:
        engine.gate = asyncio.Event()
        ahead = asyncio.create_task(up.client.post(CHAT, json=asking(stream=True), headers=with_key("ahead")))
        await reached(engine)
        with client(up) as leaving:
            await leaving.send(asking(max_tokens=900), headers=sent_with("few"))
            await until(lambda: up.gateway.admission.queued == 1)
            leaving.leave()
            await until(lambda: up.gateway.edge.open == 1)
        engine.gate.set()
        assert (await ahead).status_code == 200
        hold = asyncio.Event()
        engine.script(CHAT, Script(pieces=[b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', hold]))
        with client(up) as leaving:
            await leaving.send(asking(max_tokens=900, stream=True), headers=sent_with("few"))
            await leaving.read_until(b'"a"')
            leaving.leave()
            await up.settled()
        refused = await up.client.post(CHAT, json=asking(max_tokens=900), headers=with_key("few"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert "tokens a minute" in refused.json()["error"]["message"]


async def test_a_key_that_is_revoked_in_mid_stream_ends_its_stream_and_leaves_nothing_on_its_account(
    engine: FakeEngine, tmp_path: Path
) -> None:
    file = keys_file(tmp_path / "keys.json", few={"concurrent": 1}, more={})
    auth = {"disabled": False, "keys_file": file, "reload_s": 0.05}
    async with serve([engine.url], auth=auth) as up:
        engine.gate = asyncio.Event()
        stream = asyncio.create_task(up.client.post(CHAT, json=asking(stream=True), headers=with_key("few")))
        await reached(engine)

        async def asked_again() -> int:
            return (await up.client.post(CHAT, json=asking(), headers=with_key("few"))).status_code

        assert await asked_again() == 429
        keys_file(file, more={})

        async def revoked() -> bool:
            return await asked_again() == 401

        await until(revoked)
        engine.gate.set()
        answer = await stream
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        assert repr(up.gateway.admission.accounts) == "<Accounts 0 in-flight>"
        keys_file(file, few={"concurrent": 1}, more={})

        async def valid_again() -> bool:
            return await asked_again() == 200

        await until(valid_again)
        await up.settled()


async def test_a_queue_whose_model_goes_away_lets_nobody_wait_and_ends_empty(engine: FakeEngine) -> None:
    """One has the room, two wait; their engine serves another model from then on."""
    settings: dict[str, Any] = {"admission": {"max_in_flight": 1}, "timeouts": {"reload_wait_s": 0.05}}
    async with serve([engine.url], **settings) as up:
        engine.gate = asyncio.Event()
        ahead = asyncio.create_task(up.client.post(CHAT, json=asking(stream=True)))
        await reached(engine)
        behind = [asyncio.create_task(up.client.post(CHAT, json=asking())) for _ in range(2)]
        await until(lambda: up.gateway.admission.queued == 2)
        engine.models = ("another",)
        await until(lambda: not up.gateway.replicas.knows(MODEL))
        assert (up.gateway.admission.in_flight, up.gateway.admission.queued) == (1, 2)
        assert await up.metric("gateway_queued_requests") == 2
        engine.gate.set()
        assert (await ahead).text.endswith("data: [DONE]\n\n")
        assert {answer.status_code for answer in await asyncio.gather(*behind)} == {503}
        assert len(engine.asked(CHAT)) == 1
        await up.settled()
        assert await up.metric("gateway_in_flight_tokens") == await up.metric("gateway_queued_tokens") == 0
        assert (await up.client.post(CHAT, json={**asking(), "model": "another"})).status_code == 200


async def test_of_clients_with_one_beginning_that_leave_at_every_stage_nothing_is_left(engine: FakeEngine) -> None:
    """The beginning takes room once while anybody holds it, and none when the last one has left."""
    dice = random.Random(11)
    settings: dict[str, Any] = {"admission": {"max_in_flight": 6, "capacity_tokens": 20_000}}
    async with serve([engine.url], **settings) as up:
        queue = up.gateway.admission.of(MODEL)
        await until(lambda: queue.shares_beginnings)
        engine.default = Script(delay_s=0.02, first_token_s=0.02, token_s=0.01)

        async def one(i: int, reads: bytes | None) -> None:
            with client(up) as leaving:
                body = asking(f"{BEGINNING}{i}", stream=True, max_tokens=20, n=dice.choice([1, 2]))
                await leaving.send(body, part=0.5 if reads is None else 1)
                if reads:
                    await leaving.read_until(reads)
                leaving.leave(dice.choice(["close", "reset"]))

        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                up.gateway.check_integrity()
                if queue.in_flight > 2:
                    most = max(most, queue.in_flight_tokens)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        stages = [None, b"", b"HTTP/1.1 200", b"data:", b"[DONE]"]  # what each reads before it leaves
        await asyncio.gather(*(one(i, stages[i % len(stages)]) for i in range(60)))
        await up.settled()
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        alone = len(BEGINNING) // 4
        assert 0 < most < 2 * alone, "it was counted for each of them"
        assert (queue.in_flight_tokens, queue.queued_tokens, len(queue._held)) == (0, 0, 0)
