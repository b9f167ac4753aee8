"""Clients that leave: the engine works for nobody, and who shares a call with them notices nothing."""

import asyncio
import contextlib
import gc
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes.engine import MODEL, FakeEngine, Script
from tests.wire.conftest import Running, serve, until
from tests.wire.leaving import SOON_S, aborted_soon, client, reached
from tests.wire.streams import EVERY_DIALECT
from tests.wire.talking import BODIES, CHAT, COMPLETIONS

HOW = pytest.mark.parametrize("how", ["close", "reset"])


@pytest.fixture
async def lone(engine: FakeEngine) -> AsyncIterator[Running]:
    """A gateway that lets one request through at a time."""
    async with serve([engine.url], admission={"max_in_flight": 1}) as up:
        yield up
        await up.settled()


# -- every phase -------------------------------------------------------------------------------------------------------


@HOW
async def test_a_client_that_leaves_with_half_its_body_sent_never_reaches_the_engine(
    how: str, up: Running, engine: FakeEngine
) -> None:
    with client(up) as leaving:
        await leaving.send(BODIES[CHAT], part=0.7)
        await until(lambda: up.gateway.edge.open == 1)
        leaving.leave(how)
        await up.settled()
    assert await up.metric("gateway_cancelled_total", phase="reading") == 1
    assert not engine.asked(CHAT)


@HOW
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_the_queue_never_reaches_the_engine(
    how: str, stream: bool, lone: Running, engine: FakeEngine
) -> None:
    gate = asyncio.Event()
    engine.gate = gate
    first = asyncio.create_task(lone.chat("first", stream=True))
    await reached(engine)
    with client(lone) as leaving:
        await leaving.send({**BODIES[CHAT], "stream": stream})
        await until(lambda: lone.gateway.admission.queued == 1)
        leaving.leave(how)
        await until(lambda: lone.gateway.admission.queued == 0, SOON_S)
    gate.set()
    assert (await first).status_code == 200
    assert (await lone.chat("third")).status_code == 200
    assert len(engine.asked(CHAT)) == 2, "the one that left was asked for"
    assert await lone.metric("gateway_cancelled_total", phase="queued") == 1


@HOW
@EVERY_DIALECT
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_answer_reaches_the_engine_at_once(
    how: str, path: str, stream: bool, up: Running, engine: FakeEngine
) -> None:
    engine.script(path, Script(hang=True))
    with client(up) as leaving:
        await leaving.send({**BODIES[path], "stream": stream}, path)
        seen = await reached(engine, path)
        leaving.leave(how)
        await aborted_soon(seen, leaving)
    await up.settled()
    assert await up.metric("gateway_cancelled_total", phase="waiting") == 1
    assert await up.metric("gateway_upstream_failures_total") == 0
    assert len(engine.asked(path)) == 1


@HOW
@EVERY_DIALECT
@pytest.mark.parametrize("events", [0, 3], ids=["before the first token", "after three events"])
async def test_leaving_a_stream_reaches_the_engine_at_once(
    how: str, path: str, events: int, up: Running, engine: FakeEngine
) -> None:
    engine.script(path, Script(stall_after=events))
    with client(up) as leaving:
        await leaving.send({**BODIES[path], "stream": True, "ignore_eos": True}, path)
        await leaving.read_until(b"\n\n" if events else b"\r\n\r\n", max(1, events))
        seen = await reached(engine, path)
        leaving.leave(how)
        await aborted_soon(seen, leaving)
    await up.settled()
    assert await up.metric("gateway_cancelled_total", phase="streaming") == 1
    assert await up.metric("gateway_upstream_failures_total") == 0
    assert await up.metric("gateway_requests_total", route=path, status="200") == 1


async def test_leaving_a_stream_that_flows_stops_the_engine(up: Running, engine: FakeEngine) -> None:
    engine.script(CHAT, Script(token_s=0.005))
    with client(up) as leaving:
        await leaving.send({**BODIES[CHAT], "stream": True, "max_tokens": 4000, "ignore_eos": True})
        await leaving.read_until(b'"content":" w')
        seen = await reached(engine)
        leaving.leave()
        await aborted_soon(seen, leaving)
    await until(lambda: engine.active == 0)


async def test_leaving_while_the_engine_reloads_leaves_no_trace(engine: FakeEngine) -> None:
    async with serve([engine.url]) as up:
        await engine.stop()
        await until(lambda: not up.gateway.health.ready()[0])
        with client(up) as leaving:
            await leaving.send(BODIES[CHAT])
            await until(lambda: up.gateway.admission.in_flight == 1)
            leaving.leave()
            await until(lambda: up.gateway.admission.in_flight == 0, SOON_S)
        await engine.start()
        await up.settled()
        assert not engine.asked(CHAT)


async def test_a_client_that_pipelined_a_second_request_is_missed_all_the_same(up: Running, engine: FakeEngine) -> None:
    engine.script(CHAT, Script(hang=True))
    with client(up) as leaving:
        await leaving.send(BODIES[CHAT])
        await leaving.send(BODIES[CHAT])
        seen = await reached(engine)
        await asyncio.sleep(0.05)  # the second one has arrived by then
        leaving.leave()
        await aborted_soon(seen, leaving)
    await up.settled()
    assert len(engine.asked(CHAT)) == 1


async def test_a_client_that_is_not_read_any_more_is_missed_all_the_same(up: Running, engine: FakeEngine) -> None:
    """What a client sends beside its request must not hide that it left."""
    engine.script(CHAT, Script(hang=True))
    with client(up) as leaving:
        await leaving.send(BODIES[CHAT])
        seen = await reached(engine)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await asyncio.get_running_loop().sock_sendall(leaving.sock, b"GET / HTTP/1.1\r\n\r\n" * 100_000)
        leaving.leave("reset")
        await aborted_soon(seen, leaving)


# -- shared calls ------------------------------------------------------------------------------------------------------


async def test_leaving_a_merged_call_takes_nothing_from_the_others(engine: FakeEngine) -> None:
    async with serve([engine.url], batching={"window_ms": 1000, "max_prompts": 3}) as up:
        engine.script(CHAT, Script(hang=True))
        engine.script(COMPLETIONS, Script(delay_s=0.5))
        with client(up) as holder, client(up) as leaving:
            await holder.send(BODIES[CHAT])  # the replica is busy, so completions wait for company
            await reached(engine)
            others = [asyncio.create_task(up.completion(f"p{i}", max_tokens=4, temperature=0.5)) for i in range(2)]
            await until(lambda: up.gateway.inference.batcher.waiting == 2)
            body = {"model": MODEL, "prompt": "leaving", "max_tokens": 4, "temperature": 0.5}
            await leaving.send(body, COMPLETIONS)
            seen = await reached(engine, COMPLETIONS)
            assert len(seen.json["prompt"]) == 3
            leaving.leave()
            for answer in await asyncio.gather(*others):
                assert answer.status_code == 200
                assert len(answer.json()["choices"]) == 1
            assert seen.finished
            assert len(engine.asked(COMPLETIONS)) == 1
        await up.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_shared_call_ends_when_the_last_of_its_clients_leaves_and_not_before(
    stream: bool, up: Running, engine: FakeEngine
) -> None:
    engine.script(CHAT, Script(stall_after=3) if stream else Script(hang=True))
    body = {**BODIES[CHAT], "temperature": 0, "stream": stream, "ignore_eos": True}
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(client(up)) for _ in range(3)]
        for one in clients:
            await one.send(body)
        seen = await reached(engine)
        await until(lambda: up.gateway.edge.open == 3)
        for one in clients[:2]:
            one.leave()
        await until(lambda: up.gateway.edge.open == 1)
        await asyncio.sleep(0.1)
        assert seen.aborted_s is None
        clients[2].leave()
        await aborted_soon(seen, clients[2])
    await up.settled()
    assert len(engine.asked(CHAT)) == 1
    assert await up.metric("gateway_cancelled_total") == 3


# -- nothing is left behind --------------------------------------------------------------------------------------------


def gateway_tasks() -> int:
    """All tasks of this process but those that the scripted engine keeps for idle connections."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return len(names) - names.count("RequestHandler.start")


async def test_after_a_hundred_departures_of_every_kind_nothing_is_left(engine: FakeEngine) -> None:
    loop = asyncio.get_running_loop()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    loop.set_debug(True)
    dice = random.Random(7)
    settings: dict[str, Any] = {"admission": {"max_in_flight": 12}, "timeouts": {"keepalive_s": 0.02, "idle_s": 1}}
    try:
        async with serve([engine.url], **settings) as up:
            assert (await up.chat()).status_code == 200
            await up.settled()
            tasks = gateway_tasks()

            async def one(i: int) -> None:
                path = dice.choice(list(BODIES))
                body = {**BODIES[path], "stream": dice.random() < 0.6, "temperature": dice.choice([0, 1])}
                with client(up) as leaving:
                    await leaving.send(body, path, part=dice.choice([0.5, 1, 1, 1]))
                    await asyncio.sleep(dice.random() * 0.2)
                    leaving.leave(dice.choice(["close", "reset"]))

            engine.default = Script(delay_s=0.02, token_s=0.02)
            for _ in range(4):
                await asyncio.gather(*(one(i) for i in range(25)))
            engine.default = Script()
            await up.settled()
            assert (await up.chat()).status_code == 200
            await until(lambda: engine.active == 0)
            await up.settled()
            await until(lambda: gateway_tasks() <= tasks, 5)
            gc.collect()
            await asyncio.sleep(0)
    finally:
        loop.set_debug(False)
    assert complaints == []


async def test_an_answer_that_is_complete_counts_as_answered_though_its_client_leaves_then(
    up: Running, engine: FakeEngine
) -> None:
    for _ in range(20):
        with client(up) as leaving:
            await leaving.send({**BODIES[CHAT], "stream": True})
            await leaving.read_until(b"[DONE]")
            leaving.leave("reset")
    await up.settled()
    assert await up.metric("gateway_cancelled_total") == 0
    assert await up.metric("gateway_requests_total", route=CHAT, status="200") == 20
