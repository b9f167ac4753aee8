"""Whether an engine makes forward progress. Pure; the gateway's probes and the engine container's watchdog share it.

An engine's /health says 200 while its scheduler hangs. What can't lie is its counters: requests are running, yet no
token (prompt or generated) was counted for `stall_s`. `stall_s` must lie above the longest prefill and the first
request's compilation (docs/decisions/0004).
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at an engine's /metrics."""

    at_s: float
    running: float
    waiting: float
    tokens: float  # prompt + generation tokens counted so far


@dataclass(slots=True)
class ForwardProgress:
    """Fed with samples and probe results in time order by one owner."""

    stall_s: float
    last_sample: Sample | None = None
    progress_at_s: float | None = None  # when progress was last seen, or there was nothing to make progress on
    probe_started_s: float | None = field(default=None)

    def observe(self, sample: Sample) -> None:
        last = self.last_sample
        busy = sample.running > 0 or sample.waiting > 0
        if last is None or not busy or sample.tokens != last.tokens:
            self.progress_at_s = sample.at_s
        self.last_sample = sample

    def probe_started(self, at_s: float) -> None:
        if self.probe_started_s is None:
            self.probe_started_s = at_s

    def probe_answered(self, at_s: float) -> None:
        self.probe_started_s = None
        self.progress_at_s = at_s

    def probe_failed(self) -> None:
        """The probe got an error rather than silence: that is for /health to judge."""
        self.probe_started_s = None

    def stalled_for_s(self, now_s: float) -> float:
        """Seconds without progress though there was work; 0 where nothing is known."""
        since = [at for at in (self.progress_at_s if self._busy() else None, self.probe_started_s) if at is not None]
        return max(0.0, now_s - min(since)) if since else 0.0

    def hung(self, now_s: float) -> bool:
        return self.stalled_for_s(now_s) >= self.stall_s

    def quiet_for_s(self, now_s: float) -> float:
        """Seconds since progress was last proven, work or no work: when to send a probe."""
        return 0.0 if self.progress_at_s is None else now_s - self.progress_at_s

    def _busy(self) -> bool:
        return self.last_sample is not None and (self.last_sample.running > 0 or self.last_sample.waiting > 0)
