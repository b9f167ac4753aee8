"""Wiring: settings go in, two ASGI apps and the tasks behind them come out. No globals: tests make several."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from gateway.accountbook import AccountBook
from gateway.advisor import Advisor
from gateway.auth import AdminToken, Authenticator, read_secret
from gateway.client import App, Receive, Scope, Send
from gateway.discovery import Discovery, Resolve, resolve
from gateway.errors import MethodNotAllowedError
from gateway.exchange import Exchange
from gateway.health import Health
from gateway.inference import Inference
from gateway.ledger import Ledger
from gateway.metricfiles import MetricFiles
from gateway.metrics import Metrics
from gateway.middleware import GOODBYE_S, Edge
from gateway.pools import Admissions
from gateway.protocol import HOT_ROUTES, route
from gateway.replicas import Replicas
from gateway.routes import admin_app, public_app
from gateway.settings import Settings
from gateway.tracing import make_tracing
from gateway.upstream import Upstream
from gateway.workers import ONLY, Alone, Siblings, Worker, divided

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Membership:
    """One worker's place in a gateway, and what it shares with the others. The default is a gateway of one process."""

    worker: Worker = ONLY
    files: MetricFiles | None = None
    book: AccountBook | None = None
    siblings: Siblings = field(default_factory=Alone)


class Gateway:
    """All rooms of one gateway. `async with` it: connections and tasks live as long as the block.

    `public` and `admin` are the ASGI apps to serve. Raises SettingsError where a file it names can't be used.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        resolve: Resolve = resolve,
        membership: Membership | None = None,
    ) -> None:
        """`membership`: which worker of a gateway of several this is; unset, it is the gateway."""
        member = membership or Membership()
        whole, settings = settings, divided(settings, member.worker)
        self.settings = settings
        key_file = settings.engine.api_key_file
        engine_key = read_secret(key_file, "engine.api_key_file") if key_file else None
        self.metrics = Metrics(member.files)
        self.authenticator = Authenticator(settings.auth, self.metrics)
        token = AdminToken(settings.auth.admin_token_file)
        self.admission = Admissions(settings.admission, self.metrics, clock, member.worker, member.book)
        self.replicas = Replicas(settings, self.metrics, clock, engine_key, self._replicas_changed)
        self.discovery = Discovery(settings, self.metrics, self.replicas.list_urls, resolve)
        self.upstream = Upstream(settings.timeouts, settings.limits.max_answer_bytes, engine_key)
        self.inference = Inference(settings, self.replicas, self.admission, self.upstream, self.metrics, clock)
        self.advisor = Advisor(whole, self.metrics, self.replicas, clock, siblings=member.siblings)
        health = Health(self.replicas, self.discovery, self.admission, self.inference, self.advisor, member.worker)
        cold = public_app(settings, self.replicas, health)
        self.tracing = make_tracing(settings.tracing)
        self.ledger = Ledger(settings.ledger.path, self.metrics) if settings.ledger.path else None
        app = _dispatch(self.inference, cold)
        self.edge = Edge(
            app, settings, self.authenticator, self.metrics, clock, self.tracing, self._ended, self._serves
        )
        health.edge = self.edge
        self.health = health
        self.public: App = self.edge
        self.admin: App = admin_app(self.metrics, self.replicas, health, token, member.worker, member.siblings)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, self.tracing.close)
            if self.ledger is not None:
                await stack.enter_async_context(self.ledger)
            await stack.enter_async_context(self.upstream)
            await stack.enter_async_context(self.replicas)
            await stack.enter_async_context(self.discovery)
            for work, name in ((self.authenticator.follow_file(), "keys file"), (self.advisor.run(), "advice")):
                stack.push_async_callback(_cancel, asyncio.create_task(work, name=name))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def drain(self, hurry: asyncio.Event) -> None:
        """Refuse what is new or still being uploaded, and wait until what is in flight has ended; cut the rest off
        after timeouts.drain_s.

        `hurry` ends the waiting: a second signal.
        """
        self.edge.draining = True
        self.edge.cut(uploads_only=True)
        waits = [asyncio.create_task(event.wait()) for event in (self.edge.idle, hurry)]
        try:
            await asyncio.wait(waits, timeout=self.settings.timeouts.drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not self.edge.idle.is_set():
            logger.warning("requests cut off", extra={"fields": {"in_flight": self.edge.open}})
            self.edge.cut()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * GOODBYE_S):
                    await self.edge.idle.wait()

    def check_integrity(self) -> None:
        """Raises AssertionError where a count disagrees with what it counts."""
        self.inference.check_integrity()

    def _ended(self, exchange: Exchange) -> None:
        if self.ledger is not None:
            self.ledger.record(exchange, exchange.model)

    def _serves(self, model: str) -> bool:
        return model in self.settings.aliases or self.replicas.knows(model)

    def _replicas_changed(self) -> None:
        self.admission.arrange(self.replicas.all)


def _dispatch(hot: App, cold: App) -> App:
    """Hot POST routes past FastAPI: its stack costs more than the rest of a request together."""

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        # One spelling a route, or what a proxy in front forbids could be asked for in another.
        if path not in HOT_ROUTES or b"%" in scope["raw_path"]:
            await cold(scope, receive, send)
        elif route(scope["method"], path) is None:
            raise MethodNotAllowedError("this route takes POST", allow="POST")
        else:
            await hot(scope, receive, send)

    return dispatch


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
