"""One admission queue for each pool of engines, so that a full model refuses nobody who asks for another.

Models that one engine serves (its adapters, its other names) share its KV cache, and engines that serve one model share
its requests: a pool is what hangs together in this way. Most pools are one model and its replicas.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gateway.accountbook import AccountBook
from gateway.accounts import Accounts
from gateway.admission import Admission
from gateway.metrics import Metrics
from gateway.replica import Replica, State
from gateway.settings import Admission as AdmissionSettings
from gateway.workers import ONLY, Worker


@dataclass(frozen=True, slots=True)
class Pool:
    models: frozenset[str]
    replicas: tuple[Replica, ...]


def pools(replicas: Iterable[Replica]) -> list[Pool]:
    """The pools of the replicas that told their models. Pure."""
    found: list[Pool] = []
    for replica in replicas:
        if not replica.models:
            continue
        models = frozenset(replica.models)
        members: tuple[Replica, ...] = (replica,)
        apart = []
        for other in found:
            if other.models & models:
                models, members = other.models | models, (*other.replicas, *members)
            else:
                apart.append(other)
        found = [*apart, Pool(models, members)]
    return found


class Admissions:
    """Owner of the queues and of the keys' accounts.

    Where pools join or split, one queue goes on and the others get no new requests: those they hold end there, so for
    that time more may be in flight than the engines hold, by as much as these hold.
    """

    def __init__(
        self,
        settings: AdmissionSettings,
        metrics: Metrics,
        clock: Callable[[], float],
        worker: Worker = ONLY,
        book: AccountBook | None = None,
    ) -> None:
        """`settings` are the worker's own; of what the engines report it takes its share."""
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._worker = worker
        self._of: dict[str, Admission] = {}  # model -> its pool's queue
        self._retired: list[Admission] = []
        self._unknown = self._new()  # for models no engine told of (yet)
        self.accounts = Accounts(metrics, clock, book)
        metrics.queued_requests.set_function(lambda: self.queued)
        metrics.queued_tokens.set_function(lambda: self.queued_tokens)
        metrics.in_flight_requests.set_function(lambda: self.in_flight)
        metrics.in_flight_tokens.set_function(lambda: self.in_flight_tokens)
        metrics.capacity_tokens.set_function(lambda: self.capacity_tokens)

    def __repr__(self) -> str:
        return f"<Admissions {', '.join(f'{name}: {queue!r}' for name, queue in self._of.items())}>"

    def of(self, model: str) -> Admission:
        """The queue for requests of a model."""
        return self._of.get(model, self._unknown)

    def arrange(self, replicas: Iterable[Replica]) -> None:
        """Replicas came, went, changed state or told other figures: let each pool's queue know."""
        before = {id(queue): queue for queue in self._of.values()}
        after: dict[str, Admission] = {}
        names: dict[str, Admission] = {}
        for pool in pools(replicas):
            at_hand = [self._of[name] for name in sorted(pool.models) if name in self._of]
            free = [queue for queue in at_hand if id(queue) in before]
            queue = max(free, key=lambda queue: queue.in_flight_tokens + queue.queued_tokens, default=None)
            queue = before.pop(id(queue)) if queue is not None else self._new()
            after.update(dict.fromkeys(pool.models, queue))
            names[min(pool.models)] = queue
            ready = [replica for replica in pool.replicas if replica.state is State.READY]
            # While every engine is away the last figure stays: the waiting room still has to be bounded.
            if capacity := sum(replica.capacity_tokens or 0 for replica in ready):
                queue.set_capacity(max(1, self._worker.share(capacity)))
            queue.shares_beginnings = bool(ready) and all(replica.prefix_caching for replica in ready)
            queue.pause(not ready)
        self._of = after
        for left in before.values():
            left.retire()
        self._retired = [queue for queue in (*self._retired, *before.values()) if queue.in_flight or queue.queued]
        self._export(names)

    # -- all of it -----------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return sum(queue.in_flight for queue in self._all())

    @property
    def in_flight_tokens(self) -> int:
        return sum(queue.in_flight_tokens for queue in self._all())

    @property
    def queued(self) -> int:
        return sum(queue.queued for queue in self._all())

    @property
    def queued_tokens(self) -> int:
        return sum(queue.queued_tokens for queue in self._all())

    @property
    def capacity_tokens(self) -> int:
        """Of all pools there are; where there is none yet, what one would begin with."""
        return sum(queue.capacity_tokens for queue in self._pooled()) if self._of else self._unknown.capacity_tokens

    @property
    def drain_tokens_per_s(self) -> float | None:
        """Of all pools whose pace is known."""
        known = [rate for queue in self._pooled() if (rate := queue.drain_tokens_per_s) is not None]
        return sum(known) if known else None

    def status(self) -> list[dict[str, object]]:
        """For /status, a pool each."""
        return [
            {
                "models": sorted(name for name, other in self._of.items() if other is queue),
                "capacity_tokens": queue.capacity_tokens,
                "in_flight": queue.in_flight,
                "in_flight_tokens": queue.in_flight_tokens,
                "queued": queue.queued,
                "queued_tokens": queue.queued_tokens,
                "drain_tokens_per_s": queue.drain_tokens_per_s,
            }
            for queue in self._pooled()
        ]

    def check_integrity(self) -> None:
        self.accounts.check_integrity()
        for queue in self._all():
            queue.check_integrity()

    def _new(self) -> Admission:
        return Admission(self._settings, self._metrics, self._clock)

    def _pooled(self) -> Iterator[Admission]:
        return iter({id(queue): queue for queue in self._of.values()}.values())

    def _all(self) -> Iterator[Admission]:
        yield from self._pooled()
        yield from self._retired
        yield self._unknown

    def _export(self, names: dict[str, Admission]) -> None:
        metrics = self._metrics
        for gauge, figure in (
            (metrics.pool_capacity_tokens, "capacity_tokens"),
            (metrics.pool_in_flight_tokens, "in_flight_tokens"),
            (metrics.pool_queued_tokens, "queued_tokens"),
        ):
            gauge.clear()
            for name, queue in names.items():
                gauge.labels(name).set_function(functools.partial(getattr, queue, figure))
