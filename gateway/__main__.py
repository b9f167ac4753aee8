"""`python -m gateway`: serve the public and the admin address from one event loop until SIGTERM or SIGINT.

Exit codes: 0 drained and stopped; 1 settings, keys or an address can't be used (one line says which and why).
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from gateway.app import Gateway
from gateway.client import App
from gateway.keys import KeysFileError
from gateway.logs import configure
from gateway.server import JsonErrorsProtocol
from gateway.settings import Settings, SettingsError, load

logger = logging.getLogger("gateway")
# Longer than what clients and proxies in front keep idle connections, so that they close first.
CLIENT_KEEPALIVE_S = 75


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
    except OSError as error:
        sock.close()
        raise SettingsError(f"{name} = {address!r}: {error.strerror}; expected a free address of this host") from None
    return sock


def _server(app: App) -> _Server:
    config = uvicorn.Config(
        app,
        http=JsonErrorsProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=CLIENT_KEEPALIVE_S,
        backlog=2048,
    )
    return _Server(config)


async def serve(settings: Settings, public: socket.socket, admin: socket.socket) -> None:
    """Serve until a signal, then drain: readiness off, new requests refused, those in flight finished."""
    async with Gateway(settings) as gateway:
        servers = [_server(gateway.public), _server(gateway.admin)]
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        async with asyncio.TaskGroup() as group:
            for server, sock in zip(servers, (public, admin), strict=True):
                group.create_task(server.serve([sock]))
            logger.info("serving", extra={"fields": {"public": settings.listen, "admin": settings.admin_listen}})
            await stop.wait()
            logger.info("draining", extra={"fields": {"in_flight": gateway.admission.in_flight}})
            await gateway.drain()
            for server in servers:
                server.should_exit = True
    logger.info("stopped")


def main() -> int:
    try:
        settings = load()
        configure(settings.logs.level)
        public = _bind(settings.listen, "listen")
        admin = _bind(settings.admin_listen, "admin_listen")
        with asyncio.Runner(loop_factory=_loop) as runner:
            runner.run(serve(settings, public, admin))
    except (SettingsError, KeysFileError) as error:
        for line in str(error).splitlines():
            print(f"gateway: {line}", file=sys.stderr)
        return 1
    return 0


def _loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


if __name__ == "__main__":
    sys.exit(main())
