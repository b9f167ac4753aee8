"""Advice while the gateway runs: it reads its own figures and the engines' pages every few seconds and keeps a window.

State: the readings of the last WINDOW_S, oldest first, and the kinds of advice that hold. Only `look` changes it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from gateway.advice import advise
from gateway.facts import Facts
from gateway.findings import KINDS, Finding
from gateway.metrics import Metrics
from gateway.readings import (
    ENGINE_SERIES,
    GATEWAY_SERIES,
    EngineReading,
    Reading,
    facts,
    place,
    read_engine,
    read_gateway,
    samples_of,
)
from gateway.replicas import Replicas, State
from gateway.settings import Settings
from gateway.workers import Alone, Siblings

logger = logging.getLogger(__name__)

WINDOW_S = 300.0
INTERVAL_S = 5.0


class Advisor:
    """Owner of the window. `run` is a task of the gateway's; `advice` looks again and says what holds now."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        replicas: Replicas,
        clock: Callable[[], float],
        window_s: float = WINDOW_S,
        siblings: Siblings | None = None,
    ) -> None:
        self._metrics = metrics
        self._replicas = replicas
        self._clock = clock
        self._siblings = siblings or Alone()
        self._window_s = window_s
        self._own = metrics.source(GATEWAY_SERIES)
        self._readings: deque[Reading] = deque()
        for name, value in {
            "max_in_flight": settings.admission.max_in_flight,
            "max_queue_tokens": settings.admission.max_queue_tokens,
            "max_wait_s": settings.admission.max_wait_s,
            "capacity_tokens": settings.admission.capacity_tokens or 0,
            "window_ms": settings.batching.window_ms,
            "stall_s": settings.timeouts.stall_s,
            "workers": settings.workers,
        }.items():
            metrics.setting.labels(name).set(value)
        self._show([])

    async def run(self) -> None:
        while True:
            try:
                await self._siblings.tell("flush")  # or their gauges would be as old as their own last look
                self.look()
            except Exception:  # a page nobody foresaw must not end the advice, and advice must not end the gateway
                logger.exception("looking for advice failed")
            await asyncio.sleep(INTERVAL_S)

    def look(self) -> tuple[Facts, list[Finding]]:
        """Take a reading, forget those that are too old, judge the window."""
        readings, now = self._readings, self._clock()
        readings.append(self._read(now))
        while len(readings) > 1 and readings[1].at_s <= now - self._window_s:
            readings.popleft()
        found = facts(tuple(readings))
        findings = advise(found)
        self._show(findings)
        return found, findings

    def advice(self) -> dict[str, Any]:
        """For /status."""
        found, findings = self.look()
        return {"window_s": round(found.seconds, 1), "findings": [finding.as_json() for finding in findings]}

    def _read(self, now: float) -> Reading:
        engines: dict[str, EngineReading] = {}
        for replica in self._replicas.all:
            if replica.state is State.DOWN or not replica.page:
                continue
            try:
                engines[place(replica.url)] = read_engine(samples_of(replica.page, ENGINE_SERIES))
            except ValueError:
                continue  # no page of metrics: the engine counts as one that told nothing
        samples = (sample for family in self._own.collect() for sample in family.samples)
        return Reading(now, engines, read_gateway(samples))

    def _show(self, findings: list[Finding]) -> None:
        holds = {finding.kind for finding in findings}
        for kind, severity in KINDS.items():
            self._metrics.advice.labels(kind, severity).set(kind in holds)
