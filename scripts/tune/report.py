"""What `make tune` found, in words and one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scripts.tune.space import price


def _repeats(rates: list[float]) -> str:
    return f"{min(rates):.0f} to {max(rates):.0f} in {len(rates)} repeats"


def render(report: Mapping[str, Any], profile: str) -> str:
    """Markdown."""
    current, best = report["current"], report.get("best")
    lines = [f"# make tune: {profile}", "", f"{verdict(report)} {price(best['changes']) if best else ''}".rstrip(), ""]
    lines += [
        "| | tokens/s within the SLO | in flight | prefill, tokens/s | decode, tokens/s | KV tokens | changes |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in (("before", current), ("best trial", best)):
        if found:
            changes = ", ".join(f"{k}: {v}" for k, v in found.get("changes", {}).items())
            cells = [name, _repeats(found["repeats"]), str(found["in_flight"]), f"{found['prefill_tokens_per_s']:.0f}"]
            cells.append(f"{found['decode_tokens_per_s']:.0f}" if found["decode_tokens_per_s"] else "–")
            lines.append(f"| {' | '.join([*cells, str(found['kv_tokens']), changes])} |")
    if report["planned_kv_tokens"] is not None:
        lines += ["", f"The memory plan expects {report['planned_kv_tokens']:,} KV tokens before."]
    lines += ["", "Trials:", ""]
    for trial in report["trials"]:
        changes = ", ".join(f"{k}: {v}" for k, v in trial["changes"].items())
        end = f"failed: {trial['failed']}" if trial["failed"] else f"{trial['tokens_per_s']:.0f} tokens/s"
        lines.append(f"- {changes}: {end}")
    soak = report["soak"]
    lines += ["", "Gateway limits:", "", *(f"- {name}: {value}" for name, value in report["limits"].items()), ""]
    lines.append(
        f"Soak: {soak['rounds']} rounds with {soak['in_flight']} in flight, {soak['lost']} requests lost, "
        f"{soak['ttft_kept']:.1%} of first tokens and {soak['itl_kept']:.1%} of the others within the SLO, "
        f"{soak['tokens_per_s']['median']:.0f} tokens/s."
    )
    return "\n".join(lines) + "\n"


def verdict(report: Mapping[str, Any]) -> str:
    """One sentence: replaced, or why not."""
    if not report["soak"]["held"]:
        return "Kept as it was: under the soak it lost requests or broke the SLO."
    best = report.get("best")
    if report["replaced"] and best:
        gain = min(best["repeats"]) / max(report["current"]["repeats"]) if max(report["current"]["repeats"]) else None
        least = f"at least × {gain:.2f}" if gain else "the old one never kept the SLO"
        return f"Replaced: the best trial's worst repeat beats the old profile's best ({least})."
    if failed := report.get("unconfirmed"):
        return f"Kept as it was: the best trial failed when it was started again ({failed['failed']})."
    if best:
        return "Kept as it was: the best trial was not better beyond the spread of the repeats."
    return "Kept as it was: no trial served more."
