"""A key's own limits: the clock is the test's."""

import contextlib

import pytest

from gateway.accounts import Accounts
from gateway.errors import OverloadedError, UpstreamFailedError
from gateway.keys import Tenant
from gateway.metrics import Metrics


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


LIMITED = Tenant("limited", requests_per_minute=2, tokens_per_minute=300, concurrent=1)


def charged(keys: Accounts, tenant: Tenant, tokens: int) -> None:
    with keys.charge(tenant, tokens):
        pass


def test_a_key_is_held_to_its_own_limits(clock: Clock) -> None:
    keys = Accounts(Metrics(), clock)
    with keys.charge(LIMITED, 100):
        with pytest.raises(OverloadedError, match="at once") as refused:
            charged(keys, LIMITED, 100)
        assert refused.value.cause == "key_concurrency"
    charged(keys, LIMITED, 100)
    with pytest.raises(OverloadedError, match="requests a minute") as refused:
        charged(keys, LIMITED, 100)
    assert refused.value.retry_after_s == pytest.approx(30)
    clock.now += 30
    with pytest.raises(OverloadedError, match="tokens a minute") as refused:
        charged(keys, LIMITED, 300)
    assert refused.value.cause == "key_tokens"
    charged(keys, LIMITED, 100)  # the refusal above took no request from the allowance
    keys.check_integrity()


def test_a_limit_of_one_is_said_in_the_singular(clock: Clock) -> None:
    keys = Accounts(Metrics(), clock)
    single = Tenant("single", concurrent=1)
    with keys.charge(single, 1), pytest.raises(OverloadedError, match="may have 1 request at once"):
        charged(keys, single, 1)


def test_a_key_pays_for_the_tokens_it_used_not_for_the_estimate(clock: Clock) -> None:
    keys = Accounts(Metrics(), clock)
    frugal = Tenant("frugal", tokens_per_minute=1000)
    for _ in range(5):  # by the estimates, the second would be refused
        with keys.charge(frugal, 600) as charge:
            charge.used_tokens = 100
    with pytest.raises(OverloadedError, match="tokens a minute"):
        charged(keys, frugal, 600)


def test_a_refused_request_costs_its_key_nothing(clock: Clock) -> None:
    keys = Accounts(Metrics(), clock)
    limited = Tenant("limited", requests_per_minute=1, tokens_per_minute=100)
    with pytest.raises(OverloadedError, match="queue is full"), keys.charge(limited, 100):
        raise OverloadedError("the queue is full", cause="queue_full", retry_after_s=1)
    charged(keys, limited, 100)


def test_an_answer_that_did_not_come_costs_a_request_and_no_tokens(clock: Clock) -> None:
    keys = Accounts(Metrics(), clock)
    limited = Tenant("limited", requests_per_minute=2, tokens_per_minute=100)
    for _ in range(2):
        with pytest.raises(UpstreamFailedError), keys.charge(limited, 100):
            raise UpstreamFailedError("broken")
    with pytest.raises(OverloadedError, match="requests a minute"):
        charged(keys, limited, 1)


def test_keys_of_one_name_with_different_limits_do_not_fill_each_others_allowance_anew(clock: Clock) -> None:
    """As while one replaces the other, or the file with the limits is changed."""
    keys = Accounts(Metrics(), clock)
    old = Tenant("app", requests_per_minute=2, tokens_per_minute=200)
    new, free = Tenant("app", requests_per_minute=4, tokens_per_minute=400), Tenant("app")
    charged(keys, old, 100)
    for tenant in (new, free, new, new):
        charged(keys, tenant, 100)
    for tenant in (old, new):
        with pytest.raises(OverloadedError, match="requests a minute"):
            charged(keys, tenant, 1)
    clock.now += 15  # as much as a quarter of the larger limit
    charged(keys, new, 100)
    with pytest.raises(OverloadedError, match="requests a minute") as refused:
        charged(keys, old, 100)
    assert refused.value.retry_after_s == pytest.approx(90)  # two went out beyond its limit, and one is asked for
    keys.check_integrity()


def test_a_limit_that_comes_while_requests_are_out_counts_only_later_ones(clock: Clock) -> None:
    keys = Accounts(Metrics(), clock)
    free, limited = Tenant("app"), Tenant("app", concurrent=1)
    with contextlib.ExitStack() as before:
        for _ in range(3):
            before.enter_context(keys.charge(free, 10))
        with keys.charge(limited, 10):
            before.close()
            with pytest.raises(OverloadedError):
                charged(keys, limited, 10)
    charged(keys, limited, 10)
    keys.check_integrity()
