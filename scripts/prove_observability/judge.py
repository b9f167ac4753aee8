"""Whether a query can be believed: its names exist, its labels select something, it returned data. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from scripts.prove_observability.expressions import ExpressionError, Selector, selectors
from scripts.prove_observability.queries import Query

REVIEWED = Path(__file__).with_name("reviewed.yaml")
# Prometheus makes these itself, out of what we ship.
BUILT_IN = frozenset({"up", "ALERTS", "ALERTS_FOR_STATE", "scrape_duration_seconds", "scrape_samples_scraped"})


@dataclass(frozen=True)
class Collected:
    """What a live run saw. series: name -> label sets; older: names that only other releases' pages have."""

    series: Mapping[str, Sequence[Mapping[str, str]]]
    older: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Excuse:
    """A reviewed exception: what may be empty, and why. `when`: the run it holds in, or in all."""

    selector: str
    why: str
    when: str = "always"


@dataclass(frozen=True)
class Verdict:
    """problems: each a line that fails the proof. excused: the reasons that were needed."""

    query: Query
    problems: tuple[str, ...]
    excused: tuple[str, ...] = field(default=())


def excuses(run: str, path: Path = REVIEWED) -> list[Excuse]:
    """The reviewed list, as it holds for this run."""
    listed = [Excuse(**entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))]
    return [excuse for excuse in listed if excuse.when in ("always", run)]


def judge(query: Query, seen: Collected, returned: bool | None, allowed: Iterable[Excuse] = ()) -> Verdict:
    """`returned`: whether the whole expression gave a number; None where that is not asked (an alert is quiet)."""
    try:
        found = selectors(query.expression)
    except ExpressionError as error:
        return Verdict(query, (f"not PromQL: {error}",))
    allowed = list(allowed)
    problems, excused = [], []
    for selector in found:
        problem = _problem(selector, seen)
        if problem is None:
            continue
        excuse = next((each for each in allowed if re.fullmatch(each.selector, str(selector))), None)
        exists = selector.name in seen.series or selector.name in seen.older
        if excuse is not None and (exists or excuse.when != "always"):
            excused.append(excuse.why)
        else:
            problems.append(problem)
    if returned is False and not problems and not excused:
        whole = next((each for each in allowed if re.fullmatch(each.selector, query.expression)), None)
        if whole is None:
            problems.append(f"returned nothing: {query.expression}")
        else:
            excused.append(whole.why)
    return Verdict(query, tuple(problems), tuple(dict.fromkeys(excused)))


def _problem(selector: Selector, seen: Collected) -> str | None:
    if not selector.name:
        return f"no name: {selector}"
    series = seen.series.get(selector.name)
    if series is None:
        if selector.stand_in and selector.name in seen.older:
            return None
        return f"no such series: {selector.name}"
    if not any(selector.matches(labels) for labels in series):
        return f"no series has these labels: {selector}"
    return None


def mutations(queries: Iterable[Query], seen: Collected, allowed: Sequence[Excuse]) -> tuple[int, list[str]]:
    """Renames each series of each query in turn. Returns how many were tried, and those that went unnoticed."""
    tried, unnoticed = 0, []
    for query in queries:
        for name in dict.fromkeys(selector.name for selector in selectors(query.expression)):
            renamed = re.sub(rf"(?<![\w:]){re.escape(name)}(?![\w:])", f"{name}_renamed", query.expression)
            mutant = Query(query.kind, query.where, renamed, query.instant, query.labels)
            tried += 1
            if not judge(mutant, seen, returned=True, allowed=allowed).problems:
                unnoticed.append(f"{query.where}: {name}")
    return tried, unnoticed
