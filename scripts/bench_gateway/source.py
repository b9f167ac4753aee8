"""What stands behind every party: an engine that answers at once, one bare asyncio protocol and no framework.

    python -m scripts.bench_gateway.source --port 8000

Whole answers are ready-made bytes, one choice a prompt, so that a merged list gets what it asked for. Streams move
together, as a batch of an engine does: each step brings every stream of that pace its next write; a step of 0 ms, as
fast as they are taken. Speaks what a
gateway asks of vLLM: /health, /v1/models, /metrics. Beside those: POST /go lets held streams run on, GET /counts tells
how much was answered, which the load's own count is held against.
"""

import argparse
import asyncio
import functools
from collections.abc import Callable
from typing import Any

import httptools
import orjson
import uvloop

from scripts.bench_gateway import answers

REST_MS = 1.0  # until a look at streams none of which took more
CAPACITY_TOKENS = 50_000_000  # no party is to queue for want of room


class State:
    """Of the whole process: what was answered, and the streams on their way."""

    def __init__(self) -> None:
        self.counts = {"prompts": 0, "calls": 0, "streams": 0, "events": 0}
        self.held: set[Stream] = set()
        self.moving: dict[float, set[Stream]] = {}  # by their step
        self.tokens = 0

    def begin(self, stream: "Stream") -> None:
        if stream.step_ms < 0:
            self.held.add(stream)
            return
        batch = self.moving.get(stream.step_ms)
        if batch is not None:
            batch.add(stream)
            return
        loop = asyncio.get_running_loop()
        self.moving[stream.step_ms] = {stream}
        self._step(loop, stream.step_ms, loop.time())

    def forget(self, stream: "Stream") -> None:
        self.held.discard(stream)
        for batch in self.moving.values():
            batch.discard(stream)

    def go(self) -> None:
        for stream in self.held:
            stream.write_rest()
        self.held.clear()

    def _step(self, loop: asyncio.AbstractEventLoop, step_ms: float, due_s: float) -> None:
        batch = self.moving[step_ms]
        awake = [stream for stream in batch if not stream.paused]
        batch.difference_update([stream for stream in awake if not stream.write_next()])
        if not batch:
            del self.moving[step_ms]
        elif awake and not step_ms:
            loop.call_soon(self._step, loop, step_ms, due_s)
        else:
            due_s = max(due_s + (step_ms or REST_MS) / 1000, loop.time())  # a late step delays the next: no bursts
            loop.call_at(due_s, self._step, loop, step_ms, due_s)


class Stream:
    """One event stream being sent."""

    def __init__(self, transport: asyncio.Transport, state: State, events: int, per_write: int, usage: bool) -> None:
        self.step_ms = 0.0
        self.paused = False  # its party takes no more for now
        self._transport = transport
        self._state = state
        self._events = events
        self._writes = list(reversed(_writes(events, per_write, usage)))

    def write_next(self) -> bool:
        """Whether there is more to come."""
        if self._transport.is_closing():  # its party gave up
            return False
        self._transport.write(self._writes.pop())
        self._state.tokens += 1
        if not self._writes:
            self._state.counts["streams"] += 1
            self._state.counts["events"] += self._events
        return bool(self._writes)

    def write_rest(self) -> None:
        while self.write_next():
            pass


@functools.lru_cache(64)
def _writes(events: int, per_write: int, usage: bool) -> tuple[bytes, ...]:
    """A stream's writes, each one chunk of the body; the last write carries the body's end too."""
    pieces = answers.stream_events(events, usage)
    chunks = [b"".join(pieces[start : start + per_write]) for start in range(0, len(pieces), per_write)]
    framed = [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks]
    return (*framed[:-1], framed[-1] + b"0\r\n\r\n")


@functools.lru_cache(4096)
def _whole(prompts: int, with_ids: bool) -> bytes:
    return _answer(answers.whole_answer(prompts, with_ids))


def _answer(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
    b"cache-control: no-cache\r\n\r\n"
)


class Connection(asyncio.Protocol):
    """One connection of a party, requests one after the other."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = b""
        self._stream: Stream | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stream is not None:
            self._state.forget(self._stream)

    def pause_writing(self) -> None:
        if self._stream is not None:
            self._stream.paused = True

    def resume_writing(self) -> None:
        if self._stream is not None:
            self._stream.paused = False

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._url = url
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._transport.write(_ROUTES.get(self._url.partition(b"?")[0], Connection._nothing)(self))

    def _completion(self) -> bytes:
        document = orjson.loads(self._body)
        prompt = document["prompt"]
        prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
        if prompt != "Hi":  # else it is a gateway's own probe
            self._state.counts["prompts"] += prompts
            self._state.counts["calls"] += 1
        self._state.tokens += prompts
        return _whole(prompts, bool(document.get("return_token_ids")))

    def _chat(self) -> bytes:
        document: dict[str, Any] = orjson.loads(self._body)
        try:
            events, per_write, step_ms, usage = answers.chat_order(document)
        except (ValueError, KeyError, TypeError, AttributeError):
            return _answer(b'{"error":{"message":"not a benchmark\'s chat"}}', "400 Bad Request")
        self._stream = Stream(self._transport, self._state, events, per_write, usage)
        self._stream.step_ms = step_ms
        self._transport.write(STREAM_HEAD)
        if step_ms < 0:
            self._stream.write_next()
        asyncio.get_running_loop().call_soon(self._state.begin, self._stream)
        return b""

    def _health(self) -> bytes:
        return _answer(b"")

    def _models(self) -> bytes:
        names = (answers.MODEL, answers.CHAT_MODEL)
        data = [{"id": name, "object": "model", "owned_by": "vllm", "max_model_len": 8192} for name in names]
        return _answer(orjson.dumps({"object": "list", "data": data}))

    def _metrics(self) -> bytes:
        labels = f'engine="0",model_name="{answers.MODEL}"'
        page = (
            f"vllm:num_requests_running{{{labels}}} 0\nvllm:num_requests_waiting{{{labels}}} 0\n"
            f"vllm:prompt_tokens_total{{{labels}}} 0\nvllm:generation_tokens_total{{{labels}}} {self._state.tokens}\n"
            f'vllm:cache_config_info{{block_size="16",kv_cache_size_tokens="{CAPACITY_TOKENS}"}} 1\n'
        )
        return _answer(page.encode(), kind="text/plain; version=0.0.4")

    def _go(self) -> bytes:
        self._state.go()
        return _answer(b"{}")

    def _counts(self) -> bytes:
        return _answer(orjson.dumps({**self._state.counts, "held": len(self._state.held)}))

    def _nothing(self) -> bytes:
        return _answer(b'{"detail":"Not Found"}', "404 Not Found")


_ROUTES: dict[bytes, Callable[[Connection], bytes]] = {
    b"/v1/completions": Connection._completion,
    b"/v1/chat/completions": Connection._chat,
    b"/health": Connection._health,
    b"/v1/models": Connection._models,
    b"/metrics": Connection._metrics,
    b"/go": Connection._go,
    b"/counts": Connection._counts,
}


async def serve(port: int) -> None:
    state = State()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(state), "127.0.0.1", port, backlog=4096)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_gateway.source",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--port", type=int, required=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
