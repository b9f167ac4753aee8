"""From an engine's answer to the client: whole answers checked, streams passed on event by event.

The relay owns the answer it was given and closes it however it ends. Bytes pass through unchanged; what is measured or
looked for is read beside the stream. Once a stream has begun, a failure becomes one error event, never a forged end.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from gateway import sse
from gateway.client import ClientGoneError, Sink
from gateway.errors import GatewayError, UpstreamFailedError, UpstreamTimeoutError, error_body
from gateway.exchange import Exchange, Reply
from gateway.metrics import Metrics
from gateway.protocol import Kind
from gateway.settings import Timeouts
from gateway.upstream import Answer

logger = logging.getLogger(__name__)

# What the last event of a stream is: [DONE], or in these dialects an event of one of these types.
_END = {
    Kind.RESPONSES: (b"response.completed", b"response.incomplete", b"response.failed"),
    Kind.MESSAGES: (b"message_stop",),
}
# After its last event the engine has this long to end the response, so that the connection can be used again.
END_S = 1.0
# The usage is the last chunk, or stands in all of them, and such an event is no longer than this.
USAGE_BYTES = 8192
# A timer this late means that the whole process stood still: what came meanwhile is still to be read.
LATE_S = 0.1


async def read_whole(answer: Answer, kind: Kind) -> Reply:
    """A non-streamed answer, checked to be one. Raises UpstreamFailedError where it is none; closes the answer."""
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
    if 200 <= answer.status < 300 and not _is_error(document):
        return Reply(answer.status, body, usage=sse.usage_of(document), cached_tokens=sse.cached_of(document))
    if answer.status < 400:
        raise UpstreamFailedError(f"the engine answered {answer.status} with something that is no answer")
    if answer.status in (401, 403):
        raise UpstreamFailedError("the engine refused the gateway's own key")
    retry_after = answer.retry_after or ("1" if answer.status in (429, 503) else None)
    told = _error(answer.status, document, body, kind)
    return Reply(answer.status, told, retry_after=retry_after, no_route=_no_route(answer.status, document))


def _is_error(document: dict[str, object]) -> bool:
    """An error under a good status. A response's own "error" field stands beside its object name."""
    return document.get("object") == "error" or (bool(document.get("error")) and "object" not in document)


def _no_route(status: int, document: dict[str, object]) -> bool:
    """Whether this is the web framework's answer, as it is or in vLLM's shape, and not the engine's own."""
    inner = document.get("error")
    told = inner.get("message") if isinstance(inner, dict) else document.get("detail")
    return (status, told) in ((404, "Not Found"), (405, "Method Not Allowed"))


def _error(status: int, document: dict[str, object], body: bytes, kind: Kind) -> bytes:
    """An engine's error in the one shape: as it came where it has it, rewritten from what older versions send."""
    inner = document.get("error")
    if isinstance(inner, dict) and isinstance(inner.get("message"), str):
        complete = {"message", "type", "param", "code"} <= inner.keys()
        if complete and (not kind.anthropic or document.get("type") == "error"):
            return body
        error = {"type": None, "param": None, "code": None, **inner}
    else:
        told = [document.get("message"), document.get("detail"), inner if isinstance(inner, str) else None]
        message = next(filter(None, told), f"the engine answered {status}")
        name = document.get("type") or ("invalid_request_error" if status < 500 else "server_error")
        error = {"message": str(message), "type": name, "param": document.get("param"), "code": document.get("code")}
    return orjson.dumps({"type": "error", "error": error} if kind.anthropic else {"error": error})


class _Ear:
    """Listens for an engine's next bytes, no longer than until `until_s`, which may move between two calls.

    It keeps one timer for a whole stream, because one for each read would cost as much as passing on a token.
    """

    def __init__(self, answer: Answer, clock: Callable[[], float]) -> None:
        """For use by the current task only."""
        task = asyncio.current_task()
        assert task is not None
        self.until_s = 0.0
        self._answer = answer
        self._clock = clock
        self._task = task
        self._cancels = task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf  # when it rings
        self._listening = False
        self._rang = False

    async def chunk(self) -> bytes | None:
        """Like Answer.chunk; None when `until_s` passed first, and then nothing is lost: call it again."""
        if self.until_s < self._timer_s:
            self._set_timer()
        self._listening = True
        try:
            return await self._answer.chunk()
        except asyncio.CancelledError:
            if not self._rang or self._task.uncancel() > self._cancels:
                raise
            return self._answer.arrived() or None  # bytes and the limit may come in the same step
        finally:
            self._listening = self._rang = False

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        self.close()
        self._timer_s = self.until_s
        self._timer = self._loop.call_later(max(0.001, self.until_s - self._clock()), self._ring)

    def _ring(self) -> None:
        now, due_s = self._clock(), self._timer_s
        self._timer_s = math.inf
        if not self._listening:
            return  # the next call sets the timer again
        if now < self.until_s:  # it has moved since
            self._set_timer()
        elif now > due_s + LATE_S:  # timers run before sockets are read: listen once more
            self._timer_s = now + LATE_S
            self._timer = self._loop.call_later(LATE_S, self._ring)
        else:
            # The task stands in Answer.chunk, so that is where this arrives: nothing else can be cut short.
            self._rang = True
            self._task.cancel()


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
        self._end_marks = _END.get(kind, (sse.DONE,))
        # In the other dialects events have ids of their own.
        self._same_id = sse.SameId() if kind in (Kind.CHAT, Kind.COMPLETIONS) else None
        self._strayed = False  # an event of another request's answer came: nothing more goes out
        self._finished = False  # the dialect's last event was seen: nothing goes out after it
        self._failed = False  # the engine sent an error event of its own
        self._sending = False  # a send has not returned: the client is not reading
        self._last_content_s = 0.0

    async def run(self, deadline: float | None, *, hide_usage: bool) -> None:
        """Relay to the end. Failures become one error event; raises ClientGoneError if the client took nothing more.

        `deadline` is in the event loop's time. `hide_usage`: the gateway asked for the usage event, the client did not.
        """
        self._hide_usage = hide_usage
        await self._sink.start()
        self._exchange.phase = "streaming"
        try:
            async with asyncio.timeout_at(deadline):
                await self._pump()
        except TimeoutError:
            if self._sending:
                raise ClientGoneError from None
            await self._fail("deadline", UpstreamTimeoutError("the request took longer than its deadline"))
        except UpstreamTimeoutError as error:
            await self._fail("timeout_in_stream", error)
        except GatewayError as error:
            await self._fail("broken_stream", error)
        except Exception as error:
            if self._sending or isinstance(error, ClientGoneError):
                raise
            # A bug in reading beside the stream. The client still gets its error event, the log gets the trace.
            logger.exception("reading a stream failed", extra={"fields": {"request_id": self._exchange.request_id}})
            await self._fail("unreadable_stream", GatewayError("the gateway failed unexpectedly"))
        finally:
            self._answer.close()
        await self._sink.end()

    async def _pump(self) -> None:
        """Pass on what comes until the end. Raises GatewayError where that is not a good one."""
        keepalive_s, silence_s = self._timeouts.keepalive_s, self._timeouts.first_byte_s
        heard_s = said_s = self._clock()
        ear = _Ear(self._answer, self._clock)
        try:
            while True:
                ear.until_s = heard_s + (END_S if self._finished else min(silence_s, said_s - heard_s + keepalive_s))
                data = await ear.chunk()
                if data:
                    events = self._feed(data)
                    silence_s = self._timeouts.idle_s
                    if events and not self._finished and (events := self._read(events)):
                        await self._say(events)
                        said_s = self._clock()
                    if self._strayed:
                        raise UpstreamFailedError("the engine sent events of another request's answer")
                    heard_s = self._clock()  # after sending: while we did not listen, the engine was not silent
                elif data is not None or self._finished:
                    await self._end_without_blank_line()
                    break
                elif self._clock() >= heard_s + silence_s:
                    raise UpstreamTimeoutError("the engine stayed silent too long in mid-stream")
                else:  # idle hops cut a connection that a long prefill leaves silent
                    await self._say(sse.comment("waiting for the engine"))
                    said_s = self._clock()
        finally:
            ear.close()
        if not self._finished and not self._failed:
            raise UpstreamFailedError("the engine ended the stream before its answer was complete")

    async def _end_without_blank_line(self) -> None:
        """Some servers leave out the last event's blank line. Whatever else is incomplete stays so."""
        rest = b"" if self._finished else self._framer.rest()
        if any(mark in rest for mark in self._end_marks) and (events := self._read(rest)) and self._finished:
            await self._say(events)

    async def _say(self, data: bytes) -> None:
        self._sending = True
        await self._sink.events(data)
        self._sending = False

    async def _fail(self, label: str, error: GatewayError) -> None:
        if self._finished:
            return  # the answer was complete, whatever happened to the connection then
        self._exchange.failure = self._exchange.failure or label
        if not self._failed:  # else the client has its error event
            anthropic = self._kind.anthropic
            await self._sink.events(sse.error_event(error_body(error, anthropic=anthropic), anthropic=anthropic))

    # -- reading beside the stream -------------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> bytes:
        try:
            return self._framer.feed(data)
        except ValueError as error:
            raise UpstreamFailedError(f"the engine sent {error}") from None

    def _read(self, events: bytes) -> bytes:
        """Note what the events tell; returns those the client shall have. Most are only searched, not parsed."""
        ids = self._same_id
        if ids is not None and (count := ids.chunks(events)):
            self._time(events, count)
            self._look_for_error(events)
            return self._read_usage(events) if b'"usage"' in events[-USAGE_BYTES:] else events
        if ids is not None and (at := ids.of_another(events)) is not None:
            self._strayed = True
            events = events[:at]
            if not events:
                return events
        for mark in self._end_marks:  # `any` of a generator costs more than all that is looked for here
            if mark in events:
                events = self._cut_after_end(events)
                break
        self._time(events, events.count(b"\n\n") + events.count(b"\n\r\n"))
        self._look_for_error(events)
        return self._read_usage(events) if b'"usage"' in events else events

    def _look_for_error(self, events: bytes) -> None:
        if b'"error"' in events and any(map(sse.is_error, _documents(events))):
            self._failed = True
            self._exchange.failure = "engine_error_event"

    def _cut_after_end(self, events: bytes) -> bytes:
        at = 0
        for event in sse.split(events):
            at += len(event)
            if any(mark in event for mark in self._end_marks):  # in a text, perhaps
                document = sse.json_of(event)
                name = sse.data_of(event).strip() if document is None else str(document.get("type")).encode()
                if name in self._end_marks:
                    self._finished = True
                    break
        return events[:at]

    def _time(self, events: bytes, count: int) -> None:
        now = self._clock()
        if self._exchange.first_token_s is None:
            if any(map(sse.has_content, _documents(events))):
                self._exchange.first_token_s = self._last_content_s = now
        elif not self._finished:
            self._metrics.itl_seconds.observe((now - self._last_content_s) / max(1, count))
            self._last_content_s = now

    def _read_usage(self, events: bytes) -> bytes:
        kept = []
        for event in sse.split(events):
            document = sse.json_of(event) if b'"usage"' in event else None
            usage = None if document is None else sse.usage_of(document)
            if document is not None and usage is not None:
                self._exchange.prompt_tokens = max(self._exchange.prompt_tokens, usage[0])
                self._exchange.generation_tokens = max(self._exchange.generation_tokens, usage[1])
                if (cached := sse.cached_of(document)) is not None:
                    self._exchange.cached_tokens = cached
                if self._hide_usage and document.get("choices") == []:
                    continue
            kept.append(event)
        return b"".join(kept)


def _documents(events: bytes) -> Iterator[dict[str, Any]]:
    return filter(None, map(sse.json_of, sse.split(events)))
