"""The live part: everything that is shipped, asked of a Prometheus that watches the real stack under real load."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from scripts.engine_args import History
from scripts.prove_observability import judge, queries
from scripts.prove_observability.lab import Lab
from scripts.prove_observability.queries import Query

SCRAPES = Path("tests/fixtures/scrapes")


@dataclass(frozen=True)
class Asked:
    """What one live run came to."""

    run: str
    verdicts: tuple[judge.Verdict, ...]
    mutants: int
    unnoticed: tuple[str, ...]
    unshipped_jobs: tuple[str, ...]
    series: int
    names: frozenset[str]
    stats_lines: int = 0  # of the engine's own periodic log

    @property
    def problems(self) -> list[str]:
        found = [f"{v.query.where}: {problem}" for v in self.verdicts for problem in v.problems]
        found += [f"renamed, and nobody noticed: {name}" for name in self.unnoticed]
        return found + [f"configs/prometheus/prometheus.yml does not scrape {job}" for job in self.unshipped_jobs]


def shipped(lab: Lab) -> list[Query]:
    """All queries, as they run in the lab: its interval, its windows."""
    interval = f"{lab.interval_s}s"
    macros = {"__rate_interval": f"{4 * lab.interval_s}s", "__interval": interval, "__range": "60s", "datasource": ""}
    return [*queries.dashboards(macros), *queries.rules(lab.folder / "rules")]


def older_names() -> frozenset[str]:
    """Every series on the pages of other releases, or in the captured history of all."""
    found: set[str] = set()
    for path in SCRAPES.glob("*.prom"):
        for family in text_string_to_metric_families(path.read_text(encoding="utf-8")):
            found.update(sample.name for sample in family.samples)
    history = History.load()
    for metric in {metric for version in history.versions for metric in history.engine(version).metrics}:
        histogram = metric.kind == "histogram"
        found.update(metric.name + suffix for suffix in (("_bucket", "_sum", "_count") if histogram else ("",)))
    return frozenset(found)


def ask(lab: Lab, run: str, start: float) -> Asked:
    """Judges every query over the time since `start`, and renames each of its series."""
    shipped_queries = shipped(lab)
    allowed = judge.excuses(run)
    end = time.time()
    seen = judge.Collected(lab.prometheus.series(start, end), older_names())
    verdicts = tuple(_verdicts(lab, shipped_queries, seen, allowed, start, end))
    sound = [verdict.query for verdict in verdicts if not verdict.problems]
    tried, unnoticed = judge.mutations(sound, seen, allowed)
    count = sum(len(sets) for sets in seen.series.values())
    # One engine exports it; whoever else has a series of that name must not hide that it is gone.
    names = frozenset(
        name for name, sets in seen.series.items() if any(labels.get("job") == "engine" for labels in sets)
    )
    return Asked(run, verdicts, tried, tuple(unnoticed), lab.unshipped_jobs, count, names)


def _verdicts(
    lab: Lab,
    asked: Sequence[Query],
    seen: judge.Collected,
    allowed: Sequence[judge.Excuse],
    start: float,
    end: float,
) -> Iterator[judge.Verdict]:
    for query in asked:
        first = judge.judge(query, seen, None, allowed)
        if first.problems:
            yield first
            continue
        yield judge.judge(query, seen, _returned(lab, query, seen, start, end), allowed)


def _returned(lab: Lab, query: Query, seen: judge.Collected, start: float, end: float) -> bool | None:
    if query.kind == "alert":
        return None  # its parts were looked at; that it fires is the faults' proof
    if query.kind == "annotation":
        return None  # a deploy or a restart need not have happened
    if query.kind == "record":
        wanted = dict(query.labels)
        recorded = seen.series.get(queries.name_of(query), ())
        return any(all(labels.get(key) == value for key, value in wanted.items()) for labels in recorded)
    return lab.prometheus.returned(query.expression, start, end, lab.interval_s)
