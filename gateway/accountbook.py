"""Where the keys' accounts are kept: in this process, or in a file that all workers of one gateway map.

Key limits bind a key, not a worker, so with several workers every count has to be one count. Records are of fixed
size and only ever added; each worker has a column of its own for the requests it has in flight, so that those of a
worker that died can be struck out. A record lock of the kernel's, which dies with its holder, makes each step whole; it
costs some microseconds, and only keys with limits pay them. The monotonic clock is one for the whole machine.

Room on the disk is taken for ROOM_RECORDS at a time. Where there is none for a new key, that key is refused: counting
it in each worker by itself would give it its limits several times over.

    header:  records (u64)
    record:  name (64 bytes), then for requests and for tokens: per minute, level, at (f64), then u32 in flight a worker
"""

import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gateway.errors import UnavailableError
from gateway.limits import Allowance
from gateway.workers import Worker

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<Q")
_FIXED = struct.Struct("<64s6d")
ROOM_RECORDS = 4096  # half a megabyte


@dataclass(slots=True, eq=False)
class Account:
    """What a tenant with limits of its own has used. `in_flight` counts over all workers."""

    in_flight: int = 0
    requests: Allowance | None = None
    tokens: Allowance | None = None


class AccountBook(Protocol):
    """One account for each tenant."""

    @contextmanager
    def account(self, name: str) -> Iterator[Account]:
        """The tenant's account, made where there is none. What the block leaves in it stands; nobody else has it.

        Raises UnavailableError where none can be made.
        """

    def in_flight(self) -> int:
        """Requests in flight, of all tenants, that this process counted."""


class LocalBook:
    """For a gateway that is one process."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    @contextmanager
    def account(self, name: str) -> Iterator[Account]:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account()
        yield account

    def in_flight(self) -> int:
        assert all(account.in_flight >= 0 for account in self._accounts.values())
        return sum(account.in_flight for account in self._accounts.values())


class SharedBook:
    """A file of records. Every worker, and the parent, opens it for itself."""

    def __init__(self, path: Path, worker: Worker) -> None:
        self._worker = worker
        self._counts = struct.Struct(f"<{worker.of}I")
        self._size = _FIXED.size + self._counts.size
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._at: dict[str, int] = {}
        self._known = 0  # records looked at
        self._full_at: int | None = None  # bytes of the file when it could not grow and that was told
        with self._locked():
            if os.fstat(self._descriptor).st_size == 0:
                self._make_room(ROOM_RECORDS)
            self._map = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)

    def __len__(self) -> int:
        return int(_HEADER.unpack_from(self._map)[0])

    def close(self) -> None:
        self._map.close()
        os.close(self._descriptor)

    @contextmanager
    def account(self, name: str) -> Iterator[Account]:
        with self._locked():
            at = self._find(name)
            _, *figures = _FIXED.unpack_from(self._map, at)
            counts = list(self._counts.unpack_from(self._map, at + _FIXED.size))
            whole = sum(counts)
            account = Account(whole, _allowance(figures[:3]), _allowance(figures[3:]))
            try:
                yield account
            finally:
                counts[self._worker.number - 1] += account.in_flight - whole
                self._counts.pack_into(self._map, at + _FIXED.size, *counts)
                kept = (*_figures(account.requests), *_figures(account.tokens))
                _FIXED.pack_into(self._map, at, name.encode(), *kept)

    def in_flight(self) -> int:
        with self._locked():
            own = self._worker.number - 1
            return sum(self._counts.unpack_from(self._map, at + _FIXED.size)[own] for at in self._records())

    def strike_out(self, number: int) -> bool:
        """Worker `number` is gone, and with it what it had in flight. False, and nothing done, while somebody has the
        lock: who asks must not wait for one that was stopped with it, for it is the one who ends such workers."""
        try:
            with self._locked(fcntl.LOCK_NB):
                for at in self._records():
                    struct.pack_into("<I", self._map, at + _FIXED.size + 4 * (number - 1), 0)
        except (BlockingIOError, PermissionError):  # POSIX leaves open which
            return False
        return True

    @contextmanager
    def _locked(self, how: int = 0) -> Iterator[None]:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | how)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _records(self) -> range:
        self._cover(len(self))
        return range(_HEADER.size, _HEADER.size + len(self) * self._size, self._size)

    def _find(self, name: str) -> int:
        """Where a tenant's record is; added where there is none."""
        found = self._at.get(name)
        if found is not None:
            return found
        places = self._records()
        for at in places[self._known :]:
            self._at[_FIXED.unpack_from(self._map, at)[0].rstrip(b"\0").decode()] = at
        self._known = len(places)
        if name not in self._at:
            self._cover(self._known + 1)
            at = self._at[name] = _HEADER.size + self._known * self._size
            _FIXED.pack_into(self._map, at, name.encode(), *(0.0,) * 6)
            self._known += 1
            _HEADER.pack_into(self._map, 0, self._known)
        return self._at[name]

    def _cover(self, records: int) -> None:
        """Have at least so many records in the file and mapped: another worker may have made it longer."""
        needed = _HEADER.size + records * self._size
        if os.fstat(self._descriptor).st_size < needed:
            self._find_room(records + ROOM_RECORDS)
        if self._full_at is not None and os.fstat(self._descriptor).st_size > self._full_at:
            logger.warning("there is room for the accounts of more keys again")
            self._full_at = None
        if len(self._map) < needed:
            self._map.close()
            self._map = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)

    def _find_room(self, records: int) -> None:
        try:
            self._make_room(records)
        except OSError as error:
            if self._full_at is None:
                fields = {"keys": len(self), "error": error.strerror}
                logger.warning("no room for the accounts of more keys, which are refused", extra={"fields": fields})
            self._full_at = os.fstat(self._descriptor).st_size
            raise UnavailableError(
                "the gateway's disk is full: there is no room to count what this key may have by its limits",
                retry_after_s=5,
                code="gateway_disk_full",
            ) from None

    def _make_room(self, records: int) -> None:
        """On the disk as well: a write into a hole of a mapped file kills the process where the disk is full."""
        os.posix_fallocate(self._descriptor, 0, _HEADER.size + records * self._size)


def _allowance(figures: list[float]) -> Allowance | None:
    return Allowance(*figures) if figures[0] else None


def _figures(allowance: Allowance | None) -> tuple[float, float, float]:
    return (0.0, 0.0, 0.0) if allowance is None else (allowance.per_minute, allowance.level, allowance.at_s)
