"""The tuning loop's decisions, its search space, and how it rewrites and restores files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import load
from scripts.bench import engine
from scripts.bench.generator import Generator
from scripts.checks.probes import Probes, Ran
from scripts.planner.settings import profile_path, read_profile
from scripts.tune import checks, clock, decide, report, search, settings, space
from scripts.tune.__main__ import main
from scripts.tune.probe import Setup
from scripts.tune.task import Task

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


def test_the_slo_is_kept_or_not_over_all_rounds_together() -> None:
    good, slow = ([1.0] * 9, [0.05] * 90), ([1.0] * 8 + [3.0], [0.05] * 80 + [0.2] * 10)
    assert decide.kept([good], SLO) == (1.0, 1.0)
    assert decide.kept([good, slow], SLO) == (17 / 18, 170 / 180)
    assert decide.kept([([], [])], SLO) == (1.0, 1.0)


def test_a_gain_that_is_asked_for_must_be_reached() -> None:
    assert decide.better([100.0], [103.5], gain=1.03)
    assert not decide.better([100.0], [102.5], gain=1.03)


def test_decoding_is_what_the_streams_give_together() -> None:
    assert decide.decode_tokens_per_s({"itl_ms": {"50": 40.0}, "tokens_per_event": 1.0}, 4) == 100
    assert decide.decode_tokens_per_s({"itl_ms": {"50": 40.0}, "tokens_per_event": 8.0}, 4) == 800
    assert decide.decode_tokens_per_s({"itl_ms": None, "tokens_per_event": None}, 4) is None


COST = clock.Cost(boot_s=30, prefill_s=10, repeat_s=20)


def test_the_search_ends_so_that_what_follows_still_fits() -> None:
    rest = clock.rest_s(COST, repeats=3, soak_s=45)
    assert rest == (30 + 10 + 60) + (30 + 20) + (30 + 30 + 45 + 20)
    assert clock.another(200, 780, [75, 60], COST, rest)
    assert not clock.another(500, 780, [75, 60], COST, rest)
    assert not clock.another(200, 780, [400], COST, rest)  # as long as the longest before it
    assert clock.another(900, 780, [], COST, rest)  # the first is always made


def a_task(folder: Path) -> Task:
    setup = Setup(
        engine.Launcher("python"), Generator("python"), "m", "chat", SLO, 8, 2, None, environment={}, folder=folder
    )
    return Task(setup, {}, space.space("cpu"), 60, 3, 2, 1.0, 1, 0, None, print)


def test_files_are_changed_all_or_none(tmp_path: Path) -> None:
    one, full = tmp_path / "one.yaml", tmp_path / "folder" / "two.yaml"
    full.parent.mkdir()
    one.write_text("a: 1\n")
    full.write_text("b: 2\n")
    (full.parent / ".two.yaml.new").mkdir()  # takes no file
    with pytest.raises(OSError, match="directory"):
        settings.apply({one: "a: 9\n", full: "b: 9\n"}, tmp_path / "before")
    assert (one.read_text(), full.read_text()) == ("a: 1\n", "b: 2\n")
    assert not list(tmp_path.glob(".*"))


def test_a_trial_that_was_cut_off_stands_in_line_once_more(tmp_path: Path) -> None:
    task = a_task(tmp_path)
    study = search.open_study(task)
    cut = study.ask()
    first = {name: cut.suggest_categorical(name, values) for name, values in task.candidates.items()}
    for _ in range(2):  # interrupted again before it came to the turn
        study = search.open_study(task)
        assert [trial.state.name for trial in study.trials] == ["FAIL", "WAITING"]
    again = study.ask()
    assert {name: again.suggest_categorical(name, values) for name, values in task.candidates.items()} == first


@pytest.mark.parametrize(
    ("said", "free", "why"),
    [
        ("INFO\nValueError: no such block size\n", 0, "ValueError: no such block size"),
        (
            "gateway: x = 'soon': expected a number\n\n",
            9,
            "ended with code 1: gateway: x = 'soon': expected a number ({})",
        ),
        ("", 9, "ended with code 1: without a word ({})"),
        ("INFO\n", 0, "[Errno 28] No space left on device: '{}'"),
    ],
)
def test_what_does_not_start_is_told_by_its_own_words_or_by_the_full_disk(
    said: str, free: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "engine.log"
    log.write_text(said)
    # A full disk is only to be had with root's rights to mount one.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9 - free, free))
    command = [sys.executable, "-c", "raise SystemExit(1)"]
    with subprocess.Popen(command) as process:
        process.wait()
        with pytest.raises((engine.StartError, OSError)) as ended:
            engine._until("http://127.0.0.1:9/", process, log, 5)
    assert str(ended.value) == why.format(log)
    assert isinstance(ended.value, OSError) == (not free and "Value" not in said)


def test_trials_of_other_conditions_do_not_count(tmp_path: Path) -> None:
    search.open_study(a_task(tmp_path))
    now = {"slo": {"ttft_s": 2.0}, "model": "m"}
    assert search.take_up(tmp_path, now) == ["slo.ttft_s: nothing → 2.0", "model: nothing → m"]
    search.open_study(a_task(tmp_path))
    assert search.take_up(tmp_path, now) == []
    assert (tmp_path / search.JOURNAL).exists()
    assert search.take_up(tmp_path, {**now, "slo": {"ttft_s": 1.0}}) == ["slo.ttft_s: 2.0 → 1.0"]
    assert not (tmp_path / search.JOURNAL).exists()


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


XML = """<nvidia_smi_log><driver_version>580.1</driver_version><gpu id="0"><product_name>{name}</product_name>
<fb_memory_usage><total>24564 MiB</total><used>10 MiB</used><free>24000 MiB</free></fb_memory_usage>
<processes>{processes}</processes></gpu></nvidia_smi_log>"""
HELD = "<process_info><pid>7</pid><process_name>VLLM::EngineCore</process_name></process_info>"


@pytest.mark.parametrize(
    ("xml", "any_card", "says"),
    [
        (
            None,
            False,
            ["p.rtx4090.yaml is for a card of the kind rtx4090, and no NVIDIA card answers here; --platform cpu"],
        ),
        (XML.format(name="NVIDIA GeForce RTX 4090", processes=""), False, []),
        (
            XML.format(name="NVIDIA H200", processes=""),
            False,
            ["is for a card of the kind rtx4090, and here is NVIDIA H200"],
        ),
        (XML.format(name="NVIDIA H200", processes=""), True, []),
        (
            XML.format(name="NVIDIA GeForce RTX 4090", processes=HELD),
            False,
            ["on the card already (VLLM::EngineCore): make down"],
        ),
    ],
)
def test_the_card_must_be_the_profiles_and_free(
    xml: str | None, any_card: bool, says: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    probes = Probes(run=lambda command, environ=None: None if xml is None else Ran(0, xml if "-x" in command else ""))
    launcher = engine.Launcher(str(tmp_path / "python"))
    found = list(checks.problems(Path("p.rtx4090.yaml"), str(tmp_path), launcher, "gpu", probes, any_card=any_card))
    assert "has no vLLM: make .venv-engine/.installed" in found[0]
    assert len(found) == 1 + len(says)
    assert all(part in line for part, line in zip(says, found[1:], strict=True))


def test_a_profile_says_its_platform_and_its_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    none = Probes(run=lambda command, environ=None: None)
    assert checks.platform_of("smollm2-135m.cpu.yaml", none) == "cpu"
    assert checks.platform_of("llama3-8b-awq.rtx4090.fp8kv.yaml", none) == "gpu"
    assert checks.platform_of("mine.yaml", none) == "cpu"
    monkeypatch.setenv("MODELS_DIR", str(tmp_path))
    place = tmp_path / "llama3-8b-awq" / "current"
    profile = {"model": "/models/llama3-8b-awq/current"}
    assert checks.model_of(profile) is None
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    assert checks.model_of(profile) == str(place)


def test_the_memory_plan_stands_beside_what_is_measured() -> None:
    profile = read_profile(profile_path("llama3-8b-awq.rtx4090"))
    planned = checks.planned_kv_tokens(Path("x.rtx4090.yaml"), profile, "llama3-8b-awq", "gpu")
    assert planned is not None
    assert 120_000 < planned < 130_000  # docs/engine-profiles.md
    assert checks.planned_kv_tokens(Path("x.yaml"), profile, "llama3-8b-awq", "gpu") is None


def test_bad_usage_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-profile", "--model", "m"]) == 2
    assert "no profile " in capsys.readouterr().err
    assert main(["smollm2-135m.cup"]) == 2
    assert capsys.readouterr().err.endswith("smollm2-135m.cup.yaml: did you mean smollm2-135m.cpu?\n")
    with pytest.raises(SystemExit, match="2"):
        main([""])
    said = capsys.readouterr().err
    assert said == "tune: say which profile: make tune PROFILE=llama3-8b-awq.rtx4090 (a file of configs/engine)\n"
    assert main(["x", "--revert", "--out", str(tmp_path)]) == 1
    assert "nothing to take back" in capsys.readouterr().err


def found(**more: Any) -> dict[str, Any]:
    one = {"repeats": [10.0, 11.0], "in_flight": 4, "prefill_tokens_per_s": 100.0, "kv_tokens": 5}
    one["decode_tokens_per_s"] = 12.0
    soak: dict[str, Any] = {"rounds": 2, "in_flight": 4, "ttft_kept": 1.0, "itl_kept": 0.97, "lost": 0, "held": True}
    soak["tokens_per_s"] = {"median": 9.0}
    trials = [{"changes": {"max-num-seqs": 8}, "tokens_per_s": 20.0, "failed": None}]
    best = {**one, "repeats": [20.0, 22.0], "changes": {"max-num-seqs": 8}}
    base = {"current": one, "best": best, "trials": trials, "limits": {"batching.max_prompts": 8}, "soak": soak}
    return {**base, "replaced": True, "planned_kv_tokens": 5, **more}


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


@pytest.mark.parametrize(("servers", "said"), [(2, True), (1, False)])
def test_the_report_names_what_a_second_api_server_costs(servers: int, said: bool) -> None:
    best = {**found()["best"], "changes": {"api-server-count": servers}}
    assert ("a stop cuts off the streams in flight" in report.render(found(best=best), "p")) == said
