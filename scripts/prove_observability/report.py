"""What a proof came to: results as JSON, a table for docs/alerts-proof.md. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.prove_observability.faults import Outcome
from scripts.prove_observability.live import Asked


def result(
    run: Mapping[str, Any],
    asked: Sequence[Asked],
    outcomes: Sequence[Outcome],
    known: Sequence[tuple[str, str]],
    broken: Sequence[str],
    earlier: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """All figures, and the problems of all of it. `known`: alerts (name, severity) that some fault has to raise."""
    kept = earlier or {"runs": [], "queries": [], "alerts": []}
    rounds, faults = {one.run for one in asked}, {outcome.fault for outcome in outcomes}
    queries = [one for one in kept["queries"] if one["run"] not in rounds] + [_run(one, asked[0]) for one in asked]
    alerts = [one for one in kept["alerts"] if one["fault"] not in faults]
    alerts += [_alert(outcome) for outcome in outcomes]
    raised = {(one["alert"], one["severity"]) for one in alerts if one["problem"] is None}
    problems = [problem for one in queries for problem in one["problems"]]
    problems += [f"{one['fault']}: {one['problem']}" for one in alerts if one["problem"]]
    problems += [f"no fault raised {name} ({severity})" for name, severity in known if (name, severity) not in raised]
    problems += broken
    return {
        "ok": not problems,
        "problems": problems,
        "runs": [*kept["runs"], dict(run)],
        "queries": queries,
        "alerts": alerts,
    }


def _alert(outcome: Outcome) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(outcome).items() if key != "told_at"}


def _run(run: Asked, first: Asked) -> dict[str, Any]:
    kinds = Counter(verdict.query.kind for verdict in run.verdicts)
    return {
        "run": run.run,
        "series": run.series,
        "asked": dict(sorted(kinds.items())),
        "renamed": run.mutants,
        "engine_series_gone": sorted(first.names - run.names),
        "engine_stats_lines": run.stats_lines,
        "excused": [
            {"where": verdict.query.where, "why": list(verdict.excused)} for verdict in run.verdicts if verdict.excused
        ],
        "problems": run.problems,
    }


def document(result: Mapping[str, Any]) -> str:
    """docs/alerts-proof.md."""
    run = result["runs"][-1]
    head = (
        f"Written by `make prove-observability` from docs/results/observability.json ({run['date']}, "
        f"{run['machine']}). Real engine, gateway, Prometheus, Alertmanager and node exporter; windows times "
        f"{run['window_scale']:g}, one scrape a second. Seconds to fire: from the moment the fault is done until "
        "Alertmanager's webhook arrives. Seconds to clear: from when its mending begins, restarts included. With the "
        "windows of configs/prometheus/rules an alert takes as long as its `for` says."
    )
    lines = [
        "# Alerts that were seen to fire",
        "",
        head,
        "",
        "| alert | severity | the fault | fires after | clears after | told to |",
        "|---|---|---|---|---|---|",
    ]
    for one in result["alerts"]:
        told = one["receiver"] or (f"nobody: {', '.join(one['inhibited_by'])} says it" if one["inhibited_by"] else "–")
        cells = (one["alert"], one["severity"] or "", one["how"], _s(one["fired_s"]), _s(one["cleared_s"]), told)
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "GPU alerts run against a recorded page (tests/fixtures/scrapes/derived-dcgm.prom).", ""]
    lines += [
        "## Queries",
        "",
        "| run | panels | records | alerts | variables | annotations | series renamed, all noticed |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for run in result["queries"]:
        counts = [str(run["asked"].get(kind, 0)) for kind in ("panel", "record", "alert", "variable", "annotation")]
        lines.append("| " + " | ".join((run["run"], *counts, str(run["renamed"]))) + " |")
    excused = sorted({(why, one["where"]) for run in result["queries"] for one in run["excused"] for why in one["why"]})
    if excused:
        lines += ["", "Reviewed exceptions (scripts/prove_observability/reviewed.yaml):", ""]
        lines += [f"- {where}: {why}" for why, where in excused]
    return "\n".join(lines) + "\n"


def _s(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:g} s"
