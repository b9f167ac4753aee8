"""What a PromQL expression reads: its selectors, and which of them stand in for another (`new or old`). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import promql_parser as promql

_OPERATORS = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}


class ExpressionError(Exception):
    """Not PromQL."""


@dataclass(frozen=True)
class Selector:
    """One series selector. `stand_in`: the right side of an `or`, read where the left side has nothing."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]  # label, operator, value
    stand_in: bool

    def __str__(self) -> str:
        inside = ",".join(f'{label}{operator}"{value}"' for label, operator, value in self.matchers)
        return f"{self.name}{{{inside}}}" if inside else self.name

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a series of this name with these labels is selected."""
        return all(_matches(operator, value, labels.get(label, "")) for label, operator, value in self.matchers)


def _matches(operator: str, wanted: str, found: str) -> bool:
    if operator in ("=", "!="):
        return (found == wanted) == (operator == "=")
    return (re.fullmatch(wanted, found) is not None) == (operator == "=~")


def selectors(expression: str) -> list[Selector]:
    """Every series selector of the expression, in reading order. Raises ExpressionError."""
    try:
        tree = promql.parse(expression)
    except Exception as error:
        raise ExpressionError(f"{error}: {expression}") from error
    return list(_walk(tree, stand_in=False))


def _walk(node: Any, *, stand_in: bool) -> Iterator[Selector]:
    if isinstance(node, promql.VectorSelector):
        yield _selector(node, stand_in)
    elif isinstance(node, promql.MatrixSelector):
        yield _selector(node.vector_selector, stand_in)
    elif isinstance(node, promql.BinaryExpr):
        yield from _walk(node.lhs, stand_in=stand_in)
        yield from _walk(node.rhs, stand_in=stand_in or str(node.op) == "or")
    elif isinstance(node, promql.Call):
        for argument in node.args:
            yield from _walk(argument, stand_in=stand_in)
    elif isinstance(node, (promql.AggregateExpr, promql.ParenExpr, promql.SubqueryExpr, promql.UnaryExpr)):
        yield from _walk(node.expr, stand_in=stand_in)


def _selector(node: Any, stand_in: bool) -> Selector:
    name = node.name or ""
    matchers = []
    for matcher in node.matchers.matchers:
        operator = _OPERATORS[str(matcher.op).split(".")[-1]]
        if matcher.name == "__name__" and operator == "=":
            name = matcher.value
        else:
            matchers.append((matcher.name, operator, matcher.value))
    return Selector(name, tuple(matchers), stand_in)
