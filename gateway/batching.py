"""Micro-batching: short requests that arrive together become one list, which saves the engine's API server its
per-request work (docs/decisions/0003 has what that gains, and when it gains nothing).

What may share a call is merging.py's to say. Requests that may, for one replica and with one key, share a group:

1. nothing of ours is in flight at the replica: a request goes alone, at once (the caller sees to that).
2. a group is open: join it; full by tokens, then by count: it leaves at once.
3. otherwise open one; it leaves after window_ms, or as soon as the replica runs dry.

A group of one goes alone with its client's own bytes. If the engine refuses the merged call (4xx), each member goes
alone: only the guilty hear of it. Any other failure is everybody's, since the work may have begun; one that can't be
reached is, too, and each member's caller then looks for another.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from gateway.errors import GatewayError, UpstreamFailedError, UpstreamUnreachableError
from gateway.exchange import Reply
from gateway.merging import demultiplex, group_key, merged_body
from gateway.metrics import Metrics
from gateway.protocol import Envelope, Kind
from gateway.settings import Batching


class Target(Protocol):
    """Where a call goes: a replica, as far as this room needs to know one."""

    in_flight: int


Send = Callable[[Target, Kind, bytes, str], Awaitable[Reply]]


@dataclass(slots=True, eq=False)
class Member:
    """One client's share of a group. `reply` resolves to None when it shall go alone."""

    envelope: Envelope
    request_id: str
    tokens: int
    joined_s: float
    reply: asyncio.Future[Reply | None]


@dataclass(slots=True, eq=False)
class _Group:
    target: Target
    key: bytes
    extra: dict[str, Any]
    members: list[Member] = field(default_factory=list)
    tokens: int = 0
    timer: asyncio.TimerHandle | None = None
    call: asyncio.Task[None] | None = None

    @property
    def prompts(self) -> int:
        return sum(member.envelope.size.prompts for member in self.members)


class MicroBatcher:
    """Owner of the open groups and of the merged calls on their way."""

    def __init__(
        self, settings: Batching, metrics: Metrics, send: Send, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._send = send
        self._clock = clock
        self._open: dict[tuple[int, bytes], _Group] = {}
        self._calls: set[_Group] = set()

    def __repr__(self) -> str:
        return f"<MicroBatcher {len(self._open)} groups open, {len(self._calls)} calls in flight>"

    @property
    def waiting(self) -> int:
        """Requests in open groups."""
        return sum(len(group.members) for group in self._open.values())

    async def submit(
        self, target: Target, envelope: Envelope, request_id: str, tokens: int, extra: dict[str, Any]
    ) -> Reply | None:
        """Wait for company, then for the answer; None means: go alone now. `extra` are the gateway's own body fields.

        Cancelling this coroutine takes the member out; the last one to leave ends the engine's call.
        """
        member = Member(envelope, request_id, tokens, self._clock(), asyncio.get_running_loop().create_future())
        group = self._join(target, member, extra)
        try:
            return await member.reply
        except asyncio.CancelledError:
            self._drop(group, member)
            raise

    def flush(self, target: Target) -> None:
        """The target has nothing of ours in flight any more: whoever waits for it goes."""
        for group in [group for group in self._open.values() if group.target is target]:
            self._close(group)

    def check_integrity(self) -> None:
        for (target, key), group in self._open.items():
            assert group.members and (id(group.target), group.key) == (target, key), self
            assert group.tokens == sum(member.tokens for member in group.members), self
            assert group.call is None, self
        assert all(group.call is not None and not group.call.done() for group in self._calls), self

    # -- groups --------------------------------------------------------------------------------------------------------

    def _join(self, target: Target, member: Member, extra: dict[str, Any]) -> _Group:
        key = group_key(member.envelope, orjson.dumps(extra))
        place = (id(target), key)
        group = self._open.get(place)
        if group is not None and (
            group.tokens + member.tokens > self._settings.max_tokens
            or group.prompts + member.envelope.size.prompts > self._settings.max_prompts
        ):
            self._close(group)
            group = None
        if group is None:
            group = self._open[place] = _Group(target, key, extra)
            group.timer = asyncio.get_running_loop().call_later(self._settings.window_ms / 1000, self._close, group)
        group.members.append(member)
        group.tokens += member.tokens
        if group.tokens >= self._settings.max_tokens or group.prompts >= self._settings.max_prompts:
            self._close(group)
        return group

    def _close(self, group: _Group) -> None:
        """The group takes nobody more: send it."""
        if self._open.pop((id(group.target), group.key), None) is None:
            return
        if group.timer is not None:
            group.timer.cancel()
        now = self._clock()
        group.members = [member for member in group.members if not member.reply.done()]
        for member in group.members:
            self._metrics.batch_wait_seconds.observe(now - member.joined_s)
        if len(group.members) < 2:
            for member in group.members:
                member.reply.set_result(None)
            return
        self._metrics.batch_prompts.observe(group.prompts)
        self._calls.add(group)
        group.call = asyncio.create_task(self._call(group), name="micro-batch")

    def _drop(self, group: _Group, member: Member) -> None:
        if member not in group.members:
            return
        group.members.remove(member)
        group.tokens -= member.tokens
        if group.members:
            return
        if group.call is not None:
            group.call.cancel()
        elif self._open.pop((id(group.target), group.key), None) is not None and group.timer is not None:
            group.timer.cancel()

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def _call(self, group: _Group) -> None:
        members = list(group.members)  # who is in the call, whoever leaves meanwhile
        replies: Sequence[Reply | None]
        try:
            replies = await self._ask(group, members)
        except GatewayError as error:
            if isinstance(error, UpstreamUnreachableError):
                self._metrics.splits.labels("unreachable").inc()
            for member in members:
                if not member.reply.done():
                    member.reply.set_exception(error)
            return
        except Exception as error:
            failure = UpstreamFailedError(f"the merged call failed ({type(error).__name__})")
            for member in members:
                if not member.reply.done():
                    member.reply.set_exception(failure)
            raise
        finally:
            self._calls.discard(group)
        for member, reply in zip(members, replies, strict=True):
            if not member.reply.done():
                member.reply.set_result(reply)

    async def _ask(self, group: _Group, members: Sequence[Member]) -> Sequence[Reply | None]:
        envelopes = [member.envelope for member in members]
        body = merged_body(envelopes, group.extra)
        reply = await self._send(group.target, envelopes[0].kind, body, members[0].request_id)
        if 400 <= reply.status < 500:
            self._metrics.splits.labels("refused").inc()
            return [None] * len(members)
        if reply.status != 200:
            return [reply] * len(members)
        answer = demultiplex(reply.body, envelopes, [member.request_id for member in members])
        if answer is None:
            self._metrics.splits.labels("no_accounting").inc()
            return [None] * len(members)
        self._metrics.merged.inc(len(members))
        return answer
