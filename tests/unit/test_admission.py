"""Admission decided without a wire: the clock is ours, releases are explicit, nothing sleeps."""

import asyncio
import random

import pytest

from gateway.admission import Admission, Lease
from gateway.errors import OverloadedError
from gateway.keys import Tenant
from gateway.metrics import Metrics
from gateway.settings import Admission as AdmissionSettings

ONE, TWO = Tenant("one"), Tenant("two")
FAR = 1e9  # a deadline nobody reaches


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def admission(clock: Clock, **settings: float) -> Admission:
    values = {"capacity_tokens": 100, "max_queue_tokens": 10_000, "max_wait_s": 3600, **settings}
    return Admission(AdmissionSettings(**values), Metrics(), clock)


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def waiting(admission: Admission, tenant: Tenant, tokens: int, count: int = 1) -> list[asyncio.Task[Lease]]:
    tasks = [asyncio.create_task(admission.acquire(tenant, tokens, FAR)) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def granted(tasks: list[asyncio.Task[Lease]]) -> int:
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return sum(task.done() and task.exception() is None for task in tasks)


async def test_what_fits_goes_at_once(clock: Clock) -> None:
    gate = admission(clock)
    with await gate.acquire(ONE, 60, FAR), await gate.acquire(TWO, 40, FAR):
        assert repr(gate) == "<Admission 100/100 tokens, 2 in-flight, 0 queued>"
        gate.check_integrity()
    assert repr(gate) == "<Admission 0/100 tokens, 0 in-flight, 0 queued>"


async def test_what_does_not_fit_waits_for_room_and_then_goes(clock: Clock) -> None:
    gate = admission(clock)
    lease = await gate.acquire(ONE, 60, FAR)
    tasks = await waiting(gate, TWO, 60)
    assert repr(gate) == "<Admission 60/100 tokens, 1 in-flight, 1 queued>"
    lease.close()
    assert await granted(tasks) == 1
    gate.check_integrity()


async def test_a_request_larger_than_everything_goes_alone_rather_than_never(clock: Clock) -> None:
    gate = admission(clock)
    lease = await gate.acquire(ONE, 1, FAR)
    tasks = await waiting(gate, ONE, 5000)
    assert await granted(tasks) == 0
    lease.close()
    assert await granted(tasks) == 1


async def test_a_large_request_stops_nobody_and_is_overtaken_by_its_own_size_at_most(clock: Clock) -> None:
    gate = admission(clock)
    lease = await gate.acquire(ONE, 50, FAR)
    large = await waiting(gate, TWO, 90)
    passed = 0
    for _ in range(12):
        small = await waiting(gate, ONE, 10)
        if not await granted(small):
            break
        passed += 1
        small[0].result().close()
    assert passed == 9
    assert not large[0].done()
    lease.close()
    assert await granted(large) == 1
    large[0].result().close()
    assert await granted(small) == 1
    gate.check_integrity()


async def test_nor_does_a_large_request_stop_smaller_ones_of_its_own_key(clock: Clock) -> None:
    gate = admission(clock)
    await gate.acquire(ONE, 50, FAR)
    large = await waiting(gate, ONE, 90)
    small = await waiting(gate, ONE, 10)
    assert await granted(small) == 1
    assert await granted(large) == 0


async def test_a_slow_pace_behind_a_large_request_is_no_reason_to_refuse_what_fits(clock: Clock) -> None:
    gate = admission(clock, capacity_tokens=10_000, max_queue_tokens=10**6, max_wait_s=5)
    await gate.acquire(ONE, 500, FAR)
    await waiting(gate, TWO, 16_000)
    for _ in range(5):  # small ones trickle past: by the tokens they give back, the pace is a crawl
        small = await waiting(gate, ONE, 10)
        clock.now += 1
        small[0].result().close()
    assert gate.drain_tokens_per_s == pytest.approx(10, rel=0.1)
    fits = await waiting(gate, Tenant("three"), 9000)
    assert await granted(fits) == 1


async def test_a_tiny_weight_costs_its_own_key_and_not_the_loop(clock: Clock) -> None:
    gate = admission(clock)
    lease = await gate.acquire(ONE, 100, FAR)
    tasks = await waiting(gate, Tenant("tiny", weight=1e-9), 90)
    lease.close()  # quanta one by one would take minutes here
    assert await granted(tasks) == 1


async def test_closing_a_lease_twice_gives_back_once(clock: Clock) -> None:
    gate = admission(clock)
    lease = await gate.acquire(ONE, 60, FAR)
    lease.close()
    lease.close()
    assert gate.in_flight_tokens == 0
    gate.check_integrity()


async def test_the_queue_is_bounded_in_tokens(clock: Clock) -> None:
    gate = admission(clock, max_queue_tokens=100)
    await gate.acquire(ONE, 100, FAR)
    tasks = await waiting(gate, ONE, 50, 2)
    with pytest.raises(OverloadedError) as refused:
        await gate.acquire(ONE, 1, FAR)
    assert refused.value.cause == "queue_full"
    assert refused.value.status == 429
    assert await granted(tasks) == 0
    gate.check_integrity()


async def test_a_full_queue_makes_room_for_the_tenant_that_fills_it_least(clock: Clock) -> None:
    gate = admission(clock, max_queue_tokens=100)
    await gate.acquire(ONE, 100, FAR)
    greedy = await waiting(gate, ONE, 20, 5)
    modest = await waiting(gate, TWO, 20)
    await asyncio.sleep(0)
    assert [task.done() for task in greedy] == [False] * 4 + [True], "the newest of the greedy one gives way"
    error = greedy[4].exception()
    assert isinstance(error, OverloadedError)
    assert error.cause == "pushed_out"
    assert not modest[0].done()
    gate.check_integrity()


async def test_who_leaves_in_the_step_in_which_it_would_be_pushed_out_harms_nobody(clock: Clock) -> None:
    gate = admission(clock, max_queue_tokens=100)
    lease = await gate.acquire(ONE, 100, FAR)
    greedy = await waiting(gate, ONE, 20, 5)
    modest = asyncio.create_task(gate.acquire(TWO, 20, FAR))  # it gets its turn before the other hears of its end
    greedy[4].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert greedy[4].cancelled() and not modest.done()
    gate.check_integrity()
    lease.close()
    assert await granted([*greedy[:4], modest]) == 5


async def test_tenants_share_by_tokens_however_many_requests_each_has(clock: Clock) -> None:
    gate = admission(clock, capacity_tokens=1000, max_queue_tokens=10**9)
    leases = [await gate.acquire(ONE, 1000, FAR)]
    greedy = await waiting(gate, ONE, 1000, 500)
    modest = await waiting(gate, TWO, 1000, 3)
    served = []
    for _ in range(8):
        leases.pop().close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        done = [task for task in greedy + modest if task.done() and task not in served]
        assert len(done) == 1
        served += done
        leases.append(done[0].result())
        gate.check_integrity()
    turns = ["modest" if task in modest else "greedy" for task in served]
    assert turns.count("modest") == 3, turns
    assert turns.index("modest") <= 1, turns  # it waits for one of the greedy one's requests at most
    for task in greedy:
        task.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)


async def test_a_weight_of_two_gets_twice_the_tokens(clock: Clock) -> None:
    gate = admission(clock, capacity_tokens=1000, max_queue_tokens=10**9)
    heavy = Tenant("heavy", weight=2)
    lease = await gate.acquire(ONE, 1000, FAR)
    tasks = {"heavy": await waiting(gate, heavy, 1000, 40), "one": await waiting(gate, ONE, 1000, 40)}
    for _ in range(30):
        lease.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        lease = next(t.result() for ts in tasks.values() for t in ts if t.done() and t.result().open)
    share = {name: sum(task.done() for task in ts) for name, ts in tasks.items()}
    assert share == {"heavy": 20, "one": 10}
    for task in [*tasks["heavy"], *tasks["one"]]:
        task.cancel()
    await asyncio.gather(*tasks["heavy"], *tasks["one"], return_exceptions=True)


async def test_a_refusal_in_a_cold_burst_tells_no_shorter_wait_than_what_is_in_flight_has_already_taken(
    clock: Clock,
) -> None:
    gate = admission(clock, max_queue_tokens=400)
    lease = await gate.acquire(ONE, 100, FAR)
    tasks = await waiting(gate, ONE, 100, 4)
    assert gate.drain_tokens_per_s is None
    for age_s in (0, 5, 30):
        clock.now = lease.granted_s + age_s
        with pytest.raises(OverloadedError) as refused:
            await gate.acquire(ONE, 200, FAR)
        assert refused.value.cause == "queue_full"
        # 200 tokens too many, and 100 tokens have been in flight for that long without an end.
        assert refused.value.retry_after_s == (2 * age_s or 1.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    lease.close()


async def test_a_wait_that_would_pass_the_deadline_is_refused_at_once(clock: Clock) -> None:
    gate = admission(clock)
    rate = 100.0  # tokens a second, shown to the gate under saturation
    lease = await gate.acquire(ONE, 100, FAR)
    tasks = await waiting(gate, ONE, 100, 20)
    for _ in range(10):
        clock.now += 100 / rate
        lease.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        lease = next(task.result() for task in tasks if task.done() and task.result().open)
    assert gate.drain_tokens_per_s == pytest.approx(rate, rel=0.01)
    # 10 of 100 tokens wait and one is in flight: the next would be admitted after 11 s.
    with pytest.raises(OverloadedError) as refused:
        await gate.acquire(ONE, 100, clock.now + 5)
    assert refused.value.cause == "predicted_wait"
    assert refused.value.retry_after_s == pytest.approx(11 - 5, rel=0.1)
    accepted = await waiting(gate, ONE, 100)
    assert not accepted[0].done()
    for task in [*tasks, *accepted]:
        task.cancel()
    await asyncio.gather(*tasks, *accepted, return_exceptions=True)


async def test_a_deadline_that_passes_in_the_queue_is_a_refusal_and_leaves_nothing(clock: Clock) -> None:
    gate = admission(clock)
    await gate.acquire(ONE, 100, FAR)
    with pytest.raises(OverloadedError) as refused:
        await gate.acquire(ONE, 50, clock.now + 0.01)
    assert refused.value.cause == "waited_too_long"
    assert gate.queued == gate.queued_tokens == 0
    gate.check_integrity()


async def test_a_client_that_leaves_the_queue_frees_its_place(clock: Clock) -> None:
    gate = admission(clock)
    lease = await gate.acquire(ONE, 100, FAR)
    first, second = await waiting(gate, ONE, 100, 2)
    first.cancel()
    await asyncio.sleep(0)
    assert gate.queued == 1
    lease.close()
    assert await granted([second]) == 1
    gate.check_integrity()


async def test_a_grant_that_meets_a_leaving_client_is_given_back(clock: Clock) -> None:
    gate = admission(clock)
    lease = await gate.acquire(ONE, 100, FAR)
    first, second = await waiting(gate, ONE, 100, 2)
    lease.close()  # grants the first …
    first.cancel()  # … in the very step in which its client leaves
    await asyncio.gather(first, return_exceptions=True)
    assert await granted([second]) == 1
    gate.check_integrity()


async def test_a_client_that_left_before_the_grant_is_passed_over(clock: Clock) -> None:
    gate = admission(clock)
    lease = await gate.acquire(ONE, 100, FAR)
    first, second = await waiting(gate, ONE, 100, 2)
    first.cancel()
    lease.close()  # before the first could leave the queue
    assert await granted([second]) == 1
    gate.check_integrity()


async def test_more_capacity_lets_the_waiting_go(clock: Clock) -> None:
    gate = Admission(AdmissionSettings(), Metrics(), clock)
    gate.set_capacity(100)
    await gate.acquire(ONE, 100, FAR)
    tasks = await waiting(gate, ONE, 100)
    gate.set_capacity(200)
    assert await granted(tasks) == 1


async def test_max_in_flight_holds_whatever_the_sizes(clock: Clock) -> None:
    gate = admission(clock, max_in_flight=2)
    leases = [await gate.acquire(ONE, 1, FAR) for _ in range(2)]
    tasks = await waiting(gate, ONE, 1)
    assert await granted(tasks) == 0
    leases[0].close()
    assert await granted(tasks) == 1


async def test_while_no_engine_is_ready_max_wait_does_not_run(clock: Clock) -> None:
    gate = admission(clock, max_wait_s=0.02)
    lease = await gate.acquire(ONE, 100, FAR)
    before = await waiting(gate, ONE, 100)
    gate.pause(True)
    during = await waiting(gate, ONE, 100)
    control = admission(clock, max_wait_s=0.02)
    await control.acquire(ONE, 100, FAR)
    with pytest.raises(OverloadedError, match="in the queue"):
        await control.acquire(ONE, 100, FAR)  # max_wait_s has passed where it runs
    assert gate.queued == 2
    gate.pause(False)  # from now on it runs again
    lease.close()
    assert await granted(before) == 1
    with pytest.raises(OverloadedError, match="in the queue"):
        await during[0]
    gate.check_integrity()


async def test_a_pause_is_no_saturation(clock: Clock) -> None:
    gate = admission(clock)
    lease = await gate.acquire(ONE, 100, FAR)
    tasks = await waiting(gate, ONE, 100, 3)
    for pause_s in (0, 1000, 0):
        gate.pause(True)
        clock.now += pause_s
        gate.pause(False)
        clock.now += 1
        lease.close()
        await granted(tasks)
        lease = next(task.result() for task in tasks if task.done() and task.result().open)
    assert gate.drain_tokens_per_s == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize("seed", range(25))
async def test_counts_agree_after_any_sequence_of_arrivals_ends_and_departures(seed: int) -> None:
    dice = random.Random(seed)
    clock = Clock()
    gate = admission(clock, max_queue_tokens=500, max_in_flight=dice.choice([3, 1000]))
    tasks: list[asyncio.Task[Lease]] = []
    for _ in range(300):
        clock.now += dice.random()
        action = dice.random()
        if action < 0.5:
            tenant = Tenant(f"t{dice.randrange(4)}", weight=dice.choice([0.5, 1, 3]))
            tasks.append(asyncio.create_task(gate.acquire(tenant, dice.randrange(1, 150), FAR)))
        elif tasks and action < 0.8:
            task = dice.choice(tasks)
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().close()
        elif tasks:
            dice.choice(tasks).cancel()
        if dice.random() < 0.7:
            await asyncio.sleep(0)
        gate.check_integrity()
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Lease):
            outcome.close()
    gate.check_integrity()
    assert gate.in_flight == gate.queued == gate.queued_tokens == gate.in_flight_tokens == 0
