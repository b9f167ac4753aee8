"""Pure decisions: is a profile better beyond the noise, and what limits follow from what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Slo:
    """What a client is promised; 95 % of a measurement's tokens must keep it."""

    ttft_s: float
    itl_s: float


def within(figures: Mapping[str, Any], slo: Slo) -> bool:
    """Whether a streamed measurement (scripts.bench.drive) kept the SLO and lost no request."""
    if figures["completed"] < figures["requests"] or not figures["ttft_ms"]:
        return False
    between = figures["itl_ms"]
    return bool(
        figures["ttft_ms"]["95"] <= slo.ttft_s * 1000 and (between is None or between["95"] <= slo.itl_s * 1000)
    )


def better(current: Sequence[float], candidate: Sequence[float]) -> bool:
    """Whether the candidate's worst repeat beats the current one's best: beyond what repeats of either differ by."""
    return bool(current and candidate) and min(candidate) > max(current)


def next_level(measured: Mapping[int, tuple[bool, float]], start: int, most: int) -> int | None:
    """The number in flight to measure next, None when the saturation point is known.

    `measured`: number in flight to (within the SLO?, generation tokens/s). From `start` upwards by doubling while the
    SLO holds and another doubling gave at least 5 %; downwards by halving while it does not hold.
    """
    if not measured:
        return start
    good = sorted(level for level, (kept, _) in measured.items() if kept)
    if not good:
        lowest = min(measured)
        return lowest // 2 if lowest > 1 else None
    top = good[-1]
    if top * 2 in measured or top * 2 > most:
        return None
    if top // 2 in measured and measured[top][1] < measured[top // 2][1] * 1.05:
        return None
    return top * 2


def saturation(measured: Mapping[int, tuple[bool, float]]) -> tuple[int, float]:
    """(number in flight, generation tokens/s) of the best level within the SLO; (0, 0.0) where none is."""
    kept = [(rate, level) for level, (good, rate) in measured.items() if good]
    rate, level = max(kept, default=(0.0, 0))
    return level, rate


def queue_tokens(prefill_tokens_per_s: float, slo: Slo) -> int:
    """Tokens that may wait in the gateway: what the engine prefills within the TTFT promised. More would be late."""
    return max(1024, int(prefill_tokens_per_s * slo.ttft_s))
