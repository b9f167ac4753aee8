"""What counts as proof: exact predictions, honest doubt, and contradictions."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.checks import Check
from scripts.checks.proof import judge
from scripts.checks.proof.judge import Held, Pair, Sent
from scripts.checks.proof.log import parse_log
from scripts.checks.proof.scrape import Scrape, parse_scrape
from scripts.checks.proof.traffic import long_lengths, prefix_length
from scripts.planner.numbers import MIB

ENGINES = Path(__file__).parents[1] / "fixtures" / "engines"


def scrape(name: str) -> Scrape:
    return parse_scrape((ENGINES / f"{name}.metrics").read_text(encoding="utf-8"))


def pair(
    tokens: int,
    queries: float,
    hits: float,
    cold_hits: float = 0,
    ttft: tuple[float, float] = (0.5, 0.1),
    cached: int | None = None,
) -> Pair:
    return Pair(tokens, Sent(queries, cold_hits, None, ttft[0]), Sent(queries, hits, None, ttft[1], cached))


# -- prefix cache -----------------------------------------------------------------------------------------------------


def test_a_release_that_counts_tokens_is_judged_in_tokens() -> None:
    check = judge.judge_prefix([pair(528, 528, 512)] * 3, scrape("recorded-0.32.0-cpu"))
    assert check.status == "ok"
    assert "+512 tokens = 16 blocks of 32" in check.found


def test_a_release_that_counts_blocks_is_judged_in_blocks() -> None:
    check = judge.judge_prefix([pair(520, 32, 32)] * 3, scrape("derived-0.8.5"))
    assert check.status == "ok"
    assert "+32 blocks = 32 blocks of 16" in check.found


@pytest.mark.parametrize("hits", [480, 496, 528, 0])
def test_any_other_number_of_hits_contradicts_the_prediction(hits: int) -> None:
    check = judge.judge_prefix([pair(528, 528, 512), pair(528, 528, hits)], scrape("recorded-0.32.0-cpu"))
    assert check.status == "fail"
    assert f"{hits} of 512 predicted" in check.found


def test_a_hit_of_a_fresh_prompt_is_a_contradiction() -> None:
    check = judge.judge_prefix([pair(528, 528, 512, cold_hits=32)], scrape("recorded-0.32.0-cpu"))
    assert (check.status, "fresh prompt hit 32" in check.found) == ("fail", True)


def test_usage_that_disagrees_with_the_counter_is_a_contradiction() -> None:
    check = judge.judge_prefix([pair(528, 528, 512, cached=256)], scrape("recorded-0.32.0-cpu"))
    assert (check.status, "256 cached tokens" in check.found) == ("fail", True)


def test_other_traffic_is_noticed_and_nothing_is_concluded() -> None:
    check = judge.judge_prefix([pair(528, 528 + 77, 512 + 64)], scrape("recorded-0.32.0-cpu"))
    assert check.status == "warn"
    assert "other requests" in check.found


def test_prefix_caching_that_is_off_fails_by_its_label_and_by_v0s_sentinel() -> None:
    off = scrape("derived-0.6.3-prefix-off")
    for found in (off, replace(off, prefix_caching=None), replace(off, hit_rate=None)):
        check = judge.judge_prefix([], found)
        assert (check.status, check.found) == ("fail", "prefix caching is off")


def test_v0s_ratio_must_rise_over_every_second_sending() -> None:
    first = scrape("derived-0.6.3")
    rising = [Pair(520, Sent(None, None, 0.2, 0.5), Sent(None, None, 0.25, 0.1))] * 3
    assert judge.judge_prefix(rising, first).status == "ok"
    flat = [*rising, Pair(520, Sent(None, None, 0.25, 0.5), Sent(None, None, 0.25, 0.1))]
    check = judge.judge_prefix(flat, first)
    assert (check.status, "3 of 4" in check.found) == ("warn", True)


def test_speculative_decoding_turns_a_missing_block_into_doubt() -> None:
    speculative = replace(scrape("recorded-0.32.0-cpu"), speculative=True)
    assert judge.judge_prefix([pair(528, 528, 480)], speculative).status == "warn"


@given(st.integers(2, 512), st.integers(64, 131072))
def test_a_prompt_for_the_pairs_fills_a_block_and_is_never_whole_blocks(block_size: int, max_model_len: int) -> None:
    length = prefix_length(block_size, max_model_len)
    if length is None:
        assert block_size + 1 >= max_model_len - 2
        return
    assert length <= max_model_len - 2
    assert length % block_size
    assert judge.predicted_hits(length, block_size) == length // block_size * block_size >= block_size


def test_the_long_request_is_2048_tokens_or_what_the_context_holds() -> None:
    assert sum(long_lengths(8192)) == 2048
    assert sum(long_lengths(2048)) == 2048
    assert sum(long_lengths(512)) == 512
    assert sum(long_lengths(None)) == 2048


# -- first token ------------------------------------------------------------------------------------------------------


def test_a_clear_gain_is_told_with_its_odds() -> None:
    pairs = [pair(528, 528, 512, ttft=(0.5 + i / 100, 0.1 + i / 100)) for i in range(5)]
    check = judge.judge_ttft(pairs)
    assert (check.status, "1 in 252" in check.found) == ("ok", True)


def test_a_gain_inside_the_noise_is_not_claimed() -> None:
    pairs = [pair(528, 528, 512, ttft=ttft) for ttft in ((0.50, 0.10), (0.51, 0.11), (0.52, 0.505), (0.5, 0.1))]
    check = judge.judge_ttft(pairs)
    assert (check.status, "noise is larger" in check.found) == ("skip", True)


def test_two_pairs_prove_no_gain() -> None:
    assert judge.judge_ttft([pair(528, 528, 512)] * 2).status == "skip"


# -- KV usage ---------------------------------------------------------------------------------------------------------


def held(peak: float, before: float = 0, after: float = 0, returned: float | None = 0.1) -> Held:
    return Held(1984, 64, before, peak, after, returned)


@pytest.mark.parametrize("peak", [62, 63, 64, 64.09])
def test_a_rise_by_the_requests_own_blocks_is_proof(peak: float) -> None:
    assert judge.judge_usage(held(peak), scrape("recorded-0.32.0-cpu"), 728).status == "ok"


@pytest.mark.parametrize("peak", [30, 60.9, 66, 728])
def test_any_other_rise_proves_nothing(peak: float) -> None:
    assert judge.judge_usage(held(peak), scrape("recorded-0.32.0-cpu"), 728).status == "warn"


def test_usage_that_was_not_seen_or_never_came_back_is_said() -> None:
    unseen = judge.judge_usage(held(0), scrape("recorded-0.32.0-cpu"), 728)
    assert "no scrape saw it rise" in unseen.found
    stuck = judge.judge_usage(held(64, after=64, returned=None), scrape("recorded-0.32.0-cpu"), 728)
    assert "did not come back" in stuck.found
    assert {unseen.status, stuck.status} == {"warn"}


def test_without_the_pools_size_no_blocks_are_predicted() -> None:
    check = judge.judge_usage(held(0.01), scrape("derived-0.8.5"), None)
    assert (check.status, "no blocks can be predicted" in check.found) == ("warn", True)


# -- blocks -----------------------------------------------------------------------------------------------------------


def log(name: str) -> judge.StartLog:
    return parse_log((ENGINES / f"{name}.log").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("page", "start", "blocks"),
    [
        ("derived-0.6.3", "derived-0.6.3", 7615),
        ("derived-0.8.5", "derived-0.8.5", 2508),
        ("derived-0.10.2", "derived-0.10.2", 15257),
        ("derived-0.26.0", "derived-0.26.0", 62516),
        ("recorded-0.32.0-cpu", "recorded-0.32.0-cpu", 728),
    ],
)
def test_page_and_log_of_one_engine_agree_on_its_blocks(page: str, start: str, blocks: int) -> None:
    assert judge.pool_blocks(scrape(page), log(start)) == blocks
    assert judge.judge_blocks(scrape(page), log(start)).status == "ok"


def test_the_log_of_another_engine_is_noticed() -> None:
    check = judge.judge_blocks(scrape("derived-0.26.0"), log("derived-0.10.2"))
    assert (check.status, "another engine's log?" in check.found) == ("warn", True)


def test_v1_of_0_8_without_its_log_has_no_pool_size() -> None:
    assert judge.pool_blocks(scrape("derived-0.8.5"), None) is None
    assert judge.judge_blocks(scrape("derived-0.8.5"), None).status == "warn"


# -- memory -----------------------------------------------------------------------------------------------------------


def test_growth_far_below_the_requests_kv_is_a_preallocated_pool() -> None:
    check = judge.judge_memory([round(0.1 * MIB)], 45 * MIB, 2048, "process 1")
    assert (check.status, "+0.1 MiB over 1 fresh request of 2048 tokens, 45.0 MiB" in check.found) == ("ok", True)


def test_an_allocator_that_warms_up_is_asked_again() -> None:
    assert judge.needs_second(21 * MIB, 45 * MIB)
    assert not judge.needs_second(MIB, 45 * MIB)
    assert judge.judge_memory([21 * MIB, 0], 45 * MIB, 2048, "process 1").status == "ok"


def test_growth_by_every_request_is_no_preallocated_pool() -> None:
    assert judge.judge_memory([45 * MIB, 44 * MIB], 45 * MIB, 2048, "process 1").status == "warn"


def test_without_the_kv_bytes_of_a_token_memory_is_not_judged() -> None:
    check = judge.judge_memory([45 * MIB], None, 2048, "process 1")
    assert (check.status, "nothing is judged" in check.found) == ("skip", True)


# -- verdict ----------------------------------------------------------------------------------------------------------


def checks(**changed: str) -> list[Check]:
    names = {"blocks": judge.BLOCKS, "prefix": judge.PREFIX, "usage": judge.USAGE, "ttft": "first token"}
    return [
        Check(name, changed.get(key, "ok"), "", f"found {key}")  # type: ignore[arg-type]
        for key, name in names.items()
    ]


def test_the_verdict_needs_all_three_proofs_and_no_contradiction() -> None:
    assert judge.verdict(checks())[0] == "PASS"
    assert judge.verdict(checks(ttft="skip"))[0] == "PASS"
    assert judge.verdict(checks(usage="warn")) == ("UNSURE", "KV usage: found usage")
    assert judge.verdict(checks(prefix="skip"))[0] == "UNSURE"
    assert judge.verdict(checks(prefix="fail", usage="warn")) == ("FAIL", "prefix cache: found prefix")
    assert judge.verdict([])[0] == "UNSURE"


def test_a_log_that_was_given_and_is_of_no_use_leaves_it_unsure() -> None:
    given = Check(judge.LOG, "warn", "", "engine.log is cut off")
    assert judge.verdict([*checks(), given]) == ("UNSURE", "start-up log: engine.log is cut off")
    assert judge.verdict([*checks(), Check(judge.LOG, "skip", "", "none was given")])[0] == "PASS"


def test_each_verdict_has_its_exit_code() -> None:
    assert judge.EXIT_CODES == {"PASS": 0, "FAIL": 1, "UNSURE": 3}
