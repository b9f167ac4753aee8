"""A small engine of few blocks and slots for tests, and a gateway in front of it whose advice is read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.advisor import Advisor
from gateway.findings import Finding
from gateway.readings import ENGINE_SERIES, EngineReading, read_engine, samples_of
from scripts import _ports, demo, model_fetch
from scripts.checks.proof.traffic import SOME_TEXT
from tests.engine.conftest import START_S, _answers, until
from tests.wire.conftest import Running, serve
from tests.wire.conftest import until as until_async

BLOCK = 32
POOL_BLOCKS = 96
SLOTS = 8
SHAPE = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 64}
ENGINE_OPTIONS = (
    *("--hf-overrides", json.dumps(SHAPE), "--load-format", "dummy", "--dtype", "float32"),
    *("--num-gpu-blocks-override", str(POOL_BLOCKS), "--max-num-seqs", str(SLOTS), "--shutdown-timeout", "0"),
)
LOOK_S = 0.2


@dataclass
class Thin:
    """The engine; `start` again after `stop` is a restart."""

    folder: Path
    port: int = field(default_factory=_ports.free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{_ports.HOST}:{self.port}"

    def start(self) -> None:
        ports = demo.Ports(engine=self.port)
        service = next(s for s in demo.plan(ports, model_fetch.model_dir(), None).services if s.name == "engine")
        guard = (sys.executable, "-m", "scripts._guard", "--parent", str(os.getpid()), "--")
        with (self.folder / "engine.log").open("ab") as log:
            self.process = subprocess.Popen(
                (*guard, *service.command, *ENGINE_OPTIONS),
                env={**os.environ, **service.env},
                cwd=demo.ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> None:
        until(self._up, f"an engine at {self.url} (its log is in {self.folder})", START_S)

    def _up(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            end = (self.folder / "engine.log").read_text(errors="replace").splitlines()[-30:]
            pytest.fail(f"the engine ended with {self.process.returncode}:\n" + "\n".join(end), pytrace=False)
        return _answers(f"{self.url}/health")

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(30)

    def page(self) -> EngineReading:
        return read_engine(samples_of(httpx.get(f"{self.url}/metrics", trust_env=False).text, ENGINE_SERIES))


@dataclass
class Watched:
    """A gateway of its own in front of the engine, and a window that begins with the test's traffic."""

    up: Running
    thin: Thin
    advisor: Advisor
    before: EngineReading

    async def send(self, prompt: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": demo.MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0.5, "ignore_eos": True} | fields
        return await self.up.client.post("/v1/completions", json=body, headers=headers, timeout=120)

    async def send_all(self, prompts: list[str], at_once: int = 6, **fields: Any) -> list[httpx.Response]:
        """In order, a few at a time, while the advisor looks as it does in production, only more often."""
        room = asyncio.Semaphore(at_once)

        async def one(prompt: str) -> httpx.Response:
            async with room:
                return await self.send(prompt, **fields)

        async with self.looking():
            return await asyncio.gather(*map(one, prompts))

    @contextlib.asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        async def look() -> None:
            while True:
                self.advisor.look()
                await asyncio.sleep(LOOK_S)

        task = asyncio.create_task(look())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def fresh_page(self) -> None:
        """Until the gateway has read the engine's page twice more: once may have been under way."""
        for _ in range(2):
            old = self.up.gateway.replicas.all[0].page
            await until_async(lambda old=old: self.up.gateway.replicas.all[0].page is not old)

    async def findings(self) -> dict[str, Finding]:
        await self.fresh_page()
        return {finding.kind: finding for finding in self.advisor.look()[1]}

    def engine_gained(self, name: str) -> float:
        return self.thin.page().values[name] - self.before.values.get(name, 0.0)

    def missed(self) -> float:
        return self.engine_gained("vllm:prefix_cache_queries_total") - self.engine_gained(
            "vllm:prefix_cache_hits_total"
        )


@contextlib.asynccontextmanager
async def watched(thin: Thin, **settings: Any) -> AsyncIterator[Watched]:
    async with serve([thin.url], **settings) as up:
        gateway = up.gateway
        advisor = Advisor(gateway.settings, gateway.metrics, gateway.replicas, asyncio.get_running_loop().time)
        found = Watched(up, thin, advisor, thin.page())
        await found.fresh_page()
        found.before = thin.page()
        advisor.look()
        yield found


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


WORDS = SOME_TEXT.split()


def shares(finding: Finding) -> dict[str, float]:
    return dict(finding.numbers["shares"])
