"""Clients that leave, and clients that stay but do not read: the engine works for nobody, and others notice nothing."""

import asyncio
import contextlib
import gc
import json
import random
import socket
import struct
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.fakes.engine import MODEL, FakeEngine, Script, Seen
from tests.wire.conftest import Running, serve, until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}]},
    COMPLETIONS: {"model": MODEL, "prompt": "hello there", "max_tokens": 1000},
    RESPONSES: {"model": MODEL, "input": "hello there"},
    MESSAGES: {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 16},
}
EVERY_DIALECT = pytest.mark.parametrize("path", list(BODIES))
HOW = pytest.mark.parametrize("how", ["close", "reset"])
SOON_S = 1.0  # in which an engine must hear that its client has left


@dataclass
class Client:
    """A client of its own socket, so that it can leave as real ones do, or stay and not read."""

    sock: socket.socket
    left_s: float = 0.0

    async def send(self, body: dict[str, Any], path: str = CHAT, headers: str = "", part: float = 1.0) -> "Client":
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}"
        whole = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
        await asyncio.get_running_loop().sock_sendall(self.sock, whole[: int(len(whole) * part)])
        return self

    async def read_until(self, wanted: bytes, times: int = 1) -> bytes:
        text = b""
        async with asyncio.timeout(10):
            while text.count(wanted) < times:
                part = await asyncio.get_running_loop().sock_recv(self.sock, 65536)
                assert part, text
                text += part
        return text

    async def read_to_end(self) -> bytes:
        """Until the gateway closes or breaks off the connection."""
        text = b""
        with contextlib.suppress(ConnectionError):
            while part := await asyncio.get_running_loop().sock_recv(self.sock, 1 << 20):
                text += part
        return text

    def leave(self, how: str = "close") -> None:
        if how == "reset":
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.left_s = time.monotonic()
        self.sock.close()


@contextlib.contextmanager
def client(up: Running, receive_buffer: int | None = None) -> Iterator[Client]:
    host, port = up.url.removeprefix("http://").split(":")
    with socket.socket() as sock:
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.connect((host, int(port)))
        sock.setblocking(False)
        yield Client(sock)


async def reached(engine: FakeEngine, path: str = CHAT, count: int = 1) -> Seen:
    await until(lambda: len(engine.asked(path)) >= count)
    return engine.asked(path)[count - 1]


async def aborted_soon(seen: Seen, who: Client) -> None:
    await until(lambda: seen.aborted_s is not None)
    assert seen.aborted_s is not None and not seen.finished
    assert seen.aborted_s - who.left_s < SOON_S


@pytest.fixture
async def lone(engine: FakeEngine) -> AsyncIterator[Running]:
    """A gateway that lets one request through at a time."""
    async with serve([engine.url], admission={"max_in_flight": 1}) as up:
        yield up
        await up.settled()


# -- every phase (B8) --------------------------------------------------------------------------------------------------


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
    settings = {"admission": {"max_in_flight": 12}, "timeouts": {"keepalive_s": 0.02, "idle_s": 1}}
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


# -- clients that do not read ------------------------------------------------------------------------------------------

FLOOD = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 65536 + b'"}}]}\n\n'
FLOOD_BYTES = 64 * 2**20


async def stalled(seen: Seen) -> int:
    """Bytes that the engine got rid of before its socket took no more."""
    sent = -1
    while seen.sent_bytes != sent:
        sent = seen.sent_bytes
        await asyncio.sleep(0.25)
    return sent


async def test_clients_that_do_not_read_stop_their_engine_not_the_others_and_fill_no_memory(
    up: Running, engine: FakeEngine
) -> None:
    count = 8
    engine.script(CHAT, *(Script(pieces=[FLOOD] * (FLOOD_BYTES // len(FLOOD))) for _ in range(count)))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(client(up, receive_buffer=4096)) for _ in range(count)]
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for stuck in clients:
                await stuck.send({**BODIES[CHAT], "stream": True})
            await reached(engine, count=count)
            sent = [await stalled(seen) for seen in engine.asked(CHAT)]
            held = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        # The kernel's socket buffers, on both sides of the gateway, take some megabytes each; the gateway hardly any,
        # though this process also holds the engine's own buffers.
        assert max(sent) < FLOOD_BYTES / 2, "nothing held the engine back"
        assert held / count < 700 * 1024, "the gateway buffers for its clients"
        async with asyncio.timeout(5):
            answers = await asyncio.gather(*(up.chat(f"other {i}", stream=i % 2 == 0) for i in range(10)))
        assert {answer.status_code for answer in answers} == {200}
        assert up.gateway.edge.open == count
    await up.settled()


async def test_a_client_that_takes_nothing_for_idle_s_is_cut_off_and_its_engine_freed(engine: FakeEngine) -> None:
    async with serve([engine.url], timeouts={"idle_s": 1}) as up:
        engine.script(CHAT, Script(pieces=[FLOOD] * (FLOOD_BYTES // len(FLOOD))))
        with client(up, receive_buffer=4096) as stuck:
            await stuck.send({**BODIES[CHAT], "stream": True})
            seen = await reached(engine)
            await until(lambda: seen.aborted_s is not None, 10)
            await up.settled()
            text = await stuck.read_to_end()
            assert b"[DONE]" not in text and not text.endswith(b"0\r\n\r\n"), "a cut must not look like an end"
        assert await up.metric("gateway_cancelled_total", phase="streaming") == 1
        assert await up.metric("gateway_upstream_failures_total") == 0, "the engine did nothing wrong"


async def test_a_client_that_reads_slowly_but_reads_is_not_cut_off(engine: FakeEngine) -> None:
    async with serve([engine.url], timeouts={"idle_s": 1}) as up:
        count = 12 * 2**20 // len(FLOOD)
        engine.script(CHAT, Script(pieces=[*[FLOOD] * count, b"data: [DONE]\n\n"]))
        with client(up, receive_buffer=4096) as slow:
            await slow.send({**BODIES[CHAT], "stream": True})
            loop, text, begin = asyncio.get_running_loop(), bytearray(), time.monotonic()
            while not text.endswith(b"0\r\n\r\n"):
                part = await loop.sock_recv(slow.sock, 1 << 20)
                assert part, "cut off"
                text += part
                if time.monotonic() - begin < 3:  # three times as long as a client may stand still
                    await asyncio.sleep(0.2)
        assert text.count(FLOOD[:40]) == count
        await up.settled()


async def test_a_whole_answer_that_nobody_takes_is_cut_off_too(engine: FakeEngine) -> None:
    async with serve([engine.url], timeouts={"idle_s": 1}) as up:
        body = b'{"object":"chat.completion","choices":"' + b"x" * 32 * 2**20 + b'"}'
        engine.script(CHAT, Script(body=body))
        with client(up, receive_buffer=4096) as stuck:
            await stuck.send(BODIES[CHAT])
            await reached(engine)
            await until(lambda: up.gateway.edge.open == 0)
            await asyncio.sleep(2.5)
            assert len(await stuck.read_to_end()) < len(body)


async def test_a_deadline_ends_a_stream_that_its_client_does_not_read(up: Running, engine: FakeEngine) -> None:
    engine.script(CHAT, Script(pieces=[FLOOD] * (FLOOD_BYTES // len(FLOOD))))
    with client(up, receive_buffer=4096) as stuck:
        await stuck.send({**BODIES[CHAT], "stream": True}, headers="X-Request-Timeout-S: 1\r\n")
        seen = await reached(engine)
        await until(lambda: seen.aborted_s is not None, 10)
        await up.settled()
    assert await up.metric("gateway_cancelled_total", phase="streaming") == 1
