"""The trials: an Optuna study over space.py, kept in a file with its conditions, so that an interrupted run goes on."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from gateway.wording import several
from scripts.bench import conditions, drive, engine
from scripts.bench.folder import write
from scripts.tune import clock, space
from scripts.tune.probe import booted
from scripts.tune.task import Task

JOURNAL, CONDITIONS = "study.journal", "study.conditions.json"
FAILURES = (engine.StartError, drive.DriveError, httpx.HTTPError)


def take_up(folder: Path, now: Mapping[str, Any]) -> list[str]:
    """Forgets trials that were made under other conditions; what differs, empty where they count or none are there."""
    kept, differs = folder / CONDITIONS, list[str]()
    if (folder / JOURNAL).exists():
        before: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            before = json.loads(kept.read_text())
        differs = conditions.changed(before, json.loads(json.dumps(now)))
        if differs:
            forget(folder)
    write(kept, json.dumps(now, indent=2))
    return differs


def forget(folder: Path) -> None:
    (folder / JOURNAL).unlink(missing_ok=True)
    (folder / CONDITIONS).unlink(missing_ok=True)


def search(task: Task, start: int, begin: float, cost: clock.Cost) -> tuple[list[dict[str, Any]], int]:
    """All trials, an earlier run's first, and the number of those. `begin`: when this run began, time.monotonic()."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = open_study(task)
    resumed = sum(map(_measured, study.trials))
    if resumed:
        task.say(f"{several(resumed, 'trial')} of an interrupted run {'counts' if resumed == 1 else 'count'}")
    rest, took = clock.rest_s(cost, repeats=task.repeats, soak_s=task.soak_s), list[float]()

    def objective(trial: optuna.Trial) -> float:
        flags = {name: trial.suggest_categorical(name, values) for name, values in task.candidates.items()}
        changes = space.changed(task.profile, flags)
        trial.set_user_attr("changes", changes)
        merged = {**task.profile, **changes}
        tried = [each.user_attrs.get("changes") for each in study.trials if _measured(each)]
        if not changes or not space.fits(merged) or changes in tried:
            raise optuna.TrialPruned
        spent = (time.monotonic() - begin) / 60
        which = f"trial {len(tried) + 1} of at most {task.trials}, {spent:.0f} of {task.budget_s / 60:.0f} min spent"
        task.say(f"{which}: {' '.join(f'{k}={v}' for k, v in changes.items())}")
        at = time.monotonic()
        try:
            with booted(task.setup, merged, f"trial-{trial.number}") as probe:
                level, rate = probe.saturate(start)
        except FAILURES as error:
            trial.set_user_attr("failed", str(error) or type(error).__name__)
            task.say(f"  failed and passed over: {error}")
            raise optuna.TrialPruned from error
        took.append(time.monotonic() - at)
        trial.set_user_attr("in_flight", level)
        task.say(f"  {rate:.0f} tokens/s within the SLO, {level} in flight")
        return rate

    while sum(map(_measured, study.trials)) < task.trials and len(study.trials) < 6 * task.trials:
        if not clock.another(time.monotonic() - begin, task.budget_s, took, cost, rest):
            task.say("no time for another trial")
            break
        study.optimize(objective, n_trials=1)
    return [_told(trial) for trial in study.trials if _measured(trial)], resumed


def open_study(task: Task) -> optuna.Study:
    """The folder's study; a trial that an interruption cut off stands in line once more."""
    study = optuna.create_study(
        study_name="tune",
        storage=JournalStorage(JournalFileBackend(str(task.setup.folder / JOURNAL))),
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=task.seed, n_startup_trials=4, constant_liar=False),
        load_if_exists=True,
    )
    if not study.trials:
        # The middle of every list first: a bad profile is then left behind at once.
        study.enqueue_trial({name: values[len(values) // 2] for name, values in task.candidates.items()})
    for trial in study.trials:
        if trial.state == TrialState.RUNNING:
            study.tell(trial.number, state=TrialState.FAIL)
        cut = trial.state in (TrialState.RUNNING, TrialState.FAIL) and len(trial.params) == len(task.candidates)
        if cut and not any(_flags(other) == trial.params for other in study.trials[trial.number + 1 :]):
            study.enqueue_trial(trial.params)
    return study


def _flags(trial: FrozenTrial) -> dict[str, Any]:
    """A trial's flags, one's that waits included."""
    return trial.params or dict(trial.system_attrs.get("fixed_params", {}))


def _measured(trial: FrozenTrial) -> bool:
    return trial.value is not None or "failed" in trial.user_attrs


def _told(trial: FrozenTrial) -> dict[str, Any]:
    known = trial.user_attrs
    return {
        "changes": known.get("changes", {}),
        "tokens_per_s": trial.value if trial.value is not None else 0.0,
        "in_flight": known.get("in_flight", 0),
        "failed": known.get("failed"),
    }
