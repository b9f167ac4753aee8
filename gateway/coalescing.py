"""Identical deterministic requests of one tenant in flight share one engine call.

Deterministic means temperature 0, a seed, or an embedding. The first such request starts a flight; those that come
while it is under way join it, and replay what it has sent so far before following on. Each gets the bytes it would have
got alone, with its own request id in place of the flight's. The last one to leave ends the flight.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from gateway import sse
from gateway.client import Sink
from gateway.errors import GatewayError, error_body
from gateway.exchange import Exchange, Reply
from gateway.metrics import Metrics
from gateway.protocol import Envelope, Kind

Serve = Callable[[Exchange, Envelope, Sink], Awaitable[None]]
Key = tuple[str, Kind, bytes]


def deterministic(envelope: Envelope) -> bool:
    """Whether asking twice gives the same answer, as far as the request can say."""
    if envelope.kind is Kind.EMBEDDINGS:
        return True
    temperature, seed = envelope.document.get("temperature"), envelope.document.get("seed")
    return (type(temperature) in (int, float) and temperature == 0) or type(seed) is int


def _as_event(error: BaseException, kind: Kind) -> bytes:
    """A failure after the first byte, as each passenger's last event."""
    told = error if isinstance(error, GatewayError) else GatewayError("the gateway failed unexpectedly")
    return sse.error_event(error_body(told, anthropic=kind.anthropic), anthropic=kind.anthropic)


@dataclass(slots=True, eq=False)
class Flight:
    """A shared engine call: a sink that remembers. Written by its task, read by its passengers."""

    exchange: Exchange
    key: Key
    passengers: int = 0
    reply: Reply | None = None
    chunks: list[bytes] = field(default_factory=list)
    streaming: bool = False
    ended: bool = False
    error: BaseException | None = None
    task: asyncio.Task[None] | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def whole(self, reply: Reply) -> None:
        self.reply = reply
        self._tell()

    async def start(self) -> None:
        self.streaming = True
        self._tell()

    async def events(self, data: bytes) -> None:
        self.chunks.append(data)
        self._tell()

    async def end(self) -> None:
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def board(self, exchange: Exchange, sink: Sink, clock: Callable[[], float]) -> None:
        """Follow the flight to its end on behalf of one client. Raises what the flight failed with."""
        own, theirs = exchange.upstream_id.encode(), self.exchange.upstream_id.encode()
        sent, started = 0, False
        while True:
            news = self._news
            if self.error is not None and not started:
                raise self.error
            if self.reply is not None:
                self._note(exchange)
                await sink.whole(replace(self.reply, body=self.reply.body.replace(theirs, own)))
                return
            if self.streaming and not started:
                started = True
                exchange.phase = "streaming"
                await sink.start()
            if sent < len(self.chunks):
                data = b"".join(self.chunks[sent:])
                sent = len(self.chunks)
                if exchange.first_token_s is None and self.exchange.first_token_s is not None:
                    exchange.first_token_s = clock()
                await sink.events(data.replace(theirs, own))
            elif self.ended:
                self._note(exchange)
                if self.error is not None:
                    await sink.events(_as_event(self.error, self.key[1]))
                await sink.end()
                return
            else:
                exchange.phase = self.exchange.phase
                await news.wait()

    def _note(self, exchange: Exchange) -> None:
        exchange.prompt_tokens = self.exchange.prompt_tokens
        exchange.generation_tokens = self.exchange.generation_tokens
        exchange.replica, exchange.failure = self.exchange.replica, self.exchange.failure


class Coalescer:
    """Owner of the flights under way."""

    def __init__(self, metrics: Metrics, serve: Serve, clock: Callable[[], float], joinable_s: float) -> None:
        """A flight older than `joinable_s` has too little of its deadline left to be joined."""
        self._metrics = metrics
        self._serve = serve
        self._joinable_s = joinable_s
        self._clock = clock
        self._flights: dict[Key, Flight] = {}

    def __repr__(self) -> str:
        passengers = sum(flight.passengers for flight in self._flights.values())
        return f"<Coalescer {len(self._flights)} flights, {passengers} passengers>"

    async def serve(self, exchange: Exchange, envelope: Envelope, sink: Sink) -> None:
        """Serve one client, on a flight of its own or one under way."""
        key = (exchange.tenant_label, envelope.kind, envelope.body)
        flight = self._flights.get(key)
        if flight is None or self._clock() - flight.exchange.arrived_s > self._joinable_s:
            flight = self._flights[key] = Flight(replace(exchange), key)
            flight.task = asyncio.create_task(self._fly(flight, envelope), name="flight")
        else:
            self._metrics.coalesced.inc()
        flight.passengers += 1
        try:
            await flight.board(exchange, sink, self._clock)
        finally:
            flight.passengers -= 1
            if not flight.passengers and not flight.ended and flight.task is not None:
                self._forget(flight)  # nobody must join a flight that is being called off
                flight.task.cancel()

    async def _fly(self, flight: Flight, envelope: Envelope) -> None:
        try:
            await self._serve(flight.exchange, envelope, flight)
        except Exception as error:  # each passenger raises it to its own client
            flight.error = error
        finally:
            flight.ended = True
            self._forget(flight)
            flight._tell()

    def _forget(self, flight: Flight) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def check_integrity(self) -> None:
        assert all(flight.passengers > 0 and not flight.ended for flight in self._flights.values()), self
