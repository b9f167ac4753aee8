"""What is measured beside a stream: first token, time between tokens, tokens."""

import asyncio

import pytest

from tests.fakes.dialects import named
from tests.fakes.engine import FakeEngine, Script
from tests.wire.conftest import Running, renewing
from tests.wire.streams import (
    DONE,
    EVERY_DIALECT,
    FINISH,
    Reader,
    delta,
    open_stream,
    text_of,
)
from tests.wire.talking import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
)

up, engine = renewing()
pytestmark = pytest.mark.asyncio(loop_scope="module")


@EVERY_DIALECT
async def test_the_first_token_is_the_first_event_with_content(path: str, up: Running, engine: FakeEngine) -> None:
    gate = asyncio.Event()
    opening = {
        CHAT: delta("", delta={"role": "assistant", "content": ""}),
        COMPLETIONS: b'data: {"choices":[{"index":0,"text":"","finish_reason":null}]}\n\n',
        RESPONSES: named("response.created", response={"usage": None}) + b"\n\n",
        MESSAGES: named("message_start", message={"usage": {"input_tokens": 3, "output_tokens": 0}}) + b"\n\n",
    }[path]
    content = {
        CHAT: delta("a") + delta("b"),
        COMPLETIONS: b'data: {"choices":[{"index":0,"text":"a"}]}\n\n',
        RESPONSES: named("response.output_text.delta", delta="a") + b"\n\n",
        MESSAGES: named("content_block_delta", delta={"type": "text_delta", "text": "a"}) + b"\n\n",
    }[path]
    end = {RESPONSES: named("response.completed", response={}), MESSAGES: named("message_stop")}.get(path, DONE.strip())
    engine.script(path, Script(pieces=[opening, gate, content, end + b"\n\n"]))
    async with open_stream(up, path) as answer:
        reader = Reader(answer)
        await reader.until(opening)
        await asyncio.sleep(0.3)
        gate.set()
        await reader.rest()
    assert await up.metric("gateway_time_to_first_token_seconds_count", route=path) == 1
    assert await up.metric("gateway_time_to_first_token_seconds_sum", route=path) > 0.3


async def test_a_stream_without_content_has_no_first_token(up: Running, engine: FakeEngine) -> None:
    engine.script(CHAT, Script(pieces=[delta("", delta={"role": "assistant"}), FINISH, DONE]))
    await text_of(up)
    assert await up.metric("gateway_time_to_first_token_seconds_count") == 0
    assert await up.metric("gateway_requests_total", route=CHAT, status="200") == 1


async def test_inter_token_latency_is_what_passed_between_reads(up: Running, engine: FakeEngine) -> None:
    gate = asyncio.Event()
    engine.script(CHAT, Script(pieces=[delta("a"), gate, delta("b"), FINISH + DONE]))
    async with open_stream(up) as answer:
        reader = Reader(answer)
        await reader.until(b'"a"')
        await asyncio.sleep(0.3)
        gate.set()
        await reader.rest()
    assert await up.metric("gateway_inter_token_latency_seconds_count") == 1, "the end is no token"
    assert 0.25 < await up.metric("gateway_inter_token_latency_seconds_sum") < 2
