"""Checks: small functions that look at one thing, change nothing, and return what they saw as a `Check`."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "skip"]
_ORDER: tuple[Status, ...] = ("skip", "ok", "warn", "fail")
EXIT_CODES: dict[Status, int] = {"skip": 0, "ok": 0, "warn": 3, "fail": 1}


@dataclass(frozen=True)
class Check:
    """One finding. `skip` means "could not be looked at here": `found` says why, and nothing was judged.

    `fix` is what to do, empty where nothing is to be done. No field ever holds a secret.
    """

    name: str
    status: Status
    expected: str
    found: str
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def ok(name: str, expected: str, found: str) -> Check:
    return Check(name, "ok", expected, found)


def warn(name: str, expected: str, found: str, fix: str) -> Check:
    return Check(name, "warn", expected, found, fix)


def fail(name: str, expected: str, found: str, fix: str) -> Check:
    return Check(name, "fail", expected, found, fix)


def skip(name: str, expected: str, why: str) -> Check:
    return Check(name, "skip", expected, why)


def judged(good: bool, name: str, expected: str, found: str, fix: str, worse: Status = "fail") -> Check:
    """`ok` or `worse`; the fix is kept only where there is something to fix."""
    return Check(name, "ok" if good else worse, expected, found, "" if good else fix)


def worst(checks: Iterable[Check]) -> Status:
    """The worst status; `skip` where nothing could be looked at."""
    return max((check.status for check in checks), key=_ORDER.index, default="skip")
