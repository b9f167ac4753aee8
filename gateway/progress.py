"""Whether an engine makes forward progress. Pure; the gateway's probes and the engine container's watchdog share it.

An engine's /health says 200 while its scheduler hangs. Two witnesses can't lie:

1. its counters: requests are running or waiting, yet no token (prompt or generated) was counted for `stall_s`.
2. a one-token probe that has not come back after `stall_s`, while the counters stood still as well. Only this one sees
   an engine that hung while idle: the figures on its page are then as old as the hang, and say "nothing to do".

A probe that waits behind others proves nothing while the counters move. `stall_s` must lie above the longest prefill
and the first request's compilation (docs/decisions/0004).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at an engine's /metrics."""

    at_s: float
    running: float
    waiting: float
    tokens: float  # prompt + generation tokens counted so far


@dataclass(slots=True)
class ForwardProgress:
    """Fed with samples and probe results in time order by one owner. Times are seconds of one monotonic clock."""

    stall_s: float
    last_sample: Sample | None = None
    fair_at_s: float | None = None  # when the counters last moved, or had nothing to move for
    proven_at_s: float | None = None  # when a token was last seen to come out, or the watch began
    probe_started_s: float | None = None  # of the oldest probe without an answer

    def observe(self, sample: Sample) -> None:
        last, self.last_sample = self.last_sample, sample
        if last is not None and sample.tokens != last.tokens:  # a restart sets them back: that is movement as well
            self.fair_at_s = self.proven_at_s = sample.at_s
        elif last is None or not _busy(sample):
            self.fair_at_s = sample.at_s
        if self.proven_at_s is None:
            self.proven_at_s = sample.at_s

    def probe_started(self, at_s: float) -> None:
        if self.probe_started_s is None:
            self.probe_started_s = at_s

    def probe_answered(self, at_s: float) -> None:
        self.probe_started_s = None
        self.fair_at_s = self.proven_at_s = at_s

    def probe_failed(self) -> None:
        """The probe got an error rather than silence: that is for /health to judge."""
        self.probe_started_s = None

    def stalled_for_s(self, now_s: float) -> float:
        """Seconds without progress though there was work; 0 where nothing is known."""
        return max(0.0, self._counters_stalled_s(), self._probe_stalled_s(now_s))

    def hung(self, now_s: float) -> bool:
        return self.stalled_for_s(now_s) >= self.stall_s

    def quiet_for_s(self, now_s: float) -> float:
        """Seconds since a token was last seen to come out, work or no work: when to send a probe."""
        return 0.0 if self.proven_at_s is None else now_s - self.proven_at_s

    def _counters_stalled_s(self) -> float:
        # Up to the last look, not up to now: a page that can't be read says nothing about the engine.
        if self.last_sample is None or self.fair_at_s is None or not _busy(self.last_sample):
            return 0.0
        return self.last_sample.at_s - self.fair_at_s

    def _probe_stalled_s(self, now_s: float) -> float:
        if self.probe_started_s is None:
            return 0.0
        proven = self.probe_started_s if self.proven_at_s is None else self.proven_at_s
        return now_s - max(self.probe_started_s, proven)


def _busy(sample: Sample) -> bool:
    return sample.running > 0 or sample.waiting > 0
