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
import os
import re
import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

MODEL = "fake-8b"
MAX_MODEL_LEN = 8192
POISON = "POISON"  # a prompt the engine refuses, failing the whole list it stands in
OUT_OF_LUCK = b'{"error":{"message":"out of luck","type":"InternalServerError","code":500}}'
_WORDS = re.compile(r"\w+|[^\w\s]")


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


@dataclass
class Seen:
    """One request as it reached the engine."""

    path: str
    headers: dict[str, str]
    raw: bytes
    json: dict[str, Any]
    at_s: float
    aborted_s: float | None = None  # when the gateway broke it off
    finished: bool = False


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
    ) -> None:
        self.models = models
        self.kv_tokens = kv_tokens
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
        self.gate: asyncio.Event | None = None  # streams send their headers, then wait for it
        self._thaw = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.port = 0

    # -- for tests -----------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def script(self, path: str, *scripts: Script) -> None:
        self.scripts[path].extend(scripts)

    def asked(self, path: str) -> list[Seen]:
        """Requests of clients, without the gateway's own probes."""
        return [seen for seen in self.seen if seen.path == path and not _is_probe(seen.json)]

    def freeze(self) -> None:
        self.frozen = True
        self._thaw.clear()

    def thaw(self) -> None:
        self.frozen = False
        self._thaw.set()

    async def __aenter__(self) -> "FakeEngine":
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
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
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
        if (refusal := self._keyless(request)) is not None:
            return refusal
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
        config = f'block_size="16",engine="0",kv_cache_size_tokens="{self.kv_tokens}",num_gpu_blocks="1"'
        lines = [
            f"vllm:num_requests_running{{{labels}}} {self.active + self.extra_running}",
            f"vllm:num_requests_waiting{{{labels}}} 0.0",
            f"vllm:prompt_tokens_total{{{labels}}} {self.counters['prompt']}",
            f"vllm:generation_tokens_total{{{labels}}} {self.counters['generation']}",
            f"vllm:cache_config_info{{{config}}} 1.0",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _other(self, request: web.Request) -> web.Response:
        self.seen.append(Seen(request.path, dict(request.headers), await request.read(), {}, time.monotonic()))
        return web.json_response({"leaked": request.path})

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        document = json.loads(raw)
        seen = Seen(request.path, dict(request.headers), raw, document, time.monotonic())
        self.seen.append(seen)
        if (refusal := self._keyless(request)) is not None:
            return refusal
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
        script = queue.popleft() if queue and not _is_probe(seen.json) else self.default
        if script.hang:
            await asyncio.Event().wait()
        if script.delay_s or self.service_s:
            await asyncio.sleep(script.delay_s or self.service_s)
        if script.reset_before_answer:
            return await _reset(request)
        if script.status != 200 or script.body is not None:
            return web.Response(status=script.status, body=script.body or b"", headers=script.headers)
        refusal = _refusal(seen.json)
        if refusal is not None:
            return web.json_response(
                {"error": {"message": refusal, "type": "BadRequestError", "param": "prompt", "code": 400}}, status=400
            )
        if seen.json.get("stream"):
            return await self._stream(request, seen.json, script)
        body = orjson.dumps(self._answer(request, seen.json, script))
        if script.gzip:
            return web.Response(
                body=gzip.compress(body), headers={"Content-Encoding": "gzip", "Content-Type": "application/json"}
            )
        return web.Response(body=body, content_type="application/json")

    def _answer(self, request: web.Request, document: dict[str, Any], script: Script) -> dict[str, Any]:
        if request.path == "/v1/embeddings":
            return self._embeddings(document, script)
        choices, usage = generate(document)
        self._count(usage)
        if script.drop_choice:
            choices = choices[:-1]
        if script.drop_token_ids:
            for choice in choices:
                choice["token_ids"] = choice["prompt_token_ids"] = None
        prefix = "cmpl" if request.path == "/v1/completions" else "chatcmpl"
        if prefix == "chatcmpl":
            for choice in choices:
                choice["message"] = {"role": "assistant", "content": choice.pop("text")}
        return {
            "id": f"{prefix}-{request.headers.get('X-Request-Id', 'none')}",
            "object": "text_completion",
            "created": 1700000000,
            "model": document.get("model"),
            "choices": choices,
            "usage": usage,
        }

    def _embeddings(self, document: dict[str, Any], script: Script) -> dict[str, Any]:
        inputs = prompts_of(document.get("input"))
        data = [
            {"object": "embedding", "index": i, "embedding": [_hash(tokens, k) % 1000 / 1000 for k in range(4)]}
            for i, tokens in enumerate(map(tokenize, inputs))
        ]
        count = sum(len(tokenize(text)) for text in inputs) + script.extra_usage
        return {
            "object": "list",
            "data": data,
            "model": document.get("model"),
            "usage": {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0},
        }

    def _count(self, usage: dict[str, Any]) -> None:
        self.counters["prompt"] += usage["prompt_tokens"]
        self.counters["generation"] += usage["completion_tokens"]

    async def _stream(self, request: web.Request, document: dict[str, Any], script: Script) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if self.gate is not None:
            await self.gate.wait()
        if script.first_token_s:
            await asyncio.sleep(script.first_token_s)
        newline = b"\r\n" if script.crlf else b"\n"
        events = self._events(request, document)
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
                pending.append(
                    b'data: {"error":{"message":"out of luck","type":"InternalServerError","code":500}}' + newline * 2
                )
                break
            if number == len(events):
                break
            self.counters["generation"] += 1
            pending.append(b"data: " + events[number] + newline * 2)
            if len(pending) >= script.events_per_write:
                await _write(response, pending, script)
            if script.token_s:
                await asyncio.sleep(script.token_s)
        await _write(response, pending, script)
        await response.write_eof()
        return response

    def _events(self, request: web.Request, document: dict[str, Any]) -> list[bytes]:
        """A stream's events: role (chat), one a token, finish, usage if asked for, [DONE]."""
        choices, usage = generate(document)
        chat = request.path == "/v1/chat/completions"
        events: list[Any] = []
        base = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request.headers.get('X-Request-Id', 'none')}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1700000000,
            "model": document.get("model"),
        }
        for choice in choices:
            pieces = re.findall(r" \w+", choice["text"])
            if chat:
                events.append({"index": choice["index"], "delta": {"role": "assistant", "content": ""}})
                events += [{"index": choice["index"], "delta": {"content": piece}} for piece in pieces]
                events.append({"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]})
            else:
                events += [{"index": choice["index"], "text": piece, "finish_reason": None} for piece in pieces]
                events.append({"index": choice["index"], "text": "", "finish_reason": choice["finish_reason"]})
        rows = [{**base, "choices": [event]} for event in events]
        if (document.get("stream_options") or {}).get("include_usage"):
            rows.append({**base, "choices": [], "usage": usage})
        return [*map(orjson.dumps, rows), b"[DONE]"]


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


def _is_probe(document: dict[str, Any]) -> bool:
    return document.get("prompt") == "Hi" and document.get("max_tokens") == 1


def _refusal(document: dict[str, Any]) -> str | None:
    prompts = prompts_of(document.get("prompt", document.get("messages", document.get("input"))))
    if any(prompt in ("", []) or (isinstance(prompt, str) and POISON in prompt) for prompt in prompts):
        return "a prompt of this list can't be served"
    longest = max((len(tokenize(prompt)) for prompt in prompts), default=0)
    if longest + (document.get("max_tokens") or 1) > MAX_MODEL_LEN:
        return f"This model's maximum context length is {MAX_MODEL_LEN} tokens."
    return None


def prompts_of(value: Any) -> list[Any]:
    """The list of prompts in any of the API's spellings; a chat is one prompt."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [json.dumps(value, ensure_ascii=False)]
    if isinstance(value, list) and value and isinstance(value[0], int):
        return [value]
    return value if isinstance(value, list) else []


def tokenize(prompt: Any) -> list[int]:
    """A beginning-of-text token and one a word or sign; ids stay as they are."""
    if isinstance(prompt, list):
        return prompt
    return [1] + [zlib.crc32(word.encode()) % 50_000 for word in _WORDS.findall(prompt)]


def _hash(tokens: list[int], salt: Any) -> int:
    return zlib.crc32(repr((tokens, salt)).encode())


# What changes the answer; everything else (user, stream, …) does not.
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "logit_bias", "stop", "min_p")


def generate(document: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Choices (prompt-major with n) and usage. Deterministic at temperature 0 or with a seed, else random."""
    prompts = prompts_of(document.get("prompt", document.get("messages", document.get("input"))))
    n = document.get("n") or 1
    most = document.get("max_tokens") or document.get("max_completion_tokens") or 16
    random = document.get("temperature") != 0 and document.get("seed") is None
    sampling = [document.get(name) for name in _SAMPLING]
    choices: list[dict[str, Any]] = []
    prompt_tokens = generation_tokens = 0
    for prompt in prompts:
        ids = tokenize(prompt)
        prompt_tokens += len(ids)
        for copy in range(n):
            salt = (sampling, copy, os.urandom(8) if random else b"")
            tokens: list[int] = []
            finish = "length"
            while len(tokens) < most:
                token = _hash(ids, (salt, len(tokens)))
                tokens.append(token % 50_000)
                if token % 29 == 0:
                    finish = "stop"
                    break
            generation_tokens += len(tokens)
            logprobs = None
            if document.get("logprobs") is not None:
                logprobs = {
                    "token_logprobs": [-(token % 700) / 300 for token in tokens],
                    "tokens": [f" w{t}" for t in tokens],
                }
            wants_ids = document.get("return_token_ids")
            choices.append(
                {
                    "index": len(choices),
                    "text": "".join(f" w{token}" for token in tokens),
                    "logprobs": logprobs,
                    "finish_reason": finish,
                    "stop_reason": None,
                    "token_ids": tokens if wants_ids else None,
                    "prompt_token_ids": ids if wants_ids else None,
                }
            )
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generation_tokens,
        "total_tokens": prompt_tokens + generation_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    return choices, usage


async def _serve_forever(port: int, token_s: float, service_s: float, slots: int) -> None:
    # Streams take no slot here: a benchmark of streams and one of whole answers share this engine.
    engine = FakeEngine(kv_tokens=10_000_000, slots=slots, service_s=service_s, stream_slots=False)
    engine.port = port
    engine.default = Script(token_s=token_s)
    async with engine:
        print(engine.url, flush=True)
        await asyncio.Event().wait()


async def events_of(stream: AsyncIterator[bytes]) -> list[bytes]:
    """The data of every event in a client's byte stream, comments left out."""
    text = b"".join([chunk async for chunk in stream])
    return [
        line.removeprefix(b"data: ") for event in re.split(rb"\r?\n\r?\n", text) for line in re.split(rb"\r?\n", event)
        if line.startswith(b"data: ")
    ]  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--token-s", type=float, default=0.0, help="between a stream's events")
    parser.add_argument("--service-s", type=float, default=0.0, help="for a whole answer")
    parser.add_argument("--slots", type=int, default=256, help="whole answers at a time")
    arguments = parser.parse_args()
    asyncio.run(_serve_forever(arguments.port, arguments.token_s, arguments.service_s, arguments.slots))
