"""What the live proof calls a problem."""

from __future__ import annotations

import re

import pytest

from scripts.prove_observability import config, live, queries
from scripts.prove_observability.expressions import ExpressionError, selectors
from scripts.prove_observability.judge import Collected, Excuse, judge, mutations
from scripts.prove_observability.lab import JOBS
from scripts.prove_observability.queries import Query

SEEN = Collected(
    {"new_total": [{"job": "engine", "status": "200"}], "up": [{"job": "engine"}]}, frozenset({"old_total"})
)


def panel(expression: str) -> Query:
    return Query("panel", "board / panel", expression)


def test_selectors_of_every_kind_of_expression_are_found() -> None:
    found = selectors('-sum by (a) (rate(x{a="1"}[5m])) / (y or z) > 3 unless on (i) max_over_time(sum(w)[5m:1m])')
    assert [str(each) for each in found] == ['x{a="1"}', "y", "z", "w"]
    assert [each.stand_in for each in found] == [False, False, True, False]


def test_what_is_no_promql_is_a_problem() -> None:
    with pytest.raises(ExpressionError):
        selectors("sum(")
    assert judge(panel("sum("), SEEN, returned=None).problems


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(new_total[5m])", None),
        ('new_total{status=~"2.."}', None),
        ('new_total{status=~"5.."}', "no series has these labels"),
        ('new_total{code="200"}', "no series has these labels"),
        ("newer_total", "no such series"),
        ("new_total or old_total", None),
        ("old_total or new_total", "no such series: old_total"),
        ("new_total or older_total", "no such series: older_total"),
    ],
)
def test_names_and_labels_have_to_exist(expression: str, problem: str | None) -> None:
    problems = judge(panel(expression), SEEN, returned=True).problems
    assert (problem is None) == (not problems)
    assert problem is None or problem in problems[0]


def test_a_query_that_returns_nothing_is_a_problem_unless_reviewed() -> None:
    query = panel("new_total > 5")
    assert "returned nothing" in judge(query, SEEN, returned=False).problems[0]
    reviewed = judge(query, SEEN, returned=False, allowed=[Excuse("new_total > 5", "quiet")])
    assert (reviewed.problems, reviewed.excused) == ((), ("quiet",))


def test_a_reviewed_selector_still_needs_its_name() -> None:
    """An exception for missing labels never hides a renamed series."""
    allowed = [Excuse(".*", "anything goes")]
    assert not judge(panel('new_total{a="b"}'), SEEN, returned=True, allowed=allowed).problems
    assert judge(panel('gone_total{a="b"}'), SEEN, returned=True, allowed=allowed).problems


def test_every_renamed_series_is_noticed_and_an_unnoticed_one_is_told() -> None:
    assert mutations([panel("new_total / on () up")], SEEN, []) == (2, [])
    blind = Collected({**SEEN.series, "new_total_renamed": SEEN.series["new_total"]})
    assert mutations([panel("new_total / on () up")], blind, []) == (2, ["board / panel: new_total"])


def test_every_shipped_query_is_promql_once_filled_in() -> None:
    """Variables and macros are all known, so that none is asked as it stands in the file."""
    macros = {"__rate_interval": "4s", "__interval": "1s", "__range": "60s", "datasource": ""}
    found = [*queries.dashboards(macros), *queries.rules(queries.Path("configs/prometheus/rules"))]
    assert len(found) > 100
    for query in found:
        assert not re.search(r"\$[^\d]", query.expression), query.where  # $1 is label_replace's
        selectors(query.expression)


def test_older_names_are_those_of_other_releases_pages() -> None:
    assert {"vllm:gpu_cache_usage_perc", "vllm:prefix_cache_hits_total"} <= live.older_names()


def test_a_job_the_lab_does_not_know_is_refused_and_one_nobody_ships_is_named() -> None:
    shipped = {"global": {}, "scrape_configs": [{"job_name": "engine"}]}
    assert "node-exporter" in config.unshipped(shipped, JOBS)
    with pytest.raises(config.ConfigError, match="moon"):
        made = {"global": {}, "scrape_configs": [{"job_name": "moon"}]}
        config.prometheus(made, JOBS, interval="1s", alertmanager="127.0.0.1:1")


def test_the_shipped_relabelling_and_routes_stay() -> None:
    """Only where targets are found, and how long is waited, is the lab's own."""
    relabel = [{"target_label": "x", "replacement": "y"}]
    job = {"job_name": "engine", "relabel_configs": relabel, "dns_sd_configs": [{"names": ["engine"]}]}
    made = config.prometheus(
        {"global": {"scrape_interval": "5s"}, "scrape_configs": [job]}, JOBS, interval="1s", alertmanager="a:1"
    )
    assert made["scrape_configs"][0]["relabel_configs"] == relabel
    assert "dns_sd_configs" not in made["scrape_configs"][0]
    route = {
        "receiver": "t",
        "group_wait": "30s",
        "routes": [{"receiver": "p", "group_wait": "10s", "matchers": ["x"]}],
    }
    told = config.alertmanager({"route": route, "receivers": [{"name": "t"}, {"name": "p"}]}, "http://r/{}".format)
    assert told["route"]["routes"] == [{"receiver": "p", "group_wait": "1s", "matchers": ["x"]}]
    assert told["receivers"][1]["webhook_configs"] == [{"send_resolved": True, "url": "http://r/p"}]
