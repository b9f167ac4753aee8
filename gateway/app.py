"""Wiring: settings go in, two ASGI apps and the tasks behind them come out. No globals: tests make several."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Self

from gateway.admission import Admission
from gateway.auth import AdminToken, Authenticator
from gateway.client import App, Receive, Scope, Send
from gateway.health import Health
from gateway.inference import Inference
from gateway.metrics import Metrics
from gateway.middleware import Edge
from gateway.protocol import route
from gateway.replicas import Replicas
from gateway.routes import admin_app, public_app
from gateway.settings import Settings
from gateway.upstream import Upstream


class Gateway:
    """All rooms of one gateway. `async with` it: connections and tasks live as long as the block.

    `public` and `admin` are the ASGI apps to serve. Raises KeysFileError where keys or tokens can't be used.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        engine_key = settings.engine.api_key_file.read_text().strip() if settings.engine.api_key_file else None
        self.metrics = Metrics()
        self.authenticator = Authenticator(settings.auth, self.metrics)
        token = AdminToken(settings.auth.admin_token_file)
        self.admission = Admission(settings.admission, self.metrics, clock)
        self.replicas = Replicas(settings, self.metrics, clock, engine_key, self._capacity_changed)
        self.upstream = Upstream(settings.timeouts, engine_key)
        self.inference = Inference(settings, self.replicas, self.admission, self.upstream, self.metrics, clock)
        health = Health(self.replicas, self.admission, self.inference)
        cold = public_app(settings, self.replicas, health)
        self.edge = Edge(_dispatch(self.inference, cold), settings, self.authenticator, self.metrics, clock)
        health.edge = self.edge
        self.health = health
        self.public: App = self.edge
        self.admin: App = admin_app(self.metrics, self.replicas, health, token)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.upstream)
            await stack.enter_async_context(self.replicas)
            follower = asyncio.create_task(self.authenticator.follow_file(), name="keys file")
            stack.push_async_callback(_cancel, follower)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def drain(self) -> None:
        """Refuse what is new, and wait until what is in flight has ended, at the longest timeouts.drain_s."""
        self.edge.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.timeouts.drain_s):
                await self.edge.idle.wait()

    def check_integrity(self) -> None:
        """Raises AssertionError where a count disagrees with what it counts."""
        self.inference.check_integrity()

    def _capacity_changed(self) -> None:
        # While every engine is away the last figure stays: the waiting room still has to be bounded.
        if capacity := self.replicas.capacity_tokens:
            self.admission.set_capacity(capacity)


def _dispatch(hot: App, cold: App) -> App:
    """Hot POST routes past FastAPI: its stack costs more than the rest of a request together."""

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        app = cold if route(scope["method"], scope["path"]) is None else hot
        await app(scope, receive, send)

    return dispatch


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
