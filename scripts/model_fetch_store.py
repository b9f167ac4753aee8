"""Where a fetched model lies and how it gets there: whole or not at all.

    MODELS_DIR/<name>/<version>/            the files, and source.json, which says where each came from
    MODELS_DIR/<name>/current, previous     what profiles name, and what was served before: links to a version
    MODELS_DIR/<name>/.<version>.partial/   a run at work, or what an interrupted one left; never served
    MODELS_DIR/<name>/.lock                 held (flock) by the run at work

The quantization job fills the same tree; its versions hold a manifest.json, and `make promote` moves their link.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SOURCE = "source.json"
_QUANTIZED = "manifest.json"
CURRENT, PREVIOUS = "current", "previous"


class StoreError(Exception):
    """The place is not usable; the message is one line with the way out."""


@dataclass(frozen=True)
class Held:
    """One file of a version."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """Where a version came from. model: org/model or a directory; revision: the commit, or "local".

    requested: the branch, tag or commit that was asked for; "main" where none was.
    """

    model: str
    requested: str
    revision: str
    licence: str
    files: Mapping[str, Held]


@dataclass(frozen=True)
class Place:
    """A model's place below MODELS_DIR. Nothing is made by looking."""

    root: Path
    name: str

    @property
    def home(self) -> Path:
        return self.root / self.name

    @property
    def current(self) -> Path:
        return self.home / CURRENT

    def version(self, version: str) -> Path:
        return self.home / version

    def partial(self, version: str) -> Path:
        return self.home / f".{version}.partial"

    def check(self) -> None:
        """Raises StoreError where something else stands in the way."""
        if (self.home / "config.json").exists():
            raise StoreError(f"{self.home} is itself a model, without versions: choose another name (AS=...)")
        if self.current.exists() and not self.current.is_symlink():
            raise StoreError(f"{self.current} is no link: move it away, then again")

    def served(self) -> str | None:
        """The version that `current` leads to; None where it leads nowhere."""
        return self.current.resolve().name if self.current.is_dir() else None

    def promoted(self) -> bool:
        """Whether `current` was chosen by the quantization job's gate, which a download must not undo."""
        return (self.current / _QUANTIZED).is_file() and not (self.current / SOURCE).is_file()

    @contextlib.contextmanager
    def alone(self, wait: Callable[[], None]) -> Iterator[None]:
        """One run at a time; a second one calls `wait`, then waits. A home that stays empty goes with the lock."""
        made = not self.root.exists()
        with self._locked(wait):
            try:
                yield
            finally:
                self._tidy(made)

    @contextlib.contextmanager
    def _locked(self, wait: Callable[[], None]) -> Iterator[None]:
        lock = self.home / ".lock"
        while True:
            for folder in (self.root, self.home):
                if not folder.exists():
                    folder.mkdir(parents=True, exist_ok=True)
                    folder.chmod(0o755)  # whatever the umask: a container passes through as another user
            with lock.open("w", encoding="utf-8") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    wait()
                    fcntl.flock(file, fcntl.LOCK_EX)
                if _same(lock, file.fileno()):  # else its holder took the home along
                    yield
                    return

    def put(self, version: str, source: Source) -> None:
        """The partial directory becomes the version. Raises OSError."""
        part = self.partial(version)
        _write(part / SOURCE, json.dumps(asdict(source), indent=1) + "\n")
        for path in part.iterdir():
            if path.stat().st_mode & 0o444 != 0o444:  # a linked one is, and its mode is the original's too
                path.chmod(0o644)  # a container reads it as another user
        part.chmod(0o755)
        sync(part)
        if self.version(version).exists():  # damaged, or it would not have come to this
            shutil.rmtree(self.version(version))
        part.rename(self.version(version))
        sync(self.home)

    def serve(self, version: str) -> None:
        """Moves `current`; what it led to becomes `previous`, for `make revert`. Raises OSError.

        A reader sees the old version or the new one; whoever is killed in between still has a way back.
        """
        if (served := self.served()) is not None:
            self._point(PREVIOUS, served)
        self._point(CURRENT, version)

    def _point(self, link: str, version: str) -> None:
        part = self.home / f".{link}.part"
        part.unlink(missing_ok=True)
        part.symlink_to(version)
        part.replace(self.home / link)
        sync(self.home)

    def _tidy(self, made: bool) -> None:
        for path in self.home.glob(".*.partial"):
            with contextlib.suppress(OSError):
                path.rmdir()  # only an empty one
        if {path.name for path in self.home.iterdir()} <= {".lock"}:
            shutil.rmtree(self.home, ignore_errors=True)
            if made:
                with contextlib.suppress(OSError):
                    self.root.rmdir()


def read_source(directory: Path) -> Source | None:
    """What source.json says; None where there is none that can be read."""
    try:
        found: dict[str, Any] = json.loads((directory / SOURCE).read_text(encoding="utf-8"))
        files = {name: Held(int(held["bytes"]), str(held["sha256"])) for name, held in found.pop("files").items()}
        return Source(**found, files=files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def whole(directory: Path, *, hashes: bool = False) -> bool:
    """Every file of source.json is there in its length, with `hashes` every byte of it."""
    source = read_source(directory)
    if source is None:
        return False
    for name, held in source.files.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != held.bytes:
            return False
        if hashes and hold(path) != held:
            return False
    return True


def hold(path: Path) -> Held:
    with path.open("rb") as file:
        return Held(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def digest(files: Mapping[str, Held]) -> str:
    """A version's name from what it holds; equal files give equal names."""
    text = json.dumps({name: held.sha256 for name, held in sorted(files.items())})
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def take(source: Path, target: Path) -> None:
    """A second name for the same bytes where that can be, else a copy that is on the disk when this returns.

    A container sees nothing outside MODELS_DIR, so no symbolic link; and reads as another user, so what only its owner
    may read is copied.
    """
    real = source.resolve()
    target.unlink(missing_ok=True)
    if real.stat().st_mode & 0o444 == 0o444:
        with contextlib.suppress(OSError):
            os.link(real, target)
            return
    shutil.copyfile(real, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _same(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(directory: Path) -> None:
    """Makes renames and new names in it survive a power cut."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
