"""Trace context to the engine, and one span a request to a collector."""

import asyncio
import contextlib
import gzip
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.settings import SettingsError, Tracing
from gateway.tracing import PassThrough, make_tracing, trace_context
from tests.fakes.engine import MODEL, FakeEngine, Script
from tests.wire.conftest import Running, serve, until
from tests.wire.guarding import lower
from tests.wire.process import started

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "canary-prompt"}], "max_tokens": 3}


class Collector:
    """An OTLP/HTTP collector: it keeps the spans it gets. `broken` answers 503."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.raw = b""
        self.broken = False
        self.asked = 0

    async def __aenter__(self) -> "Collector":
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        self.asked += 1
        if self.broken:
            return web.Response(status=503)
        body = await request.read()
        if body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response(content_type="application/x-protobuf")


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with Collector() as collector:
        yield collector


def attributes(span: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def upstream(engine: FakeEngine, path: str = "/v1/chat/completions") -> dict[str, str]:
    return lower(engine.asked(path)[-1].headers)


async def chat(up: Running, *headers: tuple[str, str], **fields: Any) -> httpx.Response:
    return await up.client.post("/v1/chat/completions", json={**CHAT, **fields}, headers=list(headers))


async def test_one_span_a_request_between_the_clients_and_the_engines(engine: FakeEngine, collector: Collector) -> None:
    async with serve([engine.url], tracing={"otlp_endpoint": collector.url}) as up:
        assert (await chat(up, ("traceparent", PARENT), ("tracestate", "vendor=1"))).status_code == 200
        onward = upstream(engine)
        async with up.stream(max_tokens=3) as answer:
            await answer.aread()
        await up.client.get("/v1/models")
        await until(lambda: len(collector.spans) == 2)
    span, streamed = collector.spans
    assert span.name == "POST /v1/chat/completions"
    assert span.trace_id.hex() == TRACE
    assert span.parent_span_id.hex() == "b7ad6b7169203331"
    assert onward["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
    assert onward["tracestate"] == "vendor=1"
    version, trace, parent, flags = upstream(engine)["traceparent"].split("-")
    assert (version, trace, parent) == ("00", streamed.trace_id.hex(), streamed.span_id.hex())
    assert int(flags, 16) & 1  # sampled
    assert streamed.trace_id.hex() != TRACE
    assert streamed.parent_span_id == b""
    told = attributes(span)
    assert told["http.response.status_code"] == 200
    assert told["gen_ai.request.model"] == MODEL
    assert told["gen_ai.usage.input_tokens"] > 0 < told["gen_ai.usage.output_tokens"]
    assert told["gateway.replica"] == engine.url
    assert attributes(streamed)["gateway.time_to_first_token_s"] > 0
    assert b"canary" not in collector.raw


async def test_a_failed_request_is_a_failed_span(engine: FakeEngine, collector: Collector) -> None:
    async with serve([engine.url], tracing={"otlp_endpoint": collector.url}) as up:
        engine.script("/v1/chat/completions", Script(reset_before_answer=True))
        assert (await chat(up)).status_code == 502
        await chat(up, n=0)
        await until(lambda: len(collector.spans) == 2)
    failed, refused = collector.spans
    assert failed.status.code == 2
    assert attributes(refused)["http.response.status_code"] == 400
    assert refused.status.code == 0


async def test_a_merged_call_belongs_to_several_and_carries_nobodys_context(
    engine: FakeEngine, collector: Collector
) -> None:
    engine.service_s = 0.3
    async with serve([engine.url], tracing={"otlp_endpoint": collector.url}, batching={"window_ms": 200}) as up:
        first = asyncio.create_task(up.completion("first", max_tokens=2, temperature=1))
        await until(lambda: engine.asked("/v1/completions"))
        assert "traceparent" in upstream(engine, "/v1/completions")
        await asyncio.gather(*(up.completion(f"{n}", max_tokens=2, temperature=1) for n in range(3)), first)
        await until(lambda: len(collector.spans) == 4)
    assert isinstance(engine.asked("/v1/completions")[-1].json["prompt"], list)
    assert "traceparent" not in upstream(engine, "/v1/completions")


async def test_a_client_that_samples_nothing_gets_no_span_and_the_engine_is_told_so(
    engine: FakeEngine, collector: Collector
) -> None:
    async with serve([engine.url], tracing={"otlp_endpoint": collector.url}) as up:
        await chat(up, ("traceparent", PARENT.removesuffix("01") + "00"))
        assert upstream(engine)["traceparent"].startswith(f"00-{TRACE}-")
        assert upstream(engine)["traceparent"].endswith("-00")
        await chat(up)
        await until(lambda: collector.spans)
    assert len(collector.spans) == 1


async def test_a_sample_ratio_of_nothing_leaves_only_the_clients_own_traces(
    engine: FakeEngine, collector: Collector
) -> None:
    async with serve([engine.url], tracing={"otlp_endpoint": collector.url, "sample_ratio": 0}) as up:
        await chat(up)
        await chat(up, ("traceparent", PARENT))
        await until(lambda: collector.spans)
    assert [span.trace_id.hex() for span in collector.spans] == [TRACE]


async def test_spans_are_sent_to_the_end_when_the_gateway_stops(engine: FakeEngine, collector: Collector) -> None:
    async with serve([engine.url], tracing={"otlp_endpoint": collector.url}) as up:
        await chat(up)
    assert len(collector.spans) == 1


async def test_a_collector_that_is_away_or_broken_costs_no_request(engine: FakeEngine, collector: Collector) -> None:
    collector.broken = True
    async with serve([engine.url], tracing={"otlp_endpoint": collector.url}) as up:
        for _ in range(5):
            assert (await chat(up)).status_code == 200
    assert collector.asked


async def test_off_a_well_formed_context_is_passed_on_as_it_came(up: Running, engine: FakeEngine) -> None:
    await chat(up, ("traceparent", PARENT), ("tracestate", "vendor=1"), ("tracestate", "other=2"))
    assert upstream(engine)["traceparent"] == PARENT
    assert upstream(engine)["tracestate"] == "vendor=1,other=2"
    await chat(up, ("traceparent", f"cc-{TRACE}-b7ad6b7169203331-01-what-the-future-will-be-like"))
    assert upstream(engine)["traceparent"].startswith(f"cc-{TRACE}")


UNFIT = [
    "",
    "canary",
    PARENT.upper(),
    PARENT[:-1],
    PARENT + "x",
    PARENT + "-extra",
    PARENT.replace("00-", "ff-", 1),
    f"00-{'0' * 32}-b7ad6b7169203331-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"00-{TRACE}-b7ad6b716920333g-01",
    f"{PARENT}, {PARENT}",
    f"cc-{TRACE}-b7ad6b7169203331-01-" + "x" * 1000,
]


async def test_anything_else_is_dropped_with_its_tracestate(up: Running, engine: FakeEngine) -> None:
    for parent in UNFIT:
        await chat(up, ("traceparent", parent), ("tracestate", "vendor=canary"))
        assert not {"traceparent", "tracestate"} & upstream(engine).keys(), parent


def test_two_parents_are_none_and_an_unfit_state_is_left_out() -> None:
    parent = (b"traceparent", PARENT.encode())
    assert trace_context([parent, parent]) == {}
    for state in (b"x" * 513, b"\xff", b""):
        assert trace_context([parent, (b"tracestate", state)]) == {"traceparent": PARENT}


def test_off_neither_the_sdk_nor_an_exporter_is_imported() -> None:
    """A process of its own: this one has imported them long since. (FastAPI imports the API, without an SDK a stub.)"""
    code = "import sys, gateway.serving; print([name for name in sys.modules if name.startswith('opentelemetry.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "opentelemetry.sdk" not in done.stdout
    assert "opentelemetry.exporter" not in done.stdout
    assert isinstance(make_tracing(Tracing()), PassThrough)


def test_without_its_packages_it_refuses_to_start_and_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"tracing\.otlp_endpoint = 'http://x:1/v1/traces'.*extra `tracing`"):
        make_tracing(Tracing(otlp_endpoint="http://x:1"))


async def test_the_process_stops_in_time_though_its_collector_never_answers(engine: FakeEngine) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, started([engine.url], tracing__otlp_endpoint=f"http://127.0.0.1:{port}") as gateway:
        await gateway.serving()
        async with httpx.AsyncClient(trust_env=False) as client:

            async def answered() -> bool:
                answer = await client.post(f"{gateway.url}/v1/chat/completions", json=CHAT)
                return answer.status_code == 200

            await until(answered)
        gateway.signal(signal.SIGTERM)
        assert await gateway.ended(20) == 0
        assert not [line for line in gateway.lines if re.search("canary", str(line))]
