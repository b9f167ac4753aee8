"""Which engines there are, where that changes while the gateway runs: from files, and from the addresses behind names.

Each source is looked at every interval_s by a task of its own. What a source said last stands until it says something
else: a file that can't be used, or a name that can't be resolved, takes no engine away. It is counted at every change
or look, and logged once.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from gateway.metrics import Metrics
from gateway.settings import Settings
from gateway.targets import TargetsError, read_targets

logger = logging.getLogger(__name__)

FIRST_LOOK_S = 2.0  # the start waits no longer for names to be resolved

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve(host: str, port: int) -> Sequence[str]:
    """Every A and AAAA record as the system sees them. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class _Source:
    """One place where engines are named. `look` returns their base URLs, None where nothing changed; raises
    TargetsError."""

    kind: str
    name: str
    urls: tuple[str, ...] = ()
    problem: str | None = None

    async def look(self) -> tuple[str, ...] | None:
        raise NotImplementedError


class _File(_Source):
    kind = "file"

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._stamp: tuple[int, ...] | None = ()

    async def look(self) -> tuple[str, ...] | None:
        stamp = self._stat()
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        return await asyncio.to_thread(read_targets, self._path)  # YAML of a thousand engines takes its time

    def _stat(self) -> tuple[int, ...] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_size


@dataclass
class _Name(_Source):
    name: str
    resolve: Resolve
    kind = "dns"

    async def look(self) -> tuple[str, ...] | None:
        split = urlsplit(self.name)
        port = split.port or 80
        try:
            addresses = await self.resolve(split.hostname or "", port)
            # IPv4 first, then by number: an order of the resolver's own would say nothing, and change with each look.
            known = sorted({ipaddress.ip_address(address) for address in addresses}, key=lambda a: (a.version, int(a)))
        except (OSError, ValueError) as error:
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise TargetsError(f"{self.name}: {text}") from None
        if not known:
            raise TargetsError(f"{self.name}: no address")
        return tuple(f"http://{f'[{a}]' if a.version == 6 else a}:{port}" for a in known)


class Discovery:
    """Owner of the sources. `async with` it; `publish` gets every list of base URLs that is another than before."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        publish: Callable[[Sequence[str]], None],
        resolve: Resolve = resolve,
    ) -> None:
        chosen = settings.discovery
        self._static = settings.static_engines
        self._interval_s = chosen.interval_s
        self._metrics = metrics
        self._publish = publish
        self.sources: list[_Source] = [
            *(_File(path) for path in chosen.files),
            *(_Name(name, resolve) for name in chosen.dns),
        ]
        self._tasks: list[asyncio.Task[None]] = []
        for source in self.sources:
            metrics.discovery_failures.labels(source.kind)
        metrics.discovery_bad.set_function(lambda: sum(source.problem is not None for source in self.sources))

    async def __aenter__(self) -> Self:
        firsts = []
        for source in self.sources:
            first = asyncio.Event()
            firsts.append(asyncio.ensure_future(first.wait()))
            self._tasks.append(asyncio.create_task(self._follow(source, first), name=f"discovery {source.name}"))
        if firsts:
            _, late = await asyncio.wait(firsts, timeout=FIRST_LOOK_S)
            for wait in late:
                wait.cancel()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def status(self) -> list[dict[str, object]]:
        """For /status."""
        return [
            {"kind": source.kind, "source": source.name, "engines": list(source.urls), "problem": source.problem}
            for source in self.sources
        ]

    async def _follow(self, source: _Source, first: asyncio.Event) -> None:
        while True:
            try:
                await self._look(source)
            except Exception:  # a bug must not end the following: the list would stay as it is for good
                self._metrics.discovery_failures.labels(source.kind).inc()
                logger.exception("looking for engines failed", extra={"fields": {"source": source.name}})
            first.set()
            await asyncio.sleep(self._interval_s)

    async def _look(self, source: _Source) -> None:
        try:
            urls = await source.look()
        except TargetsError as error:
            self._metrics.discovery_failures.labels(source.kind).inc()
            if str(error) != source.problem:
                source.problem = str(error)
                fields = {"kind": source.kind, "why": source.problem, "kept": len(source.urls)}
                logger.error("engines can't be looked up, the old ones stay", extra={"fields": fields})  # noqa: TRY400
            return
        if urls is None:
            return
        source.problem = None
        if urls != source.urls:
            source.urls = urls
            fields = {"kind": source.kind, "source": source.name, "engines": len(urls)}
            logger.info("engines looked up", extra={"fields": fields})
            everybody = dict.fromkeys(self._static)
            for other in self.sources:
                everybody.update(dict.fromkeys(other.urls))
            self._publish(list(everybody))
