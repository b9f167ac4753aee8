"""The tuning loop's decisions, its search space, and how it rewrites and restores files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import load
from scripts.bench import engine
from scripts.tune import decide, report, settings, space
from scripts.tune.__main__ import main

ROOT = Path(__file__).parent.parent.parent
SLO = decide.Slo(ttft_s=2.0, itl_s=0.1)


def figures(**more: Any) -> dict[str, Any]:
    return {"requests": 8, "completed": 8, "ttft_ms": {"95": 1999.0}, "itl_ms": {"95": 99.0}, **more}


@pytest.mark.parametrize(
    ("more", "held"),
    [
        ({}, True),
        ({"ttft_ms": {"95": 2001.0}}, False),
        ({"itl_ms": {"95": 101.0}}, False),
        ({"itl_ms": None}, True),  # answers of one token
        ({"completed": 7}, False),
    ],
)
def test_a_measurement_holds_the_slo_or_not(more: dict[str, Any], held: bool) -> None:
    assert decide.within(figures(**more), SLO) is held


@pytest.mark.parametrize(
    ("current", "candidate", "better"),
    [
        ([100.0, 105.0], [106.0, 120.0], True),
        ([100.0, 105.0], [104.0, 200.0], False),  # its worst lies within the other's spread
        ([0.0], [1.0], True),  # what never held the SLO is beaten by anything that does
        ([100.0], [100.0], False),
        ([], [1.0], False),
    ],
)
def test_better_is_beyond_what_repeats_differ_by(current: list[float], candidate: list[float], better: bool) -> None:
    assert decide.better(current, candidate) is better


def climb(serves: dict[int, tuple[bool, float]], start: int, most: int = 64) -> list[int]:
    """The levels that would be measured on a machine that behaves like `serves`."""
    measured: dict[int, tuple[bool, float]] = {}
    while (level := decide.next_level(measured, start, most)) is not None:
        measured[level] = serves[level]
    return list(measured)


def test_the_climb_ends_where_the_slo_breaks() -> None:
    assert climb({4: (True, 40), 8: (True, 80), 16: (False, 150)}, 4) == [4, 8, 16]


def test_the_climb_ends_where_more_in_flight_gives_nothing_more() -> None:
    assert climb({4: (True, 40), 8: (True, 41)}, 4) == [4, 8]


def test_the_climb_goes_down_where_its_start_is_too_much() -> None:
    assert climb({8: (False, 90), 4: (False, 50), 2: (True, 20)}, 8) == [8, 4, 2]


def test_the_climb_gives_up_at_one_and_stops_at_the_most() -> None:
    assert climb({2: (False, 1), 1: (False, 1)}, 2) == [2, 1]
    assert climb({32: (True, 1), 64: (True, 2)}, 32) == [32, 64]


def test_saturation_is_the_most_served_within_the_slo() -> None:
    assert decide.saturation({4: (True, 40), 8: (True, 80), 16: (False, 150)}) == (8, 80)
    assert decide.saturation({1: (False, 10)}) == (0, 0.0)


def test_the_queue_holds_what_is_prefilled_within_the_promise() -> None:
    assert decide.queue_tokens(10_000, SLO) == 20_000
    assert decide.queue_tokens(1, SLO) == 1024


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_nothing_is_tried_that_changes_what_clients_get_or_what_is_backwards(platform: str) -> None:
    tried = set(space.space(platform, kv_fp8=True))
    forbidden = {"gpu-memory-utilization", "max-model-len", "quantization", "enforce-eager", "swap-space", "dtype"}
    assert not tried & forbidden
    assert "kv-cache-dtype" not in space.space(platform)


def test_a_batch_smaller_than_its_sequences_is_not_tried() -> None:
    assert not space.fits({"max-num-seqs": 512, "max-num-batched-tokens": 256})
    assert space.fits({"max-num-seqs": 512})


def test_what_the_profile_says_already_is_no_change() -> None:
    assert space.changed({"max-num-seqs": 64, "a": 1}, {"max-num-seqs": 64, "b": 2}) == {"b": 2}


def test_flags_become_arguments_without_model_and_address() -> None:
    flags = {"model": "/m", "host": "h", "enforce-eager": True, "max-num-seqs": 4}
    assert engine.arguments(flags) == ("--enforce-eager", "--max-num-seqs", "4")


def test_a_rewritten_profile_keeps_its_comments_and_its_other_flags() -> None:
    before = (ROOT / "configs/engine/smollm2-135m.cpu.yaml").read_text()
    after = settings.rewritten(before, {"max-num-seqs": 8, "max-num-batched-tokens": 512}, "measured")
    assert yaml.safe_load(after) == {**yaml.safe_load(before), "max-num-seqs": 8, "max-num-batched-tokens": 512}
    assert set(before.splitlines()) - set(after.splitlines()) == {"max-num-seqs: 32"}
    assert after.endswith("\n# max-num-seqs, max-num-batched-tokens: measured\n")


def test_rewritten_gateway_settings_are_still_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = (ROOT / "configs/gateway.yaml").read_text()
    after = settings.rewritten(before, {"admission.max_queue_tokens": 5000, "batching.max_prompts": 16}, "measured")
    path = tmp_path / "gateway.yaml"
    path.write_text(after)
    monkeypatch.setenv("GATEWAY_CONFIG", str(path))
    monkeypatch.setenv("GATEWAY__AUTH__DISABLED", "true")
    read = load()
    assert (read.admission.max_queue_tokens, read.batching.max_prompts, read.batching.window_ms) == (5000, 16, 15)


def test_revert_puts_back_exactly_what_was_there_once(tmp_path: Path) -> None:
    one, two, kept = tmp_path / "one.yaml", tmp_path / "two.yaml", tmp_path / "before"
    one.write_text("a: 1  # why\n")
    two.write_text("b: 2\n")
    settings.apply({one: "a: 9\n", two: "b: 9\n"}, kept)
    assert one.read_text() == "a: 9\n"
    assert settings.revert(kept) == [one, two]
    assert (one.read_text(), two.read_text()) == ("a: 1  # why\n", "b: 2\n")
    with pytest.raises(settings.NothingToRevertError):
        settings.revert(kept)


def test_bad_usage_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-profile", "--model", "m"]) == 2
    assert "no-such-profile.yaml: No such file" in capsys.readouterr().err
    assert main(["x", "--revert", "--out", str(tmp_path)]) == 1
    assert "nothing to take back" in capsys.readouterr().err


def found(**more: Any) -> dict[str, Any]:
    one = {"repeats": [10.0, 11.0], "in_flight": 4, "prefill_tokens_per_s": 100.0, "kv_tokens": 5}
    soak = {"rounds": 2, "within_slo": 2, "lost": 0, "held": True, "tokens_per_s": {"median": 9.0}}
    trials = [{"changes": {"max-num-seqs": 8}, "tokens_per_s": 20.0, "failed": None}]
    best = {**one, "repeats": [20.0, 22.0], "changes": {"max-num-seqs": 8}}
    base = {"current": one, "best": best, "trials": trials, "limits": {"batching.max_prompts": 8}, "soak": soak}
    return {**base, "replaced": True, **more}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, "Replaced: the best trial's worst repeat beats the old profile's best (at least × 1.82)."),
        ({"replaced": False}, "not better beyond the spread"),
        ({"replaced": False, "best": None}, "no trial served more"),
    ],
)
def test_the_report_says_what_was_done_and_why(more: dict[str, Any], says: str) -> None:
    assert says in report.render(found(**more), "p")


def test_a_soak_that_lost_requests_keeps_the_old_profile() -> None:
    soak = {**found()["soak"], "held": False, "lost": 1}
    assert "Kept as it was: under the soak" in report.render(found(soak=soak, replaced=False), "p")
