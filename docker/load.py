"""Demo load: a few clients that chat through the gateway all the time, so that dashboards have something to show.

    LOAD_URL       the gateway (http://gateway:8080)
    LOAD_KEY_FILE  file with the API key
    LOAD_CLIENTS   how many chat at once (4)

Each streams an answer, thinks for a while, and asks again; who is refused comes back when Retry-After says. A line of
counts goes to the log every ten seconds. Runs in the gateway's image; ends by SIGTERM.
"""

from __future__ import annotations

import asyncio
import collections
import os
import random
import signal
from pathlib import Path

import httpx

ANSWERED = Path("/tmp/answered")  # noqa: S108 - the container's own; its age is what the health check looks at
SYSTEM = "You are a patient librarian. You answer in a few plain sentences, and you name a book where one fits. " * 4
TOPICS = ("rivers", "bridges", "bread", "clocks", "maps", "whales", "glass", "tea", "lighthouses", "moss")
THINK_S = (0.5, 4.0)
REPORT_S = 10


async def client(http: httpx.AsyncClient, model: str, counts: collections.Counter[str], dice: random.Random) -> None:
    """One visitor after another in one seat."""
    while True:
        question = f"What should I read about {dice.choice(TOPICS)}, and why? ({dice.randrange(10**6)})"
        body = {
            "model": model,
            # The same beginning for everybody, then the question: what a prefix cache is for.
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            "stream": True,
            "max_tokens": dice.choice((16, 64, 128)),
        }
        pause = dice.uniform(*THINK_S)
        try:
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                ended = [line async for line in answer.aiter_lines()][-2:]
                if answer.status_code == httpx.codes.OK and "data: [DONE]" in ended:
                    counts["answered"] += 1
                    ANSWERED.touch()  # noqa: ASYNC240 - memory, not a disk
                else:
                    counts[f"HTTP {answer.status_code}" if answer.status_code != httpx.codes.OK else "broken"] += 1
                    pause = float(answer.headers.get("retry-after", pause))
        except httpx.HTTPError as error:
            counts[type(error).__name__] += 1
        await asyncio.sleep(pause)


async def the_model(http: httpx.AsyncClient) -> str:
    """The first model the gateway lists; waits until there is one."""
    while True:
        try:
            answer = await http.get("/v1/models")
            if answer.status_code in (401, 403):
                raise SystemExit("load: the gateway refuses the key in LOAD_KEY_FILE")
            if answer.status_code == httpx.codes.OK and answer.json()["data"]:
                return str(answer.json()["data"][0]["id"])
        except httpx.HTTPError:
            pass  # not up yet
        await asyncio.sleep(2)


async def run(url: str, key: str, clients: int) -> None:
    counts: collections.Counter[str] = collections.Counter()
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300, trust_env=False) as http:
        model = await the_model(http)
        print(f"load: {clients} clients ask {model}", flush=True)
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(client(http, model, counts, random.Random(number)))  # noqa: S311 - no secret
            while True:
                await asyncio.sleep(REPORT_S)
                told = ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))
                print(f"load: {told or 'nothing yet'}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        asyncio.run(
            run(
                os.environ.get("LOAD_URL", "http://gateway:8080"),
                Path(os.environ["LOAD_KEY_FILE"]).read_text(encoding="ascii").strip(),
                int(os.environ.get("LOAD_CLIENTS", "4")),
            )
        )
    except KeyboardInterrupt:
        print("load: stopped", flush=True)
