"""Is there time for one more trial? Pure arithmetic over what the run has cost so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Seconds that this run has measured: an engine's start, the prefill rate, one repeat at the point found."""

    boot_s: float
    prefill_s: float
    repeat_s: float


def rest_s(cost: Cost, *, repeats: int, soak_s: float) -> float:
    """Seconds from the search's end to the run's: best and current profile again, one merge limit, the soak.

    A repeat of short completions is taken for half a repeat of chats, more merge limits for what time is left.
    """
    best = cost.boot_s + cost.prefill_s + repeats * cost.repeat_s
    again = cost.boot_s + cost.repeat_s
    soak = cost.boot_s + repeats * cost.repeat_s / 2 + soak_s + cost.repeat_s
    return best + again + soak


def another(spent_s: float, budget_s: float, trials_s: list[float], cost: Cost, rest: float) -> bool:
    """Whether a trial still fits. The first is always made: without one there is nothing to find."""
    if not trials_s:
        return True
    # As long as the longest before it; a trial starts at the current point and climbs from there.
    return spent_s + max(*trials_s, cost.boot_s + 2 * cost.repeat_s) + rest <= budget_s
