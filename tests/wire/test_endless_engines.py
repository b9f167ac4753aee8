"""An engine that goes on and on when the gateway looks at it costs a bounded look, and what was known of it stands."""

import asyncio
import logging
from collections import Counter
from typing import Any

import pytest
from aiohttp import web

from gateway import monitor
from gateway.replica import MOST_MODELS, State
from tests.fakes.engine import MODEL, FakeEngine
from tests.wire.conftest import Running, serve, until


class EndlessEngine(FakeEngine):
    """Its GET routes named in `endless` send 64 KiB at a time, `pause_s` apart, and never end. `looked` counts all."""

    endless: frozenset[str] = frozenset()
    pause_s = 0.0

    def __init__(self, models: tuple[str, ...] = (MODEL,)) -> None:
        super().__init__(models=models)
        self.looked: Counter[str] = Counter()

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b" " * 65536)
            await asyncio.sleep(self.pause_s)

    async def _either(self, request: web.Request, usual: Any) -> Any:
        self.looked[request.path] += 1
        return await (self._endless if request.path in self.endless else usual)(request)

    async def _models(self, request: web.Request) -> Any:
        return await self._either(request, super()._models)

    async def _health(self, request: web.Request) -> Any:
        return await self._either(request, super()._health)

    async def _metrics(self, request: web.Request) -> Any:
        return await self._either(request, super()._metrics)

    async def looked_again(self, path: str) -> None:
        """Two more looks at this path have begun, so one has ended."""
        before = self.looked[path]
        await until(lambda: self.looked[path] >= before + 2)


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = [record for record in caplog.records if record.message.startswith("models can't be read again")]
    return [getattr(record, "fields")["reason"] for record in told]  # noqa: B009


async def still_served(up: Running) -> None:
    (replica,) = up.gateway.replicas.all
    assert replica.state is State.READY
    assert list(replica.models) == [MODEL]
    assert (await up.chat()).status_code == 200


@pytest.mark.parametrize(
    ("models", "why"),
    [
        (tuple(f"m{number}" for number in range(MOST_MODELS + 1)), f"lists {MOST_MODELS + 1} models; at most"),
        (("m" * 501,), "no list of models"),
        (tuple(f"{number}{'m' * 9000}" for number in range(1000)), f"more than {monitor.MOST_BYTES} bytes"),
    ],
    ids=["many", "long", "large"],
)
async def test_a_list_of_models_beyond_all_bounds_is_told_once_and_the_last_one_stands(
    models: tuple[str, ...], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with EndlessEngine() as engine, serve([engine.url]) as up:
        engine.models = models
        await until(lambda: reasons(caplog))
        await engine.looked_again("/v1/models")
        (told,) = reasons(caplog)
        assert why in told
        await still_served(up)
        engine.models = (MODEL, "new")
        await until(lambda: up.gateway.replicas.knows("new"))
        assert len(reasons(caplog)) == 1


async def test_such_an_engine_is_not_served_from_the_start_and_says_why() -> None:
    engine = EndlessEngine(tuple(f"m{number}" for number in range(MOST_MODELS + 1)))
    async with engine, serve([engine.url], wait=False) as up:
        (replica,) = up.gateway.replicas.all
        await until(lambda: "1001 models; at most 1000" in replica.reason)
        assert replica.state is State.WARMING
        assert not replica.models


@pytest.mark.parametrize("pause_s", [0.0, 0.2], ids=["fast", "dripping"])
async def test_an_endless_answer_ends_at_a_size_or_a_time_and_the_looks_go_on(
    pause_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with EndlessEngine() as engine, serve([engine.url], health={"timeout_s": 0.3}) as up:
        engine.pause_s = pause_s
        engine.endless = frozenset({"/v1/models"})
        await until(lambda: reasons(caplog))
        await still_served(up)
        engine.endless = frozenset({"/metrics"})
        await engine.looked_again("/metrics")
        await still_served(up)
        engine.endless = frozenset({"/health"})
        (replica,) = up.gateway.replicas.all
        await until(lambda: replica.state is State.DOWN)
        engine.endless = frozenset()
        await until(lambda: replica.state is State.READY)
