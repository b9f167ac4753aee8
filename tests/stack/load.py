"""Clients that keep asking while something breaks, and what each of them saw."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx

from tests.stack.checkout import MODEL, Stack

ANSWERED = "answered"
CUT = "cut off"  # the connection broke in mid-stream, without a word
NO_CONNECTION = "no connection"
ERROR_EVENT = "error event"  # a stream that had begun said what went wrong, and ended
BACK_OFF_S = 1.0  # a client that was refused comes again soon, whatever Retry-After says: the harder case


@dataclass(frozen=True)
class Seen:
    """One request: seconds of the monotonic clock, and how it ended. `retry_after` is the header of a refusal."""

    began_s: float
    ended_s: float
    outcome: str
    retry_after: str | None = None


class Load:
    """`with Load(stack, clients=6) as load:` streams chats all the time. Read `seen` whenever you like."""

    def __init__(self, stack: Stack, clients: int = 6, tokens: int = 24) -> None:
        self._stack, self._clients, self._tokens = stack, clients, tokens
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.seen: list[Seen] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def outcomes(self, since_s: float = 0.0) -> dict[str, int]:
        """How many requests that ended after `since_s` ended in which way."""
        return dict(Counter(seen.outcome for seen in list(self.seen) if seen.ended_s >= since_s))

    def answered_after(self, moment_s: float) -> float | None:
        """Seconds from `moment_s` to the end of the first whole answer to a request sent after it."""
        ends = [seen.ended_s for seen in list(self.seen) if seen.outcome == ANSWERED and seen.began_s > moment_s]
        return min(ends) - moment_s if ends else None

    def longest_s(self, since_s: float) -> float:
        """The longest that a client waited for a whole answer."""
        waits = [s.ended_s - s.began_s for s in list(self.seen) if s.outcome == ANSWERED and s.ended_s >= since_s]
        return max(waits, default=0.0)

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=self._clients, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=300, trust_env=False, limits=limits) as client:
            await asyncio.gather(*(self._client(client, number) for number in range(self._clients)))

    async def _client(self, client: httpx.AsyncClient, number: int) -> None:
        serial = 0
        while not self._stop.is_set():
            serial += 1
            seen = await self._one(client, f"Client {number}, question {serial}: tell me about the number {serial}.")
            self.seen.append(seen)
            if seen.outcome != ANSWERED:
                await asyncio.sleep(BACK_OFF_S)

    async def _one(self, client: httpx.AsyncClient, text: str) -> Seen:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": True}
        body |= {"max_tokens": self._tokens, "temperature": 0.7}
        began, outcome, retry_after = time.monotonic(), NO_CONNECTION, None
        try:
            url = f"{self._stack.url}/v1/chat/completions"
            async with client.stream("POST", url, json=body, headers=self._stack.headers) as answer:
                if answer.status_code != 200:
                    outcome, retry_after = f"HTTP {answer.status_code}", answer.headers.get("retry-after")
                    await answer.aread()
                else:
                    outcome = CUT
                    async for line in answer.aiter_lines():
                        outcome = _read(line, outcome)
        except httpx.HTTPError:
            pass  # the outcome so far says how far it came
        return Seen(began, time.monotonic(), outcome, retry_after)


def _read(line: str, outcome: str) -> str:
    """The outcome after one more line of the stream."""
    data = line.removeprefix("data: ")
    if data == line:
        return outcome
    if data == "[DONE]":
        return ANSWERED if outcome == CUT else outcome
    return ERROR_EVENT if "error" in json.loads(data) else outcome
