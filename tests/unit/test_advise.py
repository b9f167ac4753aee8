"""`make advise` outside its rules: where it reads, what it adds, how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gateway.advice import advise as judge
from gateway.findings import Finding
from gateway.readings import (
    ENGINE_SERIES,
    GATEWAY_SERIES,
    Reading,
    Sample,
    facts,
    place,
    read_engine,
    read_gateway,
    samples_of,
)
from scripts import advise
from scripts.advising import SourceError, plans, sources
from scripts.planner import PlanError

GATEWAY = 'gateway_setting{{name="stall_s"}} 60\ngateway_replica_ready{{replica="http://engine:8000"}} 1\n{more}'
ENGINE = 'vllm:num_requests_running{{engine="0"}} 2\nvllm:prompt_tokens_total{{engine="0"}} {tokens}\nother_total 5\n'


def client(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(answer))


def pages(**by_host: str) -> Callable[[httpx.Request], httpx.Response]:
    def answer(request: httpx.Request) -> httpx.Response:
        page = by_host.get(request.url.host)
        return httpx.Response(404) if page is None or request.url.path != "/metrics" else httpx.Response(200, text=page)

    return answer


def test_engines_that_are_not_named_are_those_the_gateway_names() -> None:
    with client(pages(admin=GATEWAY.format(more=""), engine=ENGINE.format(tokens=7))) as http:
        (reading,) = sources.from_pages(http, "http://admin:9000", (), 0)
    assert reading.engines["engine:8000"].values["vllm:prompt_tokens_total"] == 7


def test_another_servers_page_is_no_gateway() -> None:
    with (
        client(pages(admin="go_goroutines 5\n")) as http,
        pytest.raises(SourceError, match="nothing to read at http://admin"),
    ):
        sources.from_pages(http, "http://admin:9000", (), 0)


def test_an_engine_without_a_gateway_is_judged_by_its_own_page() -> None:
    with client(pages(engine=ENGINE.format(tokens=7))) as http:
        found = facts(sources.from_pages(http, None, ("http://engine:8000",), 0))
    assert found.gateway is None
    assert [finding.kind for finding in judge(found)] == ["no_limit"]


def matrix(*series: tuple[dict[str, str], list[tuple[float, float]]]) -> httpx.Response:
    result = [{"metric": labels, "values": [[at, str(value)] for at, value in values]} for labels, values in series]
    return httpx.Response(200, json={"status": "success", "data": {"resultType": "matrix", "result": result}})


def series(
    name: str, /, *values: tuple[float, float], **labels: str
) -> tuple[dict[str, str], list[tuple[float, float]]]:
    return {"__name__": name, "instance": "engine:8000", **labels}, list(values)


def test_a_range_out_of_prometheus_becomes_one_reading_an_instant() -> None:
    answer = matrix(
        series("vllm:prompt_tokens_total", (10, 100), (20, 400), engine="0"),
        series("vllm:prompt_tokens_total", (10, 1), (20, 2), engine="1"),
        series("process_cpu_seconds_total", (10, 5), (20, 14)),
        series("process_cpu_seconds_total", (10, 500), (20, 900), instance="prometheus:9090"),
        series("gateway_setting", (20, 60), name="stall_s", instance="gateway:9000"),
    )
    with client(lambda _: answer) as http:
        readings = sources.from_prometheus(http, "http://prometheus:9090/", 60, end_s=20)
    found = facts(readings)
    assert [reading.at_s for reading in readings] == [10, 20]
    assert [engine.name for engine in found.engines] == ["engine:8000"]
    assert found.engines[0].prompt_tokens == 301
    assert found.engines[0].api_cores == pytest.approx(0.9)
    assert found.gateway is not None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(200, text="<html>"), "no Prometheus answers"),
        (httpx.Response(400, json={"status": "error"}), "no Prometheus answers"),
        (matrix(), "has no series"),
    ],
)
def test_what_is_no_prometheus_or_holds_nothing_of_ours_is_said_in_one_line(answer: httpx.Response, words: str) -> None:
    with client(lambda _: answer) as http, pytest.raises(SourceError, match=words):
        sources.from_prometheus(http, "http://prometheus:9090", 60)


def reading(at_s: float, **values: float) -> Reading:
    samples = [Sample(f"vllm:{name}", {"engine": "0"}, value) for name, value in values.items()]
    return Reading(at_s, {"engine:8000": read_engine(samples)})


def test_a_counter_that_begins_anew_gains_what_it_counted_since() -> None:
    counts = (100, 150, 20, 30)
    found = facts([reading(i, prompt_tokens_total=count, num_requests_running=i) for i, count in enumerate(counts)])
    assert found.engines[0].prompt_tokens == 50 + 20 + 10
    assert found.engines[0].restarted
    assert (found.engines[0].running_mean, found.engines[0].running_max) == (1.5, 3)


@pytest.mark.parametrize(
    ("admitted", "counted", "gained"), [((5, 8, 12), (10, 40, 70), 60), ((5, 1, 2), (50, 30, 40), 40)]
)
def test_a_gateway_that_restarted_gains_what_it_counted_since(
    admitted: tuple[int, ...], counted: tuple[int, ...], gained: float
) -> None:
    pages = [
        f'gateway_queue_seconds_count {n}\ngateway_prefix_tokens_total{{tenant="a",outcome="hit"}} {tokens}\n'
        for n, tokens in zip(admitted, counted, strict=True)
    ]
    readings = [Reading(i, {}, read_gateway(samples_of(page, GATEWAY_SERIES))) for i, page in enumerate(pages)]
    found = facts(readings).gateway
    assert found is not None
    assert found.prefix == {"a": {"hit": gained}}


def test_waiting_beside_a_full_pool_is_told_from_waiting_beside_one_with_room() -> None:
    states = ((0, 0.95), (3, 0.95), (3, 0.2), (3, 0.89))
    found = facts([reading(i, num_requests_waiting=n, kv_cache_usage_perc=u) for i, (n, u) in enumerate(states)])
    assert (found.engines[0].pressed_share, found.engines[0].held_share) == (0.25, 0.5)


def test_releases_that_count_the_prefix_cache_in_blocks_are_read_in_tokens() -> None:
    page = (
        'vllm:gpu_prefix_cache_queries_total{engine="0"} 10\nvllm:gpu_prefix_cache_hits_total{engine="0"} 4\n'
        'vllm:cache_config_info{block_size="16"} 1\n'
    )
    values = read_engine(samples_of(page, ENGINE_SERIES)).values
    assert values["vllm:gpu_prefix_cache_queries_total"] == 160
    both = page + 'vllm:prefix_cache_queries_total{engine="0"} 160\n'
    assert read_engine(samples_of(both, ENGINE_SERIES)).values["vllm:gpu_prefix_cache_queries_total"] == 10


def test_a_base_url_and_a_scrape_target_name_one_place() -> None:
    assert place("http://engine:8000") == place("engine:8000") == "engine:8000"


PRESSURE = Finding("kv_pressure", "a.", "b.", "c.", {})


def test_the_memory_plan_adds_its_tokens_where_more_pool_is_advised() -> None:
    (finding,) = plans.planned([PRESSURE], "llama3-8b-awq.rtx4090")
    sizes = finding.numbers["planned_pool_tokens"]
    now, *others = sizes.values()
    assert all(tokens > now for tokens in others)
    assert f"{now:,} tokens" in finding.change
    assert finding.change.startswith("c. By the memory plan")


@pytest.mark.parametrize("name", ["nothing", "smollm2-135m.cpu", "../../etc/passwd"])
def test_a_profile_that_has_no_plan_is_one_line(name: str) -> None:
    with pytest.raises(PlanError):
        plans.planned([PRESSURE], name)


def test_a_plan_is_made_only_where_more_pool_is_advised() -> None:
    others = [Finding("idle", "a.", "b.", "c.", {}), Finding("prefix_misses", "a.", "b.", "c.", {"cause": "short"})]
    assert plans.planned(others, "nothing") == others


@pytest.mark.parametrize(
    "argv",
    [["--window", "0"], ["--watch", "nan"], ["--prometheus", "http://x", "--engine", "http://y"], ["more"]],
)
def test_wrong_usage_ends_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        advise.parse_args(argv)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("advise: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "code"), [("idle", 0), ("kv_full_healthy", 0), ("kv_pressure", 1), ("engine_absent", 1)]
)
def test_the_exit_code_says_whether_something_limits(
    kind: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding: Any = Finding(kind, "It is so.", "By 5.", "Change it.", {"by": 5})
    monkeypatch.setattr(sources, "from_pages", lambda *_: [Reading(0, {}), Reading(15, {})])
    monkeypatch.setattr(advise, "advise", lambda _: [finding])
    assert advise.main(["--engine", "http://engine:8000", "--json"]) == code
    said = json.loads(capsys.readouterr().out)
    assert (said["seconds"], said["findings"][0]["kind"], said["findings"][0]["numbers"]) == (15, kind, {"by": 5})


def test_nothing_to_read_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert advise.main(["--engine", "http://127.0.0.1:1", "--window", "1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
