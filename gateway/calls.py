"""One call to an engine, as those see it who judge the engine by it, or check that its answer is the right one."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from gateway.client import Sink
from gateway.errors import UpstreamFailedError
from gateway.exchange import Reply


@dataclass(slots=True)
class Call:
    """One call as a breaker judges it. `works` stays None where nothing can be said: a client that left, a refusal."""

    status: int | None = None
    works: bool | None = None


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
