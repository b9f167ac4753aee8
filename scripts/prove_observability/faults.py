"""Faults: what is done to the stack, which alerts that has to raise, and how it is undone.

A fault is a context manager over the lab: it breaks something real, and mends it on the way out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from scripts.prove_observability.lab import Lab
from scripts.prove_observability.prom import LateError, until
from scripts.prove_observability.receiver import Told


@dataclass(frozen=True)
class Expected:
    """An alert a fault raises. `inhibited`: Alertmanager has to keep it back, for something worse is told already.

    job: of the alert's labels, where other jobs may raise it as well.
    """

    alert: str
    severity: str | None = None
    job: str | None = None
    inhibited: bool = False
    clears: bool = True


@dataclass(frozen=True)
class Fault:
    """One fault. how: what is done, for people. ci: quick enough for every commit."""

    name: str
    how: str
    expected: tuple[Expected, ...]
    run: Callable[[Lab], AbstractContextManager[None]]
    ci: bool = False
    fire_s: float = 90
    clear_s: float = 120


@dataclass
class Outcome:
    """What came of one expected alert; seconds from when the fault is done, and from when its mending
    begins; None where it never came."""

    alert: str
    severity: str | None
    fault: str
    how: str
    fired_s: float | None = None
    cleared_s: float | None = None
    receiver: str | None = None
    summary: str | None = None
    description: str | None = None
    inhibited_by: list[str] | None = None
    problem: str | None = None
    told_at: float = 0  # of the monotonic clock


def exercise(fault: Fault, lab: Lab) -> list[Outcome]:
    """Breaks, waits for every webhook, mends, waits for every all-clear. Never raises for what did not come."""
    outcomes = [Outcome(each.alert, each.severity, fault.name, fault.how) for each in fault.expected]
    try:
        _exercise(fault, lab, outcomes)
    except Exception as error:  # one broken fault must not hide what the others have to say
        for outcome in outcomes:
            outcome.problem = outcome.problem or f"{type(error).__name__}: {error}"
    return outcomes


def _exercise(fault: Fault, lab: Lab, outcomes: list[Outcome]) -> None:
    pairs = list(zip(fault.expected, outcomes, strict=True))
    with _noting(outcomes):
        until(lambda: not any(_fires(lab, each) for each in fault.expected if each.clears), "silence before it", 240)
        since = time.monotonic()
        mended = since
        with fault.run(lab):
            struck = lab.struck_at if lab.struck_at >= since else time.monotonic()
            for each, outcome in pairs:
                with _noting([outcome]):
                    _wait_fired(lab, each, outcome, since, struck, fault.fire_s)
            mended = time.monotonic()
        for each, outcome in pairs:
            if outcome.problem is None and each.clears:
                with _noting([outcome]):
                    _wait_cleared(lab, each, outcome, mended, fault.clear_s)


@contextlib.contextmanager
def _noting(outcomes: list[Outcome]) -> Iterator[None]:
    try:
        yield
    except LateError as error:
        for outcome in outcomes:
            outcome.problem = outcome.problem or str(error)


def _fires(lab: Lab, each: Expected) -> bool:
    return any(_meant(each, labels) for labels in lab.prometheus.firing(each.alert))


def _meant(each: Expected, labels: Mapping[str, str]) -> bool:
    return each.severity in (None, labels.get("severity")) and each.job in (None, labels.get("job"))


def _wait_fired(lab: Lab, each: Expected, outcome: Outcome, since: float, struck: float, limit_s: float) -> None:
    left = max(5.0, struck + limit_s - time.monotonic())
    if each.inhibited:
        by = until(
            lambda: lab.alertmanager.inhibited(each.alert, lambda labels: _meant(each, labels)),
            f"{each.alert} kept back",
            left,
        )
        outcome.inhibited_by, outcome.fired_s = by, round(time.monotonic() - struck, 1)
        return
    # What fired on and on from an earlier fault counts from when it was told, so only fresh words are accepted.
    told = until(
        lambda: lab.receiver.firing(each.alert, since if each.clears else 0, lambda labels: _meant(each, labels)),
        f"webhook: {each.alert} firing",
        left,
    )
    outcome.fired_s, outcome.told_at = round(max(0.0, told.at - struck), 1), told.at
    outcome.receiver = told.receiver
    outcome.summary, outcome.description = told.annotations.get("summary"), told.annotations.get("description")
    if outcome.severity is None:
        outcome.severity = told.labels.get("severity")


def _wait_cleared(lab: Lab, each: Expected, outcome: Outcome, mended: float, limit_s: float) -> None:
    if each.inhibited:
        until(lambda: not _fires(lab, each), f"{each.alert} no longer firing", limit_s)
        outcome.cleared_s = round(time.monotonic() - mended, 1)
        return

    # It may have come and gone while others of the same fault were waited for.
    def clear() -> Told | None:
        if _fires(lab, each):
            return None
        return lab.receiver.resolved(each.alert, outcome.told_at, lambda labels: _meant(each, labels))

    told = until(
        clear,
        f"webhook: {each.alert} resolved",
        limit_s,
    )
    outcome.cleared_s = round(max(0.0, told.at - mended), 1)
