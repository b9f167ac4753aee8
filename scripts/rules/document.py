"""The tables of docs/metrics.md, between their marks; the prose around them is written by hand. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from scripts.rules import Alert, Component, Record
from scripts.rules.render import Renderer

PATH = Path("docs/metrics.md")
_MARKED = re.compile(r"(<!-- (series|alerts) begin -->\n).*?(<!-- \2 end -->)", re.DOTALL)


def text(old: str, renderer: Renderer, components: Iterable[Component]) -> str:
    """`old` with fresh tables."""
    tables = {"series": series(renderer, components), "alerts": alerts(renderer, components)}
    return _MARKED.sub(lambda found: f"{found[1]}\n{tables[found[2]]}\n{found[3]}", old)


def series(renderer: Renderer, components: Iterable[Component]) -> str:
    """A section a file, a row a series."""
    parts = []
    for component in components:
        if component.records:
            rows = [_row(renderer, record) for record in component.records]
            head = "| series | meaning | unit | from | pitfall |\n|---|---|---|---|---|"
            parts.append(f"### {component.name}.yml\n\n{head}\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def alerts(renderer: Renderer, components: Iterable[Component]) -> str:
    """One row an alert and severity."""
    head = "| alert | severity | after | says |\n|---|---|---|---|"
    return "\n".join([head, *(_alert_row(renderer, rule) for part in components for rule in part.alerts)]) + "\n"


def _row(renderer: Renderer, rule: Record) -> str:
    labels = "".join(f'{{{key}="{value}"}}' for key, value in rule.labels.items())
    cells = (f"`{rule.name}{labels}`", renderer.words(rule.says), rule.unit, rule.source, rule.pitfall)
    return _cells(*cells)


def _alert_row(renderer: Renderer, rule: Alert) -> str:
    link = f"[{rule.name}](runbooks/{rule.name}.md)"
    summary = re.sub(r"\{\{.*?\}\}", "…", renderer.words(rule.summary))
    return _cells(link, rule.severity, rule.hold or "at once", summary)


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
