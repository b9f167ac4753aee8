"""From an engine's answer to the client: whole answers checked, streams passed on event by event.

The relay owns the answer it was given and closes it however it ends. Bytes pass through unchanged; what is measured or
looked for is read beside the stream. Once a stream has begun, a failure becomes one error event, never a forged end.
"""

import asyncio
from collections.abc import Callable

import orjson

from gateway import sse
from gateway.client import Sink
from gateway.errors import (
    GatewayError,
    UpstreamFailedError,
    UpstreamTimeoutError,
    error_body,
)
from gateway.exchange import Exchange, Reply
from gateway.metrics import Metrics
from gateway.protocol import Kind
from gateway.settings import Timeouts
from gateway.upstream import Answer

_END_MARKS = {
    Kind.RESPONSES: (b"event: response.completed", b"event: response.incomplete", b"event: response.failed"),
    Kind.MESSAGES: (b"event: message_stop",),
}


async def read_whole(answer: Answer) -> Reply:
    """A non-streamed answer, checked to be one. Raises UpstreamFailedError where it is not JSON; closes the answer."""
    try:
        body = await answer.read()
    finally:
        answer.close()
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    if not isinstance(document, dict):
        raise UpstreamFailedError(f"the engine answered {answer.status} with a body that is no JSON object")
    if answer.status < 400:
        return Reply(answer.status, body, usage=sse.usage_of(document))
    if answer.status in (401, 403):
        raise UpstreamFailedError("the engine refused the gateway's own key")
    retry_after = answer.retry_after or ("1" if answer.status in (429, 503) else None)
    return Reply(answer.status, _error(answer.status, document, body), retry_after=retry_after)


def _error(status: int, document: dict[str, object], body: bytes) -> bytes:
    """An engine's error in the one shape: as it came where it has it, rewritten from older versions' flat one."""
    inner = document.get("error")
    if isinstance(inner, dict) and isinstance(inner.get("message"), str):
        if {"message", "type", "param", "code"} <= inner.keys():
            return body
        return orjson.dumps({**document, "error": {"type": None, "param": None, "code": None, **inner}})
    message = document.get("message") or document.get("detail") or inner or f"the engine answered {status}"
    kind = document.get("type") or ("invalid_request_error" if status < 500 else "server_error")
    error = {"message": str(message), "type": kind, "param": document.get("param"), "code": document.get("code")}
    return orjson.dumps({"error": error})


class StreamRelay:
    """One stream on its way from an engine to a sink."""

    def __init__(
        self,
        kind: Kind,
        answer: Answer,
        sink: Sink,
        exchange: Exchange,
        timeouts: Timeouts,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._kind = kind
        self._answer = answer
        self._sink = sink
        self._exchange = exchange
        self._timeouts = timeouts
        self._metrics = metrics
        self._clock = clock
        self._hide_usage = False
        self._framer = sse.Framer()
        self._finished = False  # the dialect's end mark was seen
        self._failed = False  # the engine sent an error event of its own
        self._last_sent_s = clock()
        self._last_content_s: float | None = None
        self._sending = False

    async def run(self, deadline: float | None, *, hide_usage: bool) -> None:
        """Relay to the end. Raises only cancellation: failures have become an error event by then.

        `deadline` is in the event loop's time. `hide_usage`: the gateway asked for the usage event, the client did not.
        """
        self._hide_usage = hide_usage
        await self._sink.start()
        self._exchange.phase = "streaming"
        keepalive = asyncio.get_running_loop().call_later(self._timeouts.keepalive_s, self._keep_alive)
        self._keepalive = keepalive
        try:
            await self._pump(deadline or float("inf"))
        except GatewayError as error:
            await self._fail(error)
        finally:
            self._keepalive.cancel()
            self._answer.close()
        await self._sink.end()

    async def _pump(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        idle_s = self._timeouts.idle_s
        try:
            async with asyncio.timeout_at(min(deadline, loop.time() + self._timeouts.first_byte_s)) as silence:
                while data := await self._answer.chunk():
                    silence.reschedule(min(deadline, loop.time() + idle_s))
                    events = self._framer.feed(data)
                    if events and not self._finished:  # nothing goes out after the end mark
                        await self._forward(events)
        except TimeoutError:
            if self._sending:
                raise UpstreamTimeoutError(f"the client took nothing for {idle_s:g} s") from None
            if loop.time() >= deadline:
                raise UpstreamTimeoutError("the request took longer than its deadline") from None
            raise UpstreamTimeoutError("the engine stayed silent too long in mid-stream") from None
        except ValueError as error:
            raise UpstreamFailedError(f"the engine sent {error}") from None
        if not self._finished and not self._failed:
            raise UpstreamFailedError("the engine ended the stream before its answer was complete")

    async def _forward(self, events: bytes) -> None:
        now = self._clock()
        exchange = self._exchange
        if exchange.first_token_s is None:
            if self._has_content(events):
                exchange.first_token_s = self._last_content_s = now
        elif self._last_content_s is not None:
            self._metrics.itl_seconds.observe((now - self._last_content_s) / max(1, events.count(b"\n\n")))
            self._last_content_s = now
        if b'"usage":{' in events:
            events = self._read_usage(events)
        self._notice_end(events)
        if events:
            self._last_sent_s = now
            self._sending = True
            await self._sink.events(events)
            self._sending = False

    def _has_content(self, events: bytes) -> bool:
        documents = (sse.json_of(event) for event in sse.split(events))
        return any(sse.has_content(document) for document in documents if document is not None)

    def _read_usage(self, events: bytes) -> bytes:
        kept = []
        for event in sse.split(events):
            document = sse.json_of(event)
            usage = sse.usage_of(document) if document is not None else None
            if usage is not None and document is not None:
                self._exchange.prompt_tokens = max(self._exchange.prompt_tokens, usage[0])
                self._exchange.generation_tokens = max(self._exchange.generation_tokens, usage[1])
                if self._hide_usage and document.get("choices") == []:
                    continue
            kept.append(event)
        return b"".join(kept) if self._hide_usage else events

    def _notice_end(self, events: bytes) -> None:
        marks = _END_MARKS.get(self._kind)
        if marks is None:
            self._finished = sse.DONE in events[-16:]
        else:
            self._finished = any(mark in events for mark in marks)
        if b'data: {"error"' in events or b"event: error" in events:
            first = sse.split(events)
            if any((document := sse.json_of(event)) and document.get("error") for event in first):
                self._failed = True
                self._exchange.failure = "engine_error_event"

    async def _fail(self, error: GatewayError) -> None:
        self._exchange.failure = "timeout_in_stream" if isinstance(error, UpstreamTimeoutError) else "broken_stream"
        if not self._sending and not self._finished:
            anthropic = self._kind.anthropic
            await self._sink.events(sse.error_event(error_body(error, anthropic=anthropic), anthropic=anthropic))

    def _keep_alive(self) -> None:
        """Called by a timer: idle hops cut a connection that a long prefill or queue leaves silent."""
        loop = asyncio.get_running_loop()
        silent_s = self._clock() - self._last_sent_s
        if silent_s >= self._timeouts.keepalive_s and not self._sending:
            self._last_sent_s = self._clock()
            self._comment = loop.create_task(self._sink.events(sse.comment("waiting for the engine")))
            silent_s = 0.0
        self._keepalive = loop.call_later(max(0.05, self._timeouts.keepalive_s - silent_s), self._keep_alive)
