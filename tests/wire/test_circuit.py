"""A replica that fails is left out for a while, and never because of what a client did."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from gateway.breaker import Circuit
from gateway.replicas import Replica, State
from tests.fakes.engine import FakeEngine, Script
from tests.wire.conftest import Running, serve, until

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BROKEN = Script(status=500, body=b'{"error":{"message":"broken"}}')
QUICK = {"failures": 3, "open_s": 0.4, "max_open_s": 0.4}


@contextlib.asynccontextmanager
async def two(**circuit: float) -> AsyncIterator[tuple[FakeEngine, FakeEngine, Running]]:
    settings = {"circuit": {**QUICK, **circuit}}
    async with FakeEngine() as one, FakeEngine() as other, serve([one.url, other.url], **settings) as up:
        await until(lambda: len(up.gateway.replicas.ready()) == 2)
        yield one, other, up
        await up.settled()


def of(up: Running, engine: FakeEngine) -> Replica:
    return next(replica for replica in up.gateway.replicas.all if replica.url == engine.url)


def circuit(up: Running, engine: FakeEngine) -> Circuit:
    return of(up, engine).breaker.state(asyncio.get_running_loop().time())


async def break_it(up: Running, engine: FakeEngine) -> int:
    """Ask until its circuit opens; how many clients saw a failure."""
    failures = 0
    for number in range(100):
        if circuit(up, engine) is not Circuit.CLOSED:
            return failures
        failures += (await up.completion(f"p{number}")).status_code == 500
    raise AssertionError("its circuit stayed closed")


async def test_a_replica_that_fails_is_left_out_and_the_others_serve_everybody() -> None:
    async with two(open_s=60, max_open_s=60) as (broken, good, up):
        broken.default = BROKEN
        assert await break_it(up, broken) == 3
        asked = len(broken.seen)
        answers = [await up.completion(f"q{number}") for number in range(20)]
        assert {answer.status_code for answer in answers} == {200}
        assert len(broken.seen) == asked
        assert await up.metric("gateway_replica_circuit", replica=broken.url) == 2
        assert await up.metric("gateway_replica_circuit", replica=good.url) == 0
        opened = await up.metric("gateway_replica_circuit_opened_total", replica=broken.url, cause="failures")
        assert opened == 1
        status = {row["url"]: row for row in up.gateway.health.status()["replicas"]}
        assert status[broken.url]["state"] is State.READY
        assert status[broken.url]["circuit"]["state"] == "open"
        assert status[broken.url]["circuit"]["trial_in_s"] > 29
        assert up.gateway.health.ready() == (True, "")


async def test_after_its_time_one_request_tries_and_its_success_brings_the_replica_back() -> None:
    async with two() as (broken, _, up):
        broken.default = BROKEN
        await break_it(up, broken)
        broken.default = Script()
        await until(lambda: circuit(up, broken) is Circuit.HALF_OPEN)
        broken.freeze()  # the one that tries hangs until the others have been served
        assert await up.metric("gateway_replica_circuit", replica=broken.url) == 1
        before = len(broken.asked(COMPLETIONS))
        tries = [asyncio.create_task(up.completion(f"t{number}")) for number in range(30)]
        await until(lambda: sum(task.done() for task in tries) == 29)
        assert len(broken.asked(COMPLETIONS)) == before + 1, "more than one tried"
        broken.thaw()
        assert {answer.status_code for answer in await asyncio.gather(*tries)} == {200}
        assert circuit(up, broken) is Circuit.CLOSED
        await asyncio.gather(*(up.completion(f"u{number}") for number in range(30)))
        assert len(broken.asked(COMPLETIONS)) > before + 1


async def test_a_failed_trial_leaves_it_out_again() -> None:
    async with two() as (broken, _, up):
        broken.default = BROKEN
        await break_it(up, broken)
        await until(lambda: circuit(up, broken) is Circuit.HALF_OPEN)
        numbers = iter(range(100))
        while (await up.completion(f"t{next(numbers)}")).status_code != 500:
            pass  # the other one's
        assert circuit(up, broken) is not Circuit.CLOSED
        assert await up.metric("gateway_replica_circuit_opened_total", replica=broken.url, cause="trial") >= 1


async def test_a_trials_first_token_closes_the_circuit_while_its_stream_goes_on() -> None:
    async with two() as (broken, _, up):
        broken.default = BROKEN
        await break_it(up, broken)
        broken.default = Script()
        await until(lambda: circuit(up, broken) is Circuit.HALF_OPEN)
        more = asyncio.Event()
        token = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
        broken.script(CHAT, Script(pieces=[token, more, b"data: [DONE]\n\n"]))

        async def stream(number: int) -> None:
            async with up.stream(f"s{number}") as answer:
                await answer.aread()

        streams = []
        while not broken.asked(CHAT):
            streams.append(asyncio.create_task(stream(len(streams))))
            await asyncio.sleep(0.01)
        await until(lambda: circuit(up, broken) is Circuit.CLOSED)
        assert of(up, broken).in_flight == 1
        more.set()
        await asyncio.gather(*streams)


async def test_a_trial_that_its_client_leaves_decides_nothing_and_the_next_may_try() -> None:
    async with two() as (broken, _, up):
        broken.default = BROKEN
        await break_it(up, broken)
        broken.default = Script(hang=True)
        await until(lambda: circuit(up, broken) is Circuit.HALF_OPEN)
        tried = len(broken.asked(COMPLETIONS))

        async def leave(number: int) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await up.completion(f"t{number}")

        await asyncio.gather(*(leave(number) for number in range(8)))
        assert len(broken.asked(COMPLETIONS)) == tried + 1
        await up.settled()
        assert circuit(up, broken) is Circuit.HALF_OPEN
        broken.default = Script()
        for number in range(20):
            await up.completion(f"v{number}")
        assert circuit(up, broken) is Circuit.CLOSED


@pytest.mark.parametrize(
    "script",
    [
        Script(status=400, body=b'{"error":{"message":"no"}}'),
        Script(status=401, body=b'{"error":"Unauthorized"}'),
        Script(status=404, body=b'{"error":{"message":"no"}}'),
        Script(status=429, body=b'{"error":{"message":"no"}}'),
        Script(status=501, body=b'{"error":{"message":"not this model"}}'),
        Script(status=503, body=b'{"error":{"message":"busy"}}'),
    ],
    ids=["400", "401", "404", "429", "501", "503"],
)
async def test_what_a_client_did_wrong_or_an_engine_is_too_busy_for_opens_nothing(script: Script) -> None:
    async with two() as (one, other, up):
        one.default = other.default = script
        for number in range(12):
            assert (await up.completion(f"p{number}")).status_code >= 400
        assert (circuit(up, one), circuit(up, other)) == (Circuit.CLOSED, Circuit.CLOSED)


async def test_clients_that_leave_open_nothing() -> None:
    async with two() as (one, other, up):
        one.default = other.default = Script(hang=True)
        for number in range(12):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await up.completion(f"p{number}")
        await up.settled()
        assert (circuit(up, one), circuit(up, other)) == (Circuit.CLOSED, Circuit.CLOSED)


async def test_a_grammar_that_does_not_compile_is_the_clients_though_the_engine_says_500() -> None:
    async with two() as (one, other, up):
        one.default = other.default = BROKEN
        for number in range(12):
            answer = await up.completion(f"p{number}", structured_outputs={"grammar": "root ::= ["})
            assert answer.status_code == 400
        assert (circuit(up, one), circuit(up, other)) == (Circuit.CLOSED, Circuit.CLOSED)


async def test_a_poisoned_request_repeated_by_its_client_opens_nothing() -> None:
    async with two() as (one, other, up):
        one.default = other.default = BROKEN
        for _ in range(20):
            assert (await up.completion("the same poison")).status_code == 500
        assert (circuit(up, one), circuit(up, other)) == (Circuit.CLOSED, Circuit.CLOSED)


async def test_where_every_circuit_is_open_requests_go_out_all_the_same_and_one_good_answer_closes_it() -> None:
    async with two(open_s=60, max_open_s=60) as (one, other, up):
        one.default = other.default = BROKEN
        await break_it(up, one)
        await break_it(up, other)
        assert (circuit(up, one), circuit(up, other)) == (Circuit.OPEN, Circuit.OPEN)
        one.default = other.default = Script()
        for number in range(20):
            assert (await up.completion(f"q{number}")).status_code == 200
        assert Circuit.CLOSED in (circuit(up, one), circuit(up, other))


@pytest.mark.parametrize(
    "script",
    [
        Script(reset_before_answer=True),
        Script(reset_after=1),
        Script(error_event_after=1),
        Script(end_after=2),
        Script(status=502, body=b"<html>"),
    ],
    ids=["reset", "reset-in-stream", "error-event", "no-end", "502"],
)
async def test_broken_connections_streams_and_answers_count(script: Script) -> None:
    async with two(open_s=60, max_open_s=60) as (broken, _, up):
        broken.default = script
        for number in range(60):
            if circuit(up, broken) is Circuit.OPEN:
                break
            async with up.stream(f"s{number}") as answer:
                await answer.aread()
        assert circuit(up, broken) is Circuit.OPEN
        assert len(broken.asked(CHAT)) == 3


async def test_an_engine_that_restarts_and_passes_its_first_token_needs_no_trial() -> None:
    async with two(open_s=60, max_open_s=60) as (one, _, up):
        await one.stop()
        for number in range(10):  # whichever comes first, a request or a look
            assert (await up.completion(f"p{number}")).status_code == 200
        assert of(up, one).state is State.DOWN
        await one.start()
        await until(lambda: of(up, one).state is State.READY)
        assert circuit(up, one) is Circuit.CLOSED
