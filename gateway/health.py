"""What the gateway says of itself: /healthz (its own loop), /readyz (an engine makes progress), /status (all of it)."""

import os
from typing import Any

from gateway.advisor import Advisor
from gateway.discovery import Discovery
from gateway.inference import Inference
from gateway.middleware import Edge
from gateway.pools import Admissions
from gateway.replicas import Replicas
from gateway.workers import Worker


class Health:
    """Reads the state of the other rooms; changes nothing."""

    def __init__(
        self,
        replicas: Replicas,
        discovery: Discovery,
        admission: Admissions,
        inference: Inference,
        advisor: Advisor,
        worker: Worker,
    ) -> None:
        self._replicas = replicas
        self._discovery = discovery
        self._admission = admission
        self._inference = inference
        self._advisor = advisor
        self._worker = worker
        self.edge: Edge | None = None

    @property
    def draining(self) -> bool:
        return self.edge is not None and self.edge.draining

    def ready(self) -> tuple[bool, str]:
        """Whether a request sent now would find an engine, and if not, why."""
        if self.draining:
            return False, "the gateway is shutting down"
        if not self._replicas.ready():
            return False, self._replicas.explain()
        return True, ""

    def status(self) -> dict[str, Any]:
        """This process's snapshot for people and scripts; no field is a contract except those docs/operations.md
        names."""
        ready, reason = self.ready()
        admission = self._admission
        return {
            "worker": str(self._worker),
            "pid": os.getpid(),
            "ready": ready,
            "reason": reason,
            "draining": self.draining,
            "replicas": [
                {
                    "url": replica.url,
                    "state": replica.state,
                    "reason": replica.reason,
                    "models": replica.models,
                    "capacity_tokens": replica.capacity_tokens,
                    "calls": replica.in_flight,
                    "listed": replica.listed,
                    "drained": replica.drain_requested,
                    "circuit": self._replicas.circuit(replica),
                }
                for replica in self._replicas.all
            ],
            "discovery": self._discovery.status(),
            "admission": {
                "capacity_tokens": admission.capacity_tokens,
                "in_flight": admission.in_flight,
                "in_flight_tokens": admission.in_flight_tokens,
                "queued": admission.queued,
                "queued_tokens": admission.queued_tokens,
                "drain_tokens_per_s": admission.drain_tokens_per_s,
                "pools": admission.status(),
            },
            "microbatches": {"waiting": self._inference.batcher.waiting},
            "advice": self._advisor.advice(),
        }
