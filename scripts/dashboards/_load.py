"""Load for the preview: four kinds of user, so that every panel has something true to show."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

# Name -> the limits of its key, as options of scripts.keys.
TENANTS: Mapping[str, tuple[str, ...]] = {
    "chat-app": (),
    "batch-job": (),
    "notebook": ("--requests-per-minute", "10"),
    "crawler": (),
}
_SYSTEM = "You are a patient librarian. You answer in a few plain sentences, and you name a book where one fits. " * 4
_TOPICS = ("rivers", "bridges", "bread", "clocks", "maps", "whales", "glass", "tea", "lighthouses", "moss")


@dataclass(frozen=True)
class Seat:
    """One tenant's access: a client that has its key, the model, and its own dice."""

    http: httpx.AsyncClient
    model: str
    dice: random.Random

    async def ask(self, path: str, **body: Any) -> httpx.Response | None:
        """None where the connection failed: the gateway is restarting, or the run ends."""
        try:
            return await self.http.post(path, json={"model": self.model, **body})
        except httpx.HTTPError:
            return None


async def chats(seat: Seat) -> None:
    """A conversation after the other, streamed, all with the same beginning."""
    while True:
        question = f"What should I read about {seat.dice.choice(_TOPICS)}? ({seat.dice.randrange(10**6)})"
        await seat.ask(
            "/v1/chat/completions",
            messages=[{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}],
            stream=True,
            max_tokens=seat.dice.choice((16, 32, 64)),
        )
        await asyncio.sleep(seat.dice.uniform(0.2, 2))


async def bursts(seat: Seat) -> None:
    """Short completions that arrive together, some of them identical."""
    while True:
        topics = seat.dice.choices(_TOPICS, k=12)
        async with asyncio.TaskGroup() as group:
            for topic in topics:
                prompt = f"One word about {topic}:"
                group.create_task(seat.ask("/v1/completions", prompt=prompt, max_tokens=4, temperature=0))
        await asyncio.sleep(seat.dice.uniform(1, 3))


async def impatient(seat: Seat) -> None:
    """Prompts that nobody repeats; every other client leaves before the end."""
    while True:
        words = " ".join(seat.dice.choices(_TOPICS, k=60))
        asked = seat.ask("/v1/completions", prompt=f"{seat.dice.random()} {words}", max_tokens=64, stream=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asked, seat.dice.choice((0.5, 30)))
        await asyncio.sleep(seat.dice.uniform(0.2, 1.5))


async def floods(seat: Seat) -> None:
    """Now and then more than fits, asked for by max_tokens; every third time it is needed, too."""
    for number in itertools.count(1):
        await asyncio.sleep(30)
        ends = {} if number % 3 == 0 else {"stop": ["."]}
        async with asyncio.TaskGroup() as group:
            for _ in range(40):
                words = " ".join(seat.dice.choices(_TOPICS, k=100))
                group.create_task(seat.ask("/v1/completions", prompt=f"{words}: a story.", max_tokens=900, **ends))


async def run(url: str, model: str, keys: Mapping[str, str], seconds: float) -> None:
    """Loads the gateway at `url` for so long. `keys` has a secret for each of TENANTS."""
    async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
        clients = []
        for number, name in enumerate(TENANTS):
            headers = {"Authorization": f"Bearer {keys[name]}"}
            if name == "crawler":
                headers["X-Request-Timeout-S"] = "20"
            limits = httpx.Limits(max_connections=100)
            http = httpx.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False, limits=limits)
            clients.append(http)
            seat = Seat(http, model, random.Random(number))  # noqa: S311 - no secret
            for user in _users(name, seat):
                group.create_task(user)


def _users(name: str, seat: Seat) -> list[Coroutine[Any, Any, None]]:
    if name == "chat-app":
        return [chats(seat) for _ in range(4)]
    return [{"batch-job": bursts, "notebook": impatient, "crawler": floods}[name](seat)]
