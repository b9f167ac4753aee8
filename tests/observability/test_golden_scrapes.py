"""The recording rules against every recorded release."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from prometheus_client import Metric

from scripts.engine_args import History
from scripts.golden_scrapes import derived
from scripts.golden_scrapes.__main__ import BUILDS, PINNED
from tests.observability import golden

RECORDED = [PINNED, *(build.version for build in BUILDS)]
PAGES = [*RECORDED, *(f"derived-{name}" for name in derived.RELEASES)]
# Records of engine.yml that a release has nothing for, and why.
_NO_COUNTERS = {
    "engine:prefix_cache": "it exports no hits and queries",
    "engine:cache_hit": "likewise",
}
_V0_6 = {**_NO_COUNTERS, "model:request_queue_time_seconds": "it does not measure the queue"}
ABSENT = {
    "0.8.5": {**_NO_COUNTERS, "vllm:cache_hit_ratio": "nor a ratio: the V0 engine tells nothing of its prefix cache"},
    "derived-0.6.3": _V0_6,
    "derived-0.6.3-prefix-off": {**_V0_6, "vllm:cache_hit_ratio": "prefix caching is off, which it says as -1"},
}


def _total(page: dict[str, Metric], *names: str) -> float | None:
    """The counter's value under the first of the names the page has, summed over labels."""
    for name in names:
        if name in page:
            return sum(s.value for s in page[name].samples if s.name == f"{name}_total")
    return None


def _gauge(page: dict[str, Metric], *names: str) -> float | None:
    for name in names:
        if name in page:
            return max(s.value for s in page[name].samples)
    return None


@pytest.mark.parametrize("name", PAGES)
def test_the_two_ratios_come_out_right(name: str, tmp_path: Path) -> None:
    """On each release: hits over queries, or its own gauge where that is all there is and it is not -1."""
    page = golden.families(name)
    hits = _total(page, "vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits")
    queries = _total(page, "vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries")
    told = _gauge(page, "vllm:gpu_prefix_cache_hit_rate")
    ratio: float | None
    if hits is not None and queries:
        ratio = hits / queries
        assert 0 < ratio < 1
    else:
        ratio = told if told is not None and told >= 0 else None
    usage = _gauge(page, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    assert usage is not None
    wanted: dict[str, float | None] = {"max(vllm:gpu_cache_usage_ratio)": usage}
    if ratio is None:
        wanted["sum(vllm:cache_hit_ratio)"] = None
    else:
        wanted[f"abs(sum(vllm:cache_hit_ratio) - {ratio!r}) < bool 1e-9"] = 1
    assert golden.promtool(tmp_path, page, wanted) == ""


@pytest.mark.parametrize("name", PAGES)
def test_every_engine_record_has_a_value_and_none_is_nan(name: str, tmp_path: Path) -> None:
    """Each record of engine.yml, on each release that has what it is made of."""
    rules = yaml.safe_load((golden.RULES / "engine.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    records = dict.fromkeys(rule["record"] for rule in rules if "record" in rule)
    assert len(records) > 20
    page = golden.families(name)
    absent = ABSENT.get(name, {})
    wanted: dict[str, float | None] = {}
    for record in records:
        missing = any(record.startswith(prefix) for prefix in absent)
        wanted[f"count({record}) > bool 0"] = None if missing else 1
        wanted[f"count({record} != {record}) or vector(0)"] = 0
    assert golden.promtool(tmp_path, page, wanted) == ""


def test_a_wrong_ratio_would_be_seen(tmp_path: Path) -> None:
    page = golden.families(PINNED)
    said = golden.promtool(tmp_path, page, {"sum(vllm:cache_hit_ratio) < bool 0.5": 1})
    assert "FAILED" in said


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_where_it_is_from_and_has_the_releases_names(name: str) -> None:
    """No series on a page that the captured history of its release does not know."""
    text = (golden.SCRAPES / f"{name}.prom").read_text(encoding="utf-8")
    version = name.removeprefix("derived-").removesuffix("-prefix-off").removesuffix("-v1")
    first = text.splitlines()[0]
    assert first.startswith("# derived from" if name.startswith("derived-") else f"# recorded from vLLM {version}")
    engine = History.load().engine(version)
    names = {s.name for f in golden.families(name).values() for s in f.samples if s.name.startswith("vllm:")}
    assert sorted(n for n in names if not n.endswith("_created") and not engine.has_metric(n)) == []
