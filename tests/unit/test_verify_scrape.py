"""The metrics pages of releases from 0.6 on in one form, and pages of other servers."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from scripts.checks.proof import ProofError
from scripts.checks.proof.scrape import parse_scrape
from scripts.engine_args import History

ENGINES = Path(__file__).parents[1] / "fixtures" / "engines"
PAGES = sorted(path.name for path in ENGINES.glob("*.metrics"))


def page(name: str) -> str:
    return (ENGINES / f"{name}.metrics").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_no_fixture_has_a_series_that_its_release_does_not_export(name: str) -> None:
    version = re.search(r"\d+\.\d+\.\d+", name)
    assert version is not None
    engine = History.load().engine(version[0])
    names = set(re.findall(r"^(vllm:\w+)", (ENGINES / name).read_text(encoding="utf-8"), re.MULTILINE))
    assert len(names) > 4
    created = {series for series in names if series.endswith("_created")}  # prometheus_client's own
    assert not [series for series in names - created if not engine.has_metric(series)]


@pytest.mark.parametrize(
    ("name", "usage", "queries", "hits", "hit_rate", "block_size", "blocks", "tokens", "caching"),
    [
        ("derived-0.6.3", 0.0, None, None, 0.25, 16, 7615, None, True),
        ("derived-0.6.3-prefix-off", 0.0, None, None, -1.0, 16, 7615, None, False),
        ("derived-0.8.5", 0.0, 64.0, 32.0, None, 16, None, None, True),
        ("derived-0.10.2", 0.01, 1056.0, 512.0, None, 16, 15257, None, True),
        ("derived-0.26.0", 0.002, 0.0, 0.0, None, 16, 62516, 1000256, True),
        ("recorded-0.32.0-cpu", 0.0, 0.0, 0.0, None, 32, 728, 23296, True),
    ],
)
def test_new_and_old_names_mean_the_same(
    name: str,
    usage: float,
    queries: float | None,
    hits: float | None,
    hit_rate: float | None,
    block_size: int,
    blocks: int | None,
    tokens: int | None,
    caching: bool,
) -> None:
    found = parse_scrape(page(name))
    assert (found.usage, found.queries, found.hits, found.hit_rate) == (usage, queries, hits, hit_rate)
    assert (found.block_size, found.blocks, found.tokens, found.prefix_caching) == (block_size, blocks, tokens, caching)
    assert found.engines == 1


def test_a_release_with_both_names_is_not_counted_twice() -> None:
    found = parse_scrape(page("derived-0.10.2"))
    assert found.usage_name == "vllm:kv_cache_usage_perc"
    assert found.hits_name == "vllm:prefix_cache_hits_total"
    assert found.hits == 512


def test_a_running_request_makes_the_engine_busy() -> None:
    assert not parse_scrape(page("derived-0.26.0")).idle
    assert parse_scrape(page("recorded-0.32.0-cpu")).idle


def test_several_engines_behind_one_port_are_told() -> None:
    both = "\n".join(line.replace('engine="0"', 'engine="1"') for line in page("derived-0.10.2").splitlines())
    samples = [line for line in both.splitlines() if line.startswith("vllm:")]
    # One metric's samples stand together on a real page.
    lines = []
    for line in page("derived-0.10.2").splitlines():
        lines.append(line)
        if line.startswith("vllm:"):
            lines += [other for other in samples if other.split("{")[0] == line.split("{")[0]]
    found = parse_scrape("\n".join(lines) + "\n")
    assert (found.engines, found.hits, found.usage) == (2, 1024, 0.01)


def other_server() -> str:
    registry = CollectorRegistry()
    Counter("http_requests", "Another server's.", registry=registry).inc()
    return generate_latest(registry).decode()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (other_server(), "not a vLLM engine's page"),
        ("", "not a vLLM engine's page"),
        ("<!doctype html><title>404</title>\n", "no metrics page"),
        ('{"detail":"Not Found"}', "no metrics page"),
    ],
)
def test_another_servers_page_is_refused(text: str, why: str) -> None:
    with pytest.raises(ProofError, match=why):
        parse_scrape(text)
