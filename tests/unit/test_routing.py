"""Choosing a replica."""

import os
import timeit
from collections import Counter
from typing import Any

import pytest

from gateway.routing import LOAD_BOUND, SPARE, Candidate, affinity, choose, rank


def idle(count: int) -> list[Candidate]:
    return [Candidate(f"http://engine-{i}:8000", 0) for i in range(count)]


def test_nobody_to_choose_from_is_none() -> None:
    assert choose([]) is None
    assert choose([], b"key") is None


def test_without_a_key_the_least_loaded_goes_first_in_proportion_to_its_capacity() -> None:
    assert choose([Candidate("a", 3), Candidate("b", 1), Candidate("c", 2)]) == 1
    assert choose([Candidate("small", 2, weight=1), Candidate("large", 4, weight=4)]) == 1


def test_a_key_keeps_its_replica() -> None:
    keys = [os.urandom(16) for _ in range(200)]
    candidates = idle(5)
    assert [choose(candidates, key) for key in keys] == [choose(candidates, key) for key in keys]


def test_keys_spread_evenly() -> None:
    shares = Counter(choose(idle(4), os.urandom(16)) for _ in range(4000))
    assert all(850 < share < 1150 for share in shares.values()), shares


def test_a_replica_that_leaves_moves_only_its_own_keys() -> None:
    keys = [os.urandom(16) for _ in range(500)]
    before = idle(5)
    after = before[:4]
    for key in keys:
        chosen = choose(before, key)
        if chosen != 4:
            assert choose(after, key) == chosen


def test_a_replica_far_above_the_mean_is_passed_over_in_the_keys_own_order() -> None:
    key = b"conversation"
    candidates = idle(3)
    order = sorted(range(3), key=lambda i: rank(key, candidates[i].url), reverse=True)
    loaded = [Candidate(c.url, 30 if i == order[0] else 10) for i, c in enumerate(candidates)]
    assert choose(loaded, key) == order[1]


def test_a_few_requests_are_no_load_that_a_conversation_would_leave_its_cache_for() -> None:
    """The mean is next to nothing here, and a single request would be above it."""
    key = b"conversation"
    candidates = idle(3)
    favourite = max(range(3), key=lambda i: rank(key, candidates[i].url))
    for in_flight, stays in ((1, True), (SPARE - 1, True), (SPARE, False)):
        loaded = [Candidate(c.url, in_flight if i == favourite else 0) for i, c in enumerate(candidates)]
        assert (choose(loaded, key) == favourite) is stays, in_flight


def test_affinity_holds_while_the_load_is_within_its_bound() -> None:
    key = b"conversation"
    candidates = idle(3)
    favourite = max(range(3), key=lambda i: rank(key, candidates[i].url))
    loaded = [Candidate(c.url, 11 if i == favourite else 10) for i, c in enumerate(candidates)]
    assert LOAD_BOUND * 32 / 3 > 11
    assert choose(loaded, key) == favourite


def test_a_decision_among_64_replicas_takes_less_than_50_microseconds() -> None:
    """`make bench-cpu` measures all of it, circuits and the prompt's key included."""
    candidates = [Candidate(f"http://engine-{i}:8000", i % 7) for i in range(64)]
    best = min(timeit.repeat(lambda: choose(candidates, b"some conversation"), number=100, repeat=20)) / 100
    assert best < 50e-6, best


def test_where_all_are_at_the_bound_the_keys_order_decides() -> None:
    """The bound lies above the mean, so only weights that rounding makes too small bring this about."""
    candidates = [Candidate(c.url, 50, weight=1e-320) for c in idle(3)]
    assert choose(candidates, b"key") == max(range(3), key=lambda i: rank(b"key", candidates[i].url))


def turns(system: str | None = None) -> list[dict[str, Any]]:
    """A conversation as a client sends it, turn by turn."""
    messages = [{"role": "system", "content": system}] if system else []
    bodies = []
    for number in range(4):
        messages = [*messages, {"role": "user", "content": f"question {number}"}]
        bodies.append({"messages": messages})
        messages = [*messages, {"role": "assistant", "content": f"answer {number}"}]
    return bodies


@pytest.mark.parametrize("system", [None, "Be brief.", "Be brief. " * 200])
def test_every_turn_of_a_conversation_prefers_the_same_replica(system: str | None) -> None:
    assert len({affinity(body) for body in turns(system)}) == 1


@pytest.mark.parametrize("field", ["system", "instructions"])
def test_conversations_with_one_short_system_prompt_do_not_all_prefer_the_same_replica(field: str) -> None:
    def asks(text: str) -> dict[str, Any]:
        return {field: "Be brief.", "messages": [{"role": "user", "content": text}]}

    assert affinity(asks("one")) != affinity(asks("other"))


def test_requests_with_one_long_system_prompt_share_its_replica() -> None:
    def asks(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "system", "content": "x" * 2000}, {"role": "user", "content": text}]}

    assert affinity(asks("one")) == affinity(asks("other"))


def test_a_text_that_grows_at_its_end_keeps_its_replica() -> None:
    text = "a story that goes on " * 20
    assert affinity({"prompt": text}) == affinity({"prompt": text + "and on"})
    assert affinity({"prompt": "other " + text}) != affinity({"prompt": text})


@pytest.mark.parametrize(
    "body",
    [{}, {"messages": []}, {"messages": None}, {"prompt": ""}, {"input": []}],
)
def test_what_has_no_text_prefers_none(body: dict[str, Any]) -> None:
    assert affinity(body) == b""


@pytest.mark.parametrize(
    "body",
    [{"messages": ["a"]}, {"messages": "a"}, {"messages": [{"role": 5}, 6]}, {"prompt": [1, 2]}, {"input": {"a": 1}}],
)
def test_odd_bodies_have_some_key(body: dict[str, Any]) -> None:
    assert affinity(body)
