"""One inference request, from the client's body to its answer: the hot path, in eight steps.

1. read: the body, bounded in size and time (client.py)
2. envelope: the few fields the gateway acts on, and what it refuses (protocol.py)
3. model: does an engine serve it, is one ready or coming back (replicas.py)
4. charge and share: the key's own limits (admission.py); an identical deterministic request under way answers this
   one too (coalescing.py)
5. admit: a lease on the request's tokens, or a refusal that costs the engine nothing (admission.py)
6. route: a replica; another one only while nothing has been sent (routing.py)
7. ask: merged with others that are alike (batching.py), or alone (upstream.py)
8. relay: the answer to its client (relay.py); the lease ends with it

Nothing calls back upwards; failures rise as GatewayError to the edge.
"""

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any

from gateway.batching import MicroBatcher, Target
from gateway.calls import Begun, Call, Issued, works
from gateway.client import BodyRoom, ClientSink, ClientWatch, Receive, Scope, Send, Sink, read_body, request_timeout_s
from gateway.coalescing import Coalescer, deterministic
from gateway.errors import (
    BadRequestError,
    OverloadedError,
    UnavailableError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from gateway.exchange import Exchange, Reply
from gateway.limits import TokenEstimator, request_cost
from gateway.merging import mergeable
from gateway.metrics import Metrics
from gateway.pools import Admissions
from gateway.prefixes import Look, Prefixes, Prompts, outcomes
from gateway.protocol import (
    HOT_ROUTES,
    Envelope,
    Kind,
    carries_grammar,
    parse,
    route_not_served,
    unknown_model,
    with_fields,
)
from gateway.relay import StreamRelay, read_whole
from gateway.replicas import Replica, Replicas
from gateway.routing import affinity, choose
from gateway.settings import Settings
from gateway.sharing import parts_of
from gateway.upstream import Answer, Upstream

# Dialects whose streams report usage only when asked; the others always do.
_USAGE_ON_REQUEST = (Kind.CHAT, Kind.COMPLETIONS)
# How a stream fails where its engine is to blame (relay.py names them).
_ENGINES_FAULTS = {"broken_stream", "timeout_in_stream", "engine_error_event"}


class Inference:
    """The ASGI app of the hot routes. It expects the edge (middleware.py) around it."""

    def __init__(
        self,
        settings: Settings,
        replicas: Replicas,
        admission: Admissions,
        upstream: Upstream,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._replicas = replicas
        self._admission = admission
        self._upstream = upstream
        self._metrics = metrics
        self._clock = clock
        self._room = BodyRoom(settings.limits.max_arriving_bytes)
        self.estimator = TokenEstimator()
        self._issued = Issued()
        self.prefixes = Prefixes()
        metrics.prefix_entries.set_function(lambda: len(self.prefixes))
        self._prefix_tokens = functools.lru_cache(4096)(metrics.prefix_tokens.labels)
        self.batcher = MicroBatcher(settings.batching, metrics, self._send_merged, clock)
        self.coalescer = Coalescer(metrics, self._serve, clock, settings.timeouts.total_s / 2)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self._settings
        kind = HOT_ROUTES[scope["path"]]
        limit, limit_s = settings.limits.max_body_bytes, settings.timeouts.body_s
        body = await read_body(scope, receive, limit, limit_s, self._room)
        with self._room.share() as take:  # held as long as the request: parsed, a body is larger still
            if not take(len(body)):
                raise OverloadedError("overloaded: too many large bodies", cause="bodies", retry_after_s=1)
            await self._handle(scope, receive, send, kind, body)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, kind: Kind, body: bytes) -> None:
        exchange: Exchange = scope["state"]["exchange"]
        settings = self._settings
        deadline_s = request_timeout_s(scope, settings.timeouts.total_s)
        envelope = parse(kind, body, settings.limits, settings.policy)
        exchange.model = envelope.model
        sink = ClientSink(send, exchange, self._clock)
        with ClientWatch(receive, sink):
            self._require_engine(self._served_model(envelope))
            tokens = self._cost(envelope)
            with self._admission.accounts.charge(exchange.owner, tokens) as charge:
                try:
                    await self._share_or_serve(exchange, envelope, sink, deadline_s, tokens)
                except asyncio.CancelledError:
                    if exchange.phase in ("reading", "queued"):
                        charge.used_tokens = 0  # its client left, and no engine has seen anything of it
                    raise
                if exchange.prompt_tokens:
                    charge.used_tokens = exchange.prompt_tokens + exchange.generation_tokens
                elif exchange.status >= 400:
                    charge.used_tokens = 0

    def check_integrity(self) -> None:
        """Nothing is counted that does not exist, and nothing is left behind. Holds between any two awaits."""
        assert self._room.used_bytes >= 0, self._room
        self._admission.check_integrity()
        self.batcher.check_integrity()
        self.coalescer.check_integrity()
        assert all(replica.in_flight >= 0 for replica in self._replicas.all), self._replicas

    # -- steps 3 to 8 --------------------------------------------------------------------------------------------------

    async def _share_or_serve(
        self, exchange: Exchange, envelope: Envelope, sink: Sink, timeout_s: float | None, tokens: int
    ) -> None:
        # A deadline of its own can't be kept on a call that others began.
        if self._settings.batching.coalesce and timeout_s is None and deterministic(envelope):
            await self.coalescer.serve(exchange, envelope, sink)
        else:
            await self._serve(exchange, envelope, sink, timeout_s, tokens)

    def _served_model(self, envelope: Envelope) -> str:
        return self._settings.aliases.get(envelope.model, envelope.model)

    def _cost(self, envelope: Envelope) -> int:
        longest = self._replicas.models.get(self._served_model(envelope))
        return request_cost(envelope, self.estimator, self._settings.admission.assumed_answer_tokens, longest)

    def _require_engine(self, model: str) -> None:
        replicas = self._replicas
        if not replicas.knows(model) and replicas.discovered:
            raise unknown_model(model, {*replicas.models, *self._settings.aliases})
        if not replicas.ready(model) and not replicas.restarting(model):
            raise UnavailableError(f"no engine is ready: {replicas.explain()}", retry_after_s=5)

    async def _serve(
        self,
        exchange: Exchange,
        envelope: Envelope,
        sink: Sink,
        timeout_s: float | None = None,
        tokens: int | None = None,
    ) -> None:
        settings = self._settings
        deadline_s = exchange.arrived_s + (timeout_s or settings.timeouts.total_s)
        tokens = self._cost(envelope) if tokens is None else tokens
        prompts = self.prefixes.prompts(envelope.document, exchange.owner.group)
        parts = parts_of(prompts, min(tokens, self.estimator.estimate(envelope.size)))
        exchange.phase = "queued"
        queue = self._admission.of(self._served_model(envelope))
        with await queue.acquire(exchange.owner, tokens, deadline_s, parts):
            exchange.phase = "waiting"
            try:
                async with asyncio.timeout(deadline_s - self._clock()) as limit:
                    await self._answer(exchange, envelope, prompts, sink, tokens, limit)
            except TimeoutError:
                raise UpstreamTimeoutError("the request took longer than its deadline") from None
        if exchange.prompt_tokens:
            self.estimator.observe(envelope.size, exchange.prompt_tokens)

    async def _answer(
        self,
        exchange: Exchange,
        envelope: Envelope,
        prompts: Prompts,
        sink: Sink,
        tokens: int,
        limit: asyncio.Timeout,
    ) -> None:
        added = self._added_fields(exchange, envelope)
        tried: set[str] = set()
        looks: list[Look] | None = None
        while True:
            replica = await self._route(envelope, tried)
            if looks is None:
                epoch = (replica.url, replica.starts)
                looks = self.prefixes.look(prompts, epoch, self._clock())
            exchange.replica = replica.url
            trial = replica.breaker.begin()
            try:
                alone = trial or not replica.in_flight or exchange.owner.prompt_tokens_details
                if not alone and mergeable(envelope, self._settings.batching):
                    reply = await self.batcher.submit(replica, envelope, exchange.upstream_id, tokens, added)
                    if reply is not None:
                        await self._deliver(exchange, reply, sink)
                        break
                await self._ask_alone(exchange, envelope, replica, trial, added, sink, limit)
                break
            except UpstreamUnreachableError:
                # It has seen nothing of the request, so the next one may: the only case of a retry.
                self._replicas.report_unreachable(replica)
                self._metrics.failures.labels("unreachable").inc()
                self._metrics.retries.inc()
                tried.add(replica.url)
            finally:
                replica.breaker.end(trial)
        if exchange.prompt_tokens:
            cached = (
                exchange.cached_tokens if envelope.size.prompts == 1 else None
            )  # a list's is its last prompt's only
            told = outcomes(looks, prompts.more, exchange.prompt_tokens, cached, replica.block_size)
            for outcome, tokens in told.items():
                self._prefix_tokens(exchange.tenant_label, outcome).inc(tokens)

    async def _route(self, envelope: Envelope, tried: set[str]) -> Replica:
        model = self._served_model(envelope)
        while True:
            ready = self._replicas.choices(model, tried)
            chosen = choose(ready, affinity(envelope.document) if len(ready) > 1 else None)
            if chosen is not None:
                return ready[chosen]
            tried.clear()  # all of them refused: whoever is back by then may be asked again
            wait_s = self._settings.timeouts.reload_wait_s
            if not self._replicas.restarting(model) or not await self._replicas.wait_ready(model, wait_s):
                self._metrics.shed.labels("no_engine", "").inc()
                raise UnavailableError(f"no engine is ready: {self._replicas.explain()}", retry_after_s=5)

    async def _ask_alone(
        self,
        exchange: Exchange,
        envelope: Envelope,
        replica: Replica,
        trial: bool,
        added: dict[str, Any],
        sink: Sink,
        limit: asyncio.Timeout,
    ) -> None:
        hide_usage = envelope.stream and not envelope.wants_usage and envelope.kind in _USAGE_ON_REQUEST
        if hide_usage:
            options = {**(envelope.document.get("stream_options") or {}), "include_usage": True}
            options.pop("continuous_usage_stats", None)  # it asks for something only together with include_usage
            added = {**added, "stream_options": options}
        body = with_fields(envelope, added)
        timeouts = self._settings.timeouts
        with Call(replica, envelope.body, self._clock, self.batcher.flush, trial) as call:
            answer = await self._first_byte(replica.url + envelope.kind.value, body, exchange, envelope.stream)
            call.status = answer.status
            try:
                if envelope.stream and answer.status == 200 and answer.content_type.startswith("text/event-stream"):
                    deadline = limit.when()
                    limit.reschedule(None)  # from here on a missed deadline is an event, which only the relay can send
                    seen = Begun(sink, lambda: self._begun(replica, exchange)) if trial else sink
                    relay = StreamRelay(envelope.kind, answer, seen, exchange, timeouts, self._metrics, self._clock)
                    await relay.run(deadline, hide_usage=hide_usage)
                    call.works = None if exchange.failure else True
                    if exchange.failure in _ENGINES_FAULTS:
                        call.works = False
                    return
                reply = await read_whole(answer, envelope.kind)
                self._issued.require_own(reply, exchange.upstream_id)
                bad_grammar = reply.status == 500 and carries_grammar(envelope)
                call.works = None if bad_grammar else works(reply.status)
            finally:
                answer.close()
        if bad_grammar:
            # vLLM 0.32 answers 500 to a grammar that does not compile, and SDKs repeat a 500. It is the client's.
            raise BadRequestError(
                "the engine failed on this request's grammar; most likely it does not compile",
                param="structured_outputs",
                code="invalid_grammar",
            )
        await self._deliver(exchange, reply, sink)

    async def _first_byte(self, url: str, body: bytes, exchange: Exchange, stream: bool) -> Answer:
        headers = _headers(exchange.upstream_id, exchange.trace)
        self._issued.note(exchange.upstream_id)
        if not stream:  # its headers come with the whole answer, so only the request's deadline limits them
            return await self._upstream.post(url, body, headers)
        limit_s = self._settings.timeouts.first_byte_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._upstream.post(url, body, headers)
        except TimeoutError:
            raise UpstreamTimeoutError(f"the engine began no answer within {limit_s:g} s") from None

    async def _deliver(self, exchange: Exchange, reply: Reply, sink: Sink) -> None:
        if reply.no_route:
            kind = HOT_ROUTES[exchange.route]
            raise route_not_served(exchange.model, kind, self._others_at(kind, exchange.model))
        if reply.status >= 500:
            exchange.failure = "engine_5xx"
        if reply.usage is not None:
            exchange.prompt_tokens, exchange.generation_tokens = reply.usage
            exchange.cached_tokens = reply.cached_tokens
        await sink.whole(reply)

    async def _send_merged(self, target: Target, kind: Kind, body: bytes, upstream_id: str) -> Reply:
        assert isinstance(target, Replica)
        with Call(target, None, self._clock, self.batcher.flush) as call:  # nobody waits beyond it
            headers = _headers(upstream_id)  # no trace context: the call belongs to several
            self._issued.note(upstream_id)
            answer: Answer = await self._upstream.post(target.url + kind.value, body, headers)
            call.status = answer.status
            reply = await read_whole(answer, kind)
            self._issued.require_own(reply, upstream_id)
            call.works = works(reply.status)
            return reply

    def _others_at(self, kind: Kind, model: str) -> set[str]:
        """Models, and names for them, whose engines do at this route what the one of `model` does not."""
        embeds, served = kind is Kind.EMBEDDINGS, self._settings.aliases.get(model, model)
        others = [
            replica for replica in self._replicas.all if replica.embeds is embeds and served not in replica.models
        ]
        names = {name for replica in others for name in replica.models}
        return names | {alias for alias, name in self._settings.aliases.items() if name in names}

    def _begun(self, replica: Replica, exchange: Exchange) -> bool:
        """Whether a trial's stream has brought a token, which is all that it was to show."""
        if exchange.first_token_s is None:
            return False
        replica.breaker.works(self._clock(), trial=True)
        return True

    def _added_fields(self, exchange: Exchange, envelope: Envelope) -> dict[str, Any]:
        """What the gateway itself has to say to the engine about this request."""
        fields: dict[str, Any] = {}
        tenant = exchange.owner
        if envelope.model in self._settings.aliases:
            fields["model"] = self._served_model(envelope)
        if tenant.group is not None:
            fields["cache_salt"] = tenant.group
        if self._settings.policy.engine_priority:
            fields["priority"] = tenant.priority
        return fields


def _headers(upstream_id: str, trace: Mapping[str, str] | None = None) -> dict[str, str]:
    """An allow-list by construction: of the client's own headers only a checked trace context goes on."""
    return {"X-Request-Id": upstream_id, **(trace or {})}
