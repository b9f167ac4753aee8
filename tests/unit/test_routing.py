"""Choosing a replica."""

import os
import timeit
from collections import Counter

from gateway.routing import LOAD_BOUND, Candidate, choose, rank


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
    order = sorted(range(3), key=lambda i: rank(key, candidates[i].name), reverse=True)
    loaded = [Candidate(c.name, 30 if i == order[0] else 10) for i, c in enumerate(candidates)]
    assert choose(loaded, key) == order[1]


def test_affinity_holds_while_the_load_is_within_its_bound() -> None:
    key = b"conversation"
    candidates = idle(3)
    favourite = max(range(3), key=lambda i: rank(key, candidates[i].name))
    loaded = [Candidate(c.name, 11 if i == favourite else 10) for i, c in enumerate(candidates)]
    assert LOAD_BOUND * 32 / 3 > 11
    assert choose(loaded, key) == favourite


def test_a_decision_among_64_replicas_stays_far_below_a_millisecond() -> None:
    candidates = [Candidate(f"http://engine-{i}:8000", i % 7) for i in range(64)]
    best = min(timeit.repeat(lambda: choose(candidates, b"some conversation"), number=100, repeat=5)) / 100
    assert best < 1e-3, best
