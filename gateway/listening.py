"""The sockets that clients connect to.

With several workers the public address is one listening socket a worker, all on one port (SO_REUSEPORT): the kernel
deals new connections out evenly, also those of a burst, which on one shared socket a single worker was seen to take
whole (docs/decisions/0008). The admin address is one socket that they share. The parent holds them, so that connections
to a worker that died wait for its successor.
"""

import resource
import socket

from gateway.settings import SettingsError

BACKLOG = 2048


def bind(address: str, name: str) -> socket.socket:
    """A listening socket that has its port alone. Raises SettingsError naming the setting."""
    return bind_all(address, name, 1)[0]


def bind_all(address: str, name: str, count: int) -> list[socket.socket]:
    """`count` listening sockets that share a port, with each other and nobody else. Raises SettingsError."""
    sockets: list[socket.socket] = []
    try:
        # The first binds without permission to share, or a second gateway could join in without anybody noticing.
        first = _socket(address)
        sockets.append(first)
        first.bind(_place(address))
        while len(sockets) < count:
            sockets.append(_join(first))
        for sock in sockets:
            sock.listen(BACKLOG)  # two that were only bound can share a port: the second must fail here, not later
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise SettingsError(f"{name} = {address!r}: {error.strerror}; expected a free address of this host") from None
    return sockets


def bind_again(sibling: socket.socket) -> socket.socket:
    """One more listening socket on the port of these. Raises OSError."""
    sock = _join(sibling)
    sock.listen(BACKLOG)
    return sock


def address_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def raise_file_limit() -> None:
    """Each stream takes two connections, and the usual soft limit of 1024 would be met at 500 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _socket(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.rpartition(":")[0] else socket.AF_INET
    # The protocol must be named: asyncio sets TCP_NODELAY only then, and without it small answers wait 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return sock


def _join(sibling: socket.socket) -> socket.socket:
    address = address_of(sibling)
    sock = _socket(address)
    try:
        for each in (sibling, sock):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(_place(address))
    except OSError:
        sock.close()
        raise
    return sock
