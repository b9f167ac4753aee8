"""A dashboard: its place in the world (uid, links, variables, annotations) and its panels, line by line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.dashboards._panels import SOURCE
from scripts.dashboards._sdk import JSONEncoder, dashboard, prometheus

COLUMNS = 24
TAG = "vllm-stack"

# uid -> the title on the links between the dashboards.
BOARDS = {
    "vllm-overview": "Overview",
    "vllm-engine": "Engine",
    "vllm-gateway": "Gateway",
    "vllm-capacity": "Capacity",
    "vllm-usage": "Usage per key",
}


@dataclass(frozen=True)
class Choice:
    """A variable: the values of `label` on `metric`, all of them at first."""

    name: str
    label: str
    metric: str
    heading: str
    everything: str | None = ".*"  # what "All" stands for; None: the values found


@dataclass
class Board:
    """Collects rows and lines of panels; `to_json` gives the file's text."""

    uid: str
    title: str
    description: str
    choices: Sequence[Choice] = ()
    since: str = "now-1h"
    _panels: list[dashboard.Panel | dashboard.RowPanel] = field(default_factory=list)
    _y: int = 0
    _rows: int = 0

    def row(self, title: str) -> None:
        """A heading; the lines after it belong to it."""
        self._rows += 1
        place = dashboard.GridPos(h=1, w=COLUMNS, x=0, y=self._y)
        self._panels.append(dashboard.RowPanel(title=title, id_val=1000 + self._rows, grid_pos=place))
        self._y += 1

    def line(self, height: int, *panels: tuple[int, dashboard.Panel]) -> None:
        """Panels side by side, as (width, panel); together they fill the width."""
        assert sum(width for width, _ in panels) == COLUMNS, f"{self.uid}: a line is {COLUMNS} wide"
        x = 0
        for width, panel in panels:
            panel.grid_pos = dashboard.GridPos(h=height, w=width, x=x, y=self._y)
            self._panels.append(panel)
            x += width
        self._y += height

    def to_json(self) -> str:
        board = dashboard.Dashboard(
            uid=self.uid,
            title=f"vLLM stack: {self.title}",
            description=self.description,
            tags=[TAG],
            editable=False,
            graph_tooltip=dashboard.DashboardCursorSync.CROSSHAIR,
            time=dashboard.DashboardDashboardTime(from_val=self.since, to="now"),
            timepicker=dashboard.TimePickerConfig(refresh_intervals=["5s", "10s", "30s", "1m", "5m", "15m"]),
            refresh="10s",
            version=1,
            panels=self._panels,
            templating=dashboard.DashboardDashboardTemplating(list_val=[_variable(one) for one in self.choices]),
            annotations=dashboard.AnnotationContainer(list_val=_annotations()),
            links=[_link(uid, title) for uid, title in BOARDS.items() if uid != self.uid],
        )
        plain: Any = json.loads(json.dumps(board, cls=JSONEncoder))
        return json.dumps(plain, indent=2, ensure_ascii=False) + "\n"


def _link(uid: str, title: str) -> dashboard.DashboardLink:
    return dashboard.DashboardLink(
        title=title,
        type_val=dashboard.DashboardLinkType.LINK,
        icon="dashboard",
        url=f"/d/{uid}",
        keep_time=True,
        include_vars=True,
    )


def _variable(choice: Choice) -> dashboard.VariableModel:
    query = f"label_values({choice.metric}, {choice.label})"
    return dashboard.VariableModel(
        type_val=dashboard.VariableType.QUERY,
        name=choice.name,
        label=choice.heading,
        datasource=SOURCE,
        query=query,
        definition=query,
        refresh=dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED,
        sort=dashboard.VariableSort.ALPHABETICAL_ASC,
        multi=True,
        include_all=True,
        all_value=choice.everything,
        current=dashboard.VariableOption(selected=True, text=["All"], value=["$__all"]),
    )


def _annotations() -> list[dashboard.AnnotationQuery]:
    """What happened to the stack: another version of the gateway, a restart of it, a restart of an engine."""
    events = {
        "Gateway deployed": (
            "count by (version) (gateway_build_info) unless count by (version) (gateway_build_info offset 1m)",
            "blue",
            "version {{version}}",
        ),
        # A counter's birth is its process's. process_* is no help: an engine with several API servers has none.
        "Gateway restarted": ("time() - gateway_upstream_retries_created < 60", "purple", "{{instance}}"),
        "Engine restarted": (
            "(time() - vllm:num_preemptions_created < 60) or (resets(vllm:generation_tokens_total[1m]) > 0)",
            "orange",
            "{{instance}} {{model_name}}",
        ),
        "Critical alerts": (
            'count by (alertname, severity) (ALERTS{alertstate="firing", severity="critical"})',
            "red",
            "{{alertname}}",
        ),
    }
    return [_annotation(name, *event) for name, event in events.items()]


def _annotation(name: str, expr: str, colour: str, text: str) -> dashboard.AnnotationQuery:
    return dashboard.AnnotationQuery(
        name=name,
        datasource=SOURCE,
        enable=True,
        hide=False,
        icon_color=colour,
        expr=expr,
        step="10s",
        title_format=name,
        text_format=text,
        target=prometheus.Dataquery(ref_id="Anno", expr=expr, range_val=True, instant=False),
    )
