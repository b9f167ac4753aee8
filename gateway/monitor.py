"""Looks at one replica every interval: health, figures, models, and now and then a token.

What it finds goes into the replica's fields; changes of state go through its owner (`Board`), who tells the others.
Engines are not trusted to be brief: every answer is bounded in size, in time and, where it is a list, in length.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from gateway.engine_metrics import EngineFigures, read_engine_metrics
from gateway.progress import ForwardProgress, Sample
from gateway.replica import MOST_MODELS, Replica, State, served_models
from gateway.settings import Settings

logger = logging.getLogger(__name__)

MODELS_LOOKS = 10  # looks between two readings of a ready engine's models: adapters come and go while it runs
MOST_BYTES = 8 * 1024 * 1024  # of one answer. A page of metrics has some 100 kB, a list of MOST_MODELS some 500


class AnswerTooLargeError(httpx.HTTPError):
    """An engine goes on answering beyond MOST_BYTES."""


@dataclass(frozen=True, slots=True)
class Read:
    """An engine's answer, whole."""

    status: int
    body: bytes


class Board(Protocol):
    """Who owns the replicas."""

    def set_state(self, replica: Replica, state: State, reason: str) -> None: ...

    def learned(self) -> None:
        """Models or capacity of a replica are others than before."""


def make_client(settings: Settings, api_key: str | None) -> httpx.AsyncClient:
    """The client all monitors share."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.AsyncClient(headers=headers, timeout=settings.health.timeout_s, trust_env=False)


class Monitor:
    """One replica's watch. `run` is its task."""

    def __init__(
        self,
        replica: Replica,
        board: Board,
        settings: Settings,
        client: httpx.AsyncClient,
        clock: Callable[[], float],
    ) -> None:
        self._replica = replica
        self._board = board
        self._settings = settings
        self._client = client
        self._clock = clock
        self._told = ""  # why its models could not be read again

    async def run(self) -> None:
        """Until the replica is listed no more and nothing of ours is left there, or until cancelled."""
        replica = self._replica
        probe: asyncio.Task[None] | None = None
        try:
            while replica.listed or replica.in_flight:
                await self._look_whatever_comes()
                if (probe is None or probe.done()) and self._wants_probe():
                    probe = asyncio.create_task(self._probe(), name=f"probe {replica.url}")
                await asyncio.sleep(self._settings.health.interval_s)
        finally:
            if probe is not None:
                probe.cancel()
                await asyncio.gather(probe, return_exceptions=True)

    async def _look_whatever_comes(self) -> None:
        """A bug must not end the monitoring: an engine nobody looks at would be forgotten, and all of them with it."""
        try:
            try:
                await self._look()
            except Exception:
                logger.exception("looking at an engine failed", extra={"fields": {"replica": self._replica.url}})
                self._set(State.DOWN, "looking at it failed")
        except Exception:
            logger.exception("judging an engine failed", extra={"fields": {"replica": self._replica.url}})

    def _wants_probe(self) -> bool:
        up = self._replica.state in (State.READY, State.HUNG, State.DRAINING)
        return up and self._replica.progress.quiet_for_s(self._clock()) >= self._settings.health.idle_probe_s

    async def _look(self) -> None:
        replica = self._replica
        try:
            health = await self._get("/health")
        except httpx.TimeoutException:
            # A busy engine, or a busy gateway, answers late now and then; a dead one refuses. Hence patience.
            replica.missed_looks += 1
            if replica.missed_looks >= self._settings.health.max_missed:
                self._set(State.DOWN, "it does not answer its health check")
            return
        except httpx.HTTPError as error:
            self._set(State.DOWN, f"{_trouble(error)} at its health check")
            return
        replica.missed_looks = 0
        if health.status != 200:
            self._set(State.DOWN, f"its /health says {health.status}")
            return
        if replica.state is State.DOWN:
            replica.progress = ForwardProgress(self._settings.timeouts.stall_s)
            self._set(State.WARMING, "it answers /health, a first token is awaited")
        await self._read_metrics()
        replica.looks += 1
        if replica.state in (State.READY, State.DRAINING) and replica.looks >= MODELS_LOOKS:
            self._tell_of_models(await self._read_models())
        if replica.state is State.WARMING:
            obstacle = await self._read_models() or await self._warm_up()
            if obstacle:
                self._set(State.WARMING, obstacle)
            else:
                replica.breaker.close(self._clock())
                self._set_ready("")
        elif replica.state in (State.READY, State.DRAINING) and replica.progress.hung(self._clock()):
            stalled = replica.progress.stalled_for_s(self._clock())
            self._set(State.HUNG, f"no forward progress for {stalled:.0f} s")
        elif replica.state is State.HUNG and not replica.progress.hung(self._clock()):
            self._set_ready("it makes progress again")

    async def _read_metrics(self) -> None:
        """Figures where the page has them. A page that can't be had or read is no fault: probes tell the rest."""
        replica = self._replica
        try:
            page = await self._get("/metrics")
        except httpx.HTTPError:
            return
        replica.page = page.body.decode(errors="replace") if page.status == 200 else ""
        figures = read_engine_metrics(replica.page)
        self._notice_restart(figures)
        replica.block_size = figures.block_size or replica.block_size
        if figures.capacity_tokens is not None:
            told = (figures.capacity_tokens, figures.prefix_caching)
            if told != (replica.capacity_tokens, replica.prefix_caching):
                replica.capacity_tokens, replica.prefix_caching = told
                self._board.learned()
        if figures.tokens is not None:
            replica.progress.observe(Sample(self._clock(), figures.running, figures.waiting, figures.tokens))

    def _notice_restart(self, figures: EngineFigures) -> None:
        replica = self._replica
        last = replica.progress.last_sample
        if figures.started_s is not None:
            restarted = replica.started_s not in (None, figures.started_s)
            replica.started_s = figures.started_s
        else:
            restarted = last is not None and figures.tokens is not None and figures.tokens < last.tokens
        replica.starts += restarted

    async def _read_models(self) -> str | None:
        """Learn what the engine serves; what stands in the way of that, if anything."""
        replica = self._replica
        replica.looks = 0
        try:
            answer = await self._get("/v1/models")
        except AnswerTooLargeError:
            return f"its /v1/models has more than {MOST_BYTES} bytes"
        except httpx.HTTPError as error:
            return f"{_trouble(error)} at its /v1/models"
        if answer.status in (401, 403):
            return "it refuses the gateway's key (engine.api_key_file)"
        models = served_models(answer.body) if answer.status == 200 else None
        if not models:
            return f"its /v1/models answered {answer.status} and no list of models: is it a vLLM server?"
        if len(models) > MOST_MODELS:
            return f"its /v1/models lists {len(models)} models; at most {MOST_MODELS} of one engine are served"
        if models != replica.models:
            replica.models = models
            self._board.learned()
        return None

    def _tell_of_models(self, obstacle: str | None) -> None:
        """Of an engine that serves: the list we have stands."""
        if obstacle and obstacle != self._told:
            fields = {"replica": self._replica.url, "reason": obstacle, "models": len(self._replica.models)}
            logger.warning("models can't be read again, the last list stands", extra={"fields": fields})
        self._told = obstacle or ""

    async def _warm_up(self) -> str | None:
        """Ask for a first token; what stood in the way of it, if anything."""
        try:
            answer = await self._one_token()
        except httpx.HTTPError as error:
            return f"{_trouble(error)} at its first request"
        if answer.status >= 500 or answer.status in (401, 403, 429):
            return f"its first request was answered {answer.status}"
        self._replica.progress.probe_answered(self._clock())
        return None

    async def _probe(self) -> None:
        watch = self._replica.progress
        watch.probe_started(self._clock())
        try:
            answer = await self._one_token()
        except httpx.TimeoutException:
            return  # probe_started_s stays: silence is the evidence of a hung engine
        except httpx.HTTPError:
            watch.probe_failed()
            return
        if answer.status < 500:
            watch.probe_answered(self._clock())
        else:
            watch.probe_failed()

    async def _one_token(self) -> Read:
        """The smallest request that takes a forward pass: one token, or for a pooling model one embedding."""
        model = next(iter(self._replica.models), "")
        answer = await self._post(
            "/v1/completions", {"model": model, "prompt": "Hi", "max_tokens": 1, "temperature": 0}
        )
        embeds = answer.status in (400, 404, 405, 501)
        if embeds:
            answer = await self._post("/v1/embeddings", {"model": model, "input": "Hi"})
        if answer.status == 200:
            self._replica.embeds = embeds
        return answer

    async def _get(self, path: str) -> Read:
        timeout_s = self._settings.health.timeout_s
        return await self._ask("GET", path, 2 * timeout_s, timeout=timeout_s)

    async def _post(self, path: str, body: dict[str, Any]) -> Read:
        timeouts = self._settings.timeouts
        timeout = httpx.Timeout(timeouts.stall_s, connect=timeouts.connect_s)
        return await self._ask("POST", path, timeouts.stall_s + timeouts.connect_s, json=body, timeout=timeout)

    async def _ask(self, method: str, path: str, within_s: float, **options: Any) -> Read:
        """Raises httpx.HTTPError; a TimeoutException also where an answer begins and does not end."""
        try:
            async with (
                asyncio.timeout(within_s),
                self._client.stream(method, self._replica.url + path, **options) as response,
            ):
                body = bytearray()
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > MOST_BYTES:
                        raise AnswerTooLargeError(f"more than {MOST_BYTES} bytes")
                return Read(response.status_code, bytes(body))
        except TimeoutError:
            raise httpx.ReadTimeout(f"no whole answer within {within_s:g} s") from None

    def _set_ready(self, reason: str) -> None:
        self._replica.was_ready = True
        if self._replica.drains:
            self._set(State.DRAINING, "drain was requested" if self._replica.listed else "no source names it any more")
        else:
            self._set(State.READY, reason)

    def _set(self, state: State, reason: str) -> None:
        self._board.set_state(self._replica, state, reason)


def _trouble(error: httpx.HTTPError) -> str:
    """What it comes to for somebody who waits; the class is told where it is none of the usual: texts may be empty."""
    if isinstance(error, httpx.ConnectError):  # a resolver's own errors have negative numbers
        return "unknown host name" if "[Errno -" in str(error) else "no connection"
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    return f"a broken answer ({type(error).__name__})"
