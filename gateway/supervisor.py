"""The parent of several workers: starts them, starts again those that die, and ends when all have drained.

It serves nothing itself. It holds the listening sockets, so that connections outlive a worker, and one channel to each
worker, over which it also sees that the worker's loop runs. Each worker has a public socket of its own; the admin
socket is one for all, so that whoever runs answers there. Per worker, in order:

1. start: a fresh interpreter with its sockets and its channel; it has START_S to say hello.
2. watch: asked every PING_S whether it is alive; nobody waits for one that is silent, and once it is known to be stuck
   (silence.py) it is killed.
3. it died: its gauges and its requests in flight are struck out, its counts stay. It is started again at once; one that
   died twice in a row soon after its start, after 1, 2, 4 … 30 s. Its connections wait for an immediate restart; for a
   later one, or where a start failed, its socket is given up, and the kernel deals to the others.

The first start is all or nothing, and worker 1 goes first: a mistake that only a worker can find is told once.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.accountbook import SharedBook
from gateway.control import Channel, Order
from gateway.listening import address_of, bind, bind_again, bind_all, raise_file_limit
from gateway.logs import LineWriter, configure
from gateway.metricfiles import VARIABLE, forget_worker, reserve
from gateway.settings import Settings, SettingsError
from gateway.silence import HANG_S, LOOK_S, Silence, look_at
from gateway.workers import Worker, restart_delay_s

logger = logging.getLogger("gateway")

START_S = 60.0
PING_S = 1.0
TELL_S = 2.0  # for an answer to what all are asked
STRIKE_S = 0.01  # between two tries for the accounts' lock
STEADY_S = 10.0  # a worker that lived so long did not die of its start
FAILED_STARTS = 3  # of one worker in a row, while no other serves: then the whole gateway ends
DRAIN_SLACK_S = 12.0  # beyond timeouts.drain_s: last words, connections closed, the ledger's last commit
PREFIX = "gateway-"


@dataclass(eq=False)
class _Slot:
    """One worker's place."""

    number: int
    public: socket.socket | None  # none while it is given up
    process: asyncio.subprocess.Process | None = None
    channel: Channel | None = None
    hello: asyncio.Event = field(default_factory=asyncio.Event)
    starts: int = 0
    deaths: int = 0  # in a row, each soon after a start
    failed_starts: int = 0
    silent: bool = False  # it owes an answer for longer than a loop that runs takes

    @property
    def serves(self) -> bool:
        return self.hello.is_set()


class Supervisor:
    """`run` is all of it."""

    def __init__(
        self, settings: Settings, directory: Path, slots: list[_Slot], admin: socket.socket, book: SharedBook
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._slots = slots
        self._admin = admin
        self._book = book
        self._since_s = time.time()
        self._drained: set[str] = set()
        self._stopping = asyncio.Event()
        self._gave_up = asyncio.Event()
        self._kills = 0  # of stuck workers

    async def run(self) -> int:
        """Exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        keepers: list[asyncio.Task[None]] = []
        try:
            for slots in (self._slots[:1], self._slots[1:]):
                if not await self._first_start(slots, keepers):
                    return 0 if self._stopping.is_set() else 1
            public = next(slot.public for slot in self._slots if slot.public is not None)
            fields = {"public": address_of(public), "admin": address_of(self._admin), "workers": len(self._slots)}
            logger.info("serving", extra={"fields": fields})
            ends = [asyncio.ensure_future(event.wait()) for event in (self._stopping, self._gave_up)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            return 1 if self._gave_up.is_set() else 0
        finally:
            await self._stop(keepers)
            logger.info("stopped")

    # -- a worker's life -----------------------------------------------------------------------------------------------

    async def _first_start(self, slots: list[_Slot], keepers: list[asyncio.Task[None]]) -> bool:
        """Start these and keep them; False where one ended before it served, or a signal came first."""
        begun = [asyncio.create_task(self._keep(slot), name=f"worker {slot.number}") for slot in slots]
        keepers += begun
        served = asyncio.create_task(_all_say_hello(slots))
        stopping = asyncio.ensure_future(self._stopping.wait())
        ends: list[asyncio.Future[Any]] = [served, stopping, *begun]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if served.done():
            return True
        served.cancel()
        return False

    async def _keep(self, slot: _Slot) -> None:
        """Returns when it shall not be started again."""
        first = True
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                slot.public = slot.public or self._take_up_socket()
                await self._strike_out(slot)
                why, served = await self._live(slot)
            except OSError as error:  # no process or descriptor to be had now
                why, served = f"{error.strerror}", False
            with contextlib.suppress(OSError):  # else before the next start
                await self._strike_out(slot)
            if self._stopping.is_set() or self._gave_up.is_set():
                self._give_up_socket(slot)  # who comes now is told by those that still end their streams
                return
            if first and not served:
                if why != "exit code 1":  # then it has told why
                    logger.error("a worker did not start", extra={"fields": {"worker": slot.number, "why": why}})
                return
            first = False
            slot.deaths = 1 if time.monotonic() - began >= STEADY_S else slot.deaths + 1
            slot.failed_starts = 0 if served else slot.failed_starts + 1
            delay_s = restart_delay_s(slot.deaths)
            fields = {"worker": slot.number, "why": why, "starts_again_in_s": delay_s}
            logger.error("a worker ended", extra={"fields": fields})
            if slot.failed_starts >= FAILED_STARTS and not any(other.serves for other in self._slots):
                logger.error("no worker can be started, the gateway ends")
                self._gave_up.set()
                return
            if delay_s or not served:
                self._give_up_socket(slot)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _live(self, slot: _Slot) -> tuple[str, bool]:
        """One worker from its start to its end: what it died of, and whether it had served."""
        assert slot.public is not None
        ours, its = socket.socketpair()
        descriptors = {"public": slot.public.fileno(), "admin": self._admin.fileno(), "control": its.fileno()}
        post = {"number": slot.number, "of": len(self._slots), **descriptors, "directory": str(self._directory)}
        slot.starts += 1
        post |= {"parent": os.getpid(), "since_s": self._since_s, "start": slot.starts}
        with its:
            slot.process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway.worker", json.dumps(post)),
                env={**os.environ, VARIABLE: str(self._directory / "metrics")},
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=tuple(descriptors.values()),
                process_group=0,  # Ctrl-C reaches the parent alone, which hands it on once
            )
        slot.channel = await Channel.open(ours, lambda order: self._serve(order, slot))
        tasks = [asyncio.create_task(work) for work in (slot.channel.run(), self._watch(slot, slot.channel, process))]
        try:
            code = await process.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            served = slot.serves
            slot.hello.clear()
            slot.silent = False
            slot.process = slot.channel = None
        return (f"exit code {code}" if code >= 0 else signal.Signals(-code).name), served

    async def _watch(self, slot: _Slot, channel: Channel, process: asyncio.subprocess.Process) -> None:
        """Kill it where it does not start, or answers no more."""
        try:
            await asyncio.wait_for(slot.hello.wait(), START_S)
            # There is no event to wait for: silence is the event.
            while (why := await self._owes_an_answer(slot, channel, process.pid)) is None:  # noqa: ASYNC110
                await asyncio.sleep(PING_S)
            if channel.closed:
                return  # it ended, or is about to
        except TimeoutError:
            why = f"not serving after {START_S:g} s"
        logger.error("a worker is killed", extra={"fields": {"worker": slot.number, "why": why}})
        self._kills += 1
        _signal(process, signal.SIGKILL)

    async def _owes_an_answer(self, slot: _Slot, channel: Channel, pid: int) -> str | None:
        """Ask whether it is alive. None once it says so; else why it won't."""
        answer = asyncio.create_task(channel.ask("alive", 2 * HANG_S))
        silence, kills = Silence(), self._kills
        try:
            while not (await asyncio.wait([answer], timeout=LOOK_S))[0]:
                slot.silent = True
                if kills != self._kills:  # it may have waited for that one
                    silence, kills = Silence(), self._kills
                if (why := silence.verdict(look_at(pid))) is not None:
                    return why
            return None if answer.result() else "it ended"
        finally:
            slot.silent = False
            answer.cancel()

    async def _strike_out(self, slot: _Slot) -> None:
        # Mostly some microseconds, and a record lock has no event to wait for.
        while not self._book.strike_out(slot.number):  # noqa: ASYNC110
            await asyncio.sleep(STRIKE_S)
        forget_worker(self._directory / "metrics", slot.number)

    def _give_up_socket(self, slot: _Slot) -> None:
        """Only while another one keeps the port."""
        if slot.public is not None and any(other.public for other in self._slots if other is not slot):
            slot.public.close()
            slot.public = None

    def _take_up_socket(self) -> socket.socket:
        return bind_again(next(other.public for other in self._slots if other.public is not None))

    # -- what workers ask ----------------------------------------------------------------------------------------------

    async def _serve(self, order: Order, slot: _Slot) -> Any:
        if order["what"] == "hello":
            slot.hello.set()
            pid = None if slot.process is None else slot.process.pid
            logger.info("a worker serves", extra={"fields": {"worker": slot.number, "pid": pid}})
            return sorted(self._drained)
        wish = order["order"]
        if wish["what"] == "drain":  # kept for those that are being started
            (self._drained.add if wish["on"] else self._drained.discard)(wish["replica"])
        others = [other for other in self._slots if other is not slot and other.serves]
        fields = {name: value for name, value in wish.items() if name != "what"}
        # A silent one is told, too, but a page of metrics must not wait for it.
        answers = await asyncio.gather(
            *(
                other.channel.ask(wish["what"], 0 if other.silent else TELL_S, **fields)
                for other in others
                if other.channel is not None
            )
        )
        return {str(other.number): answer for other, answer in zip(others, answers, strict=True)}

    # -- the end -------------------------------------------------------------------------------------------------------

    def _signalled(self) -> None:
        self._stopping.set()
        for slot in self._slots:
            if slot.process is not None:
                _signal(slot.process, signal.SIGTERM)

    async def _stop(self, keepers: list[asyncio.Task[None]]) -> None:
        """Have all of them drain, and wait for it."""
        if not self._stopping.is_set():
            self._signalled()
        within_s = self._settings.timeouts.drain_s + DRAIN_SLACK_S
        _, late = await asyncio.wait(keepers, timeout=within_s) if keepers else (set(), set())
        for slot in self._slots:
            if slot.process is not None:
                logger.error("a worker did not drain and is killed", extra={"fields": {"worker": slot.number}})
                _signal(slot.process, signal.SIGKILL)
        await asyncio.gather(*late, return_exceptions=True)


async def _all_say_hello(slots: list[_Slot]) -> None:
    for slot in slots:
        await slot.hello.wait()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def run(settings: Settings) -> int:
    """Exit code. Raises SettingsError where an address can't be had."""
    raise_file_limit()
    count = settings.workers
    publics = bind_all(settings.listen, "listen", count)
    admin = bind(settings.admin_listen, "admin_listen")
    log: LineWriter | None = None
    with shared_directory() as directory:
        with _told_of(directory):
            (directory / "metrics").mkdir()
            for number in range(1, count + 1):
                reserve(directory / "metrics", number)
            # Workers go by what was read now, also those that are started again later.
            told = settings.model_dump(mode="json", exclude_unset=True)
            (directory / "settings.json").write_text(json.dumps(told), encoding="utf-8")
            turn = os.open(directory / "log.turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            book = SharedBook(directory / "accounts", Worker(1, count))
        slots = [_Slot(i + 1, publics[i]) for i in range(count)]
        try:
            log = configure(settings.logs.level, turn)
            return asyncio.run(Supervisor(settings, directory, slots, admin, book).run())
        finally:
            book.close()
            if log is not None:
                log.close()


@contextlib.contextmanager
def _told_of(place: Path | str) -> Iterator[None]:
    """What can't be made there is a mistake of the set-up's. Raises SettingsError."""
    try:
        yield
    except OSError as error:
        wanted = "room for what workers share; TMPDIR can name another place"
        raise SettingsError(f"{place}: {error.strerror}; expected {wanted}") from None


@contextlib.contextmanager
def shared_directory(base: Path | None = None) -> Iterator[Path]:
    """A new directory for one gateway's processes, gone afterwards; so are those of gateways that were killed.

    Raises SettingsError where there can be none.
    """
    with _told_of(base or "TMPDIR"):
        base = base or Path(tempfile.gettempdir())
    for other in base.glob(f"{PREFIX}*/held"):
        with contextlib.suppress(OSError), other.open("rb+") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other.parent, ignore_errors=True)
    with _told_of(base):
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    try:
        with (directory / "new").open("wb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            # Not there before it is locked: nobody takes it for a dead one's.
            (directory / "new").rename(directory / "held")
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
