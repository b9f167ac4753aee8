"""One process that serves: both addresses from one event loop, until a signal, then drained."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn

from gateway.app import Gateway, Membership
from gateway.client import App
from gateway.listening import BACKLOG, address_of, raise_file_limit
from gateway.logs import LineWriter
from gateway.server import protocol_for
from gateway.settings import Settings

logger = logging.getLogger("gateway")
# Longer than what clients and proxies in front keep idle connections, so that they close first.
CLIENT_KEEPALIVE_S = 75
# For uvicorn to see its connections closed once the drain has ended all requests: only who does not read is left.
CLOSE_S = 3

# Entered once the gateway is made and before it serves: what has to go on as long as it does.
Beside = Callable[[Gateway], contextlib.AbstractAsyncContextManager[None]]


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handling: two servers share one process, and drain before they stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def server(app: App, settings: Settings, one_request: bool = False) -> _Server:
    """`one_request`: close each connection after its answer."""
    config = uvicorn.Config(
        app,
        http=protocol_for(settings),
        ws="none",
        lifespan="off",
        proxy_headers=False,  # nothing here depends on the client's address
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=CLIENT_KEEPALIVE_S,
        timeout_graceful_shutdown=CLOSE_S,
        backlog=BACKLOG,
        headers=[("Connection", "close")] if one_request else [],
    )
    return _Server(config)


@contextlib.asynccontextmanager
async def _says_where(public: socket.socket, admin: socket.socket) -> AsyncIterator[None]:
    logger.info("serving", extra={"fields": {"public": address_of(public), "admin": address_of(admin)}})
    yield


async def serve(
    settings: Settings,
    public: socket.socket,
    admin: socket.socket,
    log: LineWriter,
    membership: Membership | None = None,
    beside: Beside | None = None,
) -> None:
    """Serve until a signal, then drain. A second signal ends the draining."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    async with Gateway(settings, membership=membership) as gateway:
        log.on_drop = gateway.metrics.log_lines_dropped.inc
        # A scrape must not come back to the worker that had the last one: it may have got stuck meanwhile.
        shared = membership is not None
        servers = [server(gateway.public, gateway.settings), server(gateway.admin, gateway.settings, shared)]
        async with asyncio.TaskGroup() as group, beside(gateway) if beside else _says_where(public, admin):
            for each, sock in zip(servers, (public, admin), strict=True):
                group.create_task(each.serve([sock]))
            _calm_collector()
            await stop.wait()
            logger.info("draining", extra={"fields": {"in_flight": gateway.edge.open}})
            await gateway.drain(hurry)
            for each in servers:
                each.should_exit = True
    logger.info("stopped")


def run(*arguments: Any, **options: Any) -> None:
    """`serve` in an event loop of its own. Raises SettingsError where a file it names can't be used."""
    raise_file_limit()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve(*arguments, **options))


def _calm_collector() -> None:
    """What was built so far lives for ever, and a request's objects die by counting: collecting cycles every 700
    allocations, as is the default, took a quarter of a request's CPU time and found nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()
