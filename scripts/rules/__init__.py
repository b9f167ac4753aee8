"""Recording rules and alerts: what they are. One module of `components` for each file of configs/prometheus/rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["critical", "warning", "none"]
# The routes that ask a model; the others are nobody's traffic.
INFERENCE = 'route=~"/v1/(chat/completions|completions|embeddings|responses|messages)"'


@dataclass(frozen=True)
class Record:
    """A recorded series. `expr` is PromQL, with @name@ where configs/slo.yaml has the number.

    unit: of the value. source: who exports what it is made of, and which labels are left. pitfall: what it does not
    say, empty where there is nothing to know.
    """

    name: str
    expr: str
    says: str
    unit: str
    source: str
    pitfall: str = ""
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Alert:
    """An alert. critical wakes somebody, warning becomes a ticket, none is for machines.

    expr: as a Record's. hold: how long it has to be true. The description says what to do; the runbook of the same name
    says it in full.
    """

    name: str
    expr: str
    severity: Severity
    summary: str
    description: str
    hold: str = ""
    why: str = ""


@dataclass(frozen=True)
class Component:
    """One file, and one group in it: what is recorded first is fresh for the alerts after it."""

    name: str
    says: str
    rules: tuple[Record | Alert, ...]

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(rule for rule in self.rules if isinstance(rule, Record))

    @property
    def alerts(self) -> tuple[Alert, ...]:
        return tuple(rule for rule in self.rules if isinstance(rule, Alert))


def quantiles(name: str, expr: str, says: str, unit: str, source: str, pitfall: str = "") -> Iterable[Record]:
    """p50, p95 and p99; `expr` has @q@, `name` and `says` have {}."""
    for share in ("0.5", "0.95", "0.99"):
        percent = str(round(float(share) * 100))
        yield Record(
            name.format(f"p{percent}"), expr.replace("@q@", share), says.format(f"{percent} %"), unit, source, pitfall
        )
