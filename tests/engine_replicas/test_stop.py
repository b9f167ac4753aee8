"""What a stop does to the streams in flight: a real engine with one API server, and with two.

Why api-server-count stays at 1 in the profiles (docs/engine-profiles.md). A release that drains with two fails this.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from scripts import _ports, demo, model_fetch
from tests.engine.conftest import until
from tests.engine_replicas.conftest import Engine

STREAMS, TOKENS = 6, 128
SHUTDOWN_S = 20  # three times what the streams take
ARGUMENTS = ("--kv-cache-memory-bytes", "64M", "--max-model-len", "1024", "--shutdown-timeout", str(SHUTDOWN_S))


@contextmanager
def engine(folder: Path, servers: int) -> Iterator[Engine]:
    model, port, log = model_fetch.model_dir(), _ports.free_port(), folder / "engine.log"
    assert not model_fetch.plan(model).fetch, f"the model is not in {model}: make model"
    service = demo.plan(demo.Ports(engine=port), model, None).services[0]
    guard = (sys.executable, "-m", "scripts._guard", "--parent", str(os.getpid()), "--")
    command = (*guard, *service.command, *ARGUMENTS, "--api-server-count", str(servers))
    with (
        log.open("wb") as sink,
        subprocess.Popen(
            command, env={**os.environ, **service.env}, cwd=demo.ROOT, stdout=sink, stderr=subprocess.STDOUT
        ) as process,
    ):
        started = Engine(port, process, log)
        try:
            until(lambda: process.poll() is not None or started.healthy(), f"a healthy engine ({log})", 300)
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            yield started
        finally:
            process.terminate()


async def ended_whole(up: Engine) -> tuple[int, float]:
    """Asks for the streams, sends the engine SIGTERM once each gives tokens: (streams that ended whole, s it took)."""
    given = [asyncio.Event() for _ in range(STREAMS)]

    async def stream(client: httpx.AsyncClient, number: int) -> bool:
        messages = [{"role": "user", "content": f"Count from {number}."}]
        body = {"model": demo.MODEL, "messages": messages, "stream": True, "max_tokens": TOKENS, "ignore_eos": True}
        async with client.stream("POST", f"{up.url}/v1/chat/completions", json=body) as answer:
            events = 0
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return True
                events += line.startswith("data:")
                if events == 3:
                    given[number].set()
        return False

    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        tasks = [asyncio.create_task(stream(client, number)) for number in range(STREAMS)]
        async with asyncio.timeout(60):
            await asyncio.gather(*(each.wait() for each in given))
        assert not any(task.done() for task in tasks), "not all in flight any more"
        (served,) = psutil.Process(up.process.pid).children()  # the guard's one child
        begin = time.monotonic()
        served.terminate()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, bool | httpx.TransportError) for end in ends), ends
    return sum(end is True for end in ends), time.monotonic() - begin


@pytest.mark.parametrize(("servers", "whole"), [(1, STREAMS), (2, 0)])
async def test_one_api_server_ends_its_streams_before_it_stops_and_two_cut_them_off(
    servers: int, whole: int, tmp_path: Path
) -> None:
    with engine(tmp_path, servers) as up:
        ended, took_s = await ended_whole(up)
    print(f"{servers} API servers: {ended} of {STREAMS} streams ended whole, {took_s:.1f} s after SIGTERM")
    assert ended == whole
    assert (took_s < SHUTDOWN_S) == (whole > 0), took_s
