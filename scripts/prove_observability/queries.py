"""Every query that the project ships: of panels, variables, annotations, rules and alerts. Only reads files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

DASHBOARDS = Path("grafana/dashboards")
Kind = Literal["panel", "variable", "annotation", "record", "alert"]
_LABEL_VALUES = re.compile(r"label_values\((?:(?P<series>.+),\s*)?(?P<label>\w+)\)")


@dataclass(frozen=True)
class Query:
    """One query. where: "vllm-engine / Preemptions", for people. instant: no range is drawn of it."""

    kind: Kind
    where: str
    expression: str
    instant: bool = False
    labels: tuple[tuple[str, str], ...] = ()  # a rule's own


def dashboards(macros: Mapping[str, str], folder: Path = DASHBOARDS) -> list[Query]:
    """Queries of every dashboard, with Grafana's macros and the dashboard's own variables filled in."""
    found: list[Query] = []
    for path in sorted(folder.glob("*.json")):
        board = json.loads(path.read_text(encoding="utf-8"))
        found += _dashboard(board, macros)
    return found


def _dashboard(board: Mapping[str, Any], macros: Mapping[str, str]) -> Iterator[Query]:
    uid, filled = board["uid"], dict(macros)
    for variable in board.get("templating", {}).get("list", []):
        filled[variable["name"]] = variable.get("allValue") or ".*"
        if variable["type"] == "query":
            text = variable["query"] if isinstance(variable["query"], str) else variable["query"]["query"]
            parts = _LABEL_VALUES.fullmatch(text)
            series = f'{parts["series"]}{{{parts["label"]}!=""}}' if parts and parts["series"] else text
            yield Query("variable", f"{uid} / ${variable['name']}", fill(series, filled), instant=True)
    for annotation in board.get("annotations", {}).get("list", []):
        expression = annotation.get("expr") or (annotation.get("target") or {}).get("expr")
        if expression:
            yield Query("annotation", f"{uid} / {annotation['name']}", fill(expression, filled))
    for panel in panels(board):
        for target in panel.get("targets", []):
            where = f"{uid} / {panel['title']}"
            yield Query("panel", where, fill(target["expr"], filled), instant=bool(target.get("instant")))


def panels(board: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Panels, those inside closed rows too."""
    for panel in board.get("panels", []):
        yield panel
        yield from panels(panel)


def fill(expression: str, values: Mapping[str, str]) -> str:
    """`$name` and `${name}` replaced; one that is unknown stays, and is no PromQL then."""
    return re.sub(
        r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))",
        lambda found: values.get(found[1] or found[2], found[0]),
        expression,
    )


def rules(folder: Path) -> list[Query]:
    """Records and alerts of the rule files of `folder`."""
    found: list[Query] = []
    for path in sorted(folder.glob("*.yml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                kind: Kind = "record" if "record" in rule else "alert"
                labels = tuple(sorted((rule.get("labels") or {}).items()))
                found.append(Query(kind, f"{path.name} / {rule[kind]}", rule["expr"], labels=labels))
    return found


def name_of(query: Query) -> str:
    """The rule's name, or the panel's title."""
    return query.where.split(" / ", 1)[1]
