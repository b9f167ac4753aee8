"""W3C trace context: a client's is passed on to the engine; with tracing.otlp_endpoint a span of ours stands between.

Off, the OpenTelemetry SDK is not even imported. On, each inference request is one span, child of the client's and
parent of the engine's (vLLM's --otlp-traces-endpoint); the library batches and exports it in a thread of its own.
"""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from gateway import __version__
from gateway.exchange import Exchange
from gateway.protocol import HOT_ROUTES
from gateway.settings import SettingsError
from gateway.settings import Tracing as TracingSettings

if TYPE_CHECKING:
    from opentelemetry.trace import Span

Headers = Iterable[tuple[bytes, bytes]]
FLUSH_S = 2.0  # at the end of the process, for a collector that is away

_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]{0,200})?"
)
_TRACESTATE = re.compile(rb"[ -~\t]{1,512}")


class Tracing(Protocol):
    """Told of a request's beginning and end; sets `exchange.trace`, the headers that go on to the engine."""

    def begin(self, exchange: Exchange, headers: Headers) -> None: ...

    def end(self, exchange: Exchange) -> None: ...

    def close(self) -> None:
        """Export what is left. Blocks, at the longest FLUSH_S."""


def trace_context(headers: Headers) -> dict[str, str]:
    """The client's traceparent and tracestate, if it sent exactly one well-formed traceparent; else nothing."""
    parents = [value for name, value in headers if name == b"traceparent"]
    if len(parents) != 1 or not _TRACEPARENT.fullmatch(parents[0]):
        return {}
    if parents[0].startswith(b"00") and len(parents[0]) != 55:
        return {}
    context = {"traceparent": parents[0].decode()}
    state = b",".join(value for name, value in headers if name == b"tracestate")
    if _TRACESTATE.fullmatch(state):
        context["tracestate"] = state.decode()
    return context


class PassThrough:
    """No spans of our own."""

    def begin(self, exchange: Exchange, headers: Headers) -> None:
        exchange.trace = trace_context(headers)

    def end(self, exchange: Exchange) -> None:
        """Nothing was begun."""

    def close(self) -> None:
        """Nothing is left."""


class Spans:
    """One span a request. Raises SettingsError if the packages of the extra `tracing` are missing."""

    def __init__(self, settings: TracingSettings) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise SettingsError(
                f"tracing.otlp_endpoint = {settings.otlp_endpoint!r}: expected the OpenTelemetry packages for it to be "
                "installed; they are the extra `tracing`"
            ) from None
        resource = Resource.create({"service.name": "vllm-gateway", "service.version": __version__})
        sampler = ParentBased(TraceIdRatioBased(settings.sample_ratio))
        self._provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=settings.otlp_endpoint, timeout=FLUSH_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("gateway", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._spans: dict[str, Span] = {}

    def begin(self, exchange: Exchange, headers: Headers) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        if exchange.route not in HOT_ROUTES:
            return
        parent = self._propagator.extract(trace_context(headers))
        attributes = {"http.request.method": "POST", "http.route": exchange.route}
        span = self._tracer.start_span(
            f"POST {exchange.route}", context=parent, kind=SpanKind.SERVER, attributes=attributes
        )
        self._spans[exchange.upstream_id] = span
        self._propagator.inject(exchange.trace, set_span_in_context(span))

    def end(self, exchange: Exchange) -> None:
        from opentelemetry.trace import StatusCode

        span = self._spans.pop(exchange.upstream_id, None)
        if span is None:
            return
        span.set_attributes(_attributes(exchange))
        if exchange.status >= 500 or exchange.failure:
            span.set_status(StatusCode.ERROR, exchange.failure or None)
        span.end()

    def close(self) -> None:
        self._provider.force_flush(int(FLUSH_S * 1000))
        self._provider.shutdown()


def _attributes(exchange: Exchange) -> Mapping[str, Any]:
    """OpenTelemetry's own names where it has them. Never a prompt, an answer or a key."""
    attributes: dict[str, Any] = {
        "http.response.status_code": exchange.status,
        "gen_ai.request.model": exchange.model[:200],
        "gen_ai.usage.input_tokens": exchange.prompt_tokens,
        "gen_ai.usage.output_tokens": exchange.generation_tokens,
        "gateway.request_id": exchange.request_id,
        "gateway.tenant": exchange.tenant_label,
        "gateway.replica": exchange.replica,
    }
    if exchange.first_token_s is not None:
        attributes["gateway.time_to_first_token_s"] = exchange.first_token_s - exchange.arrived_s
    return attributes


def make_tracing(settings: TracingSettings) -> Tracing:
    return PassThrough() if settings.otlp_endpoint is None else Spans(settings)
