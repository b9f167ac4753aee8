"""The arithmetic of admission."""

import random

import pytest

from gateway.limits import Allowance, DrainRate, Residence, TokenEstimator, request_cost
from gateway.protocol import Kind, PromptSize, parse
from gateway.settings import Limits, Policy


def test_token_ids_need_no_estimate() -> None:
    assert TokenEstimator().estimate(PromptSize(ids=17)) == 17


def test_every_prompt_costs_at_least_a_token() -> None:
    assert TokenEstimator().estimate(PromptSize(prompts=3)) == 3


@pytest.mark.parametrize("seed", range(5))
def test_the_estimator_learns_two_scripts_at_once_within_a_quarter(seed: int) -> None:
    """Whatever a tokenizer makes of characters and bytes, a few dozen answers teach it."""
    dice = random.Random(seed)
    truth = (dice.uniform(5, 40), dice.uniform(0.15, 0.5), dice.uniform(0.1, 0.9))

    def sample() -> tuple[PromptSize, int]:
        chars = int(dice.lognormvariate(6, 1))
        size = PromptSize(chars=chars, extra_bytes=chars * 2 if dice.random() < 0.5 else 0)
        tokens = truth[0] + truth[1] * size.chars + truth[2] * size.extra_bytes
        return size, max(1, round(tokens * dice.uniform(0.9, 1.1)))

    estimator = TokenEstimator()
    for _ in range(60):
        estimator.observe(*sample())
    for _ in range(200):
        size, tokens = sample()
        assert estimator.estimate(size) == pytest.approx(tokens, rel=0.25, abs=2)


def test_one_script_for_a_week_does_not_ruin_what_was_learned_of_the_other() -> None:
    estimator = TokenEstimator()
    chinese, english = PromptSize(chars=300, extra_bytes=600), PromptSize(chars=900)
    for _ in range(40):
        estimator.observe(chinese, 320)
        estimator.observe(english, 215)
    for _ in range(100_000):
        estimator.observe(english, 215)
    assert estimator.estimate(chinese) == pytest.approx(320, rel=0.25)
    assert estimator.estimate(english) == pytest.approx(215, rel=0.05)


def test_nonsense_usage_does_not_make_prices_negative() -> None:
    estimator = TokenEstimator()
    for tokens in (1, 10**9, 1, 10**9):
        estimator.observe(PromptSize(chars=1000, extra_bytes=10), tokens)
        estimator.observe(PromptSize(chars=10, extra_bytes=1000), 1)
    assert all(weight >= 0 for weight in estimator.weights)


def test_one_strange_answer_moves_the_estimate_by_a_little_at_most() -> None:
    estimator = TokenEstimator()
    honest = PromptSize(chars=4000)
    for _ in range(100):
        estimator.observe(honest, 1000)
    for strange in (PromptSize(chars=640_000), PromptSize(chars=90_000)):
        for _ in range(10):
            estimator.observe(strange, 8000)
    assert estimator.estimate(honest) == pytest.approx(1000, rel=0.25)


def test_no_answer_is_billed_for_more_than_the_model_can_write() -> None:
    body = b'{"model":"m","prompt":[1,2,3],"max_tokens":10000000,"n":2}'
    envelope = parse(Kind.COMPLETIONS, body, Limits(), Policy())
    assert request_cost(envelope, TokenEstimator(), 256, 8192) == 3 + 2 * 8192


@pytest.mark.parametrize(
    ("kind", "body", "tokens"),
    [
        (Kind.COMPLETIONS, b'{"model":"m","prompt":[1],"max_tokens":8000,"max_completion_tokens":1}', 8001),
        (Kind.MESSAGES, b'{"model":"m","messages":[{}],"max_tokens":8000,"max_completion_tokens":1}', 8001),
        (Kind.RESPONSES, b'{"model":"m","input":[],"max_output_tokens":8000,"max_tokens":1}', 8001),
        (Kind.CHAT, b'{"model":"m","messages":[{}],"max_completion_tokens":8000,"max_tokens":1}', 8001),
    ],
)
def test_only_the_field_that_the_engine_reads_counts(kind: Kind, body: bytes, tokens: int) -> None:
    assert request_cost(parse(kind, body, Limits(), Policy()), TokenEstimator(), 256) == tokens


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"model":"m","prompt":[1,2,3],"max_tokens":5}', 3 + 5),
        (b'{"model":"m","prompt":[1,2,3]}', 3 + 16),  # the engine's default for completions
        (b'{"model":"m","prompt":[1,2,3],"max_tokens":5,"n":4}', 3 + 4 * 5),
        (b'{"model":"m","prompt":[[1,2,3],[4]],"max_tokens":5,"n":2}', 4 + 2 * 2 * 5),
        (b'{"model":"m","prompt":[1,2,3],"max_tokens":null}', 3 + 256),
    ],
)
def test_a_request_costs_its_prompts_and_every_choices_full_answer(body: bytes, tokens: int) -> None:
    envelope = parse(Kind.COMPLETIONS, body, Limits(), Policy())
    assert request_cost(envelope, TokenEstimator(), 256) == tokens


def test_the_drain_rate_is_tokens_over_saturated_seconds() -> None:
    rate = DrainRate()
    assert rate.tokens_per_s is None
    for _ in range(50):
        rate.observe(100, 0.1)
    assert rate.tokens_per_s == pytest.approx(1000)


def test_the_drain_rate_follows_a_change_within_its_time_constant() -> None:
    rate = DrainRate(time_constant_s=10)
    for _ in range(300):
        rate.observe(100, 0.1)
    for _ in range(300):
        rate.observe(10, 0.1)
    assert rate.tokens_per_s == pytest.approx(100, rel=0.5)


def test_releases_in_one_instant_all_count() -> None:
    rate = DrainRate()
    for _ in range(10):
        rate.observe(100, 0.0)
    rate.observe(100, 1.0)
    assert rate.tokens_per_s == pytest.approx(1100, rel=0.1)


def test_residence_is_a_moving_mean() -> None:
    residence = Residence()
    assert residence.mean_s is None
    for _ in range(200):
        residence.observe(2.0)
    assert residence.mean_s == pytest.approx(2.0)


def test_an_allowance_lets_a_minutes_worth_through_at_once_and_then_its_rate() -> None:
    allowance = Allowance.full(60, 0.0)
    assert all(allowance.take(1, 0.0) == 0.0 for _ in range(60))
    assert allowance.take(1, 0.0) == pytest.approx(1.0)
    assert allowance.take(1, 1.0) == 0.0


def test_what_exceeds_a_minutes_worth_waits_for_a_full_bucket_and_then_runs_a_debt() -> None:
    allowance = Allowance.full(60, 0.0)
    assert allowance.take(90, 0.0) == 0.0
    assert allowance.take(1, 0.0) == pytest.approx(31.0)
