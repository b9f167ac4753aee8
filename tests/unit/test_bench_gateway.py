"""The gateway's benchmark: its checks of answers, its arithmetic, its page."""

import json
from pathlib import Path

import pytest

from scripts.bench_gateway import __main__ as command
from scripts.bench_gateway import answers, parties, report
from scripts.bench_gateway.load import Address

RESULT = {
    "machine": {"cpus": 2, "processor": "A CPU", "python": "3.11.7", "busy_before": 0.03},
    "cores": {"party": 0, "source": 1, "load": 1},
    "versions": {"gateway": "abc1234", "vllm-router": "0.1.17", "LiteLLM": "1.110.2"},
    "plan": {
        "rounds": 3,
        "rate": 200.0,
        "in_flight": [64],
        "per_write": [1, 8],
        "step_ms": 5.0,
        "flood": [99, 8],
        "held": 1000,
    },
    "idle_mb": {"gateway": 60.0, "vllm-router": 80.0, "LiteLLM": 400.0},
    "took_s": 100.0,
}


def row(per_cpu_s: float, party: float = 1.0, load: float = 0.3, source: float = 0.3) -> dict[str, object]:
    return {"per_cpu_s": per_cpu_s, "wall_s": 1.0, "cpu_s": {"party": party, "load": load, "source": source}}


def latency(p50_ms: float, p99_ms: float) -> dict[str, object]:
    return {"p50_ms": p50_ms, "p99_ms": p99_ms, **row(100)}


def round_of(gateway_64: float, router_64: float = 10_000, added_ms: float = 0.4) -> dict[str, object]:
    def party(work: float, ms: float, memory_mb: float) -> dict[str, object]:
        kinds = {"one_in_flight": latency(0.1 + ms, 0.3 + ms), "open_loop": latency(0.2 + ms, 0.4 + 2 * ms)}
        streams = {"events_1": row(6 * work), "events_8": row(60 * work), "flood": row(99 * work)}
        return {**kinds, "in_flight_64": row(work), **streams, "held": {"memory_mb": memory_mb, **row(1)}}

    return {
        "direct": party(1, 0, 0),
        "gateway": party(gateway_64, added_ms, 90),
        "vllm-router": party(router_64, 0.1, 110),
        "LiteLLM": party(100, 10, 700),
    }


def result(*rounds: dict[str, object]) -> dict[str, object]:
    return {**RESULT, "rounds": list(rounds)}


def aim(found: dict[str, object], words: str) -> report.Aim:
    (one,) = [aim for aim in report.aims(found) if words in aim.what]
    return one


def test_what_is_added_is_taken_from_the_same_round_and_its_median_is_told_with_the_ends() -> None:
    found = result(round_of(5000, added_ms=0.4), round_of(5000, added_ms=0.3), round_of(5000, added_ms=0.7))
    figure = report.added(found["rounds"], "gateway", "open_loop", "p99_ms")  # type: ignore[arg-type]
    assert figure is not None
    assert [round(value, 3) for value in (figure.median, figure.least, figure.most)] == [0.8, 0.6, 1.4]


def test_a_ratio_is_taken_round_by_round_and_not_of_medians() -> None:
    found = result(round_of(4000, 8000), round_of(6000, 20_000), round_of(5000, 10_000))
    figure = aim(found, "64 in flight ÷ vllm-router").figure
    assert figure == report.Figure(0.5, 0.3, 0.5)


@pytest.mark.parametrize(
    ("rounds", "verdict"),
    [
        ([5000, 5000, 5000], "met"),
        ([3000, 3100, 3900], "missed"),
        ([3000, 5000, 5000], "met, not in every round"),
        ([3000, 3000, 5000], "missed, not in every round"),
        ([4000, 4000, 4000], "met"),
    ],
)
def test_an_aim_is_judged_by_its_median_and_says_where_rounds_disagree(rounds: list[int], verdict: str) -> None:
    assert aim(result(*map(round_of, rounds)), "64 in flight ÷ vllm-router").verdict == verdict


def test_an_upper_bound_is_missed_at_the_bound() -> None:
    assert aim(result(round_of(5000, added_ms=0.49)), "one in flight").verdict == "met"
    assert aim(result(round_of(5000, added_ms=0.51)), "one in flight").verdict == "missed"


def test_without_peers_their_aims_are_not_measured_rather_than_met() -> None:
    alone = {name: rows for name, rows in round_of(5000).items() if name in ("direct", "gateway")}
    verdicts = {aim.what: aim.verdict for aim in report.aims(result(alone))}
    assert {verdict for what, verdict in verdicts.items() if "÷" in what} == {"not measured"}
    assert verdicts["MB with 1000 open streams"] == "met"
    assert "LiteLLM 1" not in report.section(result(alone), "x.json")


def test_the_tables_hold_each_party_and_mark_a_pace_that_the_load_set() -> None:
    rounds = round_of(5000)
    rounds["vllm-router"]["in_flight_64"] = row(10_000, party=0.6, load=0.5, source=0.48)  # type: ignore[index]
    text = report.section(result(rounds), "benchmarks/x.json")
    (ours,) = [line for line in text.splitlines() if line.startswith("| **the gateway** | 5,000")]
    (router,) = [line for line in text.splitlines() if line.startswith("| vllm-router 0.1.17 | 10,000")]
    assert "†" not in ours
    assert router.startswith("| vllm-router 0.1.17 | 10,000 (10,000 – 10,000) † | 60,000 (")
    assert "[JSON](benchmarks/x.json)" in text
    assert "| LiteLLM 1.110.2 | 10.00 (10.00 – 10.00) | 10.00 (10.00 – 10.00) |" in text


def test_a_peer_that_failed_has_no_figure_and_is_told_of() -> None:
    rounds = round_of(5000)
    rounds["LiteLLM"]["in_flight_64"] = {"failed": "it answered 503"}  # type: ignore[index]
    found = result(round_of(5000), rounds)
    assert aim(found, "64 in flight ÷ LiteLLM").verdict == "not measured"
    assert aim(found, "64 in flight ÷ vllm-router").verdict == "met"
    assert "No figure for LiteLLM, in flight 64: it answered 503." in report.section(found, "x.json")


def test_another_checkouts_gateway_is_started_there_and_compared_round_by_round() -> None:
    key = ("secret", "digest")
    here = parties.gateway(parties.GATEWAY, "py", (1, 2), "http://e", Path("/run"), key, 15)
    other = parties.gateway(parties.BESIDE, "py", (3, 4), "http://e", Path("/run"), key, 15, "/before")
    assert other.command == ("env", "-C", "/before", "py", "-m", "gateway")
    assert here.command == ("py", "-m", "gateway")
    assert not here.files.keys() & other.files.keys()
    assert here.environment["GATEWAY__LEDGER__PATH"] != other.environment["GATEWAY__LEDGER__PATH"]
    rounds = [
        {**round_of(ours), parties.BESIDE: round_of(theirs)["gateway"]} for ours, theirs in ((4, 2), (9, 3), (5, 5))
    ]
    text = report.section({**result(*rounds), "idle_mb": {**RESULT["idle_mb"], parties.BESIDE: 60.0}}, "x.json")  # type: ignore[dict-item]
    assert "| requests, 64 in flight | 2.00 (1.00 – 3.00) |" in text
    assert "the other gateway" not in report.section(result(round_of(5000)), "x.json")


def test_what_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.parsed(["--beside", str(tmp_path)])
    assert f"--beside {tmp_path}: no checkout with a gateway in it" in capsys.readouterr().err


def test_the_page_keeps_what_stands_around_its_marks() -> None:
    page = report.page(f"before\n\n{report.BEGIN}\nold\n{report.END}\nafter\n", ["one", "two"])
    assert page.startswith(f"before\n\n{report.BEGIN}\n<!-- Written by")
    assert "old" not in page
    assert page.endswith(f"one\n\ntwo\n\n{report.END}\nafter\n")
    assert report.page(page, ["one", "two"]) == page
    with pytest.raises(ValueError, match="no single"):
        report.page("nothing", [])


def test_the_page_in_the_repository_is_what_its_reports_say() -> None:
    assert command.write_page(check=True) == 0


def test_a_whole_answer_may_have_another_id_but_no_other_word_or_count() -> None:
    body = answers.whole_answer(1, with_ids=False)
    assert answers.whole_fault(body) is None
    assert answers.whole_fault(body.replace(b"cmpl-bench", b"cmpl-other")) is None
    for other in (body.replace(b"word3", b"word4"), body.replace(b":16", b":17"), body[:-1], b"{}"):
        assert answers.whole_fault(other) is not None, other
    assert answers.whole_fault(answers.whole_answer(2, with_ids=False)) is not None


def test_a_stream_written_anew_passes_and_one_that_lost_anything_does_not() -> None:
    events = answers.stream_events(5, usage=False)
    anew = [b"data: " + json.dumps(json.loads(event[6:])).encode() + b"\n\n" for event in events[:-1]]
    whole = [*anew, events[-1]]
    assert answers.stream_fault(b"".join(events), 5) is None
    assert answers.stream_fault(b"".join(whole), 5) is None
    for lost in range(1, 8):
        assert answers.stream_fault(b"".join(whole[:lost] + whole[lost + 1 :]), 5) is not None, lost
    assert answers.stream_fault(b"".join([*whole[:2], whole[3], whole[2], *whole[4:]]), 5) is not None


def test_the_peers_are_started_as_the_plan_says() -> None:
    router = parties.router("py", (1, 2), "http://127.0.0.1:9")
    assert router.command[:3] == ("py", "-m", "vllm_router.launch_router")
    assert "http://127.0.0.1:9" in router.command
    litellm = parties.litellm("py", 1, "http://127.0.0.1:9", Path("/run"))
    assert "--num_workers" in litellm.command
    assert "http://127.0.0.1:9/v1" in litellm.files["litellm.yaml"]
    assert parties.MASTER_KEY in litellm.files["litellm.yaml"]
    assert litellm.address.headers == {"Authorization": f"Bearer {parties.MASTER_KEY}"}
    assert b"\r\nAuthorization: Bearer sk-bench\r\n" in Address(1, litellm.address.headers).request("/x", b"{}")


def test_an_interpreter_that_has_no_peers_is_said_to_have_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert parties.versions("/nonexistent/python") == {}
    assert command.main(["--peers", "--peer-python", "/nonexistent/python"]) == 1
    assert "without vllm-router and LiteLLM; `make bench-gateway ARGS=--peers`" in capsys.readouterr().err
