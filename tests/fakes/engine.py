"""A scripted engine: answers like vLLM 0.32 where the gateway looks, and misbehaves on demand.

Its "model" is a hash, so a deterministic request has one right answer, whether it came alone or in a list. Faults are
`Script`s: one-shot, taken in order by the requests of a path. Real sockets, so resets, splits and stalls are real.

    python -m tests.fakes.engine --port 8000        # for benchmarks and for a look by hand
"""

import argparse
import asyncio
import contextlib
import gzip
import itertools
import json
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import orjson
from aiohttp import web

from tests.fakes import dialects
from tests.fakes.model import MAX_MODEL_LEN, POISON, generate, is_probe, refusal

__all__ = ["MODEL", "POISON", "RESET", "FakeEngine", "Script", "Seen"]

MODEL = "fake-8b"
OUT_OF_LUCK = b'{"error":{"message":"out of luck","type":"InternalServerError","code":500}}'


@dataclass
class Script:
    """How one request is to be treated. The default is to answer properly."""

    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0  # before the response's headers
    first_token_s: float = 0.0  # after the headers, before the first event
    token_s: float = 0.0  # between events
    hang: bool = False  # headers never come
    reset_before_answer: bool = False
    reset_after: int | None = None  # events
    stall_after: int | None = None
    error_event_after: int | None = None
    end_after: int | None = None  # events, then a clean end without [DONE]
    bytewise: bool = False
    crlf: bool = False
    events_per_write: int = 1
    gzip: bool = False
    drop_token_ids: bool = False
    drop_choice: bool = False
    extra_usage: int = 0  # prompt tokens an embedding engine adds of its own
    # Instead of an event stream: bytes are written one by one, events waited for, RESET resets, the end is a clean one.
    pieces: "Sequence[bytes | asyncio.Event | Reset] | None" = None


class Reset:
    """In `Script.pieces`: the connection is reset here."""


RESET = Reset()


@dataclass
class Seen:
    """One request as it reached the engine."""

    path: str
    headers: Mapping[str, str]  # names in any case
    raw: bytes
    json: dict[str, Any]
    at_s: float
    aborted_s: float | None = None  # when the gateway broke it off
    finished: bool = False
    sent_bytes: int = 0  # of a stream


class FakeEngine:
    """Run it with `async with`. `url` is where it listens."""

    def __init__(
        self,
        *,
        models: tuple[str, ...] = (MODEL,),
        kv_tokens: int = 100_000,
        slots: int = 256,
        service_s: float = 0.0,
        stream_slots: bool = True,
        prefix_caching: bool = True,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.models = models
        self.kv_tokens = kv_tokens
        self.prefix_caching = prefix_caching
        self.service_s = service_s
        self.slots = asyncio.Semaphore(slots)
        self.stream_slots = stream_slots
        self.healthy = True
        self.frozen = False  # counters stand still and nothing is answered, while /health says 200
        self.scripts: defaultdict[str, deque[Script]] = defaultdict(deque)
        self.default = Script()
        self.seen: list[Seen] = []
        self.active = self.peak = 0
        self.counters: Counter[str] = Counter()
        self.extra_running = 0
        self.metrics_page: str | None = None  # instead of the real figures
        self.models_page: str | None = None
        self.health_delay_s = 0.0
        self.api_key: str | None = None  # /v1 asks for it
        self.only: set[str] | None = None  # the routes it has, as a pooling engine has no completions
        self.otherwise = 404  # what it answers on the others
        self.gate: asyncio.Event | None = None  # streams send their headers, then wait for it
        self._thaw = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.host = host
        self.port = port

    # -- for tests -----------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def script(self, path: str, *scripts: Script) -> None:
        self.scripts[path].extend(scripts)

    def asked(self, path: str) -> list[Seen]:
        """Requests of clients, without the gateway's own probes."""
        return [seen for seen in self.seen if seen.path == path and not is_probe(seen.json)]

    def freeze(self) -> None:
        self.frozen = True
        self._thaw.clear()

    def thaw(self) -> None:
        self.frozen = False
        self._thaw.set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; after a `stop`, again on the same port."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/{kind:.+}", self._infer)
        app.router.add_route("*", "/{other:.*}", self._other)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, reuse_address=True, backlog=2048)  # as vLLM has
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    # -- the engine ----------------------------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self.health_delay_s)
        return web.Response(status=200 if self.healthy else 503)

    def _keyless(self, request: web.Request) -> web.Response | None:
        if self.api_key is None or request.headers.get("Authorization") == f"Bearer {self.api_key}":
            return None
        return web.json_response({"error": "Unauthorized"}, status=401)

    async def _models(self, request: web.Request) -> web.Response:
        if (unauthorized := self._keyless(request)) is not None:
            return unauthorized
        if self.models_page is not None:
            return web.Response(text=self.models_page, content_type="text/html")
        data = [
            {"id": name, "object": "model", "owned_by": "vllm", "root": "/models/x", "max_model_len": MAX_MODEL_LEN}
            for name in self.models
        ]
        return web.json_response({"object": "list", "data": data})

    async def _metrics(self, _: web.Request) -> web.Response:
        if self.metrics_page is not None:
            return web.Response(text=self.metrics_page)
        labels = f'engine="0",model_name="{self.models[0]}"'
        config = f'block_size="16",enable_prefix_caching="{self.prefix_caching}",engine="0"'
        config += f',kv_cache_size_tokens="{self.kv_tokens}",num_gpu_blocks="1"'
        lines = [
            f"vllm:num_requests_running{{{labels}}} {self.active + self.extra_running}",
            f"vllm:num_requests_waiting{{{labels}}} 0.0",
            f"vllm:prompt_tokens_total{{{labels}}} {self.counters['prompt']}",
            f"vllm:generation_tokens_total{{{labels}}} {self.counters['generation']}",
            f"vllm:cache_config_info{{{config}}} 1.0",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _other(self, request: web.Request) -> web.Response:
        self.seen.append(Seen(request.path, request.headers, await request.read(), {}, time.monotonic()))
        return web.json_response({"leaked": request.path})

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        document = json.loads(raw)
        seen = Seen(request.path, request.headers, raw, document, time.monotonic())
        self.seen.append(seen)
        if (unauthorized := self._keyless(request)) is not None:
            return unauthorized
        if self.only is not None and request.path not in self.only:
            return web.json_response({"detail": "Not Found"}, status=self.otherwise)
        self.active += 1
        self.peak = max(self.peak, self.active)
        try:
            if self.frozen:
                await self._thaw.wait()
            async with self.slots if self.stream_slots or not document.get("stream") else contextlib.nullcontext():
                response = await self._act(request, seen)
            seen.finished = True
            return response
        except (asyncio.CancelledError, ConnectionResetError):
            seen.aborted_s = time.monotonic()
            raise
        finally:
            self.active -= 1

    async def _act(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        queue = self.scripts[request.path]
        script = queue.popleft() if queue and not is_probe(seen.json) else self.default
        if script.hang:
            await asyncio.Event().wait()
        if script.delay_s or self.service_s:
            await asyncio.sleep(script.delay_s or self.service_s)
        if script.reset_before_answer:
            return await _reset(request)
        if script.status != 200 or script.body is not None:
            return web.Response(status=script.status, body=script.body or b"", headers=script.headers)
        error = refusal(seen.json)
        if error is not None:
            return web.json_response({"error": error}, status=400)
        if seen.json.get("stream") and request.path != "/v1/embeddings":
            return await self._stream(request, seen, script)
        body = orjson.dumps(self._answer(request, seen.json, script))
        if script.gzip:
            return web.Response(
                body=gzip.compress(body), headers={"Content-Encoding": "gzip", "Content-Type": "application/json"}
            )
        return web.Response(body=body, content_type="application/json")

    def _answer(self, request: web.Request, document: dict[str, Any], script: Script) -> dict[str, Any]:
        if request.path == "/v1/embeddings":
            return dialects.embeddings(document, script.extra_usage)
        choices, usage = generate(document)
        self._count(usage)
        if script.drop_choice:
            choices = choices[:-1]
        if script.drop_token_ids:
            for choice in choices:
                choice["token_ids"] = choice["prompt_token_ids"] = None
        dialect = {"/v1/responses": dialects.response, "/v1/messages": dialects.message}.get(request.path)
        if dialect is not None:
            return dialect(choices[0], usage, document["model"], _request_id(request))
        prefix = "cmpl" if request.path == "/v1/completions" else "chatcmpl"
        if prefix == "chatcmpl":
            for choice in choices:
                choice["message"] = {"role": "assistant", "content": choice.pop("text")}
        return {
            "id": f"{prefix}-{_request_id(request)}",
            "object": "text_completion" if prefix == "cmpl" else "chat.completion",
            "created": 1700000000,
            "model": document.get("model"),
            "choices": choices,
            "usage": usage,
        }

    def _count(self, usage: dict[str, Any]) -> None:
        self.counters["prompt"] += usage["prompt_tokens"]
        self.counters["generation"] += usage["completion_tokens"]

    async def _stream(self, request: web.Request, seen: Seen, script: Script) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if script.pieces is not None:
            return await self._write_pieces(request, response, seen, script.pieces)
        if self.gate is not None:
            await self.gate.wait()
        if script.first_token_s:
            await asyncio.sleep(script.first_token_s)
        newline = b"\r\n" if script.crlf else b"\n"
        events = self._events(request, seen.json)
        pending: list[bytes] = []
        for number in itertools.count():
            if number == script.reset_after:
                await _write(response, pending, script)
                return await _reset(request)
            if number == script.stall_after:
                await _write(response, pending, script)
                await asyncio.Event().wait()
            if number == script.end_after:
                break
            if number == script.error_event_after:
                pending.append(b"data: " + OUT_OF_LUCK + newline * 2)
                break
            if number == len(events):
                break
            self.counters["generation"] += 1
            pending.append(events[number].replace(b"\n", newline) + newline * 2)
            if len(pending) >= script.events_per_write:
                await _write(response, pending, script)
            if script.token_s:
                await asyncio.sleep(script.token_s)
        await _write(response, pending, script)
        await response.write_eof()
        return response

    async def _write_pieces(
        self,
        request: web.Request,
        response: web.StreamResponse,
        seen: Seen,
        pieces: Sequence[bytes | asyncio.Event | Reset],
    ) -> web.StreamResponse:
        for piece in pieces:
            if isinstance(piece, Reset):
                return await _reset(request)
            if isinstance(piece, bytes):
                await response.write(piece)
                seen.sent_bytes += len(piece)
                await asyncio.sleep(0)  # each piece its own write on the socket
            else:
                await piece.wait()
        await response.write_eof()
        return response

    def _events(self, request: web.Request, document: dict[str, Any]) -> list[bytes]:
        """A stream's events, each without its blank line."""
        choices, usage = generate(document)
        self.counters["prompt"] += usage["prompt_tokens"]
        dialect = {"/v1/responses": dialects.response_events, "/v1/messages": dialects.message_events}.get(request.path)
        if dialect is not None:
            return dialect(choices[0], usage, document["model"], _request_id(request))
        return dialects.chunk_events(request.path, choices, usage, document, _request_id(request))


async def _write(response: web.StreamResponse, pending: list[bytes], script: Script) -> None:
    data = b"".join(pending)
    pending.clear()
    if not data:
        return
    if not script.bytewise:
        await response.write(data)
        return
    for i in range(len(data)):
        await response.write(data[i : i + 1])
        await asyncio.sleep(0)  # each byte its own write on the socket


async def _reset(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    raise ConnectionResetError


def _request_id(request: web.Request) -> str:
    return request.headers.get("X-Request-Id", "none")


async def _serve_forever(port: int, token_s: float, service_s: float, slots: int) -> None:
    # Streams take no slot here: a benchmark of streams and one of whole answers share this engine.
    engine = FakeEngine(kv_tokens=10_000_000, slots=slots, service_s=service_s, stream_slots=False)
    engine.port = port
    engine.default = Script(token_s=token_s)
    async with engine:
        print(engine.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--token-s", type=float, default=0.0, help="between a stream's events")
    parser.add_argument("--service-s", type=float, default=0.0, help="for a whole answer")
    parser.add_argument("--slots", type=int, default=256, help="whole answers at a time")
    arguments = parser.parse_args()
    asyncio.run(_serve_forever(arguments.port, arguments.token_s, arguments.service_s, arguments.slots))
