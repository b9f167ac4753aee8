"""One call to an engine, as those see it who judge the engine by it, or check that its answer is the right one."""

import re
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gateway.client import Sink
from gateway.errors import UpstreamFailedError, UpstreamTimeoutError, UpstreamUnreachableError
from gateway.exchange import Reply
from gateway.replica import Replica

_MERGED = 0  # merged calls count as one request: a bad one among them is always another call's company
_FAULTS = (UpstreamFailedError, UpstreamTimeoutError)


class Call:
    """One call as a breaker judges it: `with` it, it is in flight, and at its end the replica's breaker hears what came
    of it. `works` stays None where nothing can be said: a client that left, a refusal.

    `body` tells calls of one request from another's, None stands for a merged call; `idle` is called where the replica
    has nothing of ours left.
    """

    __slots__ = ("_body", "_clock", "_idle", "_replica", "_trial", "status", "works")

    def __init__(
        self,
        replica: Replica,
        body: bytes | None,
        clock: Callable[[], float],
        idle: Callable[[Replica], None],
        trial: bool = False,
    ) -> None:
        self.status: int | None = None
        self.works: bool | None = None
        self._replica = replica
        self._body = body
        self._clock = clock
        self._idle = idle
        self._trial = trial

    def __enter__(self) -> Self:
        self._replica.in_flight += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        replica = self._replica
        if isinstance(error, _FAULTS) and not isinstance(error, UpstreamUnreachableError):  # that is told elsewhere
            self.works = None if self.status is not None and 400 <= self.status < 500 else False
        if self.works:
            replica.breaker.works(self._clock(), self._trial)
        elif self.works is False:
            replica.breaker.failed(self._clock(), _MERGED if self._body is None else hash(self._body), self._trial)
        replica.in_flight -= 1
        if not replica.in_flight:
            self._idle(replica)


def works(status: int) -> bool | None:
    """503 is a busy engine, 501 a model that can't do this, 4xx the client's own mistake: no failures, these."""
    return None if status in (501, 503) else status < 500


class Begun:
    """A sink that asks after each event whether the first token has come, until it has."""

    def __init__(self, sink: Sink, begun: Callable[[], bool]) -> None:
        self._sink = sink
        self._begun = begun
        self._done = False
        self.whole, self.start, self.end = sink.whole, sink.start, sink.end

    async def events(self, data: bytes) -> None:
        self._done = self._done or self._begun()
        await self._sink.events(data)


class Issued:
    """Ids given to engines lately. vLLM builds an answer's id from its request's; one that carries another request's id
    came over a connection that an engine or a proxy confused, and must reach nobody."""

    KEPT = 4096
    _ID = re.compile(rb'"id":\s?"(?:chatcmpl|cmpl|embd)-([A-Za-z0-9._-]+)"')

    def __init__(self) -> None:
        self._ids: dict[bytes, None] = {}

    def note(self, upstream_id: str) -> None:
        self._ids[upstream_id.encode()] = None
        if len(self._ids) > self.KEPT:
            del self._ids[next(iter(self._ids))]

    def require_own(self, reply: Reply, upstream_id: str) -> None:
        """Raises UpstreamFailedError for an answer to another request of ours."""
        found = self._ID.search(reply.body, 0, 512)
        if found is not None and found[1] != upstream_id.encode() and found[1] in self._ids:
            raise UpstreamFailedError("the engine sent the answer to another request")
