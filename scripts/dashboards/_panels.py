"""Panels in the house's manner: one way to draw a curve, a number, bars, a table, a note.

Each function takes a fixed id (links like ?viewPanel=12 live as long as the dashboard), a title, a description of what
the panel tells, and its queries. Only panel types that the preview can draw are here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.dashboards._sdk import bargauge, common, dashboard, prometheus, stat, table, text, timeseries

SOURCE = common.DataSourceRef(type_val="prometheus", uid="prometheus")  # grafana/provisioning/datasources
PLUGIN = "12.3.1"  # the Grafana of compose.yaml
GREEN, YELLOW, ORANGE, RED, BLUE, PURPLE, GREY = "green", "yellow", "orange", "red", "blue", "purple", "#8e8e8e"

# (from, colour) pairs in rising order; the first has no lower end.
Steps = Sequence[tuple[float | None, str]]


@dataclass(frozen=True)
class Query:
    """A PromQL expression and the name of what it gives; `{{label}}` in a name is the label's value.

    colour, dashed: how a curve of that name is drawn. unit: another than the panel's, so with an axis of its own on the
    right.
    """

    expr: str
    name: str = ""
    colour: str | None = None
    dashed: bool = False
    unit: str | None = None


@dataclass(frozen=True)
class Look:
    """How values are written and coloured."""

    unit: str
    decimals: int | None = None
    steps: Steps = ((None, BLUE),)
    minimum: float | None = 0
    maximum: float | None = None
    no_value: str | None = None
    # value -> (text, colour)
    words: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def graph(
    id_: int,
    title: str,
    description: str,
    *queries: Query,
    look: Look,
    stacked: bool = False,
    lines: bool = False,
    soft_max: float | None = None,
    fixed: Mapping[str, str] | None = None,
    runbook: str | None = None,
) -> dashboard.Panel:
    """Curves over time. `lines` draws the look's thresholds, `fixed` colours series whose name is a label's value."""
    custom = common.GraphFieldConfig(
        draw_style=common.GraphDrawStyle.LINE,
        line_interpolation=common.LineInterpolation.LINEAR,
        line_width=1 if stacked else 2,
        fill_opacity=40 if stacked else 8,
        show_points=common.VisibilityMode.NEVER,
        span_nulls=False,  # a gap in the data is a gap on the screen
        stacking=common.StackingConfig(
            mode=common.StackingMode.NORMAL if stacked else common.StackingMode.NONE, group="A"
        ),
        thresholds_style=common.GraphThresholdsStyleConfig(
            mode=common.GraphThresholdsStyleMode.DASHED if lines else common.GraphThresholdsStyleMode.OFF
        ),
        axis_soft_max=soft_max,  # or a curve that is 0 gets an axis up to 100
        axis_placement=common.AxisPlacement.AUTO,
        axis_label="",
    )
    options = timeseries.Options(
        legend=common.VizLegendOptions(
            display_mode=common.LegendDisplayMode.LIST,  # a table below a small graph shows two of its rows
            placement=common.LegendPlacement.BOTTOM,
            show_legend=True,
            calcs=[] if stacked else ["lastNotNull"],
        ),
        tooltip=common.VizTooltipOptions(mode=common.TooltipDisplayMode.MULTI, sort=common.SortOrder.DESCENDING),
    )
    colour = dashboard.FieldColor(mode=dashboard.FieldColorModeId.PALETTE_CLASSIC)
    colours = {query.name: query.colour for query in queries if query.colour} | dict(fixed or {})
    right = {"custom.axisPlacement": "right"}
    dash = {"custom.lineStyle": {"fill": "dash", "dash": [6, 6]}, "custom.fillOpacity": 0}
    overrides = [
        *(_override(name, color={"mode": "fixed", "fixedColor": shade}) for name, shade in colours.items()),
        *(_override(query.name, **dash) for query in queries if query.dashed),
        *(_override(query.name, unit=query.unit, **right) for query in queries if query.unit),
    ]
    return _panel("timeseries", id_, title, description, queries, look, options, custom, colour, overrides, runbook)


def number(
    id_: int,
    title: str,
    description: str,
    *queries: Query,
    look: Look,
    trend: bool = False,
    background: bool = False,
    names: bool = False,
    label: str | None = None,
    total: bool = False,
    runbook: str | None = None,
) -> dashboard.Panel:
    """The newest value, large. `trend` draws its curve behind, `background` colours the whole panel.

    `label`: the number is in this label, not in the value; `total` adds those of all series.
    """
    options = stat.Options(
        graph_mode=common.BigValueGraphMode.AREA if trend else common.BigValueGraphMode.NONE,
        color_mode=common.BigValueColorMode.BACKGROUND if background else common.BigValueColorMode.VALUE,
        justify_mode=common.BigValueJustifyMode.AUTO,
        text_mode=common.BigValueTextMode.VALUE_AND_NAME if names else common.BigValueTextMode.VALUE,
        reduce_options=_newest(),
        orientation=common.VizOrientation.AUTO,
    )
    colour = dashboard.FieldColor(mode=dashboard.FieldColorModeId.THRESHOLDS)
    panel = _panel(
        "stat", id_, title, description, queries, look, options, None, colour, [], runbook, instant=not trend
    )
    if label is not None:
        options.reduce_options = common.ReduceDataOptions(
            values=False, calcs=["sum" if total else "lastNotNull"], fields=""
        )
        panel.transformations = [_only([label]), _numbers([label])]
        _as_tables(panel)
    return panel


def bars(
    id_: int,
    title: str,
    description: str,
    *queries: Query,
    look: Look,
    runbook: str | None = None,
) -> dashboard.Panel:
    """The newest values side by side as bars."""
    options = bargauge.Options(
        display_mode=common.BarGaugeDisplayMode.BASIC,
        value_mode=common.BarGaugeValueMode.COLOR,
        name_placement=common.BarGaugeNamePlacement.LEFT,
        sizing=common.BarGaugeSizing.MANUAL,
        min_viz_height=16,
        max_viz_height=40,
        show_unfilled=True,
        text=common.VizTextDisplayOptions(title_size=14, value_size=18),
        reduce_options=_newest(),
        orientation=common.VizOrientation.HORIZONTAL,
    )
    colour = dashboard.FieldColor(mode=dashboard.FieldColorModeId.THRESHOLDS)
    return _panel("bargauge", id_, title, description, queries, look, options, None, colour, [], runbook, instant=True)


@dataclass(frozen=True)
class Column:
    """A table's column: where its values come from (a label's name, or `Value #A`), its heading and its look."""

    source: str
    heading: str
    look: Look | None = None
    width: int | None = None
    coloured: bool = False
    link: str | None = None
    number: bool = False  # a label whose text is a number


def listing(
    id_: int,
    title: str,
    description: str,
    *queries: Query,
    columns: Sequence[Column],
    look: Look,
    sort: tuple[str, bool] | None = None,
    runbook: str | None = None,
) -> dashboard.Panel:
    """A table of the newest values. Several queries are joined by the labels they share; `sort` is (heading, falling).

    Labels without a column are hidden.
    """
    order = {column.source: index for index, column in enumerate(columns)}
    transformations = []
    if len(queries) > 1:
        transformations.append(dashboard.DataTransformerConfig(id_val="merge", options={}))
    transformations.append(_only(list(order)))
    if numbers := [column.source for column in columns if column.number]:
        transformations.append(_numbers(numbers))
    transformations += [
        dashboard.DataTransformerConfig(
            id_val="organize",
            options={
                "indexByName": order,
                "renameByName": {column.source: column.heading for column in columns},
                "excludeByName": {},
                "includeByName": {},
            },
        ),
    ]
    options = table.Options(
        show_header=True,
        cell_height=common.TableCellHeight.SM,
        sort_by=[common.TableSortByFieldState(display_name=sort[0], desc=sort[1])] if sort else None,
    )
    custom = common.TableFieldOptions(align=common.FieldTextAlignment.AUTO, min_width=60, inspect=False)
    colour = dashboard.FieldColor(mode=dashboard.FieldColorModeId.THRESHOLDS)
    overrides = [_column(column) for column in columns]
    panel = _panel(
        "table", id_, title, description, queries, look, options, custom, colour, overrides, runbook, instant=True
    )
    panel.transformations = transformations
    _as_tables(panel)
    return panel


def note(id_: int, title: str, description: str, content: str) -> dashboard.Panel:
    """A few lines of Markdown."""
    return dashboard.Panel(
        type_val="text",
        id_val=id_,
        plugin_version=PLUGIN,
        title=title,
        description=description,
        options=text.Options(mode=text.TextMode.MARKDOWN, content=content),
    )


def _as_tables(panel: dashboard.Panel) -> None:
    for target in panel.targets or []:
        assert isinstance(target, prometheus.Dataquery)
        target.format_val = prometheus.PromQueryFormat.TABLE


def _only(names: list[str]) -> dashboard.DataTransformerConfig:
    return dashboard.DataTransformerConfig(id_val="filterFieldsByName", options={"include": {"names": names}})


def _numbers(names: list[str]) -> dashboard.DataTransformerConfig:
    conversions = [{"targetField": name, "destinationType": "number"} for name in names]
    return dashboard.DataTransformerConfig(
        id_val="convertFieldType", options={"conversions": conversions, "fields": {}}
    )


def _newest() -> common.ReduceDataOptions:
    return common.ReduceDataOptions(values=False, calcs=["lastNotNull"], fields="")


def _panel(
    kind: str,
    id_: int,
    title: str,
    description: str,
    queries: Sequence[Query],
    look: Look,
    options: object,
    custom: object | None,
    colour: dashboard.FieldColor,
    overrides: list[dashboard.DashboardFieldConfigSourceOverrides],
    runbook: str | None,
    instant: bool = False,
) -> dashboard.Panel:
    targets = [
        prometheus.Dataquery(
            ref_id=chr(ord("A") + index),
            datasource=SOURCE,
            expr=query.expr,
            legend_format=query.name,
            editor_mode=prometheus.QueryEditorMode.CODE,
            instant=instant,
            range_val=not instant,
        )
        for index, query in enumerate(queries)
    ]
    defaults = dashboard.FieldConfig(
        unit=look.unit,
        decimals=look.decimals,
        min_val=look.minimum,
        max_val=look.maximum,
        no_value=look.no_value,
        thresholds=_thresholds(look.steps),
        mappings=_mappings(look),
        color=colour,
        custom=custom,
    )
    return dashboard.Panel(
        type_val=kind,
        id_val=id_,
        plugin_version=PLUGIN,
        title=title,
        description=description,
        datasource=SOURCE,
        targets=list(targets),
        options=options,
        field_config=dashboard.FieldConfigSource(defaults=defaults, overrides=overrides),
        links=[_runbook(runbook)] if runbook else None,
    )


def _runbook(url: str) -> dashboard.DashboardLink:
    return dashboard.DashboardLink(
        title="Runbook", type_val=dashboard.DashboardLinkType.LINK, url=url, target_blank=True, icon="doc"
    )


def _thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    return dashboard.ThresholdsConfig(
        mode=dashboard.ThresholdsMode.ABSOLUTE,
        steps=[dashboard.Threshold(value=value, color=shade) for value, shade in steps],
    )


def _mappings(look: Look) -> list[dashboard.ValueMapping]:
    if not look.words:
        return []
    results = {
        value: dashboard.ValueMappingResult(text=words, color=shade, index=index)
        for index, (value, (words, shade)) in enumerate(look.words.items())
    }
    return [dashboard.ValueMap(options=results)]


def _override(name: str, **properties: Any) -> dashboard.DashboardFieldConfigSourceOverrides:
    return dashboard.DashboardFieldConfigSourceOverrides(
        matcher=dashboard.MatcherConfig(id_val="byName", options=name),
        properties=[dashboard.DynamicConfigValue(id_val=key, value=value) for key, value in properties.items()],
    )


def _column(column: Column) -> dashboard.DashboardFieldConfigSourceOverrides:
    properties: dict[str, Any] = {"noValue": "–"}  # the panel's own words are for when there is no row at all
    if column.look is not None:
        properties["unit"] = column.look.unit
        if column.look.decimals is not None:
            properties["decimals"] = column.look.decimals
        properties["thresholds"] = _thresholds(column.look.steps)
        if mappings := _mappings(column.look):
            properties["mappings"] = mappings
    if column.width is not None:
        properties["custom.width"] = column.width
    if column.coloured:
        properties["custom.cellOptions"] = {"type": "color-text"}
    if column.link is not None:
        properties["links"] = [{"title": "Open", "url": column.link, "targetBlank": True}]
    return _override(column.heading, **properties)
