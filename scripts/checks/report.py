"""Checks as text for people."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence

from scripts.checks import Check

_SHOWN = {"ok": "ok", "warn": "WARN", "fail": "FAIL", "skip": "skip"}
_WIDTH = 118


def lines(checks: Sequence[Check]) -> list[str]:
    """What is well or was not looked at in a line; for the rest expected, found and fix, one under the other.

    A blank line parts the groups, which are told by what stands before the dot of a name.
    """
    width = max((len(check.name) for check in checks), default=0)
    out: list[str] = []
    for _, group in itertools.groupby(checks, key=lambda check: check.name.split(".")[0] if "." in check.name else ""):
        out += ["", *itertools.chain.from_iterable(_lines(check, width) for check in group)]
    return out[1:]


def _lines(check: Check, width: int) -> Iterable[str]:
    head = f"  {_SHOWN[check.status]:<5}{check.name:<{width}}  "
    if check.status == "ok":
        yield from _wrapped(head, f"{check.found}   (expected: {check.expected})")
    elif check.status == "skip":
        yield from _wrapped(head, f"not checked: {check.found}   (expected: {check.expected})")
    else:
        indent = " " * len(head)
        yield from _wrapped(head, f"expected: {check.expected}")
        yield from _wrapped(indent, f"found:    {check.found}", hang=10)
        yield from _wrapped(indent, f"fix:      {check.fix}", hang=10)


def _wrapped(head: str, text: str, hang: int = 0) -> list[str]:
    """A line of the text that is one already stays one: it may be a command to copy."""
    width = max(_WIDTH, len(head) + 40)
    below = " " * (len(head) + hang)
    return [
        part
        for number, line in enumerate(text.splitlines())
        for part in textwrap.wrap(
            line,
            width=width,
            initial_indent=below if number else head,
            subsequent_indent=below,
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


def summary(checks: Sequence[Check]) -> str:
    count = {status: sum(check.status == status for check in checks) for status in _SHOWN}
    return f"{count['ok']} ok, {count['warn']} to mind, {count['fail']} failed, {count['skip']} not checked here"
