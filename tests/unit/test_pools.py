"""Which engines and models share a queue, and what becomes of it when that changes."""

import asyncio

import pytest

from gateway.breaker import Breaker
from gateway.keys import Tenant
from gateway.metrics import Metrics
from gateway.pools import Admissions, pools
from gateway.progress import ForwardProgress
from gateway.replica import Replica, State
from gateway.settings import Admission, Circuit
from gateway.workers import Worker

TENANT = Tenant("one")
FAR = 1e9


def replica(url: str, *models: str, capacity: int | None = 100, state: State = State.READY) -> Replica:
    made = Replica(url, ForwardProgress(60), Breaker(Circuit(), lambda: 0.5))
    made.models, made.capacity_tokens, made.state = dict.fromkeys(models, 8192), capacity, state
    return made


def admissions(**settings: float) -> tuple[Admissions, Metrics]:
    metrics = Metrics()
    return Admissions(Admission(**settings), metrics, lambda: 0.0), metrics


def test_of_what_the_engines_hold_each_worker_admits_its_share() -> None:
    gates = [Admissions(Admission(), Metrics(), lambda: 0.0, Worker(number, 3)) for number in (1, 2, 3)]
    for gate in gates:
        gate.arrange([replica("1", "a", capacity=101), replica("2", "b", capacity=1)])
    assert [gate.of("a").capacity_tokens for gate in gates] == [34, 34, 33]
    assert [gate.of("b").capacity_tokens for gate in gates] == [1, 1, 1], "0 would be no limit at all"


def shape(*replicas: Replica) -> list[tuple[set[str], list[str]]]:
    return [(set(pool.models), sorted(member.url for member in pool.replicas)) for pool in pools(replicas)]


def test_a_model_and_its_replicas_are_a_pool() -> None:
    assert shape(replica("1", "a"), replica("2", "b"), replica("3", "a")) == [({"b"}, ["2"]), ({"a"}, ["1", "3"])]


def test_names_of_one_engine_are_one_pool_and_so_is_what_hangs_together_through_it() -> None:
    assert shape(replica("1", "a", "a-lora")) == [({"a", "a-lora"}, ["1"])]
    chain = [replica("1", "a"), replica("2", "b"), replica("3", "c"), replica("4", "a", "b")]
    assert shape(*chain) == [({"c"}, ["3"]), ({"a", "b"}, ["1", "2", "4"])]


def test_an_engine_that_told_no_models_is_in_none() -> None:
    assert shape(replica("1")) == []


async def test_a_full_model_stops_no_other() -> None:
    gates, metrics = admissions()
    gates.arrange([replica("1", "a"), replica("2", "b", capacity=50)])
    lease = await gates.of("a").acquire(TENANT, 100, FAR)
    waiting = asyncio.create_task(gates.of("a").acquire(TENANT, 10, FAR))
    await asyncio.sleep(0)
    with await gates.of("b").acquire(TENANT, 50, FAR):
        assert (gates.in_flight, gates.queued, gates.in_flight_tokens, gates.queued_tokens) == (2, 1, 150, 10)
        assert gates.capacity_tokens == 150
        gates.check_integrity()
        page = metrics.page().decode()
        assert 'gateway_pool_in_flight_tokens{model="a"} 100.0' in page
        assert 'gateway_pool_queued_tokens{model="a"} 10.0' in page
        assert 'gateway_pool_capacity_tokens{model="b"} 50.0' in page
        assert "gateway_capacity_tokens 150.0" in page
    lease.close()
    (await waiting).close()


async def test_models_of_one_engine_share_its_capacity() -> None:
    gates, _ = admissions()
    gates.arrange([replica("1", "a", "a-lora")])
    assert gates.of("a") is gates.of("a-lora")
    assert gates.capacity_tokens == 100


def test_the_figure_of_a_pool_whose_engines_are_all_away_stays_and_it_is_paused() -> None:
    gates, _ = admissions()
    one, two = replica("1", "a"), replica("2", "b")
    gates.arrange([one, two])
    one.state = State.DOWN
    gates.arrange([one, two])
    assert gates.of("a").capacity_tokens == 100
    assert gates.of("a")._paused
    assert not gates.of("b")._paused


def test_a_replica_more_makes_the_pool_larger_and_keeps_its_queue() -> None:
    gates, _ = admissions()
    one = replica("1", "a")
    gates.arrange([one])
    queue = gates.of("a")
    gates.arrange([one, replica("2", "a", capacity=50)])
    assert gates.of("a") is queue
    assert queue.capacity_tokens == 150


def test_a_configured_capacity_is_each_pools() -> None:
    gates, _ = admissions(capacity_tokens=70)
    assert gates.capacity_tokens == 70
    gates.arrange([replica("1", "a"), replica("2", "b")])
    assert (gates.of("a").capacity_tokens, gates.of("b").capacity_tokens, gates.capacity_tokens) == (70, 70, 140)


async def test_pools_that_join_go_on_with_the_fuller_queue_and_nobody_is_forgotten() -> None:
    gates, metrics = admissions()
    one, two = replica("1", "a"), replica("2", "b")
    gates.arrange([one, two])
    few, many = await gates.of("a").acquire(TENANT, 10, FAR), await gates.of("b").acquire(TENANT, 100, FAR)
    more = asyncio.create_task(gates.of("b").acquire(TENANT, 20, FAR))
    fuller = gates.of("b")
    waiting = asyncio.create_task(gates.of("a").acquire(TENANT, 95, FAR))
    await asyncio.sleep(0)
    two.models = {"a": 1, "b": 1}
    gates.arrange([one, two])
    assert gates.of("a") is gates.of("b") is fuller
    assert (gates.in_flight, gates.queued) == (3, 1)  # the larger pool has room for one
    few.close()
    (await waiting).close()
    many.close()
    (await more).close()
    gates.arrange([one, two])
    assert gates._retired == []
    assert (gates.in_flight, gates.queued) == (0, 0)
    assert 'model="b"' not in metrics.page().decode()


async def test_whoever_waits_for_a_model_that_left_is_let_go_to_hear_so() -> None:
    gates, _ = admissions()
    one = replica("1", "a")
    gates.arrange([one])
    lease = await gates.of("a").acquire(TENANT, 100, FAR)
    one.state = State.DOWN
    gates.arrange([one])
    waiting = asyncio.create_task(gates.of("a").acquire(TENANT, 100, FAR))
    await asyncio.sleep(0)
    lease.close()
    gates.arrange([])
    (await asyncio.wait_for(waiting, 1)).close()
    gates.check_integrity()


@pytest.mark.parametrize("told", [None, 0])
async def test_a_pool_whose_engines_tell_no_capacity_is_limited_by_requests_alone(told: int | None) -> None:
    gates, _ = admissions(max_in_flight=2)
    gates.arrange([replica("1", "embedder", capacity=told)])
    for _ in range(2):
        await gates.of("embedder").acquire(TENANT, 10**9, FAR)
    waiting = asyncio.create_task(gates.of("embedder").acquire(TENANT, 1, FAR))
    await asyncio.sleep(0)
    assert gates.queued == 1
    waiting.cancel()
