"""The rules of advice: each speaks at its limit and not before, and none says what makes things worse."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.advice import advise
from gateway.advice_prefix import misses
from gateway.facts import EngineFacts, Facts, GatewayFacts
from gateway.findings import KINDS, Finding
from scripts import engine_args

BUSY = EngineFacts(
    "engine:8000",
    ready=True,
    running_mean=8,
    running_max=10,
    usage_mean=0.4,
    usage_max=0.5,
    prompt_tokens=50_000,
    generation_tokens=10_000,
    requests=100,
    queries=50_000,
    hits=45_000,
    api_cores=0.3,
    block_size=16,
    pool_tokens=120_000,
    cache_dtype="auto",
    utilization=0.9,
    prefix_caching=True,
)
SETTINGS = {"max_in_flight": 1024, "max_queue_tokens": 262144, "max_wait_s": 30, "stall_s": 60, "capacity_tokens": 0}
SERVING = GatewayFacts(
    requests={"app1": 80, "app2": 20},
    tokens={"app1": 30_000, "app2": 30_000},
    queue_waits=100,
    queue_wait_s=1,
    in_flight_max=10,
    in_flight_tokens_max=6_000,
    capacity_tokens=120_000,
    streams=50,
    settings=SETTINGS,
)
PRESSED = {"usage_max": 1.0, "usage_mean": 0.97, "waiting_mean": 6.0, "pressed_share": 0.9, "preemptions": 12}


def found(
    engine: dict[str, Any] | None = None, gateway: dict[str, Any] | None = None, seconds: float = 300
) -> list[Finding]:
    facts = Facts(seconds, replace(SERVING, **(gateway or {})), (replace(BUSY, **(engine or {})),))
    return advise(facts)


def kinds(*given: Any) -> list[str]:
    return [finding.kind for finding in found(*given)]


def only(kind: str, *given: Any) -> Finding:
    assert kinds(*given) == [kind]
    return found(*given)[0]


def test_a_stack_that_keeps_up_is_told_that_nothing_limits() -> None:
    assert "200 tokens a second" in only("no_limit").by_how_much


def test_a_stack_with_hardly_any_work_gets_no_advice_whatever_its_ratios() -> None:
    engine = {"running_mean": 0.1, "queries": 150, "hits": 0, "prompt_tokens": 150}
    assert kinds(engine, {"requests": {"app1": 5}}) == ["idle"]


@pytest.mark.parametrize("state", [{"ready": False, "seen": False}, {"ready": False}, {"ready": None, "seen": False}])
def test_an_engine_that_is_away_is_critical(state: dict[str, Any]) -> None:
    assert "engine_absent" in kinds(state)


def test_an_engine_that_was_drained_is_told_from_one_that_is_away() -> None:
    away = only("engine_absent", {"ready": False, "seen": False})
    assert (away.numbers["absent"], away.numbers["drained"]) == (1, 0)
    assert "make logs" in away.change and "drained" not in away.limit + away.change
    drained = found({"ready": False, "seen": False, "drained": True})[0]
    assert (drained.numbers["absent"], drained.numbers["drained"]) == (0, 1)
    assert "(drained)" in drained.limit and "ordered back" in drained.change and "make logs" not in drained.change


def test_an_engine_whose_page_alone_cannot_be_read_is_not_called_away() -> None:
    assert "engine_absent" not in kinds({"ready": True, "seen": False})


def test_a_hung_engine_is_told_from_one_that_is_away() -> None:
    assert kinds({"ready": False, "stalled_s": 61})[0] == "engine_hung"
    assert kinds({"ready": True, "stalled_s": 61}) == ["no_limit"]
    assert kinds({"ready": False, "stalled_s": 59})[0] == "engine_absent"


def test_an_engine_without_figures_is_told_to_export_them() -> None:
    assert "Take disable-log-stats out" in only("stats_off", {"stats": False}).change


def test_high_usage_alone_is_healthy_and_said_to_be() -> None:
    assert kinds({"usage_max": 0.84}) == ["no_limit"]
    finding = found({"usage_max": 0.93})[0]
    assert (finding.kind, finding.severity) == ("kv_full_healthy", "info")
    assert "healthy" in finding.limit
    assert finding.change.startswith("Nothing")


@pytest.mark.parametrize(
    ("pressure", "speaks"),
    [
        ({"usage_max": 0.95, "pressed_share": 0.19}, False),
        ({"usage_max": 0.95, "pressed_share": 0.2}, True),
        ({"usage_max": 0.95, "held_share": 1.0}, False),
        ({"usage_max": 0.89, "preemptions": 1}, True),
    ],
)
def test_pressure_is_waiting_beside_a_full_pool_or_preemption(pressure: dict[str, Any], speaks: bool) -> None:
    assert ("kv_pressure" in kinds(pressure)) is speaks


def test_pressure_gives_the_numbers_of_each_remedy() -> None:
    finding = only("kv_pressure", PRESSED)
    # 600 tokens a request; 14 wanted at once take 8,400 of 120,000: then it is the peak, and a tenth more is tried.
    assert finding.numbers["request_tokens"] == 600
    assert finding.numbers["gpu_memory_utilization"] == pytest.approx(0.93)
    assert finding.numbers["fp8_pool_tokens"] == 240_000
    assert finding.numbers["max_num_seqs"] == 8
    for words in (
        "raise gpu-memory-utilization from 0.9 to 0.93",
        "240,000 tokens",
        "max-num-seqs to 8",
        "add a replica",
    ):
        assert words in finding.change


def test_a_pool_given_in_bytes_is_raised_in_bytes_by_what_is_asked_for() -> None:
    pool = {"pool_tokens": 6_000, "pool_bytes": 512 << 20}
    finding = only("kv_pressure", PRESSED | pool)
    assert finding.numbers["pool_factor"] == pytest.approx(14 * 600 / 6000)
    assert finding.numbers["kv_cache_mib"] == pytest.approx(512 * 1.4, abs=1)
    assert "gpu-memory-utilization" not in finding.change


def test_an_fp8_cache_is_not_advised_to_who_has_one_nor_utilization_beyond_its_most() -> None:
    change = only("kv_pressure", PRESSED | {"cache_dtype": "fp8", "utilization": 0.95}).change
    assert "fp8" not in change
    assert "utilization" not in change


def test_waiting_beside_a_pool_with_room_is_a_matter_of_slots() -> None:
    waiting = {"waiting_mean": 4.0, "held_share": 0.5, "usage_max": 0.25}
    finding = only("engine_slots", waiting)
    assert finding.numbers["fit"] == 40
    assert "Raise max-num-seqs above 10" in finding.change
    assert kinds(waiting | {"held_share": 0.1}) == ["no_limit"]


@pytest.mark.parametrize(
    ("cores", "streams", "words"), [(0.84, 9, ""), (0.85, 9, "stream-interval: 8"), (0.99, 0, "Nothing is streamed")]
)
def test_a_full_core_of_the_api_server_is_named_and_the_remedy_fits_the_traffic(
    cores: float, streams: int, words: str
) -> None:
    if not words:
        assert kinds({"api_cores": cores}, {"streams": streams}) == ["no_limit"]
    else:
        assert words in only("api_server_bound", {"api_cores": cores}, {"streams": streams}).change


def test_several_api_servers_tell_no_processor_time_and_are_not_judged_by_it() -> None:
    assert kinds({"api_cores": None}) == ["no_limit"]


def test_prefix_caching_that_is_off_is_switched_on_again() -> None:
    assert "Take no-enable-prefix-caching out" in only("prefix_off", {"prefix_caching": False, "hits": 0}).change


@pytest.mark.parametrize(
    ("hits", "queries", "speaks"), [(34_999, 50_000, True), (35_000, 50_000, False), (0, 1999, False)]
)
def test_misses_are_explained_below_the_good_ratio_and_under_real_traffic_only(
    hits: float, queries: float, speaks: bool
) -> None:
    assert ("prefix_misses" in kinds({"hits": hits, "queries": queries})) is speaks


def test_shares_of_missed_tokens_are_told_by_cause_and_key() -> None:
    prefix = {
        "app1": {"short": 6000.0, "tail": 1000.0, "hit": 500.0},
        "app2": {"first_seen": 2000.0, "evicted": 500.0, "tail": 500.0, "hit": 9500.0},
    }
    finding = only("prefix_misses", {"queries": 20_000, "hits": 10_000}, {"prefix": prefix})
    assert finding.numbers["shares"] == {"short": 0.6, "first_seen": 0.2, "evicted": 0.05, "tail": 0.15}
    assert finding.numbers["cause"] == "short"
    assert "60% prompts under one block" in finding.by_how_much
    assert "app1 7,000 (86% prompts under one block" in finding.by_how_much
    assert "app2 3,000 (67% prefixes that were not repeated" in finding.by_how_much


@pytest.mark.parametrize(
    ("told", "hits", "missed"),
    [
        ({"repeated": 100, "first_seen": 50}, 100, {"first_seen": 50}),
        ({"repeated": 100, "first_seen": 50}, 30, {"first_seen": 50, "evicted": 70}),
        ({"repeated": 100, "first_seen": 50}, 120, {"first_seen": 30}),
        ({"hit": 100, "evicted": 20}, 100, {"evicted": 20}),
        ({"hit": 100, "first_seen": 20}, 500, {"first_seen": 20}),  # scheduled, and not answered yet
        ({"hit": 100, "first_seen": 20}, 0, {"first_seen": 20}),  # scheduled before the window
        ({"hit": 50, "repeated": 40, "first_seen": 20}, 10, {"first_seen": 20, "evicted": 40}),
        ({"repeated": 100, "first_seen": 50}, None, {"first_seen": 50}),
    ],
)
def test_what_is_not_told_by_answers_is_told_by_the_engines_count(
    told: dict[str, float], hits: float | None, missed: dict[str, float]
) -> None:
    assert misses(told, hits) == missed


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("short", "Nothing is wrong"),
        ("first_seen", "first and what differs"),
        ("evicted", "raise gpu-memory-utilization"),
        ("restarted", "fills up again"),
        ("salted", "one group"),
        ("elsewhere", "replicas"),
    ],
)
def test_each_cause_has_its_own_change(cause: str, words: str) -> None:
    finding = only("prefix_misses", {"hits": 0}, {"prefix": {"app1": {cause: 40_000.0, "tail": 9_000.0}}})
    assert words in finding.change


def test_traffic_past_the_gateway_is_said_to_be_unexplained() -> None:
    assert "saw none" in only("prefix_misses", {"hits": 0}).by_how_much
    half = only("prefix_misses", {"hits": 0}, {"prefix": {"app1": {"short": 25_000.0}}})
    assert "saw 50%" in half.by_how_much


REFUSED = {"shed": {"predicted_wait": 20.0, "queue_full": 5.0}, "in_flight_tokens_max": 119_000, "queued_max": 30}


@pytest.mark.parametrize(
    ("gateway", "words"),
    [
        ({}, "More engines, or fewer requests: 75% of what was asked got through."),
        ({"in_flight_max": 1024}, "Raise admission.max_in_flight above 1,024"),
        ({"settings": SETTINGS | {"capacity_tokens": 50_000}}, "Unset admission.capacity_tokens (50,000)"),
        ({"shed": {"queue_full": 20.0, "pushed_out": 5.0}}, "admission.max_queue_tokens"),
    ],
)
def test_what_holds_requests_back_at_the_gateway_is_named_with_its_own_remedy(
    gateway: dict[str, Any], words: str
) -> None:
    finding = only("gateway_queue", {"usage_max": 0.84}, REFUSED | gateway)
    assert words in finding.change
    assert "25 of 100 requests were refused" in finding.by_how_much


def test_tokens_that_are_reserved_and_not_used_are_told() -> None:
    finding = only("gateway_queue", {"usage_max": 0.1}, REFUSED)
    assert "at most 12,000 of these tokens were in use" in finding.change


def test_deadlines_of_clients_are_not_blamed_on_the_queue() -> None:
    finding = only("deadline_sheds", None, {"shed": {"predicted_wait": 9.0}, "deadline_shed": 9.0})
    assert "9 of 100 requests were refused" in finding.by_how_much


def test_a_key_that_takes_most_is_named_only_while_others_are_held_up() -> None:
    most = {"tokens": {"app1": 59_000.0, "app2": 1_000.0}}
    assert kinds(None, most) == ["no_limit"]
    held_up = most | {"shed": {"key_tokens": 3.0}, "shed_of": {"app2": 3.0}}
    finding = only("tenant_hog", None, held_up)
    assert "tokens_per_minute: 5,900" in finding.change
    assert kinds(None, held_up | {"tokens": {"app1": 35_000.0, "app2": 25_000.0}}) == ["no_limit"]


@pytest.mark.parametrize(
    ("waits", "merged", "speaks"), [(19, 0, False), (20, 0, True), (20, 2, False), (200, 19, True)]
)
def test_a_window_that_merges_next_to_nothing_is_told(waits: float, merged: float, speaks: bool) -> None:
    gateway = {"window_waits": waits, "window_wait_s": waits * 0.015, "merged": merged}
    assert ("idle_window" in kinds(None, gateway)) is speaks


def every_finding() -> list[Finding]:
    """Whatever can be said, over a grid of situations."""
    usages = [{"usage_max": usage} for usage in (0.1, 0.86, 0.95, 1.0)]
    waits = [{}, {"pressed_share": 0.8}, {"held_share": 0.8}, {"preemptions": 9}]
    pools = [{}, {"pool_bytes": 1 << 30}, {"blocks_override": 99}, {"utilization": 0.94}, {"block_size": 256}]
    caches = [{}, {"prefix_caching": False}, {"hits": 0}, {"stats": False}, {"api_cores": 1.0}, {"ready": False}]
    causes = ("short", "tail", "first_seen", "evicted", "restarted", "salted", "elsewhere")
    gateways: list[dict[str, Any]] = [{"prefix": {"app1": {cause: 1000.0}}} for cause in causes]
    gateways += [REFUSED, REFUSED | {"in_flight_max": 2000}, {"deadline_shed": 3.0}, {"streams": 0}]
    gateways += [{"shed": {"queue_full": 9.0}}, {"settings": SETTINGS | {"capacity_tokens": 9}} | {"queued_mean": 5}]
    gateways += [{"window_waits": 99}, {"tokens": {"app1": 9e9, "app2": 1}, "queued_mean": 9}, {"requests": {}}]
    said = {}
    for usage, wait, pool, cache in itertools.product(usages, waits, pools, caches):
        for gateway in gateways:
            for finding in found(usage | wait | pool | cache, gateway):
                said[finding.limit, finding.by_how_much, finding.change] = finding
    said[""] = found({"ready": False, "stalled_s": 99})[0]
    said["idle"] = found({"running_mean": 0}, {"requests": {}})[0]
    return list(said.values())


EVERY = every_finding()
# What ENGINE-independent truth calls backwards or void: none of these may ever be advised.
NEVER = (
    r"lower (the )?gpu.memory.utilization|gpu-memory-utilization (lower|down)",
    r"swap.space",
    r"max.model.len",
    r"enforce.eager|cuda.graph",
    r"paged.attn",
    r"quantization",
    r"disable-log-requests|log-level",
    r"(?<!Take )disable-log-stats",
    r"(?<!Take )no-enable-prefix-caching|(disable|off|without) prefix.caching",
    r"block-size (256|512) (is|gives)|raise block-size|block-size: \d{3}",
    r"nvidia-smi|shm",
)


def test_every_kind_can_be_said_and_each_has_its_section() -> None:
    assert {finding.kind for finding in EVERY} == set(KINDS)
    headings = re.findall(r"^#+ (\w+)$", Path("docs/advise.md").read_text(), re.MULTILINE)
    assert set(KINDS) <= set(headings)


@pytest.mark.parametrize("pattern", NEVER)
def test_no_sentence_advises_what_is_backwards(pattern: str) -> None:
    for finding in EVERY:
        for sentence in (finding.limit, finding.by_how_much, finding.change):
            assert not re.search(pattern, sentence, re.IGNORECASE), finding


def test_a_utilization_that_is_advised_is_higher_and_no_more_than_the_most() -> None:
    pairs = [re.search(r"gpu-memory-utilization from ([\d.]+) to ([\d.]+) ", finding.change) for finding in EVERY]
    given = [(float(pair[1]), float(pair[2])) for pair in pairs if pair]
    assert given
    assert all(now < then <= 0.95 for now, then in given)


def test_every_engine_option_that_is_named_exists_in_the_pinned_engine() -> None:
    known = engine_args.load()
    words = {
        word for finding in EVERY for word in re.findall(r"(?<![\w.-])[a-z]+(?:-[a-z0-9]+)+(?![\w-])", finding.change)
    }
    options = words - {"docker-compose", "micro-batching"}
    assert {"max-num-seqs", "kv-cache-dtype", "stream-interval", "gpu-memory-utilization"} <= options
    assert [word for word in sorted(options) if known.flag(f"--{word}") is None] == []


def test_every_gateway_setting_that_is_named_exists() -> None:
    listed = Path("docs/settings.md").read_text()
    named = {
        name for finding in EVERY for name in re.findall(r"(?:admission|batching)\.\w+", finding.change + finding.limit)
    }
    assert named
    assert [name for name in sorted(named) if name not in listed] == []
