"""The report's pictures: throughput with its spread, against latency, distributions, and what went on over time.

A measurement has one colour in all of them.
"""

from __future__ import annotations

import base64
import io
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

Results = Mapping[str, Sequence[Mapping[str, Any]]]
Lines = Mapping[str, tuple[Any, str]]  # boot/row to its colour and line style
_STYLES = ("-", "--", ":")


def pictures(summary: Mapping[str, Any], results: Results) -> list[tuple[str, Any]]:
    """(title, figure), those that there is something to draw for; nothing where nothing was measured."""
    if not results:
        return []
    lines = {key: (plt.cm.tab20(n % 20), _STYLES[n // 20 % len(_STYLES)]) for n, key in enumerate(results)}
    made = [("Requests per second", _bars(summary, lines)), ("Throughput and latency", _curve(results, lines))]
    streamed = {key: repeats for key, repeats in results.items() if repeats[-1]["ttft_ms"]}
    if streamed:
        made.append(("Time to first token and between tokens (last repeat)", _distributions(streamed, lines)))
    cache = (("kv_usage", "KV cache usage, %", 100), ("hit_ratio", "prefix cache hits since the start, %", 100))
    card = (("utilization.gpu", "GPU use, %", 1), ("power.draw", "power, W", 1))
    for title, panels in (("KV cache over time (last repeat)", cache), ("The card over time (last repeat)", card)):
        if any(name in point for repeats in results.values() for point in _series(repeats) for name, _, _ in panels):
            made.append((title, _over_time(results, lines, panels)))
    return made


def embedded(figure: Any) -> str:
    """A data URL; the figure is closed."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _bars(summary: Mapping[str, Any], lines: Lines) -> Any:
    names = list(summary["rows"])
    rates = [summary["rows"][name]["requests_per_s"] for name in names]
    figure, axes = plt.subplots(figsize=(12, 0.7 + 0.42 * len(names)), layout="constrained")
    middle = [rate["median"] for rate in rates]
    around = [[m - r["least"] for m, r in zip(middle, rates, strict=True)], [r["most"] - r["median"] for r in rates]]
    axes.barh(names, middle, xerr=around, color=[lines[name][0] for name in names], ecolor="#222", capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("requests/s: median, whiskers least and most")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _curve(results: Results, lines: Lines) -> Any:
    """Every repeat a point. Rows that differ only in how many are in flight are one curve through their medians."""
    figure, axes = plt.subplots(figsize=(12, 4.5), layout="constrained")
    curves: dict[tuple[Any, ...], list[tuple[float, float, str]]] = {}
    for key, repeats in results.items():
        points = [(repeat["requests_per_s"], repeat["e2e_ms"]["50"] / 1000) for repeat in repeats if repeat["e2e_ms"]]
        if not points:
            continue
        rates, times = zip(*points, strict=True)
        axes.plot(rates, times, "o", color=lines[key][0], label=key)
        load = repeats[0].get("in_flight")
        if load:
            kind = tuple(repeats[0].get(part) for part in ("boot", "workload", "endpoint", "stream", "through"))
            median = (statistics.median(rates), statistics.median(times), str(load))
            curves.setdefault((*kind, repeats[0].get("answer_tokens")), []).append(median)
    for curve in (sorted(each, key=lambda point: int(point[2])) for each in curves.values() if len(each) > 1):
        axes.plot([rate for rate, _, _ in curve], [time for _, time, _ in curve], "-", color="#999", zorder=0)
        for rate, time, load in curve:
            axes.annotate(f"{load} in flight", (rate, time), (6, 6), textcoords="offset points", fontsize="small")
    axes.set_xlabel("requests/s")
    axes.set_ylabel("E2E p50, s")
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


def _distributions(streamed: Results, lines: Lines) -> Any:
    figure, both = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained", sharey=True)
    for axes, name, title in zip(both, ("ttft_ms", "itl_ms"), ("time to first token", "between tokens"), strict=True):
        for key, repeats in streamed.items():
            if last := repeats[-1][name]:
                color, style = lines[key]
                axes.plot(list(last.values()), [float(q) for q in last], style, color=color, label=key)
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlabel(f"{title}, ms")
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set_ylabel("% at or below")
    _legend(both[1])
    return figure


def _over_time(results: Results, lines: Lines, panels: Sequence[tuple[str, str, float]]) -> Any:
    told = [panel for panel in panels if any(panel[0] in point for each in results.values() for point in _series(each))]
    figure, grid = plt.subplots(1, len(told), figsize=(12, 4), layout="constrained", squeeze=False)
    both = list(grid[0])
    for axes, (name, title, scale) in zip(both, told, strict=True):
        for key, repeats in results.items():
            series = [(point["s"], point[name] * scale) for point in _series(repeats) if name in point]
            if series:
                color, style = lines[key]
                axes.plot(*zip(*series, strict=True), style, marker=".", markersize=3, color=color, label=key)
        axes.set_xlabel("s since the measurement's start")
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        if title.endswith("%"):
            axes.set_ylim(0, 103)
        axes.spines[["top", "right"]].set_visible(False)
    handles = {line.get_label(): line for axes in both for line in axes.lines}  # a row may be in one panel alone
    _legend(both[-1], list(handles.values()))
    return figure


def _series(repeats: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, float]]:
    found: Sequence[Mapping[str, float]] = repeats[-1]["engine"]["series"]
    return found


def _legend(axes: Any, handles: Sequence[Any] | None = None) -> None:
    """Beside the axes, of their own lines where no others are given."""
    axes.spines[["top", "right"]].set_visible(False)
    shown = list(axes.lines) if handles is None else handles
    shown = [line for line in shown if not line.get_label().startswith("_")]
    if shown:
        axes.legend(handles=shown, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
