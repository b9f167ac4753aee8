"""The tables of docs/metrics.md, between their marks; the prose around them is written by hand. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from gateway.metrics import Metrics
from scripts.rules import Alert, Component, Record
from scripts.rules.render import Renderer

PATH = Path("docs/metrics.md")
DASHBOARDS = Path("grafana/dashboards")
_MARKED = re.compile(r"(<!-- (series|gateway|alerts) begin -->\n).*?(<!-- \2 end -->)", re.DOTALL)


def text(old: str, renderer: Renderer, components: Iterable[Component], boards: Mapping[str, str]) -> str:
    """`old` with fresh tables. boards: the dashboards' titles and what their panels ask for."""
    tables = {
        "series": series(renderer, components),
        "gateway": gateway(components, boards),
        "alerts": alerts(renderer, components),
    }
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


def asked(folder: Path = DASHBOARDS) -> dict[str, str]:
    """Dashboard's title -> the expressions of its panels, of the committed files; annotations, alike in all, apart."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        board = json.loads(path.read_text(encoding="utf-8"))
        targets = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
        found[board["title"].partition(": ")[2]] = "\n".join(targets)
        found["all (annotations)"] = "\n".join(annotation["expr"] for annotation in board["annotations"]["list"])
    return found


def gateway(components: Iterable[Component], boards: Mapping[str, str]) -> str:
    """Every metric that the gateway exports, and who asks for it."""
    rules = [rule for component in components for rule in component.rules]
    rows = []
    for metric in _exported():
        name = metric._name + ("_total" if metric._type == "counter" else "")
        asks = re.compile(rf"\b{metric._name}(_total|_bucket|_sum|_count|_created)?\b")
        alerting = dict.fromkeys(rule.name for rule in rules if isinstance(rule, Alert) and asks.search(rule.expr))
        recorded = dict.fromkeys(
            re.sub(r":p\d\d_", ":pNN_", rule.name)
            for rule in rules
            if isinstance(rule, Record) and asks.search(rule.expr)
        )
        shown = [title for title, expressions in boards.items() if asks.search(expressions)]
        used = [*(f"[{alert}](runbooks/{alert}.md)" for alert in alerting), *(f"`{record}`" for record in recorded)]
        labels = ", ".join(metric._labelnames)
        says = metric._documentation
        rows.append(_cells(f"`{name}`", str(metric._type), labels, says, ", ".join(used), ", ".join(shown)))
    head = "| metric | kind | labels | meaning | alerts and recorded series | dashboards |\n|---|---|---|---|---|---|"
    return "\n".join([head, *rows]) + "\n"


def _exported() -> list[MetricWrapperBase]:
    collectors = Metrics().registry._collector_to_names
    return [metric for metric in collectors if isinstance(metric, MetricWrapperBase)]


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
