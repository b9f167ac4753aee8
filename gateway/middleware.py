"""The edge: what every public request goes through, hot or not. Pure ASGI.

It gives the request an id, asks who it is from, turns every error into the one JSON shape, adds CORS headers where they
were asked for, and counts and logs the request once when it ends.
"""

import asyncio
import contextlib
import functools
import logging
import os
import re
from collections.abc import Awaitable, Callable
from typing import Any

from gateway.auth import Authenticator
from gateway.client import App, ClientGoneError, Headers, Message, Receive, Scope, Send, header, respond
from gateway.errors import (
    GatewayError,
    OverloadedError,
    UnavailableError,
    UpstreamFailedError,
    UpstreamTimeoutError,
    error_body,
)
from gateway.exchange import Exchange
from gateway.logs import write_access
from gateway.metrics import Metrics
from gateway.protocol import HOT_ROUTES, Kind
from gateway.settings import Settings
from gateway.sse import error_event
from gateway.tracing import Tracing

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/healthz", "/readyz"})  # no key: load balancers ask here
_OTHER_ROUTES = frozenset({"/v1/models", *OPEN_PATHS})
GOODBYE_S = 1.0  # for a last word to a client at shutdown; one that does not read is not waited for
_FIT_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Edge:
    """Wraps the public app. `draining` is set once, at shutdown; `idle` is set while no request is open.

    `on_end` is told of every request that ended, whatever became of it. `serves` tells whether a model is one of ours:
    any other name is the client's own words, a mistaken key for instance, and goes into no log, span or count.
    """

    def __init__(
        self,
        app: App,
        settings: Settings,
        authenticator: Authenticator,
        metrics: Metrics,
        clock: Callable[[], float],
        tracing: Tracing,
        on_end: Callable[[Exchange], None],
        serves: Callable[[str], bool],
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._metrics = metrics
        # Looking a series up by its labels costs more than counting in it; these are bounded by routes and keys.
        self._ended = functools.lru_cache(4096)(metrics.requests.labels)
        self._took = functools.lru_cache(64)(metrics.request_seconds.labels)
        self._used = functools.lru_cache(4096)(metrics.tokens.labels)
        self._clock = clock
        self._tracing = tracing
        self._on_end = on_end
        self._serves = serves
        self._origins = frozenset(origin.encode() for origin in settings.cors.allow_origins)
        self._log = settings.logs.access and settings.logs.level in ("DEBUG", "INFO")
        self._tasks: dict[asyncio.Task[Any], Exchange] = {}  # one for each request that has come and not ended
        self._cut: set[asyncio.Task[Any]] = set()  # those of them that `cut` ended
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def open(self) -> int:
        return len(self._tasks)

    def cut(self, *, uploads_only: bool = False) -> None:
        """End every open request now: an error where nothing was sent yet, an error event in a stream.

        `uploads_only`: those that are not here in full, and may not be for long.
        """
        for task, exchange in self._tasks.items():
            uploading = exchange.route in HOT_ROUTES and exchange.phase == "reading" and not exchange.model
            if uploading or not uploads_only:
                self._cut.add(task)
                task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the gateway speaks HTTP only, not {scope['type']}")
        exchange = _exchange(scope, self._clock())
        scope.setdefault("state", {})["exchange"] = exchange
        self._tracing.begin(exchange, scope["headers"])
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = exchange
        self.idle.clear()
        extra = [(b"x-request-id", exchange.request_id.encode())]
        if exchange.route == Kind.MESSAGES.value:
            extra.append((b"request-id", exchange.request_id.encode()))  # where Anthropic's clients look for it
        origin = self._allowed_origin(scope)
        if self._origins:
            extra.append((b"vary", b"Origin"))
        if origin is not None:
            extra += [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED)]
        started = False

        def outward(message: Message) -> Awaitable[None]:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                exchange.status = message["status"]
                message["headers"] = [*message["headers"], *extra]
            return send(message)

        try:
            if origin is not None and (headers := _preflight_headers(scope)):
                await respond(outward, 204, headers, b"")
                return
            self._admit(scope, exchange)
            await self._app(scope, receive, outward)
        except ClientGoneError:
            self._metrics.cancelled.labels(exchange.phase).inc()
            exchange.status = exchange.status or 499  # as nginx logs it: nobody received it
        except GatewayError as error:
            await self._refuse(error, exchange, outward, started)
        except asyncio.CancelledError:
            if task not in self._cut:
                exchange.status = exchange.status or 499
                raise
            task.uncancel()
            await self._say_goodbye(exchange, outward, started)
        except Exception:
            # A bug. The client gets the shape it knows, the log gets the trace.
            logger.exception("unexpected failure", extra={"fields": {"request_id": exchange.request_id}})
            await self._refuse(GatewayError("the gateway failed unexpectedly"), exchange, outward, started)
        finally:
            del self._tasks[task]
            self._cut.discard(task)
            if not self._tasks:
                self.idle.set()
            self._finish(exchange)

    def _admit(self, scope: Scope, exchange: Exchange) -> None:
        if scope["path"] in OPEN_PATHS:
            return
        exchange.tenant = self._authenticator.authenticate(scope)
        if self.draining:
            raise UnavailableError("the gateway is shutting down", code="draining", retry_after_s=5)

    def _allowed_origin(self, scope: Scope) -> bytes | None:
        """What access-control-allow-origin has to say; None where the browser gets no permission."""
        if not self._origins:
            return None
        origin = header(scope, b"origin")
        if origin is None or b"*" in self._origins:
            return None if origin is None else b"*"
        return origin if origin in self._origins else None

    async def _say_goodbye(self, exchange: Exchange, outward: Send, started: bool) -> None:
        error = UnavailableError("the gateway was shut down", code="draining", retry_after_s=5)
        exchange.failure = exchange.failure or "shutdown"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                if exchange.answered_s is None:
                    await self._refuse(error, exchange, outward, started)
                    return
                anthropic = exchange.route == Kind.MESSAGES.value
                event = error_event(error_body(error, anthropic=anthropic), anthropic=anthropic)
                await outward({"type": "http.response.body", "body": event, "more_body": False})

    async def _refuse(self, error: GatewayError, exchange: Exchange, outward: Send, started: bool) -> None:
        exchange.refused = isinstance(error, OverloadedError | UnavailableError)
        if isinstance(error, UpstreamFailedError | UpstreamTimeoutError):
            exchange.failure = exchange.failure or type(error).__name__.removesuffix("Error")
        if started:
            # The status has gone out. An answer left incomplete, its framing broken off, is the only honest signal.
            logger.warning("failed after the answer began", extra={"fields": {"request_id": exchange.request_id}})
            return
        headers = [(b"content-type", b"application/json"), *error.headers()]
        if error.status in (408, 413):
            headers.append((b"connection", b"close"))  # the rest of the body may still be on its way
        await respond(
            outward, error.status, headers, error_body(error, anthropic=exchange.route == Kind.MESSAGES.value)
        )

    def _finish(self, exchange: Exchange) -> None:
        now = self._clock()
        model = exchange.model
        if model and not self._serves(model):
            model, exchange.model = "unknown", ""
        try:
            try:
                self._count(exchange, now)
                self._tracing.end(exchange)
            finally:
                self._on_end(exchange)
        except Exception:  # a figure that a metric refuses must cost neither the ledger's entry nor the log's line
            logger.exception("counting a request failed", extra={"fields": {"request_id": exchange.request_id}})
        if self._log and exchange.route not in OPEN_PATHS:
            write_access(_access_fields(exchange, model, now))

    def _count(self, exchange: Exchange, now: float) -> None:
        metrics, route, tenant = self._metrics, exchange.route, exchange.tenant_label
        self._ended(route, str(exchange.status), tenant).inc()
        if exchange.failure:
            metrics.failures.labels(exchange.failure).inc()
        if route in HOT_ROUTES:
            self._took(route).observe(now - exchange.arrived_s)
            if exchange.first_token_s is not None:
                metrics.ttft_seconds.labels(route).observe(exchange.first_token_s - exchange.arrived_s)
            if exchange.prompt_tokens:
                self._used(tenant, "prompt").inc(exchange.prompt_tokens)
                self._used(tenant, "generation").inc(exchange.generation_tokens)


_EXPOSED = b"x-request-id, request-id, retry-after"
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,2000}")


def _preflight_headers(scope: Scope) -> Headers | None:
    """The permission a browser asks for before the request itself; None where this is no such question.

    Every header is permitted: what the gateway does not know, it drops. SDKs in browsers send many of their own.
    """
    if scope["method"] != "OPTIONS" or header(scope, b"access-control-request-method") is None:
        return None
    asked = header(scope, b"access-control-request-headers") or b""
    return [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", asked if _HEADER_NAMES.fullmatch(asked) else b"authorization, content-type"),
        (b"access-control-max-age", b"600"),
    ]


def _exchange(scope: Scope, now: float) -> Exchange:
    path = scope["path"]
    known = path in HOT_ROUTES or path in _OTHER_ROUTES
    route = path if known and b"%" not in scope["raw_path"] else "other"
    sent = header(scope, b"x-request-id")
    fresh = os.urandom(16).hex()
    if sent is not None and _FIT_ID.fullmatch(sent):
        # Engines use the id as a key, so two clients with one id must not meet there.
        return Exchange(sent.decode(), f"{sent.decode()}-{fresh[:12]}", now, route)
    return Exchange(fresh, fresh, now, route)


def _access_fields(exchange: Exchange, model: str, now: float) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": exchange.request_id,
        "route": exchange.route,
        "status": exchange.status,
        "tenant": exchange.tenant_label,
        "model": model,
        "replica": exchange.replica,
        "ms": round((now - exchange.arrived_s) * 1000, 1),
        "prompt_tokens": exchange.prompt_tokens,
        "generation_tokens": exchange.generation_tokens,
    }
    if exchange.first_token_s is not None:
        fields["ttft_ms"] = round((exchange.first_token_s - exchange.arrived_s) * 1000, 1)
    if exchange.failure:
        fields["failure"] = exchange.failure
    if exchange.status == 499:
        fields["phase"] = exchange.phase
    return fields
