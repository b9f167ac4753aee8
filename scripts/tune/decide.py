"""Pure decisions: is a profile better beyond the noise, and what limits follow from what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Slo:
    """What a client is promised; SHARE of the tokens must keep it."""

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


SHARE = 0.95


def kept(rounds: Sequence[tuple[Sequence[float], Sequence[float]]], slo: Slo) -> tuple[float, float]:
    """Shares of all rounds' first tokens and of all times between tokens, s, that kept the SLO; 1.0 of nothing."""
    firsts = [first for each, _ in rounds for first in each]
    between = [gap for _, each in rounds for gap in each]
    return _share(firsts, slo.ttft_s), _share(between, slo.itl_s)


def _share(values: Sequence[float], limit: float) -> float:
    return sum(value <= limit for value in values) / len(values) if values else 1.0


def better(current: Sequence[float], candidate: Sequence[float], gain: float = 1.0) -> bool:
    """Whether the candidate's worst repeat beats `gain` times the current one's best: more than repeats differ by."""
    return bool(current and candidate) and min(candidate) > max(current) * gain


def decode_tokens_per_s(figures: Mapping[str, Any], running: int) -> float | None:
    """Tokens/s while nothing but answers is computed: those that run at once by the median time between their events,
    times the tokens of an event (stream-interval's, more where an engine falls behind).

    None for answers of one token.
    """
    between = figures["itl_ms"]
    return running * 1000 * figures["tokens_per_event"] / between["50"] if between and between["50"] else None


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
