"""The load: bare connections on uvloop, so that one core of it can drive what is measured. Every answer is checked.

Times are seconds of the monotonic clock, from the write of a request (or when it was due) to its last byte.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httptools

from scripts.bench_gateway import answers

PATIENCE_S = 60.0  # for what is still under way when a phase is over; a party that takes longer has failed it


class LoadError(RuntimeError):
    """An answer that is none, or none at all: the figures are void."""


@dataclass
class Address:
    """Where a party listens, and the headers it wants."""

    port: int
    headers: dict[str, str] = field(default_factory=dict)

    def request(self, path: str, body: bytes) -> bytes:
        lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


class Connection(asyncio.Protocol):
    """One request at a time. `on_end` gets each answer's body; `begun` is set when the first piece of one has come."""

    def __init__(self) -> None:
        self.on_end: Callable[[bytes], None] = lambda body: None
        self.on_fault: Callable[[str], None] = lambda why: None
        self.begun = asyncio.Event()
        self.reads = 0  # that brought a piece of a body
        self.busy = self.lost = False
        self._body: list[bytes] = []
        self._parser: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self.busy:
            self.on_fault("the connection was closed before an answer was complete")

    def send(self, request: bytes) -> None:
        self.busy = True
        self._body.clear()
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)

    def close(self) -> None:
        self.busy = False
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        before = len(self._body)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.on_fault(f"what came is no HTTP ({error})")
            return
        if len(self._body) != before:
            self.reads += 1
            self.begun.set()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.busy = False
        body = b"".join(self._body)
        status = self._parser.get_status_code()
        if status != 200:
            self.on_fault(f"it answered {status}: {body[:200]!r}")
        else:
            self.on_end(body)


class Load:
    """Drives one party. `async with` it: its connections are closed with the block."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._idle: list[Connection] = []
        self._all: list[Connection] = []
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> "Load":
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._all:
            connection.close()
        if self._failed.done() and not self._failed.cancelled():
            self._failed.exception()  # seen

    async def connect(self, count: int) -> list[Connection]:
        """So many connections that do nothing."""
        loop = asyncio.get_running_loop()
        while len(self._idle) < count:
            try:
                _, connection = await loop.create_connection(Connection, "127.0.0.1", self._address.port)
            except OSError as error:
                raise LoadError(f"port {self._address.port} takes no connection: {error.strerror}") from None
            connection.on_fault = self._fail
            self._all.append(connection)
            self._idle.append(connection)
        return self._idle[-count:]

    async def closed_loop(self, in_flight: int, seconds: float) -> list[float]:
        """Whole answers for that long by `in_flight` connections, each sending its next when the last was answered."""
        connections = await self.connect(in_flight)
        request = self._address.request("/v1/completions", answers.completion_body())
        times: list[float] = []
        clock, until = time.perf_counter, time.perf_counter() + seconds
        pending, done = in_flight, asyncio.Event()

        def start(connection: Connection) -> None:
            begin = clock()

            def end(body: bytes) -> None:
                nonlocal begin, pending
                now = clock()
                times.append(now - begin)
                self._check(answers.whole_fault(body))
                if now < until:
                    begin = clock()
                    connection.send(request)
                else:
                    pending -= 1
                    if not pending:
                        done.set()

            connection.on_end = end
            connection.send(request)

        for connection in connections:
            start(connection)
        await self._wait(done, seconds)
        return times

    async def open_loop(self, rate: float, seconds: float) -> list[float]:
        """Requests leave on schedule whether or not earlier ones were answered; timed from when they were due."""
        await self.connect(32)
        request = self._address.request("/v1/completions", answers.completion_body())
        count = int(rate * seconds)
        times: list[float] = []
        done, stop = asyncio.Event(), threading.Event()
        loop, clock = asyncio.get_running_loop(), time.perf_counter

        async def fire(due: float) -> None:
            self._idle = [connection for connection in self._idle if not connection.lost]  # idle ones time out
            await self.connect(1)
            connection = self._idle.pop()

            def end(body: bytes) -> None:
                times.append(clock() - due)
                self._check(answers.whole_fault(body))
                self._idle.append(connection)
                if len(times) == count:
                    done.set()

            connection.on_end = end
            connection.send(request)

        tasks: set[asyncio.Task[None]] = set()

        def due_now(due: float) -> None:
            task = loop.create_task(fire(due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        def tick() -> None:
            # A thread keeps time, because the loop's own timers are a millisecond coarse.
            begin = clock() + 0.01
            for number in range(count):
                due = begin + number / rate
                if stop.wait(max(0.0, due - clock())):
                    return
                loop.call_soon_threadsafe(due_now, due)

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            await self._wait(done, seconds)
        finally:
            stop.set()
            thread.join()
        return times

    async def streams(self, count: int, events: int, per_write: int, step_ms: float) -> int:
        """`count` streams at once, each to its end. Returns how many reads brought their pieces."""
        connections = await self.connect(count)
        before = sum(connection.reads for connection in connections)
        request = self._address.request("/v1/chat/completions", answers.chat_body(events, per_write, step_ms))
        done, end = self._countdown(count, lambda body: answers.stream_fault(body, events))
        for connection in connections:
            connection.on_end = end
            connection.send(request)
        await self._wait(done, events / per_write * step_ms / 1000)
        return sum(connection.reads for connection in connections) - before

    async def hold(self, count: int, events: int, at_once: int = 50) -> asyncio.Event:
        """Open `count` streams that stand still after their beginning. The event is set once all of them have ended."""
        connections = await self.connect(count)
        request = self._address.request("/v1/chat/completions", answers.chat_body(events, 1, -1))
        ends, end = self._countdown(count, lambda body: answers.stream_fault(body, events))
        for start in range(0, count, at_once):
            group = connections[start : start + at_once]
            for connection in group:
                connection.on_end = end
                connection.begun.clear()
                connection.send(request)
            for connection in group:
                await self._wait(connection.begun, 0)
        return ends

    async def ended(self, ends: asyncio.Event) -> None:
        await self._wait(ends, 0)

    def _countdown(
        self, count: int, fault: Callable[[bytes], str | None]
    ) -> tuple[asyncio.Event, Callable[[bytes], None]]:
        """An event that is set once so many answers have come, and what each of them is to be given to."""
        done, left = asyncio.Event(), count

        def end(body: bytes) -> None:
            nonlocal left
            self._check(fault(body))
            left -= 1
            if not left:
                done.set()

        return done, end

    def _check(self, fault: str | None) -> None:
        if fault is not None:
            self._fail(fault)

    def _fail(self, why: str) -> None:
        if not self._failed.done():
            self._failed.set_exception(LoadError(why))

    async def _wait(self, event: asyncio.Event, seconds: float) -> None:
        """Until the event, or the first fault of any connection. Raises LoadError."""
        waiter = asyncio.ensure_future(event.wait())
        either: set[asyncio.Future[Any]] = {waiter, self._failed}
        try:
            await asyncio.wait(either, timeout=seconds + PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            if not waiter.done():
                raise LoadError(f"answers were still missing {PATIENCE_S:g} s after the last request was due")
        finally:
            waiter.cancel()
