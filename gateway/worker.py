"""`python -m gateway.worker`: one of several processes of a gateway. Only the parent (supervisor.py) starts it.

It serves sockets that the parent holds, answers what the parent asks (its status, its gauges, a drain, whether it is
alive), and dies with the parent, whatever that dies of.

Exit codes: as `python -m gateway`.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gateway import serving
from gateway.__main__ import stop_early, tell
from gateway.accountbook import SharedBook
from gateway.app import Gateway, Membership
from gateway.control import Channel, Order
from gateway.logs import LineWriter, configure
from gateway.metricfiles import MetricFiles
from gateway.settings import Settings, SettingsError
from gateway.workers import Worker

_PR_SET_PDEATHSIG = 1
HELLO_S = 10.0
TELL_S = 2.5  # for what all are asked together: the parent gives each of them TELL_S of its own (supervisor.py)
READY_S = 5.0  # to find an engine ready that a sibling says is


@dataclass(frozen=True)
class Post:
    """What a worker is told at its start, as the one argument of its command line (JSON).

    public, admin, control: descriptors. directory: what this gateway's processes share. parent: its process id.
    start: counts those in this place, from 1.
    """

    number: int
    of: int
    public: int
    admin: int
    control: int
    directory: str
    parent: int
    since_s: float
    start: int

    @property
    def worker(self) -> Worker:
        return Worker(self.number, self.of)


class ByParent:
    """The other workers, asked through the parent."""

    channel: Channel | None = None

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def tell(self, what: str, **fields: Any) -> dict[int, Any]:
        if self.channel is None:
            return {}
        answers = await self.channel.ask("everybody", TELL_S, order={"what": what, **fields})
        if answers is None:  # the parent is stuck: nobody can say how the others are
            return dict.fromkeys(self._worker.others)
        return {int(number): answer for number, answer in answers.items()}


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the parent ends, so that none is ever left."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked
        raise SystemExit(1)


async def _serve(order: Order, gateway: Gateway) -> Any:
    """What the parent asks. None would say that there was no answer."""
    match order["what"]:
        case "status":
            return gateway.health.status()
        case "ready":
            return gateway.health.ready()[0]
        case "flush":
            gateway.metrics.flush()
        case "drain":
            # One that is not listed here yet is no failure: sources are looked at by each worker for itself.
            return gateway.replicas.drain(order["replica"], order["on"])
    return True


async def work(settings: Settings, post: Post, log: LineWriter) -> None:
    directory = Path(post.directory)
    siblings = ByParent(post.worker)
    book = SharedBook(directory / "accounts", post.worker)
    files = MetricFiles(directory / "metrics", post.number, post.since_s)
    membership = Membership(post.worker, files, book, siblings)

    @contextlib.asynccontextmanager
    async def beside(gateway: Gateway) -> AsyncIterator[None]:
        if post.start > 1:
            gateway.metrics.worker_restarts.inc()
        channel = await Channel.open(socket.socket(fileno=post.control), lambda order: _serve(order, gateway))
        siblings.channel = channel
        listening = asyncio.create_task(channel.run(), name="parent")
        drained = await channel.ask("hello", HELLO_S)
        for url in drained or ():  # ordered while this worker was not there
            gateway.replicas.drain(url, True)
        # Clients that the kernel deals to this worker would be refused where a sibling serves: they had better wait.
        if any((await siblings.tell("ready")).values()):
            await gateway.replicas.wait_ready(None, READY_S)
        try:
            yield
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    public, admin = (socket.socket(fileno=descriptor) for descriptor in (post.public, post.admin))
    await serving.serve(settings, public, admin, log, membership, beside)


def main(arguments: list[str]) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop_early)
    post = Post(**orjson.loads(arguments[0]))
    die_with(post.parent)
    log: LineWriter | None = None
    try:
        directory = Path(post.directory)
        settings = Settings(**orjson.loads((directory / "settings.json").read_bytes()))
        turn = os.open(directory / "log.turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        log = configure(settings.logs.level, turn, post.number)
        with asyncio.Runner(loop_factory=serving.new_loop) as runner:
            runner.run(work(settings, post, log))
    except SettingsError as error:
        tell(error)
        return 1
    finally:
        if log is not None:
            log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
