"""The loop: measure what is, search, confirm beyond the noise, soak, and only then put in place.

1. The current profile: KV tokens beside the memory plan's, prefill rate, saturation under the SLO, then repeats there.
2. Trials (search.py) while what comes after them still fits into the budget.
3. The best trial again, in an engine of its own, with repeats; then the current one again, so that a machine that got
   faster or slower in between is not taken for a gain.
4. Better only if its worst repeat beats the current one's best. Otherwise, or where its engine no longer starts, the
   profile stays as it is.
5. The winner with the gateway in front, limits in force: the merge limit by trying, then a soak. A soak that loses a
   request or breaks the SLO keeps everything as it was.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.bench import engine, figures
from scripts.bench.folder import write
from scripts.bench.plan import Row
from scripts.tune import decide
from scripts.tune.clock import Cost
from scripts.tune.probe import Probe, booted
from scripts.tune.search import FAILURES, search
from scripts.tune.task import Task

MERGE_LIMITS = (8, 16, 32)


class StageError(Exception):
    """What comes after the current profile's measurement and the trials failed; one line, stage and reason."""


@contextlib.contextmanager
def _stage(name: str) -> Iterator[None]:
    try:
        yield
    except FAILURES as error:
        raise StageError(f"{name} failed: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def tune(task: Task) -> dict[str, Any]:
    """The report: current, trials, best or why it was not confirmed, whether it replaces the current one, limits, soak.

    Raises one of search.FAILURES where the current profile itself can't be measured, StageError where a later stage
    can't be done, OSError where the folder can't be written.
    """
    begin = time.monotonic()
    task.say(f"the current profile ({task.budget_s / 60:.0f} min for all of it, {task.trials} trials at most)")
    with booted(task.setup, task.profile, "current") as probe:
        report, cost = _current(task, probe)
    level = report["current"]["in_flight"]
    report["trials"], report["resumed_trials"] = search(task, level or 1, begin, cost)
    best = max(report["trials"], key=lambda trial: trial["tokens_per_s"], default=None)
    report["replaced"], winner = False, dict(task.profile)
    if best and best["changes"] and best["tokens_per_s"] > report["current"]["tokens_per_s"]:
        _confirm(task, best, report)
        if "best" in report and decide.better(report["current"]["repeats"], report["best"]["repeats"], task.gain):
            report["replaced"], winner = True, {**task.profile, **best["changes"]}
    chosen = report["best"] if report["replaced"] else report["current"]
    task.say("limits and soak" if report["replaced"] else "the current profile stays; limits and soak")
    with _stage("limits and soak"), booted(task.setup, winner, "soak") as probe:
        report["limits"] = _limits(task, probe, chosen, begin)
        report["soak"] = _soak(task, probe, chosen["in_flight"], report["limits"])
        missed = not report["soak"]["held"] and not report["soak"]["lost"]
        if report["replaced"] and missed and chosen["in_flight"] > 1:
            # The point found lies at the SLO's edge. With half as many it may hold, and still serve more than before.
            task.say("  the SLO was missed in the soak; once more with half as many in flight")
            again = _soak(task, probe, chosen["in_flight"] // 2, report["limits"])
            more = decide.better(report["current"]["repeats"], [again["tokens_per_s"]["least"]], task.gain)
            report["soak"] = {**again, "held": again["held"] and more}
    if not report["soak"]["held"]:
        report["replaced"] = False
    report["spent_s"], report["budget_s"] = round(time.monotonic() - begin, 1), task.budget_s
    return report


def _current(task: Task, probe: Probe) -> tuple[dict[str, Any], Cost]:
    at = time.monotonic()
    prefill = probe.prefill_tokens_per_s()
    prefill_s = time.monotonic() - at
    level, rate = probe.saturate(start=4)
    rates = [rate, *(_kept(probe, level) for _ in range(task.repeats - 1))] if level else [0.0]
    task.say(f"  {prefill:.0f} prompt tokens/s; at most {rate:.0f} tokens/s within the SLO, {level} in flight")
    if not level:
        slo = task.setup.slo
        task.say(f"  not even one request at a time keeps TTFT {slo.ttft_s} s and ITL {slo.itl_s} s")
    current = {
        **_measured(probe, prefill, level, rates),
        "levels": {str(number): kept for number, kept in sorted(probe.levels.items())},
    }
    task.say(f"  {current['kv_tokens']:,} KV tokens" + _beside(task.planned_kv_tokens))
    found = {"facts": dict(probe.target.facts), "planned_kv_tokens": task.planned_kv_tokens, "current": current}
    return found, Cost(probe.boot_s, prefill_s, probe.serve_s)


def _beside(planned: int | None) -> str:
    return "" if planned is None else f", {planned:,} by the memory plan"


def _measured(probe: Probe, prefill: float, level: int, rates: list[float]) -> dict[str, Any]:
    return {
        "prefill_tokens_per_s": prefill,
        "decode_tokens_per_s": probe.decode,
        "kv_tokens": int(probe.target.facts.get("kv_cache_size_tokens", 0)),
        "in_flight": level,
        "tokens_per_s": rates[0],
        "repeats": rates,
    }


def _kept(probe: Probe, level: int) -> float:
    """Tokens/s of one more repeat; 0 where the SLO was broken, for a point that is not held is not served."""
    held, rate, _ = probe.serve(level)
    return rate if held else 0.0


def _confirm(task: Task, best: dict[str, Any], report: dict[str, Any]) -> None:
    """Puts the best trial's repeats into the report, or, where it fails this time, the reason: it is not better then.

    The current profile follows in either case. Where that fails, too, the trial's flags are not to blame.
    """
    task.say("the best trial again, then the current profile again")
    try:
        report["best"] = _again(task, best)
    except FAILURES as error:
        report["unconfirmed"] = {"changes": best["changes"], "failed": _reason(error)}
        task.say(f"  the best trial failed this time, so it is not better: {_reason(error)}")
    rates = report["current"]["repeats"]
    if level := report["current"]["in_flight"]:
        with _stage("the current profile again"), booted(task.setup, task.profile, "current-again") as probe:
            rates.append(_kept(probe, level))
    if "best" in report:
        spans = (f"{min(each):.0f} to {max(each):.0f}" for each in (report["best"]["repeats"], rates))
        task.say("  {} tokens/s against {}".format(*spans))


def _again(task: Task, best: dict[str, Any]) -> dict[str, Any]:
    level = best["in_flight"]
    with booted(task.setup, {**task.profile, **best["changes"]}, "best") as probe:
        prefill = probe.prefill_tokens_per_s()
        rates = [_kept(probe, level) for _ in range(task.repeats)]
        if level > 1 and not min(rates):  # found at the SLO's edge: half as many in flight may hold it every time
            level //= 2
            rates = [_kept(probe, level) for _ in range(task.repeats)]
        return {"changes": best["changes"], **_measured(probe, prefill, level, rates)}


def _limits(task: Task, probe: Probe, chosen: dict[str, Any], begin: float) -> dict[str, Any]:
    """Gateway settings by name. The merge limit is the least of those whose repeats nothing larger beats.

    Larger limits are tried while the soak still fits into the budget, the smallest always.
    """
    limits: dict[str, Any] = {
        "admission.max_queue_tokens": decide.queue_tokens(chosen["prefill_tokens_per_s"], task.setup.slo),
    }
    in_flight = max(MERGE_LIMITS[0], 2 * chosen["in_flight"])
    at, tried = time.monotonic(), dict[int, list[float]]()
    for limit in (limit for limit in MERGE_LIMITS if limit <= in_flight):
        took = (time.monotonic() - at) / max(1, len(tried))
        if tried and time.monotonic() + took + task.soak_s + probe.serve_s > begin + task.budget_s:
            task.say(f"  no time for a merge limit of {limit} or more")
            break
        with _gateway(task, probe, {"GATEWAY__BATCHING__MAX_PROMPTS": str(limit)}) as through:
            tried[limit] = [probe.short_answers(in_flight, through) for _ in range(task.repeats)]
    merge = MERGE_LIMITS[0]
    for limit, rates in tried.items():
        if limit > merge and decide.better(tried[merge], rates):
            merge = limit
    limits["batching.max_prompts"] = merge
    spans = "; ".join(f"{limit}: {min(rates):.1f} to {max(rates):.1f} req/s" for limit, rates in tried.items())
    task.say(f"  merge limit {merge} ({spans})")
    return limits


@contextlib.contextmanager
def _gateway(task: Task, probe: Probe, settings: dict[str, str]) -> Iterator[engine.Target]:
    """A gateway in front of the probe's engine."""
    with engine.gateway(probe.target.engine, settings, log=task.setup.folder / "gateway.log") as url:
        yield engine.look(probe.target.engine, url)


def _soak(task: Task, probe: Probe, level: int, limits: dict[str, Any]) -> dict[str, Any]:
    """The workload through the gateway with the limits in force, until soak_s are over."""
    settings = {f"GATEWAY__{name.replace('.', '__').upper()}": str(value) for name, value in limits.items()}
    in_flight = max(1, level)
    rounds: list[dict[str, Any]] = []
    times: list[tuple[list[float], list[float]]] = []
    with _gateway(task, probe, settings) as through:
        until = time.monotonic() + task.soak_s
        while not rounds or time.monotonic() < until:
            row = Row(
                name="soak",
                workload=task.setup.workload,
                requests=max(8, in_flight * task.setup.waves),
                in_flight=in_flight,
                through="gateway",
                answer_tokens=task.setup.answer_tokens,
            )
            rounds.append(probe.drive(row, through))
            times.append(probe.times())
    lost = sum(found["requests"] - found["completed"] for found in rounds)
    ttft, itl = decide.kept(times, task.setup.slo)
    return {
        "in_flight": in_flight,
        "rounds": len(rounds),
        "lost": lost,
        "ttft_kept": ttft,
        "itl_kept": itl,
        # A profile that never kept the SLO has none to keep here.
        "held": lost == 0 and (level == 0 or min(ttft, itl) >= decide.SHARE),
        "tokens_per_s": figures.spread([found["generation_tokens_per_s"] for found in rounds]),
    }


def save(path: Path, report: dict[str, Any], slo: decide.Slo) -> None:
    write(path, json.dumps({**report, "slo": asdict(slo)}, indent=2))
