"""All replicas: who is there, who serves what, who takes requests.

Mutable: `all`, and what is derived from it for the request path (`_index`). Replicas come and go by `list_urls`; their
state changes by their monitors (monitor.py) and by the few methods here. One event loop, so no locks.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from gateway.breaker import CAUSES, Breaker, Circuit
from gateway.metrics import Metrics
from gateway.monitor import Monitor, make_client
from gateway.progress import ForwardProgress
from gateway.replica import Replica, State
from gateway.settings import Settings

__all__ = ["Replica", "Replicas", "State"]

logger = logging.getLogger(__name__)

CIRCUITS = tuple(Circuit)  # their places are the values of gateway_replica_circuit
NAMED_ENGINES = 6  # in the reason of a refusal, which every refused client gets


class Replicas:
    """Owner of all replicas. `async with` it: the monitors live as long as the gateway."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        clock: Callable[[], float],
        api_key: str | None = None,
        on_change: Callable[[], None] = lambda: None,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._dice = dice
        self._api_key = api_key
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._watches: dict[Replica, asyncio.Task[None]] = {}
        self._running = False
        self._models: dict[str, int | None] = {}
        self._ready: tuple[Replica, ...] = ()
        self._ready_for: dict[str, tuple[Replica, ...]] = {}
        self.all: list[Replica] = []
        metrics.replicas.set_function(lambda: sum(replica.listed for replica in self.all))
        for url in settings.static_engines:
            self._join(url)

    def __repr__(self) -> str:
        return f"<Replicas {', '.join(f'{r.url} {r.state}' for r in self.all)}>"

    async def __aenter__(self) -> "Replicas":
        self._client = make_client(self._settings, self._api_key)
        self._running = True
        for replica in self.all:
            self._watch(replica)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running = False
        tasks = list(self._watches.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    # -- what the request path asks ------------------------------------------------------------------------------------

    def ready(self, model: str | None = None) -> tuple[Replica, ...]:
        """Those that take requests (of this model)."""
        return self._ready if model is None else self._ready_for.get(model, ())

    def choices(self, model: str, tried: Collection[str] = ()) -> list[Replica]:
        """Those of this model to choose from: ready, not tried, circuit not open; where all are open, all of them,
        because a replica that may fail is better than none."""
        now = self._clock()
        left = [replica for replica in self.ready(model) if replica.url not in tried]
        return [replica for replica in left if replica.breaker.allows(now)] or left

    def knows(self, model: str) -> bool:
        """Whether some engine serves or served this model; an engine that restarts is expected back with it."""
        return model in self._models

    @property
    def discovered(self) -> bool:
        """Whether an unknown name is really unknown: every engine has told its models once, or had its time to."""
        patient_until_s = self._clock() - self._settings.timeouts.reload_wait_s
        silent = [replica for replica in self.all if not replica.models]
        return bool(self._models) and all(replica.joined_s <= patient_until_s for replica in silent)

    @property
    def models(self) -> dict[str, int | None]:
        """Served model name -> max_model_len, the least where engines differ, over all that told theirs."""
        return self._models

    def restarting(self, model: str) -> bool:
        """An engine of this model was ready and is not now: worth waiting for, unlike one that never came up."""
        return any(r.was_ready and r.state is not State.READY for r in self.all if model in r.models)

    def circuit(self, replica: Replica) -> dict[str, object]:
        """For /status."""
        now, breaker = self._clock(), replica.breaker
        opens_for_s = round(breaker.opens_for_s(now), 1)
        return {"state": breaker.state(now), "trial_in_s": opens_for_s, "failed_in_a_row": breaker.failed_in_a_row}

    def explain(self) -> str:
        """One sentence on why no engine is ready; of many engines it counts what they have in common."""
        if not self.all:
            return "no engine is listed"
        if len(self.all) <= NAMED_ENGINES:
            return "; ".join(f"engine {i + 1} is {r.state} ({r.reason})" for i, r in enumerate(self.all))
        kinds = Counter((replica.state, replica.reason) for replica in self.all).most_common()
        told = [f"{count} are {state} ({reason})" for (state, reason), count in kinds[:NAMED_ENGINES]]
        if rest := sum(count for _, count in kinds[NAMED_ENGINES:]):
            told.append(f"{rest} are not ready for other reasons")
        return f"of {len(self.all)} engines " + "; ".join(told)

    async def wait_ready(self, model: str | None, timeout_s: float) -> bool:
        """Wait until a replica (of this model) is ready; False when the time is over first."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.ready(model):
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def report_unreachable(self, replica: Replica) -> None:
        """A connection was refused: don't wait for the next look to stop sending there."""
        replica.breaker.refused(self._clock())
        if replica.state is State.READY:
            self.set_state(replica, State.DOWN, "refused a connection")

    # -- who is there --------------------------------------------------------------------------------------------------

    def drain(self, url: str, on: bool) -> bool:
        """Stop or resume sending to one replica; False if there is none of that URL."""
        for replica in self.all:
            if replica.url == url:
                replica.drain_requested = on
                self._apply_drain(replica, "drain was requested", "drain was lifted")
                return True
        return False

    def list_urls(self, urls: Iterable[str]) -> None:
        """From now on these are the replicas: new ones join, others get nothing new, end what they have, and go."""
        wanted = dict.fromkeys(urls)
        for replica in list(self.all):
            if replica.listed is not (listed := replica.url in wanted):
                replica.listed = listed
                self._apply_drain(replica, "no source names it any more", "it is named again")
                if not listed and replica.state is not State.DRAINING and not replica.in_flight:
                    self._forget(replica)
        known = {replica.url for replica in self.all}
        for url in wanted:
            if url not in known:
                self._join(url)

    def _apply_drain(self, replica: Replica, why: str, why_not: str) -> None:
        if replica.drains and replica.state is State.READY:
            self.set_state(replica, State.DRAINING, why)
        elif not replica.drains and replica.state is State.DRAINING:
            self.set_state(replica, State.READY, why_not)

    def _join(self, url: str) -> None:
        breaker = Breaker(self._settings.circuit, self._dice, lambda cause: self._opened(url, cause))
        replica = Replica(url, ForwardProgress(self._settings.timeouts.stall_s), breaker, self._clock())
        metrics = self._metrics
        for cause in CAUSES:
            metrics.circuit_opened.labels(url, cause)
        metrics.replica_ready.labels(url).set_function(lambda: float(replica.state is State.READY))
        metrics.replica_drained.labels(url).set_function(lambda: float(replica.drain_requested))
        metrics.upstream_calls.labels(url).set_function(lambda: replica.in_flight)
        metrics.replica_circuit.labels(url).set_function(lambda: CIRCUITS.index(breaker.state(self._clock())))
        metrics.replica_stalled_seconds.labels(url).set_function(lambda: replica.progress.stalled_for_s(self._clock()))
        self.all.append(replica)
        if self._running:
            logger.info("replica joined", extra={"fields": {"replica": url}})
            self._watch(replica)

    def _watch(self, replica: Replica) -> None:
        monitor = Monitor(replica, self, self._settings, self._client, self._clock)
        task = self._watches[replica] = asyncio.create_task(monitor.run(), name=f"monitor {replica.url}")
        task.add_done_callback(lambda _: self._unwatched(replica))

    def _unwatched(self, replica: Replica) -> None:
        """Its monitor has ended: nothing of ours is left there. It may have been named again in that very moment."""
        if self._running and replica.listed and replica in self.all:
            self._watch(replica)
        else:
            self._forget(replica)

    def _forget(self, replica: Replica) -> None:
        """It is gone, and so are its series: nobody shall be told of an engine that is not there."""
        if not self._running or replica not in self.all:
            return
        self.all.remove(replica)
        self._watches.pop(replica).cancel()
        for series in (
            self._metrics.replica_ready,
            self._metrics.replica_drained,
            self._metrics.upstream_calls,
            self._metrics.replica_circuit,
            self._metrics.replica_stalled_seconds,
            self._metrics.circuit_opened,
        ):
            series.remove_by_labels({"replica": replica.url})
        logger.info("replica left", extra={"fields": {"replica": replica.url}})
        self.learned()

    def _opened(self, url: str, cause: str) -> None:
        self._metrics.circuit_opened.labels(url, cause).inc()
        logger.warning("circuit opened", extra={"fields": {"replica": url, "cause": cause}})

    # -- what the monitors tell ----------------------------------------------------------------------------------------

    def set_state(self, replica: Replica, state: State, reason: str) -> None:
        before, news = replica.state, reason != replica.reason
        replica.state, replica.reason = state, reason
        if state is before:
            if news:
                fields = {"replica": replica.url, "state": state, "reason": reason}
                logger.warning("replica state stays, for another reason", extra={"fields": fields})
            return
        logger.warning(
            "replica state changed",
            extra={"fields": {"replica": replica.url, "from": before, "to": state, "reason": reason}},
        )
        self.learned()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def learned(self) -> None:
        """A replica's state, models or capacity are others than before: derive again what requests ask for."""
        self._models = {}
        for replica in self.all:
            for name, length in replica.models.items():
                other = self._models.get(name)
                self._models[name] = length if other is None else min(other, length or other)
        known = [replica.capacity_tokens for replica in self.all if replica.capacity_tokens]
        usual = sum(known) / len(known) if known else 1.0  # one that does not tell is taken for an average one
        for replica in self.all:
            replica.weight = float(replica.capacity_tokens or usual)
        self._ready = tuple(replica for replica in self.all if replica.state is State.READY)
        self._ready_for = {
            model: tuple(replica for replica in self._ready if model in replica.models) for model in self._models
        }
        self._on_change()
