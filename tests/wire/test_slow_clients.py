"""Clients that stay but do not read: they hold back their own engine call, nothing else, and not for ever."""

import asyncio
import contextlib
import time
import tracemalloc

from tests.fakes.engine import FakeEngine, Script, Seen
from tests.wire.conftest import Running, serve, until
from tests.wire.leaving import client, reached
from tests.wire.talking import BODIES, CHAT

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
