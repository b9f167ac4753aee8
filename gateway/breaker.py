"""Whether a replica's calls fail so that it is better left out for a while. Pure: time and dice come from outside.

A circuit is

- `closed`: requests go to the replica.
- `open`: they don't, until a time that doubles with each opening, up to a bound; it is drawn from the upper half of
  that, so that several gateways don't come back in one step.
- `half_open`: that time is over. One request at a time may try; its first token closes the circuit, its failure opens
  it again.

It opens

1. when a connection was refused: at once.
2. when `failures` calls in a row failed, or
3. when of the last `calls` within WINDOW_S at least `share` failed;

2 and 3 only where two different requests are among the failed: a request that an engine can't digest, repeated by its
client, proves nothing against the engine. What counts as a failure is the caller's to say (inference.py).
"""

import enum
from collections import deque
from collections.abc import Callable

from gateway.settings import Circuit as Limits

WINDOW_S = 60.0
CAUSES = ("refused", "failures", "share", "trial")  # of an opening


class Circuit(enum.StrEnum):
    CLOSED = enum.auto()
    HALF_OPEN = enum.auto()
    OPEN = enum.auto()


class Breaker:
    """One replica's circuit. Used from one event loop; times are seconds of one monotonic clock, dice give 0 to 1."""

    __slots__ = ("_dice", "_limits", "_opened", "_recent", "_row", "_since_s", "_trials", "_until_s", "on_open")

    def __init__(
        self, limits: Limits, dice: Callable[[], float], on_open: Callable[[str], None] = lambda cause: None
    ) -> None:
        """`on_open` hears the cause of each opening, one of CAUSES."""
        self._limits = limits
        self._dice = dice
        self.on_open = on_open
        self._row: list[int] = []  # the requests that failed since the last success
        self._recent: deque[tuple[float, int | None]] = deque(maxlen=limits.calls)  # None: a success
        self._until_s: float | None = None  # None: closed
        self._since_s = float("-inf")  # of the last closing
        self._opened = 0  # times in a row without a good while between
        self._trials = 0  # calls under way that began while it was not closed

    def __repr__(self) -> str:
        state = "closed" if self._until_s is None else f"open until {self._until_s:.1f}"
        return f"<Breaker {state}, {len(self._row)} failed in a row, {self._trials} trials>"

    def state(self, now: float) -> Circuit:
        if self._until_s is None:
            return Circuit.CLOSED
        return Circuit.OPEN if now < self._until_s else Circuit.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether a request may be sent there now."""
        return self._until_s is None or (now >= self._until_s and not self._trials)

    def opens_for_s(self, now: float) -> float:
        """Seconds until a trial is allowed; 0 where one is, or none is needed."""
        return 0.0 if self._until_s is None else max(0.0, self._until_s - now)

    @property
    def failed_in_a_row(self) -> int:
        return len(self._row)

    # -- one call: begin, then works or failed or neither, then end ----------------------------------------------------

    def begin(self) -> bool:
        """A call starts; whether it is a trial. A call may start in any state: where all replicas of a model are open,
        the caller sends there all the same, and what comes of it counts."""
        trial = self._until_s is not None
        self._trials += trial
        return trial

    def end(self, trial: bool) -> None:
        """The call is over, whatever came of it. A client that left decides nothing."""
        self._trials -= trial

    def works(self, now: float, trial: bool) -> None:
        if self._until_s is not None:
            if trial:  # the others began before it opened
                self.close(now)
            return
        if self._row:
            self._row.clear()
        self._recent.append((now, None))

    def failed(self, now: float, request: int, trial: bool) -> None:
        """`request` tells requests apart, as a hash does."""
        if self._until_s is not None:
            if trial and now >= self._until_s:
                self._open(now, "trial")
            return
        self._row.append(request)
        self._recent.append((now, request))
        if len(self._row) >= self._limits.failures and len(set(self._row)) > 1:
            self._open(now, "failures")
            return
        window = [which for at_s, which in self._recent if at_s > now - WINDOW_S]
        bad = [which for which in window if which is not None]
        if len(window) >= self._limits.calls and len(bad) >= self._limits.share * len(window) and len(set(bad)) > 1:
            self._open(now, "share")

    def refused(self, now: float) -> None:
        """No connection came about."""
        if self._until_s is None or now >= self._until_s:
            self._open(now, "refused")

    def close(self, now: float) -> None:
        """It works: a trial came through, or the engine passed another test."""
        if self._until_s is not None:
            self._until_s = None
            self._since_s = now
        self._row.clear()
        self._recent.clear()

    def _open(self, now: float, cause: str) -> None:
        if self._until_s is None and now - self._since_s > self._limits.max_open_s:
            self._opened = 0
        bound = min(self._limits.max_open_s, self._limits.open_s * 2.0 ** min(self._opened, 30))
        self._until_s = now + bound * (0.5 + self._dice() / 2)
        self._opened += 1
        self._row.clear()
        self._recent.clear()
        self.on_open(cause)
