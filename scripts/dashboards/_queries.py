"""The shapes of query that recur."""

from __future__ import annotations

from scripts.dashboards._panels import GREEN, ORANGE, YELLOW, Query

QUANTILES = {"0.5": ("p50", GREEN), "0.95": ("p95", YELLOW), "0.99": ("p99", ORANGE)}
RATE = "[$__rate_interval]"  # four scrapes, or the curve's step where that is longer: a burst is as long as it was


def quantiles(histogram: str, selector: str = "", old: str = "") -> tuple[Query, ...]:
    """p50, p95, p99 of a histogram; `old` is its name on older engines. Nothing, not NaN, where it saw nothing."""

    def one(q: str, name: str) -> str:
        return f"histogram_quantile({q}, sum by (le) (rate({name}_bucket{selector}{RATE}))) >= 0"

    return tuple(
        Query(f"({one(q, histogram)}) or ({one(q, old)})" if old else one(q, histogram), short, colour)
        for q, (short, colour) in QUANTILES.items()
    )


def mean(histogram: str, selector: str = "") -> str:
    """The mean of what a histogram saw; nothing while it sees nothing."""
    count = f"sum(rate({histogram}_count{selector}{RATE}))"
    return f"sum(rate({histogram}_sum{selector}{RATE})) / ({count} > 0)"
