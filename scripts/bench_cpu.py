"""CPU time of the gateway's own Python, sockets left out: one completion, and one event of a stream.

The ASGI app runs with an engine that answers at once from memory, so what is left is what this project wrote and what
it asks of its libraries. Best of several runs: whatever else the machine does can only add.

    python -m scripts.bench_cpu [--runs 5]

Exit code: 0.
"""

import argparse
import asyncio
import gc
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import uvloop

from gateway.admission import Admission
from gateway.app import Gateway
from gateway.keys import ANONYMOUS
from gateway.metrics import Metrics
from gateway.prefixes import Prefixes, outcomes
from gateway.replicas import State
from gateway.routing import affinity, choose
from gateway.settings import Admission as AdmissionSettings
from gateway.settings import Settings
from gateway.sharing import parts_of
from scripts._command import Parser

MODEL = "m"
EVENTS = 2000
REPLICAS = (2, 8, 64)
PROMPT_CHARS = (160, 2_000, 8_000, 32_000)
ANSWER = {
    "id": "cmpl-1",
    "object": "text_completion",
    "choices": [{"index": 0, "text": "word " * 16, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 33, "completion_tokens": 16, "total_tokens": 49},
}


class Answer:
    """What upstream.Answer offers, from memory."""

    status = 200
    retry_after = None

    def __init__(self, whole: bytes, events: list[bytes]) -> None:
        self.content_type = "text/event-stream" if events else "application/json"
        self._whole, self._events = whole, iter(events)

    async def read(self) -> bytes:
        return self._whole

    async def chunk(self) -> bytes:
        await asyncio.sleep(0)  # as many turns of the loop as reads
        return next(self._events, b"")

    def close(self) -> None:
        pass


def event(number: int) -> bytes:
    choice = {"index": 0, "delta": {"content": f" w{number}"}, "finish_reason": None}
    document = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


async def one(app: Any, path: str, body: bytes) -> None:
    """One request through the public ASGI app. Raises RuntimeError where it was not answered 200."""
    message = {"type": "http.request", "body": body, "more_body": False}
    waiting, statuses = asyncio.Event(), []

    async def receive() -> dict[str, Any]:
        nonlocal message
        sent, message = message, {}
        if not sent:
            await waiting.wait()
        return sent

    async def send(out: dict[str, Any]) -> None:
        if out["type"] == "http.response.start":
            statuses.append(out["status"])

    headers = [(b"host", b"x"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
    await app(scope, receive, send)
    if statuses != [200]:
        raise RuntimeError(f"answered {statuses}")


async def best(work: Callable[[], Awaitable[None]], times: int, runs: int) -> float:
    """Least CPU seconds of `times` repetitions."""
    found = []
    for _ in range(runs):
        begin = time.process_time()
        for _ in range(times):
            await work()
        found.append(time.process_time() - begin)
    return min(found)


async def measure(runs: int) -> dict[str, float]:
    gateway = Gateway(Settings(auth={"disabled": True}, logs={"access": False}))
    replica = gateway.replicas.all[0]
    replica.models, replica.state, replica.block_size = {MODEL: 8192}, State.READY, 16
    replica.capacity_tokens = 100_000
    gateway.replicas.learned()
    events = [*map(event, range(EVENTS)), b"data: [DONE]\n\n"]

    async def post(url: str, body: bytes, headers: dict[str, str]) -> Answer:
        return Answer(json.dumps(ANSWER).encode(), events if b'"stream"' in body else [])

    gateway.upstream.post = post  # type: ignore[method-assign,assignment]
    completion = json.dumps({"model": MODEL, "prompt": "the quick brown fox " * 8, "temperature": 0.7}).encode()
    chat = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
    await one(gateway.public, "/v1/completions", completion)
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # as gateway/serving.py sets it
    request_s = await best(lambda: one(gateway.public, "/v1/completions", completion), 1000, runs)
    stream_s = await best(lambda: one(gateway.public, "/v1/chat/completions", chat), 3, runs)
    return {"request_us": request_s / 1000 * 1e6, "event_us": stream_s / 3 / EVENTS * 1e6}


async def prefix_cost(chars: int, runs: int) -> float:
    """Microseconds to remember a prompt of this length, half of which came by before, and to tell what became of it."""
    rng = random.Random(1)  # noqa: S311 - text, no secret
    memory = Prefixes()
    shared = rng.randbytes(chars // 4).hex()
    documents = [{"prompt": shared + rng.randbytes(chars // 4).hex()} for _ in range(200)]

    async def work() -> None:
        for document in documents:
            prompts = memory.prompts(document, None)
            outcomes(memory.look(prompts, ("http://engine:8000", 0), 0.0), prompts.more, chars // 4, chars // 8, 16)

    return await best(work, 1, runs) / len(documents) * 1e6


async def sharing_cost(chars: int, runs: int) -> float:
    """Microseconds more for a lease that counts a prompt's beginning once; half of the prompt is held by another."""
    rng = random.Random(1)  # noqa: S311 - text, no secret
    memory, shared, tokens = Prefixes(), rng.randbytes(chars // 4).hex(), chars // 4
    asked = [memory.prompts({"prompt": shared + rng.randbytes(chars // 4).hex()}, None) for _ in range(200)]
    gate = Admission(AdmissionSettings(), Metrics(), time.monotonic)
    gate.set_capacity(1_000_000)
    gate.shares_beginnings = True
    other = await gate.acquire(ANONYMOUS, tokens, math.inf, parts_of(asked[0], tokens))

    async def counted() -> None:
        for prompts in asked:
            (await gate.acquire(ANONYMOUS, tokens, math.inf, parts_of(prompts, tokens))).close()

    async def whole() -> None:
        for _ in asked:
            (await gate.acquire(ANONYMOUS, tokens, math.inf)).close()

    more_s = await best(counted, 5, runs) - await best(whole, 5, runs)
    other.close()
    return more_s / 5 / len(asked) * 1e6


async def routing_cost(replicas: int, runs: int) -> float:
    """Microseconds to choose one of so many ready replicas for a chat: its key, the open circuits, the loads."""
    engines = tuple(f"http://engine-{number}:8000" for number in range(replicas))
    everyone = Gateway(Settings(engines=engines, auth={"disabled": True}, logs={"access": False})).replicas
    for number, replica in enumerate(everyone.all):
        replica.models, replica.state, replica.in_flight = {MODEL: 8192}, State.READY, number % 7
    everyone.learned()
    system = {"role": "system", "content": "Be brief. " * 100}
    documents = [{"messages": [system, {"role": "user", "content": f"question {number}"}]} for number in range(200)]

    async def work() -> None:
        for document in documents:
            choose(everyone.choices(MODEL), affinity(document))

    return await best(work, 1, runs) / len(documents) * 1e6


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("bench-cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args(argv)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(measure(arguments.runs))
        prompts = {chars: runner.run(prefix_cost(chars, arguments.runs)) for chars in PROMPT_CHARS}
        beginnings = {chars: runner.run(sharing_cost(chars, arguments.runs)) for chars in PROMPT_CHARS}
        choices = {count: runner.run(routing_cost(count, arguments.runs)) for count in REPLICAS}
    print(f"one completion {figures['request_us']:.0f} µs, one event of a stream {figures['event_us']:.1f} µs")
    told = ", ".join(f"{chars:,} characters {us:.1f} µs" for chars, us in prompts.items())
    print(f"of a request, what remembering its prompt takes: {told}")
    told = ", ".join(f"{chars:,} characters {us:.1f} µs" for chars, us in beginnings.items())
    print(f"of a request, what counting its prompt's beginning once takes: {told}")
    told = ", ".join(f"{us:.1f} µs among {count}" for count, us in choices.items())
    print(f"of a request, what choosing its replica takes: {told}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
