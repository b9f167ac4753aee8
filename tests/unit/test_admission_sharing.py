"""Admission where the engines keep a beginning in common once: it counts once, as long as anybody reads it."""

import asyncio

import pytest

from tests.unit.test_admission import FAR, ONE, TWO, Clock, admission, granted


@pytest.fixture
def clock() -> Clock:
    return Clock()


BEGINNING = ((1, 40), (2, 20))  # keys and tokens


async def test_a_beginning_in_common_counts_once_where_the_engines_share_it(clock: Clock) -> None:
    gate = admission(clock)
    gate.shares_beginnings = True
    leases = [await gate.acquire(ONE, 70, FAR, BEGINNING) for _ in range(4)]
    assert repr(gate) == "<Admission 100/100 tokens, 4 in-flight, 0 queued>"
    tasks = [asyncio.create_task(gate.acquire(TWO, 70, FAR, BEGINNING))]
    assert await granted(tasks) == 0
    gate.check_integrity()
    leases[0].close()
    assert await granted(tasks) == 1
    for lease in [*leases, tasks[0].result()]:
        lease.close()
        gate.check_integrity()
    assert repr(gate) == "<Admission 0/100 tokens, 0 in-flight, 0 queued>"


async def test_a_beginning_is_held_until_the_last_that_reads_it_has_ended(clock: Clock) -> None:
    gate = admission(clock)
    gate.shares_beginnings = True
    first, second = [await gate.acquire(ONE, 70, FAR, parts) for parts in (BEGINNING, BEGINNING[:1])]
    assert gate.in_flight_tokens == 100
    first.close()
    assert gate.in_flight_tokens == 70
    gate.check_integrity()
    second.close()
    assert gate.in_flight_tokens == 0


async def test_without_a_prefix_cache_everybody_counts_in_full(clock: Clock) -> None:
    gate = admission(clock)
    await gate.acquire(ONE, 70, FAR, BEGINNING)
    tasks = [asyncio.create_task(gate.acquire(ONE, 70, FAR, BEGINNING))]
    assert await granted(tasks) == 0
    assert gate.in_flight_tokens == 70
