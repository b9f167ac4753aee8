"""The client's side of the wire: its body, its leaving, and the response it gets. Plain ASGI, no framework."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any, Protocol, Self

from gateway.errors import (
    BadRequestError,
    OverloadedError,
    PayloadTooLargeError,
    RequestTimeoutError,
    UnsupportedMediaTypeError,
)
from gateway.exchange import Exchange, Reply

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

# After a refusal the rest of the body is read and dropped for this long: closing at once would reset the connection,
# and many clients would never read the response that says why.
LINGER_S = 1.0


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete. Nobody is left to tell."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that (lower-case) name."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


class BodyRoom:
    """Memory for bodies that are still arriving, all clients together: many slow uploads could fill it otherwise."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def __repr__(self) -> str:
        return f"<BodyRoom {self.used_bytes}/{self.limit_bytes} bytes>"

    def share(self) -> "_RoomShare":
        """`with` it: yields `take(bytes)`, which says whether there was room; what was taken is given back at the
        end."""
        return _RoomShare(self)


class _RoomShare:
    __slots__ = ("_room", "_taken")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._taken = 0

    def __enter__(self) -> Callable[[int], bool]:
        return self._take

    def __exit__(self, *_: object) -> None:
        self._room.used_bytes -= self._taken

    def _take(self, amount: int) -> bool:
        room = self._room
        if room.used_bytes + amount > room.limit_bytes:
            return False
        self._taken += amount
        room.used_bytes += amount
        return True


async def read_body(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float, room: BodyRoom) -> bytes:
    """The whole body. Raises PayloadTooLargeError or OverloadedError before it is buffered, RequestTimeoutError,
    ClientGoneError."""
    content_type = (header(scope, b"content-type") or b"").split(b";")[0].strip().lower()
    if content_type != b"application/json":
        raise UnsupportedMediaTypeError("send the body as Content-Type: application/json")
    declared = header(scope, b"content-length")
    try:
        async with asyncio.timeout(timeout_s):
            if declared is not None and int(declared) > max_bytes:
                if header(scope, b"expect") is None:  # else it waits to be asked for the body, which receiving does
                    await _linger(receive)
                raise PayloadTooLargeError(f"the body has {int(declared)} bytes, at most {max_bytes} are accepted")
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                body: bytes = message.get("body", b"")  # the usual case: it came in one piece
                if len(body) > max_bytes:
                    raise PayloadTooLargeError(f"at most {max_bytes} bytes of body are accepted")
                return body
            with room.share() as take:
                return await _gather(message, receive, max_bytes, take)
    except TimeoutError:
        raise RequestTimeoutError(f"the body did not arrive within {timeout_s:g} s") from None


async def _gather(message: Message, receive: Receive, max_bytes: int, take: Callable[[int], bool]) -> bytes:
    parts = bytearray()
    while message["type"] == "http.request":
        part = message.get("body", b"")
        if len(parts) + len(part) > max_bytes:
            del parts[:]
            await _linger(receive)
            raise PayloadTooLargeError(f"at most {max_bytes} bytes of body are accepted")
        if not take(len(part)):
            del parts[:]
            await _linger(receive)
            raise OverloadedError("overloaded: too many bodies are arriving at once", cause="bodies", retry_after_s=1)
        parts += part
        if not message.get("more_body"):
            return bytes(parts)
        message = await receive()
    raise ClientGoneError


async def _linger(receive: Receive) -> None:
    try:
        async with asyncio.timeout(LINGER_S):
            while True:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
    except TimeoutError:
        return


class ClientWatch:
    """`with` this, the current task is cancelled when the client leaves, and ClientGoneError raised.

    Uvicorn's `send` does nothing after a disconnect, so without a watch an engine would go on generating for nobody.
    An answer that `sink` has sent to its end is no longer watched: Uvicorn then reports a disconnect, client or not.
    """

    def __init__(self, receive: Receive, sink: "ClientSink") -> None:
        self._receive = receive
        self._sink = sink
        self._gone = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._owner = task
        self._watcher = asyncio.create_task(self._watch())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        del self._watcher  # its traceback leads back here, and only the cycle collector would undo such a ring
        if self._gone and isinstance(error, asyncio.CancelledError) and self._owner.uncancel() == 0:
            raise ClientGoneError from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._sink.complete:
            self._gone = True
            self._owner.cancel()


class Sink(Protocol):
    """Where an answer goes: to one client, or to all that share a call. Either `whole`, or `start`, `events`, `end`."""

    async def whole(self, reply: Reply) -> None:
        """A complete answer or error."""

    async def start(self) -> None:
        """An event stream begins; from here on a failure is an event."""

    def events(self, data: bytes) -> Awaitable[None]:
        """Whole events, or a comment."""

    async def end(self) -> None:
        """The stream is over."""


class ClientSink:
    """Sends to one client over ASGI."""

    def __init__(self, send: Send, exchange: Exchange, clock: Callable[[], float]) -> None:
        self._send = send
        self._exchange = exchange
        self._clock = clock
        self.complete = False  # the end was handed over to be sent

    async def whole(self, reply: Reply) -> None:
        self.complete = True
        headers: Headers = [(b"content-type", reply.content_type.encode())]
        if reply.retry_after is not None:
            headers.append((b"retry-after", reply.retry_after.encode()))
        await respond(self._send, reply.status, headers, reply.body)

    async def start(self) -> None:
        self._exchange.answered_s = self._clock()
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})

    def events(self, data: bytes) -> Awaitable[None]:
        return self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        self.complete = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


_STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would gather events
]


async def respond(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """A whole response with its length."""
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def request_timeout_s(scope: Scope, most_s: float) -> float | None:
    """The client's own deadline, X-Request-Timeout-S, in seconds; None if it set none. Raises BadRequestError."""
    value = header(scope, b"x-request-timeout-s")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= most_s:
        raise BadRequestError(f"X-Request-Timeout-S must be a number of seconds, above 0 and at most {most_s:g}")
    return seconds
