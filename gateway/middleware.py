"""The edge: what every public request goes through, hot or not. Pure ASGI.

It gives the request an id, asks who it is from, turns every error into the one JSON shape, adds CORS headers where they
were asked for, and counts and logs the request once when it ends.
"""

import asyncio
import logging
import os
import re
from collections.abc import Callable
from typing import Any

from gateway.auth import Authenticator
from gateway.client import App, ClientGoneError, Message, Receive, Scope, Send, header, respond
from gateway.errors import GatewayError, UnavailableError, UpstreamFailedError, UpstreamTimeoutError, error_body
from gateway.exchange import Exchange
from gateway.metrics import Metrics
from gateway.protocol import HOT_ROUTES, Kind
from gateway.settings import Settings

access_logger = logging.getLogger("gateway.access")
logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/healthz", "/readyz"})  # no key: load balancers ask here
_OTHER_ROUTES = frozenset({"/v1/models", *OPEN_PATHS})
_FIT_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Edge:
    """Wraps the public app. `draining` is set once, at shutdown; `idle` is set while no request is open."""

    def __init__(
        self, app: App, settings: Settings, authenticator: Authenticator, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._metrics = metrics
        self._clock = clock
        self._origins = frozenset(origin.encode() for origin in settings.cors.allow_origins)
        self._log = settings.logs.access
        self.draining = False
        self.open = 0  # requests that have come and not ended
        self.idle = asyncio.Event()
        self.idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the gateway speaks HTTP only, not {scope['type']}")
        exchange = _exchange(scope, self._clock())
        scope.setdefault("state", {})["exchange"] = exchange
        self.open += 1
        self.idle.clear()
        extra = [(b"x-request-id", exchange.request_id.encode())]
        origin = header(scope, b"origin") if self._origins else None
        if origin is not None and origin in self._origins:
            extra += [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
        started = False

        async def outward(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                exchange.status = message["status"]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        try:
            if self._is_preflight(scope, origin):
                await respond(outward, 204, _PREFLIGHT_HEADERS, b"")
                return
            await self._admit(scope, exchange)
            await self._app(scope, receive, outward)
        except ClientGoneError:
            self._metrics.cancelled.labels(exchange.phase).inc()
            exchange.status = exchange.status or 499  # as nginx logs it: nobody received it
        except GatewayError as error:
            await self._refuse(error, exchange, outward, started)
        except Exception:
            # A bug. The client gets the shape it knows, the log gets the trace.
            logger.exception("unexpected failure", extra={"fields": {"request_id": exchange.request_id}})
            await self._refuse(GatewayError("the gateway failed unexpectedly"), exchange, outward, started)
        finally:
            self.open -= 1
            if not self.open:
                self.idle.set()
            self._finish(exchange)

    async def _admit(self, scope: Scope, exchange: Exchange) -> None:
        if scope["path"] in OPEN_PATHS:
            return
        exchange.tenant = self._authenticator.authenticate(scope)
        if self.draining:
            raise UnavailableError("the gateway is shutting down", code="draining", retry_after_s=5)

    def _is_preflight(self, scope: Scope, origin: bytes | None) -> bool:
        asked = header(scope, b"access-control-request-method")
        return scope["method"] == "OPTIONS" and origin in self._origins and asked is not None

    async def _refuse(self, error: GatewayError, exchange: Exchange, outward: Send, started: bool) -> None:
        if isinstance(error, UpstreamFailedError | UpstreamTimeoutError):
            exchange.failure = exchange.failure or type(error).__name__.removesuffix("Error")
        if started:
            # The status has gone out; breaking the framing off is the only honest signal left.
            logger.warning("failed after the answer began", extra={"fields": {"request_id": exchange.request_id}})
            raise error
        headers = [(b"content-type", b"application/json"), *error.headers()]
        if error.status in (408, 413):
            headers.append((b"connection", b"close"))  # the rest of the body may still be on its way
        await respond(
            outward, error.status, headers, error_body(error, anthropic=exchange.route == Kind.MESSAGES.value)
        )

    def _finish(self, exchange: Exchange) -> None:
        now = self._clock()
        metrics, route, tenant = self._metrics, exchange.route, exchange.tenant_label
        metrics.requests.labels(route, str(exchange.status), tenant).inc()
        if exchange.failure:
            metrics.failures.labels(exchange.failure).inc()
        if route in HOT_ROUTES:
            metrics.request_seconds.labels(route).observe(now - exchange.arrived_s)
            if exchange.first_token_s is not None:
                metrics.ttft_seconds.labels(route).observe(exchange.first_token_s - exchange.arrived_s)
            if exchange.prompt_tokens:
                metrics.tokens.labels(tenant, "prompt").inc(exchange.prompt_tokens)
                metrics.tokens.labels(tenant, "generation").inc(exchange.generation_tokens)
        if self._log and route not in OPEN_PATHS:
            access_logger.info("request", extra={"fields": _access_fields(exchange, now)})


_PREFLIGHT_HEADERS = [
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-allow-headers", b"authorization, content-type, x-api-key, x-request-id, x-request-timeout-s"),
    (b"access-control-max-age", b"600"),
]


def _exchange(scope: Scope, now: float) -> Exchange:
    path = scope["path"]
    route = path if path in HOT_ROUTES or path in _OTHER_ROUTES else "other"
    sent = header(scope, b"x-request-id")
    fresh = os.urandom(16).hex()
    if sent is not None and _FIT_ID.fullmatch(sent):
        # Engines use the id as a key, so two clients with one id must not meet there.
        return Exchange(sent.decode(), f"{sent.decode()}-{fresh[:12]}", now, route)
    return Exchange(fresh, fresh, now, route)


def _access_fields(exchange: Exchange, now: float) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": exchange.request_id,
        "route": exchange.route,
        "status": exchange.status,
        "tenant": exchange.tenant_label,
        "model": exchange.model,
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
