"""Clients of their own socket, so that they can leave as real ones do, or stay and not read."""

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.fakes.engine import FakeEngine, Seen
from tests.wire.conftest import Running, until
from tests.wire.talking import CHAT

SOON_S = 1.0  # in which an engine must hear that its client has left


@dataclass
class Client:
    """A client of its own socket, so that it can leave as real ones do, or stay and not read."""

    sock: socket.socket
    left_s: float = 0.0

    async def send(self, body: dict[str, Any], path: str = CHAT, headers: str = "", part: float = 1.0) -> "Client":
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}"
        whole = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
        await asyncio.get_running_loop().sock_sendall(self.sock, whole[: int(len(whole) * part)])
        return self

    async def read_until(self, wanted: bytes, times: int = 1) -> bytes:
        text = b""
        async with asyncio.timeout(10):
            while text.count(wanted) < times:
                part = await asyncio.get_running_loop().sock_recv(self.sock, 65536)
                assert part, text
                text += part
        return text

    async def read_to_end(self) -> bytes:
        """Until the gateway closes or breaks off the connection."""
        text = b""
        with contextlib.suppress(ConnectionError):
            while part := await asyncio.get_running_loop().sock_recv(self.sock, 1 << 20):
                text += part
        return text

    def leave(self, how: str = "close") -> None:
        if how == "reset":
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.left_s = time.monotonic()
        self.sock.close()


@contextlib.contextmanager
def client(up: Running, receive_buffer: int | None = None) -> Iterator[Client]:
    host, port = up.url.removeprefix("http://").split(":")
    with socket.socket() as sock:
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.connect((host, int(port)))
        sock.setblocking(False)
        yield Client(sock)


async def reached(engine: FakeEngine, path: str = CHAT, count: int = 1) -> Seen:
    await until(lambda: len(engine.asked(path)) >= count)
    return engine.asked(path)[count - 1]


async def aborted_soon(seen: Seen, who: Client) -> None:
    await until(lambda: seen.aborted_s is not None)
    assert seen.aborted_s is not None and not seen.finished
    assert seen.aborted_s - who.left_s < SOON_S
