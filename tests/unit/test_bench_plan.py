"""Plans, workloads, figures and comparisons of the benchmarks: all of it but the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt

from scripts.bench import compare, conditions, figures, plan, report, workloads
from scripts.bench.__main__ import main
from scripts.bench.folder import Folder
from scripts.bench.pictures import pictures
from scripts.planner.settings import profile_path, read_profile

ROOT = Path(__file__).parent.parent.parent
SHIPPED = sorted((ROOT / "configs/bench").glob("*.yaml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "plan.yaml"
    path.write_text(text)
    return path


TWO = """
title: two
model: m
boots:
  - name: a
    rows:
      - {name: x, workload: chat, requests: 4, in_flight: 2, repeats: 2}
      - {name: y, workload: short, requests: 4, in_flight: 2, repeats: 3}
"""


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_plan_loads_and_its_profiles_exist(path: Path) -> None:
    chosen = plan.load(path)
    for boot in chosen.boots:
        if boot.profile:
            assert read_profile(profile_path(boot.profile))


def test_every_second_round_goes_backwards(tmp_path: Path) -> None:
    order = [(row.name, repeat) for _, row, repeat in plan.load(write(tmp_path, TWO)).measurements()]
    assert order == [("x", 0), ("y", 0), ("y", 1), ("x", 1), ("y", 2)]


def test_engines_that_are_there_together_take_turns(tmp_path: Path) -> None:
    b = TWO[TWO.index("  - name: a") :].replace("name: a", "name: b")
    chosen = plan.load(write(tmp_path, TWO.replace("title: two", "title: two\ntogether: true") + b))
    order = [f"{boot.name}{row.name}{repeat}" for boot, row, repeat in chosen.measurements()]
    assert order == ["ax0", "ay0", "bx0", "by0", "by1", "bx1", "ay1", "ax1", "ay2", "by2"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TWO.replace("in_flight: 2, repeats: 2", "in_flight: 2, rate: 1"), "not both"),
        (TWO.replace("workload: short", "workload: shrot"), "rows.1.workload"),
        (TWO.replace("name: y", "name: x"), "measured twice under one name: a/x"),
        (TWO + "ratios: [{name: r, over: a/x, under: a/z}]", "ratio r: a/z is not a measurement"),
        (TWO + "ladder: [a/x, b/x]", "ladder: b/x is not a measurement"),
        (TWO.replace("repeats: 2", "stream: false"), "stream: false needs endpoint: completions"),
        ("title: [", "plan.yaml"),
    ],
)
def test_a_plan_that_cannot_be_used_is_told_in_one_line(
    tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write(tmp_path, text)), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_a_folder_of_an_unknown_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    folder = Folder(tmp_path, plan.load(write(tmp_path, TWO)))
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(plan.PlanError, match="do not say what they were made with: --fresh moves them aside"):
        folder.take_up({}, retry=False, fresh=False, same_flags=False)
    assert (tmp_path / "plan.json").read_text() == "{}"


def test_what_differs_is_told_by_name() -> None:
    boots = [{"name": "a", "arguments": ["--x"], "rows": [{"name": "r", "requests": 4}]}]
    other = [{"name": "a", "arguments": [], "rows": [{"name": "r", "requests": 8}]}, {"name": "b"}]
    old, new = ({"plan": conditions.by_name({"boots": each}), "version": "1"} for each in (boots, other))
    assert conditions.changed(old, {**new, "version": "2"}) == [
        "plan.boots.a.arguments: --x → nothing",
        "plan.boots.a.rows.r.requests: 4 → 8",
        "version: 1 → 2",
    ]


def test_a_running_engine_is_asked_nothing_that_wants_flags(tmp_path: Path) -> None:
    flagged = TWO.replace(
        "  - name: a",
        "  - name: b\n    arguments: [--x]\n    rows: [{name: x, workload: chat, requests: 1}]\n  - name: a",
    )
    chosen = plan.load(write(tmp_path, flagged + "ratios: [{name: r, over: a/x, under: b/x}]\nladder: [a/x, b/x]"))
    assert [boot.name for boot in chosen.attached().boots] == ["a"]
    assert (chosen.attached().ratios, chosen.attached().ladder) == ((), ("a/x",))
    with pytest.raises(plan.PlanError, match="leave --engine out"):
        plan.load(write(tmp_path, flagged[: flagged.index("  - name: a")])).attached()


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("in_flight: 2", "inflight: 2", "boots.0.rows.0.inflight: is unknown: did you mean in_flight?"),
        ("    rows:", "    argument: []\n    rows:", "boots.0.argument: is unknown: did you mean arguments?"),
        ("title: two", "title: two\nladders: []", "ladders: is unknown: did you mean ladder?"),
        ("name: a", "name: A a", "boots.0.name: 'A a': expected small letters, digits, and . _ - between them"),
        ("title: two", "title: \\ud800\xff", " is no text"),
    ],
)
def test_a_typo_in_a_plan_is_one_line_with_what_was_meant(right: str, wrong: str, says: str, tmp_path: Path) -> None:
    assert right in TWO
    path = tmp_path / "p.yaml"
    path.write_bytes(TWO.replace(right, wrong, 1).encode("latin-1"))
    with pytest.raises(plan.PlanError) as refused:
        plan.load(path)
    assert str(refused.value).endswith(says)
    assert "\n" not in str(refused.value)


def test_the_same_seed_gives_the_same_requests_and_another_none_of_them() -> None:
    first = workloads.requests("mixed", 50, seed="1", max_model_len=4096)
    assert first == workloads.requests("mixed", 50, seed="1", max_model_len=4096)
    other = workloads.requests("mixed", 50, seed="2", max_model_len=4096)
    assert not {request.prompt for request in first} & {request.prompt for request in other}


def test_another_nonce_gives_the_same_lengths_in_other_words() -> None:
    first = workloads.requests("mixed", 50, seed="1", nonce="a", max_model_len=4096)
    again = workloads.requests("mixed", 50, seed="1", nonce="b", max_model_len=4096)
    assert [(len(r.prompt.split()), r.output_tokens) for r in first] == [
        (len(r.prompt.split()), r.output_tokens) for r in again
    ]
    assert not {request.prompt for request in first} & {request.prompt for request in again}


@pytest.mark.parametrize("workload", ["chat", "short", "long", "mixed"])
def test_no_two_prompts_begin_alike_unless_they_should(workload: Any) -> None:
    made = workloads.requests(workload, 200, seed="s", max_model_len=8192)
    heads = [" ".join(request.prompt.split()[:16]) for request in made]
    # A mixed load has chats with shared beginnings on purpose: eight of them.
    alike = len(heads) - len(set(heads))
    assert alike == 0 if workload != "mixed" else 0 < alike < 80


def test_prefix_prompts_share_eight_beginnings() -> None:
    made = workloads.requests("prefix", 200, seed="s", max_model_len=8192)
    assert len({" ".join(request.prompt.split()[: workloads.PREFIX_TOKENS]) for request in made}) == 8


def test_texts_take_the_place_of_generated_chats_and_stay_new_to_the_prefix_cache(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"prompt": "Why is the sky blue?", "output_tokens": 30}\n')
    texts = workloads.read_texts(path)
    made = workloads.requests("chat", 3, seed="s", max_model_len=1024, texts=texts)
    assert all(request.prompt.endswith(" Why is the sky blue?") for request in made)
    assert [request.output_tokens for request in made] == [30, 30, 30]
    assert len({request.prompt for request in made}) == 3


def test_a_bad_line_of_texts_is_named(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 3}\n{"prompt": "b"}\n')
    with pytest.raises(ValueError, match=r"texts.jsonl:2: expected"):
        workloads.read_texts(path)


def result(rate: float, **more: Any) -> dict[str, Any]:
    quantiles = {"0": 1.0, "50": 10.0, "99": 20.0, "100": 21.0}
    engine = {"prefix_hit_ratio": 0.5, "kv_usage_peak": 0.25, "preemptions": 1, "series": [{"s": 1.0, "kv_usage": 0.2}]}
    base = {"requests_per_s": rate, "generation_tokens_per_s": rate * 64, "requests": 4, "completed": 4, "errors": {}}
    return {**base, "ttft_ms": quantiles, "itl_ms": quantiles, "e2e_ms": quantiles, "engine": engine, **more}


def summary_of(chosen: plan.Plan, results: dict[str, list[dict[str, Any]]], **more: Any) -> dict[str, Any]:
    hardware = {"cpu": "c", "cores": 2, "memory_gib": 1.0, "cards": []}
    boots = {"a": {"boot": "a", "title": "t", "arguments": ["--x"], "model": "m", "version": "0.32.0"}}
    head = {
        "title": chosen.title,
        "date": "2030-01-01",
        "hardware": hardware,
        "boots": boots,
        "failures": {},
        "failed_as_expected": {},
        "to_make": 0,
    }
    return {**head, **figures.summarise(chosen, results), **more}


@pytest.fixture
def chosen(tmp_path: Path) -> plan.Plan:
    text = TWO + "ratios: [{name: r, over: a/y, under: a/x, aim: 1.1}]\nladder: [a/x, a/y]"
    return plan.load(write(tmp_path, text))


def test_a_ratio_is_of_medians_and_carries_the_widest_spread(chosen: plan.Plan) -> None:
    summary = figures.summarise(chosen, {"a/x": [result(10), result(12)], "a/y": [result(22), result(24), result(33)]})
    ratio = summary["ratios"]["r"]
    assert ratio["value"] == pytest.approx(24 / 11)
    assert (ratio["least"], ratio["most"]) == (22 / 12, 33 / 10)
    assert summary["rows"]["a/x"]["requests_per_s"] == {"median": 11, "least": 10, "most": 12, "repeats": 2}


def test_a_gain_within_the_spread_is_not_called_one(chosen: plan.Plan) -> None:
    apart = figures.summarise(chosen, {"a/x": [result(10), result(11)], "a/y": [result(12), result(13)]})
    touching = figures.summarise(chosen, {"a/x": [result(10), result(12.5)], "a/y": [result(12), result(13)]})
    assert [step["shown"] for step in apart["ladder"]] == [False, True]
    assert [step["shown"] for step in touching["ladder"]] == [False, False]


def test_what_was_not_measured_is_left_out_and_not_guessed(chosen: plan.Plan) -> None:
    summary = figures.summarise(chosen, {"a/x": [result(10)]})
    assert list(summary["rows"]) == ["a/x"]
    assert summary["ratios"] == {}
    assert [step["step"] for step in summary["ladder"]] == ["a/x"]


def test_the_reports_hold_rows_ratios_errors_and_pictures(chosen: plan.Plan) -> None:
    bad = result(9.0, completed=3, errors={"503: <busy>": 1})
    results = {"a/x": [result(10.0), bad], "a/y": [result(12.0)]}
    summary = summary_of(chosen, results, failures={"a/y 2": "no <memory>"})
    text, page = report.markdown(chosen, summary), report.page(chosen, summary, results)
    assert "| a/x | 9.50 (9.00 – 10.00) |" in text
    assert "- a/y 2: no <memory>" in text
    assert "Errors of requests that failed:\n\n- a/x: 503: <busy>\n" in text
    assert "Started with:\n\n- a: `--x`\n" in text
    assert summary["rows"]["a/x"]["failed"] == 1
    assert "no &lt;memory&gt;" in page
    assert "<memory>" not in page
    assert page.count("data:image/png;base64,") == 4
    assert "http" not in page.replace("http-equiv", "")  # self-contained


def test_rows_that_differ_in_what_is_in_flight_are_one_curve(chosen: plan.Plan) -> None:
    more = {"boot": "a", "workload": "chat"}
    results = {
        f"a/chat-{n}": [result(n / 2, in_flight=n, **more), result(n / 2 + 1, in_flight=n, **more)] for n in (64, 16)
    }
    results["a/y"] = [result(3.0, in_flight=16, boot="a", workload="short")]
    summary = {"rows": {key: {"requests_per_s": figures.spread([1.0])} for key in results}}
    (axes,) = dict(pictures(summary, results))["Throughput and latency"].axes
    assert [text.get_text() for text in axes.texts] == ["16 in flight", "64 in flight"]
    assert [len(line.get_xdata()) for line in axes.lines] == [2, 2, 1, 2]
    plt.close("all")


def test_what_went_on_over_time_is_drawn_of_what_there_is(chosen: plan.Plan) -> None:
    series = [{"s": 1.0, "kv_usage": 0.2, "hit_ratio": 0.5}, {"s": 2.0, "utilization.gpu": 80.0, "power.draw": 300.0}]
    summary = {"rows": {"a/x": {"requests_per_s": figures.spread([1.0])}}}
    drawn = dict(pictures(summary, {"a/x": [result(1, engine={"series": series})]}))
    cache, card = drawn["KV cache over time (last repeat)"], drawn["The card over time (last repeat)"]
    assert [[*line.get_ydata()] for axes in (*cache.axes, *card.axes) for line in axes.lines] == [
        [20],
        [50],
        [80],
        [300],
    ]
    bare = dict(pictures(summary, {"a/x": [result(1)]}))  # the series has the KV cache's usage and nothing else
    assert "The card over time (last repeat)" not in bare
    assert [axes.get_ylabel() for axes in bare["KV cache over time (last repeat)"].axes] == ["KV cache usage, %"]
    plt.close("all")


def test_a_report_of_nothing_measured_has_no_pictures_and_no_warnings(chosen: plan.Plan) -> None:
    summary = summary_of(chosen, {}, failures={"a": "no memory"}, failed_as_expected={"b": "no such flag"})
    page = report.page(chosen, summary, {})
    assert "data:image" not in page
    assert page.index("Failed, and was meant to") < page.index("no such flag") < page.index("no memory")


def test_a_measurement_beside_others_is_called_one(chosen: plan.Plan) -> None:
    summary = summary_of(chosen, {"a/x": [result(10, others=3)]})
    assert "a/x was measured beside 3 requests of somebody else" in report.markdown(chosen, summary)


def test_a_comparison_tells_change_from_spread_and_what_else_differs(chosen: plan.Plan, tmp_path: Path) -> None:
    old = summary_of(chosen, {"a/x": [result(10), result(11)], "a/y": [result(5)]})
    new = summary_of(chosen, {"a/x": [result(20), result(22)]})
    new["hardware"] = {**new["hardware"], "cores": 4}
    new["boots"] = {"a": {**new["boots"]["a"], "version": "0.33.0"}}
    found = compare.compare(old, new)
    assert list(found["rows"]) == ["a/x"]
    assert found["rows"]["a/x"]["requests_per_s"] == 2
    assert found["rows"]["a/x"]["shown"]
    assert found["differs"] == ["cores: 2 → 4", "a version: 0.32.0 → 0.33.0"]


def test_a_comparison_tells_where_a_measurement_of_one_name_asked_for_something_else(chosen: plan.Plan) -> None:
    old = summary_of(chosen, {"a/x": [result(10, workload="chat", in_flight=4)]})
    new = summary_of(chosen, {"a/x": [result(10, workload="long", in_flight=4)]})
    assert compare.compare(old, new)["differs"] == ["a/x workload: chat → long"]
    del old["rows"]["a/x"]["asked"]  # a summary of before it was told
    assert compare.compare(old, new)["differs"] == []


def test_runs_without_a_common_measurement_are_not_compared(
    chosen: plan.Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rows in (("one", {"a/x": [result(1)]}), ("two", {"a/y": [result(1)]})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(summary_of(chosen, rows)))
    assert compare.main([str(tmp_path / "one"), str(tmp_path / "two")]) == 1
    assert "no measurement in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "bench-compare: name two runs' folders: make bench-compare A=results/bench/one B="),
        ("none", "none: No such file or directory; A and B are folders of make bench"),
        ("empty", "empty/summary.json: No such file or directory; "),
        ("text", "text is no JSON; "),
        ("other.json", "other.json is not the summary of a make bench run: rows: is missing"),
        ("list.json", "list.json is not the summary of a make bench run: the file: expected keys and values"),
        ("half.json", "half.json is not the summary of a make bench run: rows.a/x.requests_per_s: is missing"),
        (
            "zero.json",
            "zero.json is not the summary of a make bench run: rows.a/x.requests_per_s.median: expected more",
        ),
        ("killed", "killed has no summary yet: its own make bench command writes one"),
    ],
)
def test_what_is_no_run_is_not_compared_in_one_line(
    chosen: plan.Plan, tmp_path: Path, given: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = summary_of(chosen, {"a/x": [result(1)]})
    (tmp_path / "summary.json").write_text(json.dumps(whole))
    (tmp_path / "empty").mkdir()
    (tmp_path / "killed" / "rows").mkdir(parents=True)
    (tmp_path / "killed" / "rows" / "a.x.0.json").write_text("{}")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "half.json").write_text(json.dumps({**whole, "rows": {"a/x": {}}}))
    none = {"a/x": {"requests_per_s": {"median": 0, "least": 0, "most": 0}}}
    (tmp_path / "zero.json").write_text(json.dumps({**whole, "rows": none}))
    (tmp_path / "text").write_text("# a report")
    (tmp_path / "other.json").write_text('{"ok": true}')
    assert compare.main([str(tmp_path), str(tmp_path / given) if given else ""]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("rate", "told"), [(11, "≥ 1.1, met"), (10.9, "≥ 1.1, missed")])
def test_an_aim_is_said_to_be_met_or_missed(chosen: plan.Plan, rate: float, told: str) -> None:
    summary = summary_of(chosen, {"a/x": [result(10)], "a/y": [result(rate)]})
    assert f"| {told} |" in report.markdown(chosen, summary)
    assert f"<td>{told}</td>" in report.page(chosen, summary, {})


def test_a_report_of_a_run_that_was_interrupted_says_that_it_is_incomplete(chosen: plan.Plan) -> None:
    results = {"a/x": [result(10)]}
    whole, part = summary_of(chosen, results), summary_of(chosen, results, to_make=3)
    assert "Incomplete" not in report.markdown(chosen, whole)
    assert "Incomplete: 3 more to measure; the same command goes on." in report.markdown(chosen, part)
    assert "Incomplete: 3 more" in report.page(chosen, part, {})
