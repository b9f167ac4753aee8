"""Micro-batching: short completions that arrive together become one prompt list, which saves the engine's API server
its per-request work (docs/decisions/0003 has what that gains, and when it gains nothing).

A request is mergeable when it is a completion that does not stream, asks for a short answer, and uses only fields whose
meaning inside a prompt list is known. Mergeable requests with byte-identical parameters for one replica share a group:

1. nothing of ours is in flight at the replica: go alone, at once (the caller's decision, see `open_group`).
2. a group is open: join it; full by tokens, then by count: it leaves at once.
3. otherwise open one; it leaves after window_ms, or as soon as the replica runs dry.

A group of one goes alone with its client's own bytes. From a merged answer each client gets its own choices and the
usage of its own tokens. If the engine refuses the merged call (4xx) or can't be reached, each member goes alone: only
the guilty hear of it. Any other failure is everybody's, since the work may have begun.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from gateway.errors import GatewayError, UpstreamFailedError, UpstreamUnreachableError
from gateway.metrics import Metrics
from gateway.protocol import Envelope, Kind
from gateway.settings import Batching

# Sampling parameters that a prompt list applies to each prompt as if it were alone. What is not here goes alone.
# fmt: off
MERGEABLE_FIELDS = frozenset({
    "model", "prompt", "stream", "max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "stop_token_ids", "frequency_penalty", "presence_penalty", "repetition_penalty", "logprobs", "logit_bias",
    "user", "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "add_special_tokens", "bad_words", "allowed_token_ids", "return_token_ids",
    "response_format", "structured_outputs",
})
# fmt: on


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer, ready to send."""

    status: int
    body: bytes
    content_type: str = "application/json"
    retry_after: str | None = None
    usage: tuple[int, int] | None = None  # prompt and generation tokens


class Target(Protocol):
    """Where a call goes: a replica, as far as this room needs to know one."""

    in_flight: int


Send = Callable[[Target, bytes, str], Awaitable[Reply]]


def mergeable(envelope: Envelope, settings: Batching) -> bool:
    """Whether this request may share a call at all."""
    return (
        envelope.kind is Kind.COMPLETIONS
        and settings.window_ms > 0
        and settings.max_prompts > 1
        and not envelope.stream
        and envelope.max_tokens is not None
        and envelope.max_tokens <= settings.max_answer_tokens
        and envelope.size.prompts < settings.max_prompts
        and envelope.document.keys() <= MERGEABLE_FIELDS
        and _prompt_list(envelope.document["prompt"]) is not None
    )


def group_key(envelope: Envelope, extra: bytes = b"") -> bytes:
    """Equal for requests that may share a call: same parameters to the byte, same kind of prompt, same `extra`."""
    parameters = {name: value for name, value in envelope.document.items() if name != "prompt"}
    kind = b"ids" if envelope.size.ids else b"text"
    return kind + b"\0" + extra + b"\0" + orjson.dumps(parameters, option=orjson.OPT_SORT_KEYS)


def _prompt_list(prompt: Any) -> list[Any] | None:
    """The prompts as a list; None for those that would fail a whole list, which go alone and hear it alone."""
    prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    return prompts if prompts and all(prompts) else None


@dataclass(slots=True, eq=False)
class Member:
    """One client's share of a group. `reply` resolves to None when it shall go alone."""

    envelope: Envelope
    request_id: str
    tokens: int
    joined_s: float
    reply: asyncio.Future[Reply | None]

    @property
    def prompts(self) -> list[Any]:
        prompts = _prompt_list(self.envelope.document["prompt"])
        assert prompts is not None
        return prompts


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
        except UpstreamUnreachableError:
            self._metrics.splits.labels("unreachable").inc()
            replies = [None] * len(members)
        except GatewayError as error:
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
        first = members[0]
        prompts = [prompt for member in members for prompt in member.prompts]
        document = {**first.envelope.document, **group.extra, "prompt": prompts, "return_token_ids": True}
        reply = await self._send(group.target, orjson.dumps(document), first.request_id)
        if 400 <= reply.status < 500:
            self._metrics.splits.labels("refused").inc()
            return [None] * len(members)
        if reply.status != 200:
            return [reply] * len(members)
        answer = demultiplex(reply.body, members)
        if answer is None:
            self._metrics.splits.labels("no_token_ids").inc()
            return [None] * len(members)
        self._metrics.merged.inc(len(members))
        return answer


def demultiplex(body: bytes, members: Sequence[Member]) -> list[Reply] | None:
    """Take a merged answer apart: each member's choices (prompt-major with n), reindexed, and usage of its own tokens.

    None when the engine gave no token ids to account by. Raises UpstreamFailedError when the choices don't add up.
    """
    try:
        document = orjson.loads(body)
        choices = document["choices"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise UpstreamFailedError("the engine's answer is no completion") from None
    n = members[0].envelope.n
    if len(choices) != n * sum(member.envelope.size.prompts for member in members):
        raise UpstreamFailedError("the engine answered another number of choices than were asked for")
    choices.sort(key=lambda choice: choice["index"])
    if not all(isinstance(choice.get("token_ids"), list) for choice in choices):
        return None
    replies = []
    start = 0
    for member in members:
        own = choices[start : start + n * member.envelope.size.prompts]
        start += len(own)
        if any(choice.get("prompt_token_ids") is None for choice in own[::n]):
            return None
        prompt_tokens = sum(len(choice["prompt_token_ids"]) for choice in own[::n])
        generation_tokens = sum(len(choice["token_ids"]) for choice in own)
        for index, choice in enumerate(own):
            choice["index"] = index
            if not member.envelope.document.get("return_token_ids"):
                choice["token_ids"] = choice["prompt_token_ids"] = None
        usage = {
            **document.get("usage", {}),
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generation_tokens,
            "total_tokens": prompt_tokens + generation_tokens,
        }
        if "prompt_tokens_details" in usage:
            usage["prompt_tokens_details"] = None  # the engine's figure is the last prompt's only
        whole = {**document, "id": f"cmpl-{member.request_id}", "choices": own, "usage": usage}
        replies.append(Reply(200, orjson.dumps(whole), usage=(prompt_tokens, generation_tokens)))
    return replies
