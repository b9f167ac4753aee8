"""Pure arithmetic over repeats: median with least and most, ratios of medians with the spread they may have."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.bench.plan import Plan

ASKED = ("workload", "requests", "in_flight", "rate", "through", "endpoint", "stream", "answer_tokens")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least, most, and how many there were."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "repeats": len(values)}


def summarise(plan: Plan, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """`results` maps boot/row to its repeats' figures; what was not measured is left out, not guessed."""
    rows = {key: _row(repeats) for key, repeats in results.items() if repeats}
    ratios = {}
    for ratio in plan.ratios:
        if ratio.over in rows and ratio.under in rows:
            over, under = rows[ratio.over]["requests_per_s"], rows[ratio.under]["requests_per_s"]
            ratios[ratio.name] = {
                "value": over["median"] / under["median"],
                # The widest that the repeats allow: a gain whose least is below 1 is not shown.
                "least": over["least"] / under["most"],
                "most": over["most"] / under["least"],
                "over": ratio.over,
                "under": ratio.under,
                "aim": ratio.aim,
            }
    return {"rows": rows, "ratios": ratios, "ladder": _ladder(plan.ladder, rows)}


def _ladder(keys: Sequence[str], rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each step beside the last one before it that was measured. `shown` tells a gain or loss from the spread."""
    steps: list[dict[str, Any]] = []
    measured = [key for key in keys if key in rows]
    for number, key in enumerate(measured):
        rate = rows[key]["requests_per_s"]
        first, last = (rows[measured[0]]["requests_per_s"], rows[measured[max(number - 1, 0)]]["requests_per_s"])
        steps.append(
            {
                "step": key,
                "requests_per_s": rate,
                "over_previous": rate["median"] / last["median"],
                "shown": rate["least"] > last["most"] or rate["most"] < last["least"],
                "over_first": rate["median"] / first["median"],
            }
        )
    return steps


def _row(repeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def quantile(figure: str, name: str) -> float | None:
        values = [repeat[figure][name] for repeat in repeats if repeat.get(figure)]
        return statistics.median(values) if values else None

    ratios = [r["engine"]["prefix_hit_ratio"] for r in repeats if r["engine"].get("prefix_hit_ratio") is not None]
    peaks = [r["engine"]["kv_usage_peak"] for r in repeats if r["engine"].get("kv_usage_peak") is not None]
    return {
        "asked": {name: repeats[0].get(name) for name in ASKED},
        "requests_per_s": spread([repeat["requests_per_s"] for repeat in repeats]),
        "generation_tokens_per_s": spread([repeat["generation_tokens_per_s"] for repeat in repeats]),
        "others": max(repeat.get("others", 0) for repeat in repeats),
        "failed": sum(repeat["requests"] - repeat["completed"] for repeat in repeats),
        "errors": sorted({error for repeat in repeats for error in repeat["errors"]}),
        **{f"{f}_ms_p{q}": quantile(f"{f}_ms", q) for f in ("ttft", "itl", "e2e") for q in ("50", "99")},
        "prefix_hit_ratio": statistics.median(ratios) if ratios else None,
        "kv_usage_peak": max(peaks, default=None),
        "preemptions": sum(repeat["engine"].get("preemptions") or 0 for repeat in repeats),
    }
