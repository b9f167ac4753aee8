"""The wire between the parent process and a worker: a socket pair, one JSON object a line, both may ask.

    {"ask": 7, "what": "status"}   ->   {"answer": 7, "value": {...}}

Whoever is asked answers from its event loop, so an answer also says that the loop runs.
"""

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Self

import orjson

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 16 * 1024 * 1024  # /status of a thousand engines

Order = dict[str, Any]


class Channel:
    """One end. `run` reads until the other end is closed; `serve` answers what the other end asks."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, serve: Callable[[Order], Awaitable[Any]]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._serve = serve
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._serving: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, sock: socket.socket, serve: Callable[[Order], Awaitable[Any]]) -> Self:
        return cls(*await asyncio.open_connection(sock=sock, limit=MAX_LINE_BYTES), serve)

    @property
    def closed(self) -> bool:
        return self._writer.is_closing()

    async def run(self) -> None:
        """Returns when the other end is gone."""
        try:
            while line := await self._reader.readline():
                self._take(orjson.loads(line))
        except (ConnectionError, ValueError):
            pass  # killed in the middle of a line
        finally:
            self._writer.close()
            for waiting in self._asked.values():
                waiting.cancel()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)

    async def ask(self, what: str, timeout_s: float, **fields: Any) -> Any:
        """The other end's answer; None where none came in time, or the other end is gone."""
        if self.closed:
            return None
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"ask": number, "what": what, **fields})
            await asyncio.wait([answer], timeout=timeout_s)
            return answer.result() if answer.done() and not answer.cancelled() else None
        finally:
            del self._asked[number]

    def _take(self, message: Order) -> None:
        if "answer" in message:
            waiting = self._asked.get(message["answer"])
            if waiting is not None and not waiting.done():
                waiting.set_result(message["value"])
            return
        task = asyncio.create_task(self._answer(message))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _answer(self, order: Order) -> None:
        try:
            self._send({"answer": order["ask"], "value": await self._serve(order)})
        except Exception:  # a bug, or more than a line takes: who asked must not wait for it, and the channel goes on
            logger.exception("an order failed", extra={"fields": {"what": order["what"]}})
            self._send({"answer": order["ask"], "value": None})

    def _send(self, message: Order) -> None:
        """Raises ValueError where it is more than the other end would read: it would hang up."""
        line = orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE)
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"{len(line)} bytes, of {MAX_LINE_BYTES} that a line may have")
        if not self.closed:
            self._writer.write(line)
