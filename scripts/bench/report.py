"""A run's report: Markdown for people who read, one HTML page with its pictures inside for those who look."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.bench.pictures import Results, embedded, pictures
from scripts.bench.plan import Plan

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}"
    "table{border-collapse:collapse;margin:1rem 0}"
    "td,th{padding:.3rem .7rem;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child{text-align:left;white-space:nowrap}img{max-width:100%}"
    "pre{background:#f4f4f4;padding:1rem;white-space:pre-wrap}"
)
_LADDER = ("step", "req/s, median (least – most)", "over the step before", "more than the spread", "over the first")


def table(summary: Mapping[str, Any]) -> list[list[str]]:
    """Header and one line a measurement."""
    latencies = ("TTFT p50 / p99 ms", "ITL p50 / p99 ms", "E2E p50 ms")
    lines = [["measurement", "req/s, median (least – most)", "tokens/s", *latencies, "hit ratio", "KV peak", "failed"]]
    for key, row in summary["rows"].items():
        lines.append(
            [
                key,
                _span(row["requests_per_s"]),
                f"{row['generation_tokens_per_s']['median']:.0f}",
                f"{_ms(row['ttft_ms_p50'])} / {_ms(row['ttft_ms_p99'])}",
                f"{_ms(row['itl_ms_p50'])} / {_ms(row['itl_ms_p99'])}",
                _ms(row["e2e_ms_p50"]),
                _share(row["prefix_hit_ratio"]),
                _share(row["kv_usage_peak"]),
                str(row["failed"]),
            ]
        )
    return lines


def markdown(plan: Plan, summary: Mapping[str, Any]) -> str:
    lines = [f"# {plan.title}", "", *_facts(summary), ""]
    header, *rows = table(summary)
    lines += [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    if summary["ratios"]:
        lines += ["", "| ratio of requests/s | value | least – most | aim |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(cells)} |" for cells in _ratios(summary)]
    if summary["ladder"]:
        lines += ["", f"| {' | '.join(_LADDER)} |", "|---|---|---|---|---|"]
        lines += [f"| {' | '.join(cells)} |" for cells in _ladder(summary)]
    lines += [line for name, row in summary["rows"].items() if (line := _disturbed(name, row))]
    for title, found in _outcomes(summary):
        lines += ["", f"{title}:", "", *(f"- {name}: {reason}" for name, reason in found.items())]
    if summary["boots"]:
        lines += ["", "Started with:", ""]
        lines += [f"- {name}: `{_flags(facts)}`" for name, facts in summary["boots"].items()]
    return "\n".join(lines) + "\n"


def page(plan: Plan, summary: Mapping[str, Any], results: Results) -> str:
    """A self-contained HTML page."""
    header, *rows = table(summary)
    parts = [
        f"<h1>{html.escape(plan.title)}</h1>",
        *(f"<p>{html.escape(line)}</p>" for line in _facts(summary) if line),
    ]
    parts.append(_html_table(header, rows))
    if summary["ratios"]:
        parts += ["<h2>Ratios</h2>", _html_table(["of requests/s", "value", "least – most", "aim"], _ratios(summary))]
    if summary["ladder"]:
        parts += ["<h2>Step by step</h2>", _html_table(_LADDER, _ladder(summary))]
    disturbed = (_disturbed(name, row).strip() for name, row in summary["rows"].items())
    parts += [f"<p>{html.escape(line)}</p>" for line in disturbed if line]
    for title, found in _outcomes(summary):
        items = "".join(f"<li><b>{html.escape(name)}</b>: {html.escape(why)}</li>" for name, why in found.items())
        parts += [f"<h2>{title}</h2>", f"<ul>{items}</ul>"]
    for title, figure in pictures(summary, results):
        parts += [f"<h2>{html.escape(title)}</h2>", f'<img alt="{html.escape(title)}" src="{embedded(figure)}">']
    parts += ["<h2>What was started</h2>"] if summary["boots"] else []
    for boot, facts in summary["boots"].items():
        arguments = html.escape(_flags(facts))
        rest = "; ".join(
            f"{k.replace('_', ' ')} {v}" for k, v in facts.items() if k not in ("arguments", "boot", "title")
        )
        heading = ": ".join(filter(None, (boot, facts.get("title"))))
        parts += [f"<h3>{html.escape(heading)}</h3>", f"<pre>{arguments}</pre>", f"<p>{html.escape(rest)}</p>"]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{html.escape(plan.title)}</title><style>{_STYLE}</style>{''.join(parts)}</html>\n"
    )


def _outcomes(summary: Mapping[str, Any]) -> list[tuple[str, Mapping[str, str]]]:
    """Title and reasons by name, for those that there are."""
    errors = {name: "; ".join(row["errors"]) for name, row in summary["rows"].items() if row["errors"]}
    all_of_them = (
        ("Errors of requests that failed", errors),
        ("Failed, and was meant to", summary["failed_as_expected"]),
        ("Not measured", summary["failures"]),
    )
    return [(title, found) for title, found in all_of_them if found]


def _flags(facts: Mapping[str, Any]) -> str:
    return " ".join(facts["arguments"]) or "(no flags, or a running engine's own)"


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _disturbed(name: str, row: Mapping[str, Any]) -> str:
    if not row["others"]:
        return ""
    return f"\n{name} was measured beside {row['others']} requests of somebody else: not a figure of an idle engine."


def _facts(summary: Mapping[str, Any]) -> list[str]:
    machine = summary["hardware"]
    cards = "; ".join(machine["cards"]) or "no GPU"
    versions = sorted({facts.get("version", "?") for facts in summary["boots"].values()})
    what = (
        f"{summary['date']}. {cards}; {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB. "
        f"vLLM {', '.join(versions) or '?'}."
    )
    how = (
        "Answers have fixed lengths (ignore_eos), tokens are the engine's own usage, and every prompt is new to the "
        "prefix cache but for the workload named prefix."
    )
    left = summary["to_make"]
    return [what, "", how, *(["", f"Incomplete: {left} more to measure; the same command goes on."] if left else [])]


def _ratios(summary: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            f"{name}: {ratio['over']} ÷ {ratio['under']}",
            f"{ratio['value']:.3f}",
            f"{ratio['least']:.3f} – {ratio['most']:.3f}",
            f"≥ {ratio['aim']}, {'met' if ratio['value'] >= ratio['aim'] else 'missed'}" if ratio["aim"] else "–",
        ]
        for name, ratio in summary["ratios"].items()
    ]


def _ladder(summary: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            step["step"],
            _span(step["requests_per_s"]),
            f"× {step['over_previous']:.2f}" if number else "",
            ("yes" if step["shown"] else "no, within the spread") if number else "",
            f"× {step['over_first']:.2f}",
        ]
        for number, step in enumerate(summary["ladder"])
    ]


def _span(rate: Mapping[str, float]) -> str:
    return f"{rate['median']:.2f} ({rate['least']:.2f} – {rate['most']:.2f})"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value * 100:.0f} %"
