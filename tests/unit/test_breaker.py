"""The circuit breaker: time and dice are the test's."""

import pytest

from gateway.breaker import WINDOW_S, Breaker, Circuit
from gateway.settings import Circuit as Limits

LIMITS = Limits(failures=3, share=0.5, calls=10, open_s=2, max_open_s=16)


def breaker(dice: float = 1.0) -> tuple[Breaker, list[str]]:
    causes: list[str] = []
    return Breaker(LIMITS, lambda: dice, causes.append), causes


def fail(circuit: Breaker, now: float, *requests: int) -> None:
    for request in requests:
        trial = circuit.begin()
        circuit.failed(now, request, trial)
        circuit.end(trial)


def work(circuit: Breaker, now: float, times: int = 1) -> None:
    for _ in range(times):
        trial = circuit.begin()
        circuit.works(now, trial)
        circuit.end(trial)


def test_so_many_failures_in_a_row_open_it_and_one_fewer_does_not() -> None:
    circuit, causes = breaker()
    fail(circuit, 0, 1, 2)
    assert circuit.state(0) is Circuit.CLOSED
    fail(circuit, 0, 3)
    assert circuit.state(0) is Circuit.OPEN
    assert not circuit.allows(0)
    assert causes == ["failures"]


def test_a_success_between_starts_the_row_again() -> None:
    circuit, _ = breaker()
    for _ in range(3):
        fail(circuit, 0, 1, 2)
        work(circuit, 0, 2)
    assert circuit.state(0) is Circuit.CLOSED


def test_one_request_repeated_for_ever_never_opens_it() -> None:
    circuit, causes = breaker()
    fail(circuit, 0, *[7] * 100)
    assert circuit.state(0) is Circuit.CLOSED
    assert causes == []
    fail(circuit, 0, 8)  # another one fails as well: that is the engine
    assert circuit.state(0) is Circuit.OPEN


def test_half_of_the_last_calls_open_it_though_no_row_is_long_enough() -> None:
    circuit, causes = breaker()
    for number in range(5):
        assert circuit.state(0) is Circuit.CLOSED, number
        work(circuit, 0)
        fail(circuit, 0, number)
    assert causes == ["share"]


def test_the_share_needs_its_number_of_calls_and_forgets_old_ones() -> None:
    circuit, _ = breaker()
    for number in range(4):
        work(circuit, 0)
        fail(circuit, 0, number)
    work(circuit, WINDOW_S + 1)
    fail(circuit, WINDOW_S + 1, 4)  # the ninth and tenth, but the others are of another time
    assert circuit.state(WINDOW_S + 1) is Circuit.CLOSED


def test_a_refused_connection_opens_it_at_once() -> None:
    circuit, causes = breaker()
    circuit.refused(0)
    assert circuit.state(0) is Circuit.OPEN
    assert causes == ["refused"]
    circuit.refused(1)
    assert causes == ["refused"], "it was open already"


def test_when_its_time_is_over_one_request_may_try_and_the_next_only_after_that() -> None:
    circuit, _ = breaker()
    circuit.refused(0)
    assert not circuit.allows(1.99)
    assert circuit.allows(2)
    assert circuit.state(2) is Circuit.HALF_OPEN
    assert circuit.begin() is True
    assert not circuit.allows(2)
    circuit.end(True)  # its client left: nothing is decided
    assert circuit.allows(2)
    assert circuit.begin() is True
    circuit.works(2, True)
    assert circuit.state(2) is Circuit.CLOSED
    assert circuit.allows(2)


def test_each_failed_trial_doubles_the_time_up_to_a_bound() -> None:
    circuit, causes = breaker()
    circuit.refused(0)
    now, waits = 0.0, []
    for number in range(6):
        waits.append(circuit.opens_for_s(now))
        now += waits[-1]
        assert circuit.allows(now)
        fail(circuit, now, number)
    assert waits == [2, 4, 8, 16, 16, 16]
    assert causes == ["refused", *["trial"] * 6]


@pytest.mark.parametrize(("dice", "wait_s"), [(0.0, 1.0), (0.5, 1.5), (1.0, 2.0)])
def test_the_time_is_drawn_from_its_upper_half(dice: float, wait_s: float) -> None:
    circuit, _ = breaker(dice)
    circuit.refused(0)
    assert circuit.opens_for_s(0) == wait_s


def test_a_good_while_makes_the_next_time_short_again_and_a_short_one_does_not() -> None:
    circuit, _ = breaker()
    circuit.refused(0)
    work(circuit, 2)
    circuit.refused(3)
    assert circuit.opens_for_s(3) == 4
    work(circuit, 7)
    circuit.refused(7 + LIMITS.max_open_s + 1)
    assert circuit.opens_for_s(7 + LIMITS.max_open_s + 1) == 2


def test_calls_from_before_it_opened_change_nothing_any_more() -> None:
    circuit, causes = breaker()
    early = [circuit.begin() for _ in range(4)]
    circuit.refused(0)
    circuit.works(1, early[0])
    circuit.failed(3, 1, early[1])
    assert circuit.state(1) is Circuit.OPEN
    assert causes == ["refused"]


def test_a_call_sent_although_it_is_open_closes_it_by_working_and_does_not_prolong_it_by_failing() -> None:
    """Where all replicas of a model are open, requests go there all the same."""
    circuit, causes = breaker()
    circuit.refused(0)
    fail(circuit, 1, 1, 2, 3)
    assert circuit.opens_for_s(1) == 1
    assert causes == ["refused"]
    work(circuit, 1.5)
    assert circuit.state(1.5) is Circuit.CLOSED
