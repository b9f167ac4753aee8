"""Shorter windows for a run that can't wait: every duration of the rules times one factor, bounded below."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000}
_RANGE = re.compile(r"\[(\d+[dhms])\]")
RANGE_SAMPLES = 4  # a rate needs two, and the counter of a busy moment may lack one


def milliseconds(duration: str) -> int:
    """`5m` -> 300000. One number and one unit."""
    return int(duration[:-1]) * _UNITS_MS[duration[-1]]


def text(ms: int) -> str:
    """The shortest form Prometheus reads: 300000 -> 5m, 90000 -> 90s, 1500 -> 1500ms."""
    for unit, size in _UNITS_MS.items():
        if ms % size == 0 and (unit != "d" or ms >= size):
            return f"{ms // size}{unit}"
    return f"{ms}ms"


@dataclass(frozen=True)
class Windows:
    """scale 1 leaves all as written. Else a range spans at least four scrapes, and what has to hold does so for one."""

    scale: float = 1
    scrape_ms: int = 5000

    def expr(self, promql: str) -> str:
        """An expression with its ranges scaled."""
        return _RANGE.sub(lambda found: f"[{self.range(found[1])}]", promql)

    def range(self, duration: str) -> str:
        return text(self._scaled(duration, RANGE_SAMPLES * self.scrape_ms))

    def hold(self, duration: str) -> str:
        return text(self._scaled(duration, self.scrape_ms))

    def _scaled(self, duration: str, least_ms: int) -> int:
        written = milliseconds(duration)
        return written if self.scale == 1 else max(round(written * self.scale), least_ms)
