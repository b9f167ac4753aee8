"""The loop: measure what is, search, confirm beyond the noise, soak, and only then put in place.

1. The current profile: prefill rate, KV tokens, saturation under the SLO, then repeats at that point.
2. Trials within the budget: an Optuna study over space.py, kept in a file, so that an interrupted run goes on.
3. The best trial again, in an engine of its own, with repeats; then the current one again, so that a machine that got
   faster or slower in between is not taken for a gain.
4. Better only if its worst repeat beats the current one's best. Otherwise the profile stays as it is.
5. The winner with the gateway in front, limits in force: the merge limit by trying, then a soak. A soak that loses a
   request or breaks the SLO keeps everything as it was.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from scripts.bench import drive, engine, figures
from scripts.bench.plan import Row
from scripts.tune import decide, space
from scripts.tune.probe import Probe, Setup, booted

MERGE_LIMITS = (8, 16, 32)
FAILURES = (engine.StartError, drive.DriveError, httpx.HTTPError, OSError)


@dataclass(frozen=True)
class Task:
    """What is tuned, within which bounds."""

    setup: Setup
    profile: dict[str, Any]  # as it is now
    candidates: dict[str, list[Any]]
    budget_s: float  # for the search; what comes after it is as long as it is
    trials: int
    repeats: int
    soak_s: float
    seed: int
    say: Callable[[str], None]


def tune(task: Task) -> dict[str, Any]:
    """The report: current, trials, best, whether it replaces the current one, limits, soak. Raises one of FAILURES
    where the current profile itself can't be measured."""
    begin = time.monotonic()
    task.say("the current profile")
    with booted(task.setup, task.profile, "current") as probe:
        report = _current(task, probe)
    level = report["current"]["in_flight"]
    report["trials"] = _search(task, level or 1, begin, report)
    best = max(report["trials"], key=lambda trial: trial["tokens_per_s"], default=None)
    report["replaced"], winner = False, dict(task.profile)
    if best and best["changes"] and best["tokens_per_s"] > report["current"]["tokens_per_s"]:
        report["best"] = _confirm(task, best, report)
        if decide.better(report["current"]["repeats"], report["best"]["repeats"]):
            report["replaced"], winner = True, {**task.profile, **best["changes"]}
    chosen = report["best"] if report["replaced"] else report["current"]
    task.say("limits and soak" if report["replaced"] else "the current profile stays; limits and soak")
    with booted(task.setup, winner, "soak") as probe:
        report["limits"] = _limits(task, probe, chosen)
        report["soak"] = _soak(task, probe, chosen["in_flight"], report["limits"])
    if not report["soak"]["held"]:
        report["replaced"] = False
    report["spent_s"] = time.monotonic() - begin
    return report


def _current(task: Task, probe: Probe) -> dict[str, Any]:
    prefill = probe.prefill_tokens_per_s()
    level, rate = probe.saturate(start=4)
    rates = [rate, *(_kept(probe, level) for _ in range(task.repeats - 1))] if level else [0.0]
    task.say(f"  {prefill:.0f} prompt tokens/s; at most {rate:.0f} tokens/s within the SLO, {level} in flight")
    return {
        "facts": dict(probe.target.facts),
        "current": {
            "prefill_tokens_per_s": prefill,
            "kv_tokens": int(probe.target.facts.get("kv_cache_size_tokens", 0)),
            "in_flight": level,
            "tokens_per_s": rate,
            "levels": {str(number): kept for number, kept in sorted(probe.levels.items())},
            "repeats": rates,
        },
    }


def _kept(probe: Probe, level: int) -> float:
    """Tokens/s of one more repeat; 0 where the SLO was broken, for a point that is not held is not served."""
    held, rate, _ = probe.serve(level)
    return rate if held else 0.0


def _search(task: Task, start: int, begin: float, report: dict[str, Any]) -> list[dict[str, Any]]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = JournalStorage(JournalFileBackend(str(task.setup.folder / "study.journal")))
    study = optuna.create_study(
        study_name="tune",
        storage=storage,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=task.seed, n_startup_trials=4, constant_liar=False),
        load_if_exists=True,
    )
    if not study.trials:
        # The middle of every list first: a bad profile is then left behind at once.
        study.enqueue_trial({name: values[len(values) // 2] for name, values in task.candidates.items()})
    done = [trial for trial in study.trials if trial.state.is_finished()]

    def objective(trial: optuna.Trial) -> float:
        flags = {name: trial.suggest_categorical(name, values) for name, values in task.candidates.items()}
        changes = space.changed(task.profile, flags)
        trial.set_user_attr("changes", changes)
        merged = {**task.profile, **changes}
        if not changes or not space.fits(merged):
            raise optuna.TrialPruned
        task.say(f"trial {trial.number + 1}: {' '.join(f'{k}={v}' for k, v in changes.items())}")
        try:
            with booted(task.setup, merged, f"trial-{trial.number}") as probe:
                level, rate = probe.saturate(start)
        except FAILURES as error:
            trial.set_user_attr("failed", str(error) or type(error).__name__)
            task.say(f"  failed and passed over: {error}")
            raise optuna.TrialPruned from error
        trial.set_user_attr("in_flight", level)
        task.say(f"  {rate:.0f} tokens/s within the SLO, {level} in flight")
        return rate

    while len([t for t in study.trials if t.value is not None]) < task.trials and len(study.trials) < 4 * task.trials:
        if time.monotonic() - begin > task.budget_s:
            break
        study.optimize(objective, n_trials=1)
    report["resumed_trials"] = len(done)
    return [
        {
            "changes": trial.user_attrs.get("changes", {}),
            "tokens_per_s": trial.value if trial.value is not None else 0.0,
            "in_flight": trial.user_attrs.get("in_flight", 0),
            "failed": trial.user_attrs.get("failed"),
        }
        for trial in study.trials
        if trial.value is not None or "failed" in trial.user_attrs
    ]


def _confirm(task: Task, best: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    task.say("the best trial again, then the current profile again")
    with booted(task.setup, {**task.profile, **best["changes"]}, "best") as probe:
        prefill = probe.prefill_tokens_per_s()
        rates = [_kept(probe, best["in_flight"]) for _ in range(task.repeats)]
        facts = dict(probe.target.facts)
    level = report["current"]["in_flight"]
    if level:
        with booted(task.setup, task.profile, "current-again") as probe:
            report["current"]["repeats"].append(_kept(probe, level))
    return {
        "changes": best["changes"],
        "prefill_tokens_per_s": prefill,
        "kv_tokens": int(facts.get("kv_cache_size_tokens", 0)),
        "in_flight": best["in_flight"],
        "tokens_per_s": best["tokens_per_s"],
        "repeats": rates,
    }


def _limits(task: Task, probe: Probe, chosen: dict[str, Any]) -> dict[str, Any]:
    """Gateway settings by name. The merge limit is the least of those whose repeats nothing larger beats."""
    limits: dict[str, Any] = {
        "admission.max_queue_tokens": decide.queue_tokens(chosen["prefill_tokens_per_s"], task.setup.slo),
    }
    in_flight = max(MERGE_LIMITS[0], 2 * chosen["in_flight"])
    tried: dict[int, list[float]] = {}
    for limit in (limit for limit in MERGE_LIMITS if limit <= in_flight):
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
    with _gateway(task, probe, settings) as through:
        until = time.monotonic() + task.soak_s
        while not rounds or time.monotonic() < until:
            row = Row(
                name="soak",
                workload=task.setup.workload,
                requests=max(8, in_flight * task.setup.waves),
                in_flight=in_flight,
                through="gateway",
            )
            rounds.append(probe.drive(row, through))
    lost = sum(found["requests"] - found["completed"] for found in rounds)
    held = sum(decide.within(found, task.setup.slo) for found in rounds)
    # One round in four may miss, as 5 % of the tokens may: the point was chosen at the SLO's edge.
    return {
        "rounds": len(rounds),
        "within_slo": held,
        "lost": lost,
        "held": lost == 0 and (level == 0 or held * 4 >= len(rounds) * 3),
        "tokens_per_s": figures.spread([found["generation_tokens_per_s"] for found in rounds]),
    }


def save(path: Path, report: dict[str, Any], slo: decide.Slo) -> None:
    path.write_text(json.dumps({**report, "slo": asdict(slo)}, indent=2) + "\n")
