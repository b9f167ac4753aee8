"""Several worker processes as one gateway: what each may have, and how their reports become one. Pure.

What an operator sets holds for the whole gateway, so each worker gets its share: whole parts, and of a remainder one
more for each of the first workers, so that the shares' sum is exactly what was set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.settings import Settings

Status = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Worker:
    """Which one this is: `number` counts from 1. The default is a gateway that is one process."""

    number: int = 1
    of: int = 1

    def __str__(self) -> str:
        return f"{self.number} of {self.of}"

    @property
    def others(self) -> list[int]:
        return [number for number in range(1, self.of + 1) if number != self.number]

    def share(self, total: int) -> int:
        """This worker's part of `total`."""
        part, rest = divmod(total, self.of)
        return part + (self.number <= rest)


ONLY = Worker()


class Siblings(Protocol):
    """The other workers of this gateway."""

    async def tell(self, what: str, **fields: Any) -> dict[int, Any]:
        """Have each of them do `what`; their answers by number, None from one that gave none in time."""


class Alone:
    """A gateway that is one process has none."""

    async def tell(self, what: str, **fields: Any) -> dict[int, Any]:
        return {}


def divided(settings: Settings, worker: Worker) -> Settings:
    """The settings this worker goes by: what bounds the gateway as a whole is cut down to its share."""
    if worker.of == 1:
        return settings
    chosen, limits = settings.admission, settings.limits
    whole = chosen.capacity_tokens
    admission = {
        "capacity_tokens": None if whole is None else worker.share(whole),
        "max_in_flight": worker.share(chosen.max_in_flight),
        "max_queue_tokens": worker.share(chosen.max_queue_tokens),
    }
    arriving = {"max_arriving_bytes": worker.share(limits.max_arriving_bytes)}
    return settings.model_copy(
        update={"admission": chosen.model_copy(update=admission), "limits": limits.model_copy(update=arriving)}
    )


def restart_delay_s(deaths: int) -> float:
    """Seconds before a worker is started again that died `deaths` times in a row, each soon after its start."""
    return 0.0 if deaths <= 1 else min(30.0, 2.0 ** (deaths - 2))


def whole_status(worker: Worker, own: Status, others: Mapping[int, Status | None]) -> Status:
    """/status of the gateway: the answering worker's, with counts summed over all, and a row for each worker.

    Ready is what every worker is. A worker that did not answer, or is not there (not in `others`), has a row that says
    so, and makes the gateway unready.
    """
    reports = {worker.number: own, **others}
    told = [report for report in reports.values() if report is not None]
    rows = [
        _row(number, reports[number]) if number in reports else _unready(number, "it is being started")
        for number in range(1, worker.of + 1)
    ]
    unready = next((row for row in rows if not row["ready"]), None)
    return {
        **own,
        "worker": str(worker),
        "ready": unready is None,
        "reason": "" if unready is None else f"worker {unready['worker']}: {unready['reason']}",
        "draining": any(report["draining"] for report in told),
        "replicas": _replicas([report["replicas"] for report in told]),
        "admission": _admission([report["admission"] for report in told]),
        "microbatches": _summed([report["microbatches"] for report in told]),
        "workers": rows,
    }


def _row(number: int, report: Status | None) -> Status:
    if report is None:
        return _unready(number, "it does not answer")
    admission = report["admission"]
    return {
        "worker": number,
        "pid": report["pid"],
        "ready": report["ready"],
        "reason": report["reason"],
        "in_flight": admission["in_flight"],
        "queued": admission["queued"],
        "capacity_tokens": admission["capacity_tokens"],
    }


def _unready(number: int, reason: str) -> Status:
    return {"worker": number, "ready": False, "reason": reason}


def _replicas(reports: Sequence[Sequence[Status]]) -> list[Status]:
    """Each replica once, as the first report has it; its calls are everybody's."""
    merged: dict[str, Status] = {}
    for report in reports:
        for row in report:
            if (known := merged.get(row["url"])) is None:
                merged[row["url"]] = dict(row)
            else:
                known["calls"] += row["calls"]
    return list(merged.values())


def _admission(reports: Sequence[Status]) -> Status:
    pools: dict[tuple[str, ...], list[Status]] = {}
    for report in reports:
        for pool in report["pools"]:
            pools.setdefault(tuple(pool["models"]), []).append(pool)
    return {
        **_summed([{name: value for name, value in report.items() if name != "pools"} for report in reports]),
        "pools": [{"models": list(models), **_summed(same)} for models, same in pools.items()],
    }


def _summed(reports: Sequence[Status]) -> Status:
    """Numbers added up; None counts as nothing, and is what nobody knows."""
    sums: Status = {}
    for name, first in reports[0].items():
        if first is None or isinstance(first, int | float):
            known = [report[name] for report in reports if report.get(name) is not None]
            sums[name] = sum(known) if known else None
    return sums
