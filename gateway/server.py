"""Uvicorn's HTTP/1.1 protocol, stricter where a public port needs it. What is refused here never reaches an app.

- Framing that can't be read, or can be read in two ways (Content-Length beside Transfer-Encoding): 400. Likewise an
  HTTP/1.1 request without a Host, or with two.
- A head or trailer larger than limits.max_head_bytes: 431. A head that is not complete after timeouts.head_s: 408.
- A body that is still owed timeouts.body_s after its request was answered (refused, as a rule): closed.
- A client that takes nothing, or acknowledges nothing, for timeouts.idle_s is cut off, whatever it asked for.
- One request at a time. Uvicorn would queue a pipelined one and stop reading, and a client that leaves then goes
  unnoticed; here it is not read, and the connection closes after the answer under way, as HTTP allows.
- A client that closes its own side of the connection has left, though it may wait for the answer still: a departure
  looks no other, and engines must hear of those at once.
- A client that speaks HTTP/1.0 (nginx does to what is behind it, unless told otherwise) knows no chunks: its stream
  goes out as it is, and ends where the connection does.
- An offer to upgrade (Java's HTTP client makes one with its first request) is declined by answering in HTTP/1.1;
  the parser alone would lose the body.

Errors have the gateway's one shape.
"""

import asyncio
import socket
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.errors import BadRequestError, GatewayError, HeadTooLargeError, RequestTimeoutError, error_body
from gateway.settings import Settings

# After a refusal what still comes is read and dropped for this long: closing at once would reset the connection, and
# the client would never read why.
LINGER_S = 1.0
_UPGRADE_HEADERS = frozenset({b"upgrade", b"connection", b"http2-settings"})


class _PipelinedError(Exception):
    """Stops the parser: the bytes belong to a request that came before its turn."""


class _HostError(Exception):
    """Stops the parser: HTTP/1.1 asks for one Host."""


def _unframed(app: Any, cycle: RequestResponseCycle) -> Any:
    """The app as an HTTP/1.0 client needs it: Uvicorn's cycle is told that no answer of unknown length has chunks."""

    async def plain(scope: Any, receive: Any, send: Any) -> None:
        unknown_length = False

        async def unframed(message: Any) -> None:
            nonlocal unknown_length
            if message["type"] == "http.response.start":
                unknown_length = all(name.lower() != b"content-length" for name, _ in message["headers"])
                if unknown_length:
                    cycle.chunked_encoding = False
            elif unknown_length:
                cycle.expected_content_length = len(message.get("body", b""))  # the cycle counts what it still owes
            await send(message)

        await app(scope, receive, unframed)

    return plain


class StrictProtocol(HttpToolsProtocol):
    """One client connection. `protocol_for` makes the class with its limits."""

    head_s: ClassVar[float]
    body_s: ClassVar[float]
    idle_s: ClassVar[float]
    max_head_bytes: ClassVar[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._deaf = False  # nothing more is read from this client
        self._unplaced_bytes = 0  # received since the last piece of body: part of a head or trailer
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        user_timeout = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux has it
        if user_timeout is not None:
            # The kernel sees what the app can't: bytes that sit in buffers because the peer is stuck or gone.
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, user_timeout, int(self.idle_s * 1000))
        self._timer = self.loop.call_later(self.head_s, self._head_overdue)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_timer()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        while data and not self._deaf:
            # No more at once than a head may still take, or the parser would see its end before it is found too large.
            room = self.max_head_bytes - self._unplaced_bytes
            if room > 0:
                self._feed(data[:room])
                data = data[room:]
            else:
                self._refuse(HeadTooLargeError(f"the request's head has more than {self.max_head_bytes} bytes"))
        if self._deaf:
            return
        if self._timer is None and (self._in_head or self._between_requests()):  # stray line ends count as a head
            self._timer = self.loop.call_later(self.head_s, self._head_overdue)

    def _feed(self, data: bytes) -> None:
        self._unplaced_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline_upgrade(data[offer.args[0] :])
        except httptools.HttpParserError as error:
            of_host = isinstance(error.__context__, _HostError)
            why = "an HTTP/1.1 request needs one Host header" if of_host else "the request is not valid HTTP/1.1"
            self._refuse(BadRequestError(why, code="invalid_http"))

    # -- the parser's callbacks ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._answering() is not None:
            raise _PipelinedError
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer: nobody here has use for one, and it must not pass for a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._unplaced_bytes = 0
        if self._timer is not None:
            self._cancel_timer()
        if [name for name, _ in self.headers].count(b"host") != 1 and self.parser.get_http_version() == "1.1":
            raise _HostError
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, app if cycle.scope["http_version"] == "1.1" else _unframed(app, cycle))

    def on_body(self, body: bytes) -> None:
        self._unplaced_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unplaced_bytes = 0
        self._cancel_timer()
        if self.cycle is not None and self.cycle.response_complete:  # the rest of a body that was not waited for
            again = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            self.timeout_keep_alive_task = again
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        owed = self.cycle.more_body
        super().on_response_complete()
        if owed and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.body_s, self.transport.close)

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read the same request again without its offer. `rest` is what came after its head."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":  # an upgrade by its very nature
            self._refuse(BadRequestError("this is no proxy", code="invalid_http"))
            return
        closing = any(name == b"connection" and b"close" in value.lower() for name, value in self.headers)
        headers = [(name, value) for name, value in self.headers if name not in _UPGRADE_HEADERS]
        headers += [(b"connection", b"close")] if closing else []
        lines = [b"%s %s HTTP/%s" % (method, self.url, version), *(b"%s: %s" % header for header in headers), b"", b""]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join(lines) + rest)

    # -- refusing ------------------------------------------------------------------------------------------------------

    def _answering(self) -> RequestResponseCycle | None:
        return None if self.cycle is None or self.cycle.response_complete else self.cycle

    def _between_requests(self) -> bool:
        return self._answering() is None and self.timeout_keep_alive_task is None

    def _head_overdue(self) -> None:
        self._timer = None
        if self._in_head:
            self._refuse(RequestTimeoutError(f"the request's head did not arrive within {self.head_s:g} s"))
        else:
            self.transport.close()  # connected and said nothing

    def _refuse(self, error: GatewayError) -> None:
        self._deaf = True
        self._cancel_timer()
        cycle = self._answering()
        if cycle is not None and not cycle.more_body:  # a whole request is being answered, and that answer stands
            cycle.keep_alive = False
            return
        started = False
        if cycle is not None:  # the rest of its body will never come
            started = cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
        self.flow.resume_reading()
        if not started:
            body = error_body(error)
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def protocol_for(settings: Settings) -> type[StrictProtocol]:
    """The protocol with these settings' limits, as Uvicorn wants it: a class."""
    limits = {
        "head_s": settings.timeouts.head_s,
        "body_s": settings.timeouts.body_s,
        "idle_s": settings.timeouts.idle_s,
        "max_head_bytes": settings.limits.max_head_bytes,
    }
    return type("ClientProtocol", (StrictProtocol,), limits)
