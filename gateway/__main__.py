"""`python -m gateway`: serve the public and the admin address from one event loop until SIGTERM or SIGINT.

The first signal drains: readiness off, new requests refused with 503, those in flight finished, at the longest
timeouts.drain_s. A second one stops at once. Settings come from a file and the environment (docs/settings.md).

Exit codes: 0 stopped by a signal; 1 a setting, a file it names or an address can't be used (one line a mistake);
2 wrong usage.
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import uvicorn

from gateway.app import Gateway
from gateway.client import App
from gateway.logs import LineWriter, configure
from gateway.server import protocol_for
from gateway.settings import Settings, SettingsError, load

logger = logging.getLogger("gateway")
# Longer than what clients and proxies in front keep idle connections, so that they close first.
CLIENT_KEEPALIVE_S = 75
BACKLOG = 2048
# For uvicorn to see its connections closed once the drain has ended all requests: only who does not read is left.
CLOSE_S = 3


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handling: two servers share one process, and drain before they stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(address: str, name: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol must be named: asyncio sets TCP_NODELAY only then, and without it small answers wait 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host.strip("[]"), int(port)))
        sock.listen(BACKLOG)  # two that were only bound can share a port: the second must fail here, not later
    except OSError as error:
        sock.close()
        raise SettingsError(f"{name} = {address!r}: {error.strerror}; expected a free address of this host") from None
    return sock


def _server(app: App, settings: Settings) -> _Server:
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
    )
    return _Server(config)


async def serve(settings: Settings, public: socket.socket, admin: socket.socket, log: LineWriter) -> None:
    """Serve until a signal, then drain."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    async with Gateway(settings) as gateway:
        log.on_drop = gateway.metrics.log_lines_dropped.inc
        servers = [_server(gateway.public, settings), _server(gateway.admin, settings)]
        async with asyncio.TaskGroup() as group:
            for server, sock in zip(servers, (public, admin), strict=True):
                group.create_task(server.serve([sock]))
            addresses = {"public": _address(public), "admin": _address(admin)}
            logger.info("serving", extra={"fields": addresses})
            _calm_collector()
            await stop.wait()
            logger.info("draining", extra={"fields": {"in_flight": gateway.edge.open}})
            await gateway.drain(hurry)
            for server in servers:
                server.should_exit = True
    logger.info("stopped")


def _calm_collector() -> None:
    """What was built so far lives for ever, and a request's objects die by counting: collecting cycles every 700
    allocations, as is the default, took a quarter of a request's CPU time and found nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _raise_file_limit() -> None:
    """Each stream takes two connections, and the usual soft limit of 1024 would be met at 500 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _stop_early(number: int, frame: FrameType | None) -> NoReturn:
    """Before anything is served a signal just ends the process, PID 1 of a container included."""
    raise SystemExit(0)


def main(arguments: list[str] | None = None) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_early)
    parser = argparse.ArgumentParser(
        "python -m gateway", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    log: LineWriter | None = None
    try:
        settings = load()
        log = configure(settings.logs.level)
        _raise_file_limit()
        public = _bind(settings.listen, "listen")
        admin = _bind(settings.admin_listen, "admin_listen")
        with asyncio.Runner(loop_factory=_loop) as runner:
            runner.run(serve(settings, public, admin, log))
    except SettingsError as error:
        for line in str(error).splitlines():
            print(f"gateway: {line}", file=sys.stderr)
        return 1
    finally:
        if log is not None:
            log.close()
    return 0


def _loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


if __name__ == "__main__":
    sys.exit(main())
