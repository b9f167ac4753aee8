"""A request's whole way, once for each route."""

from tests.fakes.engine import FakeEngine
from tests.wire.conftest import Running
from tests.wire.streams import events_of


async def test_a_chat_is_answered(up: Running, engine: FakeEngine) -> None:
    answer = await up.chat(temperature=0)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]
    assert len(engine.asked("/v1/chat/completions")) == 1


async def test_a_chat_is_streamed(up: Running) -> None:
    async with up.stream(max_tokens=5) as answer:
        events = await events_of(answer.aiter_bytes())
    assert answer.status_code == 200
    assert events[-1] == b"[DONE]"
    assert b'"usage"' not in b"".join(events)


async def test_metrics_count_it(up: Running) -> None:
    await up.completion("hello world", max_tokens=5)
    assert await up.metric("gateway_requests_total", route="/v1/completions", status="200") == 1
