"""Every small wrong that a rule could have: a series renamed, a comparison turned round, a number moved. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from scripts.rules import Alert, Component, Record
from scripts.rules.render import Renderer
from scripts.rules.windows import milliseconds, text

_TOKEN = re.compile(
    r"""
      (?P<skip> "[^"]*" | \{[^}]*\} | \[[^]]*\] | \b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\) )
    | (?P<call> [A-Za-z_]\w*(?=\s*\() )
    | (?P<name> [A-Za-z_:][\w:]* )
    | (?P<number> \d+(?:\.\d+)? )
    | (?P<compare> == | != | <= | >= | < | > )
    """,
    re.VERBOSE,
)
_WORDS = frozenset(
    {"and", "or", "unless", "by", "without", "on", "bool", "offset", "sum", "min", "max", "avg", "count"}
)
# The opposite, and the neighbour that differs at the edge alone; a measured share never lies exactly there.
_TURNED = {
    ">": ("<=", ">="),
    ">=": ("<", ">"),
    "<": (">=", "<="),
    "<=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
}
_SHARE = re.compile(r"\s*\d*\.\d")


@dataclass(frozen=True)
class Mutant:
    """One component with one wrong in it."""

    rule: str
    says: str
    component: Component


def mutants(component: Component, renderer: Renderer) -> Iterator[Mutant]:
    """All of a component's. Numbers are those of the rules as written to the files."""
    for place, rule in enumerate(component.rules):
        for says, wrong in _wrongs(replace(rule, expr=renderer.expr(rule))):
            rules = (*component.rules[:place], wrong, *component.rules[place + 1 :])
            yield Mutant(rule.name, says, replace(component, rules=rules))


def _wrongs(rule: Record | Alert) -> Iterator[tuple[str, Record | Alert]]:
    for token in _TOKEN.finditer(rule.expr):
        for other in _others(token):
            if rule.name == "Watchdog" and token["number"]:
                continue  # it fires whatever its value, which nobody reads
            expr = rule.expr[: token.start()] + other + rule.expr[token.end() :]
            yield f"{token[0]} -> {other} at {token.start()}", replace(rule, expr=expr)
    if isinstance(rule, Alert):
        for hold in _holds(rule.hold):
            yield f"for: {rule.hold or 'none'} -> {hold}", replace(rule, hold=hold)


def _others(token: re.Match[str]) -> tuple[str, ...]:
    said = token[0]
    if token["name"] and said not in _WORDS:
        return (f"{said}_renamed",)
    if token["compare"]:
        return _TURNED[said][:1] if _SHARE.match(token.string, token.end()) else _TURNED[said]
    if token["number"]:
        return _moved(said)
    return ()


def _moved(number: str) -> tuple[str, ...]:
    """Counts by one, shares by a tenth; below 0 is nothing that a series here has."""
    if "." in number:
        return (f"{float(number) * 0.9:.6g}", f"{float(number) * 1.1:.6g}")
    return ("1",) if number == "0" else (str(int(number) - 1), str(int(number) + 1))


def _holds(hold: str) -> tuple[str, ...]:
    return (text(milliseconds(hold) // 2), text(milliseconds(hold) * 3 // 2)) if hold else ("1m",)
