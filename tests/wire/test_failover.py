"""What happens to requests when a replica goes: who is asked again, who is not, and how long it takes."""

import asyncio
import contextlib
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from gateway.replicas import State
from tests.fakes.engine import FakeEngine, Script
from tests.wire.conftest import Running, serve, until

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
FAILOVER_S = 2.0  # the promise
BLIND = {"health": {"interval_s": 60}}  # only requests find out, no look does


@contextlib.asynccontextmanager
async def two(**settings: object) -> AsyncIterator[tuple[FakeEngine, FakeEngine, Running]]:
    async with FakeEngine() as one, FakeEngine() as other, serve([one.url, other.url], **settings) as up:
        await until(lambda: len(up.gateway.replicas.ready()) == 2)
        yield one, other, up
        await up.settled()


async def timed(up: Running, prompt: str) -> float:
    """Seconds that a request took, which has to succeed."""
    begin = time.perf_counter()
    answer = await up.completion(prompt)
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - begin


async def test_after_refused_connections_the_slowest_request_takes_less_than_two_seconds() -> None:
    async with two(**BLIND) as (one, other, up):
        await one.stop()
        took = [await timed(up, f"p{number}") for number in range(20)]
        assert max(took) < FAILOVER_S, took
        assert len(other.asked(COMPLETIONS)) == 20
        assert await up.metric("gateway_upstream_retries_total") == 1
        assert await up.metric("gateway_replica_circuit_opened_total", replica=one.url, cause="refused") == 1
        assert up.gateway.replicas.all[0].state is State.DOWN


@contextlib.contextmanager
def silent_port(port: int) -> Iterator[None]:
    """Like a host that is gone: nothing answers there, not even a refusal (a full backlog drops what comes)."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(("127.0.0.1", port))
        yield


async def test_a_host_that_is_gone_without_a_word_costs_less_than_two_seconds_once() -> None:
    async with two(**BLIND) as (one, other, up):
        await one.stop()
        with silent_port(one.port):
            took = await asyncio.gather(*(timed(up, f"p{number}") for number in range(20)))
            later = [await timed(up, f"q{number}") for number in range(20)]
        assert 1 < max(took) < FAILOVER_S, took
        assert max(later) < 1, later
        asked = {prompt for seen in other.asked(COMPLETIONS) for prompt in _prompts(seen.json["prompt"])}
        assert len(asked) == 40


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (Script(status=400, body=b'{"error":{"message":"no"}}'), 400),
        (Script(status=404, body=b'{"error":{"message":"no"}}'), 404),
        (Script(status=429, body=b'{"error":{"message":"no"}}'), 429),
        (Script(status=500, body=b'{"error":{"message":"no"}}'), 500),
        (Script(status=503, body=b'{"error":{"message":"no"}}'), 503),
        (Script(reset_before_answer=True), 502),
        (Script(hang=True), 504),
    ],
    ids=["400", "404", "429", "500", "503", "reset", "timeout"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_what_reached_one_replica_is_never_sent_to_another(script: Script, status: int, stream: bool) -> None:
    async with two(timeouts={"total_s": 0.5, "first_byte_s": 0.3}) as (one, other, up):
        one.script(CHAT, script)
        other.script(CHAT, script)
        answer = await up.chat("p", stream=stream)
        assert answer.status_code == status
        assert len(one.asked(CHAT)) + len(other.asked(CHAT)) == 1
        assert await up.metric("gateway_upstream_retries_total") == 0


async def test_a_stream_that_broke_off_is_never_begun_again_elsewhere() -> None:
    async with two() as (one, other, up):
        one.default = other.default = Script(reset_after=2)
        async with up.stream("p") as answer:
            body = await answer.aread()
        assert answer.status_code == 200
        assert b'"error"' in body
        assert b"[DONE]" not in body
        assert len(one.asked(CHAT)) + len(other.asked(CHAT)) == 1


async def test_each_replica_is_tried_once_and_then_the_request_waits_for_one_to_come_back() -> None:
    async with two(timeouts={"reload_wait_s": 0.3}, **BLIND) as (one, other, up):
        await one.stop()
        await other.stop()
        refused = await up.completion("p")
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert await up.metric("gateway_upstream_retries_total") == 2


async def test_a_request_that_found_everybody_gone_is_served_by_whoever_comes_back() -> None:
    async with two() as (one, other, up):
        await one.stop()
        await other.stop()
        waiting = asyncio.create_task(up.completion("p"))
        await until(lambda: not up.gateway.replicas.ready())
        await other.start()
        assert (await waiting).status_code == 200


async def test_members_of_a_merged_call_that_found_its_replica_gone_are_all_served_by_another() -> None:
    async with two(**BLIND) as (one, other, up):
        one.default = other.default = Script(delay_s=0.4)
        prompts = [f"p{number}" for number in range(40)]
        first = [asyncio.create_task(up.completion(prompt, max_tokens=2)) for prompt in prompts[:8]]
        await until(lambda: one.active and other.active)
        # From here on requests wait for company; what waits for `one` finds it gone.
        rest = [asyncio.create_task(up.completion(prompt, max_tokens=2)) for prompt in prompts[8:]]
        await until(lambda: up.gateway.inference.batcher.waiting)
        begun = {prompt for seen in one.asked(COMPLETIONS) for prompt in _prompts(seen.json["prompt"])}
        await one.stop()
        answers = await asyncio.gather(*first, *rest)
        lost = {prompt for prompt, answer in zip(prompts, answers, strict=True) if answer.status_code != 200}
        begun |= {prompt for seen in one.asked(COMPLETIONS) for prompt in _prompts(seen.json["prompt"])}
        assert lost <= begun


def _prompts(prompt: str | list[str]) -> list[str]:
    return [prompt] if isinstance(prompt, str) else prompt


async def test_a_killed_engine_loses_only_what_it_had_begun() -> None:
    """A process of its own, ended by SIGKILL under load."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = (sys.executable, "-m", "tests.fakes.engine", "--port", str(port), "--service-s", "0.05")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    doomed = f"http://127.0.0.1:{port}"
    try:
        async with FakeEngine(service_s=0.05) as other, serve([doomed, other.url], batching={"window_ms": 0}) as up:
            await until(lambda: len(up.gateway.replicas.ready()) == 2)
            replica = up.gateway.replicas.all[0]
            answers: list[httpx.Response] = []
            lost: Counter[int] = Counter()
            over = asyncio.Event()

            async def client(number: int) -> None:
                for turn in range(1000):
                    answers.append(answer := await up.completion(f"client {number} turn {turn}"))
                    lost[number] += answer.status_code != 200
                    if over.is_set():
                        break

            clients = [asyncio.create_task(client(number)) for number in range(16)]
            await until(lambda: len(answers) > 100 and replica.in_flight)
            killed = time.perf_counter()
            process.kill()
            await until(lambda: replica.state is State.DOWN)
            noticed_s = time.perf_counter() - killed
            served = len(answers)
            await until(lambda: len(answers) > served + 100)
            over.set()
            await asyncio.gather(*clients)
            assert {answer.status_code for answer in answers} <= {200, 502}
            assert max(lost.values()) == 1, "nobody loses more than the one request that was under way"
            assert noticed_s < FAILOVER_S
            await up.settled()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_draining_under_load_loses_nothing_and_lifting_it_brings_the_replica_back() -> None:
    async with two() as (one, other, up):
        one.service_s = other.service_s = 0.02
        over = asyncio.Event()
        statuses: list[int] = []

        async def client(number: int) -> None:
            turn = 0
            while not over.is_set():
                turn += 1
                if number % 2:
                    statuses.append((await up.completion(f"{number} {turn}")).status_code)
                else:
                    async with up.stream(f"{number} {turn}") as answer:
                        body = await answer.aread()
                        statuses.append(answer.status_code if b"[DONE]" in body else 599)

        clients = [asyncio.create_task(client(number)) for number in range(12)]
        replica = up.gateway.replicas.all[0]
        await until(lambda: replica.in_flight > 1)
        up.gateway.replicas.drain(one.url, True)
        await until(lambda: not replica.in_flight)
        asked = len(one.seen)
        served = len(statuses)
        await until(lambda: len(statuses) > served + 50)
        assert len(one.seen) == asked
        up.gateway.replicas.drain(one.url, False)
        await until(lambda: len(one.seen) > asked)
        over.set()
        await asyncio.gather(*clients)
        assert set(statuses) == {200}


async def test_a_drained_engine_that_restarts_stays_drained_until_that_is_lifted() -> None:
    async with two() as (one, other, up):
        replica = up.gateway.replicas.all[0]
        up.gateway.replicas.drain(one.url, True)
        await one.stop()
        await until(lambda: replica.state is State.DOWN)
        await one.start()
        await until(lambda: replica.state is State.DRAINING)
        assert "drain" in replica.reason
        for number in range(10):
            assert (await up.completion(f"p{number}")).status_code == 200
        assert one.asked(COMPLETIONS) == []
        up.gateway.replicas.drain(one.url, False)
        assert replica.state is State.READY
        assert len(other.asked(COMPLETIONS)) == 10


async def test_requests_for_the_only_replica_that_drains_wait_until_it_is_back() -> None:
    async with FakeEngine() as engine, serve([engine.url]) as up:
        up.gateway.replicas.drain(engine.url, True)
        waiting = asyncio.create_task(up.completion("p"))
        await until(lambda: up.gateway.edge.open == 1)
        await asyncio.sleep(0.1)
        assert not waiting.done()
        up.gateway.replicas.drain(engine.url, False)
        assert (await waiting).status_code == 200
