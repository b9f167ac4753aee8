"""The engines and what is known of each: state, models, capacity, progress, our requests in flight.

A replica is in one state:

- `down`: /health does not answer 200, or a connection was refused.
- `warming`: /health answers, but no token has been generated for us yet (loading, compiling).
- `ready`: it answered a one-token request, and has made progress since whenever it had work.
- `hung`: it had work and made no progress for stall_s, whatever /health says. Ready again once it moves.
- `draining`: it finishes what it has and gets nothing new.

One monitor task a replica looks at it every interval; only that task and the few methods below change its state.
"""

import asyncio
import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import orjson

from gateway.engine_metrics import EngineFigures, read_engine_metrics
from gateway.metrics import Metrics
from gateway.progress import ForwardProgress, Sample
from gateway.routing import Candidate
from gateway.settings import Settings

logger = logging.getLogger(__name__)

MODELS_LOOKS = 10  # looks between two readings of a ready engine's models: adapters come and go while it runs


class State(enum.StrEnum):
    DOWN = enum.auto()
    WARMING = enum.auto()
    READY = enum.auto()
    HUNG = enum.auto()
    DRAINING = enum.auto()


@dataclass(slots=True, eq=False)
class Replica:
    """One addressable engine. The request path counts `in_flight` up and down; the rest is its monitor's."""

    url: str
    progress: ForwardProgress
    state: State = State.DOWN
    reason: str = "not looked at yet"
    was_ready: bool = False
    models: dict[str, int | None] = field(default_factory=dict)  # served model name -> max_model_len (tokens)
    capacity_tokens: int | None = None
    block_size: int | None = None  # tokens
    starts: int = 0  # of the engine, as far as we saw: what it had cached before is gone
    started_s: float | None = None
    page: str = ""  # its last /metrics
    in_flight: int = 0
    missed_looks: int = 0  # in a row, by silence
    looks: int = 0  # since its models were read
    drain_requested: bool = False

    def __repr__(self) -> str:
        return f"<Replica {self.url} {self.state}, {self.in_flight} in-flight>"

    def candidate(self) -> Candidate:
        return Candidate(self.url, self.in_flight, float(self.capacity_tokens or 1))


class Replicas:
    """Owner of all replicas. `async with` it: the monitors live as long as the gateway."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        clock: Callable[[], float],
        api_key: str | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.all = [Replica(url, ForwardProgress(settings.timeouts.stall_s)) for url in settings.engines]
        for replica in self.all:
            self._export(replica)

    def _export(self, replica: Replica) -> None:
        labels = (replica.url,)
        self._metrics.replica_ready.labels(*labels).set_function(lambda: float(replica.state is State.READY))
        self._metrics.upstream_calls.labels(*labels).set_function(lambda: replica.in_flight)
        self._metrics.replica_stalled_seconds.labels(*labels).set_function(
            lambda: replica.progress.stalled_for_s(self._clock())
        )

    def __repr__(self) -> str:
        return f"<Replicas {', '.join(f'{r.url} {r.state}' for r in self.all)}>"

    async def __aenter__(self) -> "Replicas":
        self._client = httpx.AsyncClient(
            headers=self._headers, timeout=self._settings.health.timeout_s, trust_env=False
        )
        self._tasks = [
            asyncio.create_task(self._monitor(replica), name=f"monitor {replica.url}") for replica in self.all
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    # -- what the request path asks ------------------------------------------------------------------------------------

    def ready(self, model: str | None = None) -> list[Replica]:
        return [r for r in self.all if r.state is State.READY and (model is None or model in r.models)]

    def knows(self, model: str) -> bool:
        """Whether some engine serves or served this model; an engine that restarts is expected back with it."""
        return any(model in replica.models for replica in self.all)

    @property
    def discovered(self) -> bool:
        """Whether every engine has told its models at least once, so that an unknown name is really unknown."""
        return all(replica.models for replica in self.all)

    @property
    def models(self) -> dict[str, int | None]:
        """Served model name -> max_model_len, over all engines that told theirs."""
        return {name: length for replica in self.all for name, length in replica.models.items()}

    @property
    def capacity_tokens(self) -> int:
        return sum(replica.capacity_tokens or 0 for replica in self.ready())

    def restarting(self, model: str) -> bool:
        """An engine of this model was ready and is not now: worth waiting for, unlike one that never came up."""
        return any(r.was_ready and r.state is not State.READY for r in self.all if model in r.models)

    def explain(self) -> str:
        """One sentence on why no engine is ready."""
        return "; ".join(f"engine {i + 1} is {r.state} ({r.reason})" for i, r in enumerate(self.all))

    async def wait_ready(self, model: str, timeout_s: float) -> bool:
        """Wait until a replica of this model is ready; False when the time is over first."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.ready(model):
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def report_unreachable(self, replica: Replica) -> None:
        """A connection was refused: don't wait for the next look to stop sending there."""
        if replica.state is State.READY:
            self._set(replica, State.DOWN, "refused a connection")

    def drain(self, url: str, on: bool) -> bool:
        """Stop or resume sending to one replica; False if there is none of that URL."""
        for replica in self.all:
            if replica.url == url:
                replica.drain_requested = on
                if on and replica.state is State.READY:
                    self._set(replica, State.DRAINING, "drain was requested")
                elif not on and replica.state is State.DRAINING:
                    self._set(replica, State.READY, "drain was lifted")
                return True
        return False

    # -- what the monitors do ------------------------------------------------------------------------------------------

    async def _monitor(self, replica: Replica) -> None:
        probe: asyncio.Task[None] | None = None
        try:
            while True:
                try:
                    await self._look(replica)
                except Exception:
                    # A bug must not end the monitoring: an engine nobody looks at would stay in its last state.
                    logger.exception("looking at an engine failed", extra={"fields": {"replica": replica.url}})
                    self._set(replica, State.DOWN, "looking at it failed")
                if (probe is None or probe.done()) and self._wants_probe(replica):
                    probe = asyncio.create_task(self._probe(replica), name=f"probe {replica.url}")
                await asyncio.sleep(self._settings.health.interval_s)
        finally:
            if probe is not None:
                probe.cancel()
                await asyncio.gather(probe, return_exceptions=True)

    def _wants_probe(self, replica: Replica) -> bool:
        up = replica.state in (State.READY, State.HUNG, State.DRAINING)
        return up and replica.progress.quiet_for_s(self._clock()) >= self._settings.health.idle_probe_s

    async def _look(self, replica: Replica) -> None:
        try:
            health = await self._client.get(f"{replica.url}/health")
        except httpx.TimeoutException:
            # A busy engine, or a busy gateway, answers late now and then; a dead one refuses. Hence patience.
            replica.missed_looks += 1
            if replica.missed_looks >= self._settings.health.max_missed:
                self._set(replica, State.DOWN, "it does not answer its health check")
            return
        except httpx.HTTPError as error:
            # Which exception it was matters more than its text: timeouts have none.
            self._set(replica, State.DOWN, f"{type(error).__name__} at its health check")
            return
        replica.missed_looks = 0
        if health.status_code != 200:
            self._set(replica, State.DOWN, f"its /health says {health.status_code}")
            return
        if replica.state is State.DOWN:
            replica.progress = ForwardProgress(self._settings.timeouts.stall_s)
            self._set(replica, State.WARMING, "it answers /health, a first token is awaited")
        await self._read_metrics(replica)
        replica.looks += 1
        if replica.state in (State.READY, State.DRAINING) and replica.looks >= MODELS_LOOKS:
            await self._read_models(replica)  # where that fails, the list we have stands
        if replica.state is State.WARMING:
            obstacle = await self._read_models(replica) or await self._warm_up(replica)
            if obstacle:
                self._set(replica, State.WARMING, obstacle)
            else:
                self._set_ready(replica, "")
        elif replica.state in (State.READY, State.DRAINING) and replica.progress.hung(self._clock()):
            stalled = replica.progress.stalled_for_s(self._clock())
            self._set(replica, State.HUNG, f"no forward progress for {stalled:.0f} s")
        elif replica.state is State.HUNG and not replica.progress.hung(self._clock()):
            self._set_ready(replica, "it makes progress again")

    async def _read_metrics(self, replica: Replica) -> None:
        """Figures where the page has them. A page that can't be had or read is no fault: probes tell the rest."""
        try:
            page = await self._client.get(f"{replica.url}/metrics")
        except httpx.HTTPError:
            return
        replica.page = page.text if page.status_code == 200 else ""
        figures = read_engine_metrics(replica.page)
        self._notice_restart(replica, figures)
        replica.block_size = figures.block_size or replica.block_size
        if figures.capacity_tokens is not None and figures.capacity_tokens != replica.capacity_tokens:
            replica.capacity_tokens = figures.capacity_tokens
            self._on_change()
        if figures.tokens is not None:
            replica.progress.observe(Sample(self._clock(), figures.running, figures.waiting, figures.tokens))

    @staticmethod
    def _notice_restart(replica: Replica, figures: EngineFigures) -> None:
        last = replica.progress.last_sample
        if figures.started_s is not None:
            restarted = replica.started_s not in (None, figures.started_s)
            replica.started_s = figures.started_s
        else:
            restarted = last is not None and figures.tokens is not None and figures.tokens < last.tokens
        replica.starts += restarted

    async def _read_models(self, replica: Replica) -> str | None:
        """Learn what the engine serves; what stands in the way of that, if anything."""
        replica.looks = 0
        try:
            answer = await self._client.get(f"{replica.url}/v1/models")
        except httpx.HTTPError as error:
            return f"{type(error).__name__} at its /v1/models"
        if answer.status_code in (401, 403):
            return "it refuses the gateway's key (engine.api_key_file)"
        models = served_models(answer.content) if answer.status_code == 200 else None
        if not models:
            return f"its /v1/models answered {answer.status_code} and no list of models: is it a vLLM server?"
        replica.models = models
        return None

    async def _warm_up(self, replica: Replica) -> str | None:
        """Ask for a first token; what stood in the way of it, if anything."""
        try:
            answer = await self._one_token(replica)
        except httpx.HTTPError as error:
            return f"{type(error).__name__} at its first request"
        if answer.status_code >= 500 or answer.status_code in (401, 403, 429):
            return f"its first request was answered {answer.status_code}"
        replica.progress.probe_answered(self._clock())
        return None

    async def _probe(self, replica: Replica) -> None:
        watch = replica.progress
        watch.probe_started(self._clock())
        try:
            answer = await self._one_token(replica)
        except httpx.TimeoutException:
            return  # probe_started_s stays: silence is the evidence of a hung engine
        except httpx.HTTPError:
            watch.probe_failed()
            return
        if answer.status_code < 500:
            watch.probe_answered(self._clock())
        else:
            watch.probe_failed()

    async def _one_token(self, replica: Replica) -> httpx.Response:
        """The smallest request that takes a forward pass: one token, or for a pooling model one embedding."""
        timeout = httpx.Timeout(self._settings.timeouts.stall_s, connect=self._settings.timeouts.connect_s)
        model = next(iter(replica.models), "")
        answer = await self._client.post(
            f"{replica.url}/v1/completions",
            json={"model": model, "prompt": "Hi", "max_tokens": 1, "temperature": 0},
            timeout=timeout,
        )
        if answer.status_code in (400, 404, 405):
            answer = await self._client.post(
                f"{replica.url}/v1/embeddings", json={"model": model, "input": "Hi"}, timeout=timeout
            )
        return answer

    def _set_ready(self, replica: Replica, reason: str) -> None:
        replica.was_ready = True
        self._set(replica, State.DRAINING if replica.drain_requested else State.READY, reason)

    def _set(self, replica: Replica, state: State, reason: str) -> None:
        before, news = replica.state, reason != replica.reason
        replica.state, replica.reason = state, reason
        if state is before:
            if news:
                fields = {"replica": replica.url, "state": state, "reason": reason}
                logger.warning("replica state stays, for another reason", extra={"fields": fields})
            return
        logger.warning(
            "replica state changed",
            extra={"fields": {"replica": replica.url, "from": before, "to": state, "reason": reason}},
        )
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._on_change()


def served_models(body: bytes) -> dict[str, int | None] | None:
    """Model name -> max_model_len (tokens) from an engine's /v1/models; None where the body is no such list."""
    try:
        listed = orjson.loads(body)["data"]
        models = {model["id"]: model.get("max_model_len") for model in listed}
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None
    if not all(isinstance(name, str) and isinstance(length, int | None) for name, length in models.items()):
        return None
    return models
