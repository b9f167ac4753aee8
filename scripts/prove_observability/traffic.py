"""Load on the lab: a mix that moves every series of a healthy stack, and the one-sided kinds that make faults."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from scripts.demo import MODEL
from scripts.golden_scrapes.record import PREFIX

WORDS = PREFIX.replace(".", "").lower().split()
PAUSE_S = 0.5  # after a refusal, as a client that was told to come back would


@dataclass(frozen=True)
class Front:
    """Where requests go, and as whom."""

    url: str
    key: str | None = None
    deadline_s: float | None = None

    @property
    def headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return key | ({"X-Request-Timeout-S": f"{self.deadline_s}"} if self.deadline_s else {})


Job = Callable[[aiohttp.ClientSession, Front, random.Random], Awaitable[int]]


async def _post(session: aiohttp.ClientSession, front: Front, path: str, body: dict[str, Any]) -> int:
    body = {"model": MODEL, "temperature": 0, **body}
    async with session.post(front.url + path, json=body, headers=front.headers) as answer:
        async for _ in answer.content.iter_any():
            pass
        return answer.status


async def _chat(session: aiohttp.ClientSession, front: Front, user: str, **fields: Any) -> int:
    messages = [{"role": "system", "content": PREFIX}, {"role": "user", "content": user}]
    return await _post(session, front, "/v1/chat/completions", {"messages": messages, **fields})


def words(rng: random.Random, count: int) -> str:
    """Text that nobody sent before."""
    return " ".join(rng.choice(WORDS) + str(rng.randrange(10)) for _ in range(count))


async def streamed_chat(session: aiohttp.ClientSession, front: Front, rng: random.Random) -> int:
    """A streamed chat whose beginning all share."""
    return await _chat(session, front, words(rng, 4), stream=True, max_tokens=16, ignore_eos=True)


async def short_completion(session: aiohttp.ClientSession, front: Front, rng: random.Random) -> int:
    """A completion that can be merged with others."""
    return await _post(session, front, "/v1/completions", {"prompt": words(rng, 6), "max_tokens": 4})


async def same_question(session: aiohttp.ClientSession, front: Front, _: random.Random) -> int:
    """Twice at once the same, so that one engine call can serve both."""
    both = (_chat(session, front, "When is the last boat?", max_tokens=12) for _ in range(2))
    return max(await asyncio.gather(*both))


async def impatient(session: aiohttp.ClientSession, front: Front, rng: random.Random) -> int:
    """A client that leaves in the middle of its stream."""
    messages = [{"role": "user", "content": words(rng, 4)}]
    body = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": 200, "ignore_eos": True}
    async with session.post(front.url + "/v1/chat/completions", json=body, headers=front.headers) as answer:
        async for _ in answer.content.iter_any():
            break
    return 200


async def mistaken(session: aiohttp.ClientSession, front: Front, _: random.Random) -> int:
    """A request that is the client's own fault."""
    await _post(session, front, "/v1/completions", {"prompt": "x", "max_tokens": -1})
    return 200


async def spoilsport(session: aiohttp.ClientSession, front: Front, rng: random.Random) -> int:
    """Three that can be merged, and that the engine refuses; and one too long, among others'."""
    strange = {"max_tokens": 4, "stop_token_ids": [999_999]}
    bodies = [{"prompt": words(rng, 6), **strange} for _ in range(3)]
    bodies.append({"prompt": words(rng, 1200), "max_tokens": 4})
    await asyncio.gather(*(_post(session, front, "/v1/completions", body) for body in bodies))
    return 599  # and a pause


async def hurried(session: aiohttp.ClientSession, front: Front, rng: random.Random) -> int:
    """More than the engine can do by the client's own deadline, in one piece and as a stream."""
    hasty = Front(front.url, front.key, deadline_s=2)
    body = {"prompt": words(rng, 6), "max_tokens": 400, "ignore_eos": True}
    await _post(session, hasty, "/v1/completions", body)
    await _post(session, hasty, "/v1/completions", {**body, "stream": True})
    return 599


async def fresh_long(session: aiohttp.ClientSession, front: Front, rng: random.Random) -> int:
    """A long prompt that shares nothing, and hardly an answer."""
    return await _post(session, front, "/v1/completions", {"prompt": words(rng, 300), "max_tokens": 1, "stream": True})


async def long_answer(session: aiohttp.ClientSession, front: Front, rng: random.Random) -> int:
    """A short prompt and an answer of hundreds of tokens."""
    body = {"prompt": words(rng, 6), "max_tokens": 400, "ignore_eos": True, "stream": True}
    return await _post(session, front, "/v1/completions", body)


async def middling_answer(session: aiohttp.ClientSession, front: Front, rng: random.Random) -> int:
    """As long_answer, but one ends every second or so, so that what it waited is known soon."""
    body = {"prompt": words(rng, 6), "max_tokens": 150, "ignore_eos": True, "stream": True}
    return await _post(session, front, "/v1/completions", body)


async def talkative(session: aiohttp.ClientSession, front: Front, rng: random.Random) -> int:
    """A stream of middling length, short enough that several end within any window."""
    body = {"prompt": words(rng, 10), "max_tokens": 40, "ignore_eos": True, "stream": True}
    return await _post(session, front, "/v1/completions", body)


MIX: tuple[Job, ...] = (
    *(streamed_chat, streamed_chat, short_completion, short_completion, short_completion, short_completion),
    *(same_question, impatient, mistaken, spoilsport, hurried),
)


class Clients(threading.Thread):
    """Each job again and again until stopped. Failures are the faults' doing, and only paused after."""

    def __init__(self, front: Front, jobs: tuple[Job, ...], pace_s: float) -> None:
        super().__init__(daemon=True, name="clients")
        self._front, self._jobs, self._pace_s = front, jobs, pace_s
        self._loop = asyncio.new_event_loop()
        self._tasks: list[asyncio.Task[None]] = []
        self._seeds = itertools.count(random.SystemRandom().randrange(1 << 30))
        self.answered = 0

    def run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._all())
        self._loop.close()

    async def _all(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
            self._tasks = [asyncio.ensure_future(self._repeat(session, job)) for job in self._jobs]
            await asyncio.gather(*self._tasks)

    async def _repeat(self, session: aiohttp.ClientSession, job: Job) -> None:
        rng = random.Random(next(self._seeds))  # noqa: S311
        while True:
            try:
                status = await job(session, self._front, rng)
            except (aiohttp.ClientError, TimeoutError, OSError):
                status = 599
            self.answered += status == 200
            await asyncio.sleep(self._pace_s if status == 200 else PAUSE_S)

    def stop(self) -> None:
        def cancel() -> None:
            for task in self._tasks:
                task.cancel()

        self._loop.call_soon_threadsafe(cancel)
        self.join(20)


@contextlib.contextmanager
def load(front: Front, *jobs: Job, pace_s: float = 0.05) -> Iterator[Clients]:
    """One client a job, for as long as the block runs."""
    clients = Clients(front, jobs, pace_s)
    clients.start()
    try:
        yield clients
    finally:
        clients.stop()
