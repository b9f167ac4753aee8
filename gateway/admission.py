"""Admission: a bounded, fair queue in front of one pool of engines (pools.py). Nothing it refuses reaches one.

State: `in-flight` tokens and requests (open leases) and, per tenant, the waiting. A request is decided on arrival:

1. it fits and nobody waits: a lease at once.
2. its predicted wait passes its deadline: refused, with the time after which it would not have been.
3. the queue is full: the tenant that fills it most, relative to its weight, gives up its newest waiting request;
   if that is the arriving one, it is refused.
4. otherwise it waits, max_wait_s at the longest. Tenants are served by start-time fair queueing on tokens (Goyal, Vin,
   Cheng 1996), each tenant in order of arrival. A request that does not fit yet may be overtaken by ones that do, by
   as many tokens as it asks for itself and no more: it is neither starved nor does it stop everybody.

What requests in flight have in common at their beginning counts once where the engines share it (sharing.py), so one
may fit that is larger than what is free. Turns, prices and the pace go by whole sizes.

While no engine is ready (`paused`) nothing can be predicted and max_wait_s does not run: a request then waits until its
own deadline, since a restart takes longer than any queue should.

`_next()` decides who goes; `acquire` and `Lease.close` do the waiting and waking. One event loop, so no locks.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from gateway.errors import OverloadedError
from gateway.keys import Tenant
from gateway.limits import DrainRate, Residence
from gateway.metrics import Metrics
from gateway.settings import Admission as AdmissionSettings
from gateway.sharing import Held, Parts

LOOK_AHEAD = 32  # waiting requests of one tenant that are looked at for one that fits


class Lease:
    """Permission to have `tokens` in flight, of which `parts` may be others' as well. Close it exactly when the work
    ended; closing again does nothing."""

    __slots__ = ("_admission", "granted_s", "open", "parts", "tenant", "tokens")

    def __init__(self, admission: "Admission", tenant: str, tokens: int, parts: Parts, granted_s: float) -> None:
        self._admission = admission
        self.tenant = tenant
        self.tokens = tokens
        self.parts = parts
        self.granted_s = granted_s
        self.open = True

    def close(self) -> None:
        if self.open:
            self.open = False
            self._admission._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(slots=True, eq=False)
class _Waiter:
    tokens: int
    parts: Parts
    queued_s: float
    granted: asyncio.Future[Lease]
    deadline_s: float
    timeout: asyncio.Timeout | None = None
    overtaken: int = 0  # tokens that went past it while it did not fit


@dataclass(slots=True, eq=False)
class _Line:
    """One tenant's waiting requests, in order."""

    weight: float
    waiters: deque[_Waiter] = field(default_factory=deque)
    tokens: int = 0
    start: float = 0.0  # virtual time at which its next request may begin: its tokens so far, over its weight


class Admission:
    """Owner of the queue. `capacity_tokens` is set by whoever knows the engines; 0 means nothing is known yet."""

    def __init__(self, settings: AdmissionSettings, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self.capacity_tokens = settings.capacity_tokens or 0
        self.shares_beginnings = False  # the engines have a prefix cache, all of them
        self._leased_tokens = 0
        self._parts_tokens = 0  # of these, in parts
        self._held = Held()
        self.queued_tokens = 0
        self._leases: set[Lease] = set()
        self._lines: dict[str, _Line] = {}  # tenants with somebody waiting
        self._virtual = 0.0  # virtual time: the start tag of what was granted last
        self._finished: dict[str, float] = {}  # tenants that emptied their line ahead of virtual time
        self._drain = DrainRate()
        self._residence = Residence()
        self._saturated_since_s: float | None = None
        self._paused = False

    def __repr__(self) -> str:
        tokens = f"{self.in_flight_tokens}/{self.capacity_tokens} tokens"
        return f"<Admission {tokens}, {self.in_flight} in-flight, {self.queued} queued>"

    @property
    def in_flight(self) -> int:
        return len(self._leases)

    @property
    def in_flight_tokens(self) -> int:
        """What the engines have to hold: beginnings in common once."""
        return self._leased_tokens - self._parts_tokens + self._held.tokens

    @property
    def queued(self) -> int:
        return sum(len(line.waiters) for line in self._lines.values())

    def set_capacity(self, tokens: int) -> None:
        """The engines' own figure; a configured one wins. Growing it lets waiting requests go at once."""
        if self._settings.capacity_tokens is None and tokens != self.capacity_tokens:
            self.capacity_tokens = tokens
            self._grant()

    def pause(self, paused: bool) -> None:
        """No engine is ready, or one is again."""
        if paused is self._paused:
            return
        self._paused = paused
        now = self._clock()
        self._mark_saturation(now)  # a standstill says nothing about the pace
        for line in self._lines.values():
            for waiter in line.waiters:
                self._set_timeout(waiter, now)

    def retire(self) -> None:
        """It gets no new requests: those that wait have only each other to wait for."""
        self.pause(False)
        self._grant()

    async def acquire(self, tenant: Tenant, tokens: int, deadline_s: float, parts: Parts = ()) -> Lease:
        """Wait for a lease on `tokens`, at the longest until `deadline_s` on this admission's clock. `parts`: the
        prompt's beginning.

        Raises OverloadedError: at once where the wait can be predicted, at the deadline where the prediction was wrong.
        """
        now = self._clock()
        lease = await self._wait(tenant, tokens, parts if self.shares_beginnings else (), now, deadline_s)
        self._metrics.queue_seconds.observe(lease.granted_s - now)
        return lease

    async def _wait(self, tenant: Tenant, tokens: int, parts: Parts, now: float, deadline_s: float) -> Lease:
        if not self._lines and self._fits(tokens, parts):
            return self._lease(tenant.name, tokens, parts, now)
        wait_s = self.predicted_wait_s(tenant, tokens)
        allowed_s = self._allowed_s(deadline_s, now)
        # What fits now waits for a turn at most; the pace says nothing about that while a large request is held up.
        if wait_s is not None and wait_s > allowed_s and not self._fits(tokens, parts):
            if wait_s <= self._settings.max_wait_s:
                self._metrics.deadline_shed.labels(tenant.name).inc()
            raise self._refusal(
                "predicted_wait", tenant, f"would wait {wait_s:.1f} s, {allowed_s:.1f} s allowed", wait_s - allowed_s
            )
        self._make_room(tenant, tokens)
        line = self._lines.get(tenant.name)
        if line is None:
            line = self._lines[tenant.name] = _Line(tenant.weight)
            line.start = max(self._virtual, self._finished.pop(tenant.name, 0.0))
        waiter = _Waiter(tokens, parts, now, asyncio.get_running_loop().create_future(), deadline_s)
        line.waiters.append(waiter)
        line.tokens += tokens
        self.queued_tokens += tokens
        self._mark_saturation(now)
        self._grant()  # it may be one that fits past one that does not
        lease: Lease | None = None
        try:
            async with asyncio.timeout(allowed_s) as waiter.timeout:
                lease = await waiter.granted
            return lease
        except TimeoutError:
            waited_s = self._clock() - now
            raise self._refusal(
                "waited_too_long", tenant, f"waited {waited_s:.1f} s in the queue", self._backlog_s()
            ) from None
        finally:
            if lease is None:
                if waiter in line.waiters:
                    self._leave(tenant.name, line, waiter)
                elif waiter.granted.done() and not waiter.granted.cancelled() and not waiter.granted.exception():
                    waiter.granted.result().close()  # granted in the very step in which the client left

    def predicted_wait_s(self, tenant: Tenant, tokens: int) -> float | None:
        """Seconds until `tokens` more of this tenant would be admitted; None while nothing is known of the pace."""
        rate = self.drain_tokens_per_s
        if rate is None or self._paused:
            return None
        own = self._lines.get(tenant.name)
        own_tokens = (own.tokens if own else 0) + tokens
        ahead = own_tokens + sum(
            min(line.tokens, own_tokens * line.weight / tenant.weight)
            for name, line in self._lines.items()
            if name != tenant.name
        )
        free = max(0, self.capacity_tokens - self.in_flight_tokens)
        return max(0.0, ahead - free) / rate

    @property
    def drain_tokens_per_s(self) -> float | None:
        """Tokens a second given back under saturation; before any was seen, Little's law on what is in flight."""
        if (measured := self._drain.tokens_per_s) is not None:
            return measured
        if self._residence.mean_s and self._leased_tokens:
            return self._leased_tokens / self._residence.mean_s
        return None

    def check_integrity(self) -> None:
        """queued + in-flight = unfinished, and every sum agrees with its parts."""
        assert self.in_flight_tokens >= 0, self
        assert self._leased_tokens == sum(lease.tokens for lease in self._leases), self
        every = [part for lease in self._leases for part in lease.parts]
        assert self._parts_tokens == sum(tokens for _, tokens in every), self
        assert len(self._held) == len({key for key, _ in every}), self
        assert all(lease.open for lease in self._leases), self
        assert all(line.waiters for line in self._lines.values()), self
        for line in self._lines.values():
            assert line.tokens == sum(waiter.tokens for waiter in line.waiters), self
            assert all(waiter.granted.cancelled() for waiter in line.waiters if waiter.granted.done()), self
        assert self.queued_tokens == sum(line.tokens for line in self._lines.values()), self

    # -- deciding: no awaits below this line ---------------------------------------------------------------------------

    def _fits(self, tokens: int, parts: Parts) -> bool:
        if self.in_flight >= self._settings.max_in_flight:
            return False
        # A request larger than everything goes alone: the engine, which knows its own limit, answers it.
        if not self._leases or not self.capacity_tokens:
            return True
        free = self.capacity_tokens - self.in_flight_tokens
        return tokens <= free or tokens - self._held.common(parts) <= free

    def _next(self) -> tuple[str, _Waiter] | None:
        """Take the next waiting request that may go out of its line: the earliest start tag that fits."""
        held_up: list[_Waiter] = []
        for name, line in sorted(self._lines.items(), key=lambda item: item[1].start):
            for waiter in itertools.islice(line.waiters, LOOK_AHEAD):
                if not self._fits(waiter.tokens, waiter.parts):
                    held_up.append(waiter)
                elif all(other.overtaken + waiter.tokens <= other.tokens for other in held_up):
                    for other in held_up:
                        other.overtaken += waiter.tokens
                    self._virtual = max(self._virtual, line.start)
                    line.start += waiter.tokens / line.weight
                    self._leave(name, line, waiter)
                    return name, waiter
        return None

    def _grant(self) -> None:
        now = self._clock()
        while (chosen := self._next()) is not None:
            name, waiter = chosen
            if not waiter.granted.done():  # its client left, and it had no turn yet to leave the queue
                waiter.granted.set_result(self._lease(name, waiter.tokens, waiter.parts, now))

    def _lease(self, tenant: str, tokens: int, parts: Parts, now: float) -> Lease:
        lease = Lease(self, tenant, tokens, parts, now)
        self._leases.add(lease)
        self._leased_tokens += tokens
        self._parts_tokens += sum(size for _, size in parts)
        self._held.take(parts)
        return lease

    def _release(self, lease: Lease) -> None:
        now = self._clock()
        self._leases.remove(lease)
        self._leased_tokens -= lease.tokens
        self._parts_tokens -= sum(size for _, size in lease.parts)
        self._held.give_back(lease.parts)
        self._residence.observe(now - lease.granted_s)
        if self._saturated_since_s is not None:
            self._drain.observe(lease.tokens, now - self._saturated_since_s)
        if self._lines:
            self._grant()
        self._mark_saturation(now)

    def _leave(self, name: str, line: _Line, waiter: _Waiter) -> None:
        line.waiters.remove(waiter)
        line.tokens -= waiter.tokens
        self.queued_tokens -= waiter.tokens
        if not line.waiters:
            del self._lines[name]
            # Remembered only while it is ahead of its share: credit for having been idle would be a burst.
            self._finished = {tenant: tag for tenant, tag in self._finished.items() if tag > self._virtual}
            if line.start > self._virtual:
                self._finished[name] = line.start
        self._mark_saturation(self._clock())

    def _mark_saturation(self, now: float) -> None:
        self._saturated_since_s = now if self._lines and not self._paused else None

    def _allowed_s(self, deadline_s: float, now: float) -> float:
        """How long a request may wait from now on."""
        return deadline_s - now if self._paused else min(deadline_s - now, self._settings.max_wait_s)

    def _set_timeout(self, waiter: _Waiter, now: float) -> None:
        if waiter.timeout is not None and not waiter.timeout.expired():
            waiter.timeout.reschedule(asyncio.get_running_loop().time() + self._allowed_s(waiter.deadline_s, now))

    def _make_room(self, tenant: Tenant, tokens: int) -> None:
        """Case 3 above. Evicts newest first, so that whoever waited longest keeps its place."""
        limit = self._settings.max_queue_tokens
        while self.queued_tokens + tokens > limit:
            own = self._lines.get(tenant.name)
            own_load = ((own.tokens if own else 0) + tokens) / tenant.weight
            name, line = max(
                self._lines.items(), key=lambda item: item[1].tokens / item[1].weight, default=(None, None)
            )
            if name is None or line is None or name == tenant.name or line.tokens / line.weight <= own_load:
                excess_s = (self.queued_tokens + tokens - limit) / (self._pace() or float("inf"))
                raise self._refusal("queue_full", tenant, "the queue is full", excess_s or self._backlog_s())
            victim = line.waiters[-1]
            self._leave(name, line, victim)
            if victim.granted.done():
                continue  # its client left, and it had no turn yet to leave the queue
            why = "the queue is full and this key fills it most"
            victim.granted.set_exception(self._refusal("pushed_out", Tenant(name), why, self._backlog_s()))

    def _backlog_s(self) -> float:
        """Seconds until what waits now has been admitted."""
        rate = self._pace()
        return 1.0 if rate is None else max(1.0, self.queued_tokens / rate)

    def _pace(self) -> float | None:
        """Tokens a second for Retry-After. Before any request has ended, what is in flight takes at least as long as
        the oldest of it has taken: too little to refuse anybody for, but an honest least to come back after."""
        if (known := self.drain_tokens_per_s) is not None or not self._leases:
            return known
        age_s = self._clock() - min(lease.granted_s for lease in self._leases)
        return self._leased_tokens / age_s if age_s > 0 else None

    def _refusal(self, cause: str, tenant: Tenant, detail: str, retry_after_s: float) -> OverloadedError:
        self._metrics.shed.labels(cause, tenant.name).inc()
        return OverloadedError(f"overloaded: {detail}", cause=cause, retry_after_s=retry_after_s)
