"""Where a model's files come from: the hub, or a directory here. Both end in one partial directory."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from scripts.checks import Check, model
from scripts.model_fetch_rules import File, RefusedError, Request, choose, judge
from scripts.model_fetch_store import Held, Place, Source, digest, hold, take
from scripts.models_hub import Hub, Listing
from scripts.planner.numbers import gib

RESERVE = 256 << 20  # bytes that stay free: a full disk breaks more than this download
LARGE = 64 << 20  # bytes; from there on a file has a line of its own


class ModelError(Exception):
    """No model; the message is for people, its first line the cause."""


class Progress:
    """Lines, and on a terminal what has come and how fast, rewritten in place. Writes nothing where `quiet`."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._live = not quiet and sys.stdout.isatty()
        self._total = self._done = self._fresh = 0
        self._since = self._shown = time.monotonic()

    def line(self, text: str) -> None:
        if not self._quiet:
            print(f"{self._clear}  model: {text}", flush=True)

    def problem(self, text: str) -> None:
        if self._live:
            print(self._clear, end="", flush=True)
        print(f"model: {text}", file=sys.stderr)

    def expect(self, total: int, done: int) -> None:
        """How many bytes there are, and how many of them are there already."""
        self._total, self._done, self._fresh, self._since = total, done, 0, time.monotonic()

    def came(self, size: int) -> None:
        self._done += size
        self._fresh += size
        now = time.monotonic()
        if not self._live or now - self._shown < 0.2:
            return
        self._shown = now
        rate = self._fresh / max(now - self._since, 0.001)
        left_min = max(self._total - self._done, 0) / rate / 60
        text = f"{self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {rate / 1e6:.1f} MB/s, {left_min:.0f} min left"
        print(f"\r\033[K  model: {text[: shutil.get_terminal_size().columns - 10]}", end="", flush=True)

    @property
    def _clear(self) -> str:
        return "\r\033[K" if self._live else ""


class Origin(Protocol):
    """`bring` fills a directory and returns what it put there; `resumes`: half of it is worth keeping."""

    resumes: bool
    version: str
    files: Sequence[File]

    def bring(self, folder: Path) -> Mapping[str, Held]: ...

    def source(self, held: Mapping[str, Held]) -> Source: ...


class FromHub:
    """A repository at one commit. Raises RefusedError and HubError, at once for what its listing tells."""

    resumes = True

    def __init__(self, hub: Hub, request: Request, say: Progress) -> None:
        self._hub, self._request, self._say = hub, request, say
        self._listing: Listing = hub.list(request)
        self.files: Sequence[File] = choose(self._listing.files, request.repo)
        self.version = self._listing.commit[:12]
        say.line(f"{request.repo} at commit {self.version}, licence {self._listing.licence}")

    def bring(self, folder: Path) -> Mapping[str, Held]:
        """The small files first: what they say decides whether the weights are asked for."""
        done = present(folder, self.files)
        self._say.expect(sum(file.size for file in self.files), done)
        if done:
            self._say.line(f"{gib(done)} came in an earlier run")
        held: dict[str, Held] = {}
        weights = [file for file in self.files if file.name.endswith(".safetensors")]
        for file in (file for file in self.files if file not in weights):
            held[file.name] = self._one(file, folder)
        judge(folder, [file.name for file in self.files])
        for file in weights:
            held[file.name] = self._one(file, folder)
        return held

    def _one(self, file: File, folder: Path) -> Held:
        since = time.monotonic()
        found = Held(file.size, self._hub.download(self._listing, self._request, file, folder))
        if file.size >= LARGE:
            self._say.line(f"{file.name}: {gib(file.size)}, checksum right, {time.monotonic() - since:.0f} s")
        return found

    def source(self, held: Mapping[str, Held]) -> Source:
        return Source(
            self._request.repo, self._request.revision or "main", self._listing.commit, self._listing.licence, held
        )


class FromDirectory:
    """A model that lies here already; checked and read before anything is made. Raises RefusedError, ModelError."""

    resumes = False

    def __init__(self, folder: Path, say: Progress) -> None:
        self._folder = folder
        listed = [File(path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file()]
        self.files: Sequence[File] = choose(listed, str(folder))
        judge(folder, [file.name for file in self.files])
        complete(folder)
        say.line(f"reads {gib(sum(file.size for file in self.files))} for the checksums")
        self._held = {file.name: hold(folder / file.name) for file in self.files}
        self.version = digest(self._held)

    def bring(self, folder: Path) -> Mapping[str, Held]:
        for name in self._held:
            take(self._folder / name, folder / name)
        return self._held

    def source(self, held: Mapping[str, Held]) -> Source:
        return Source(str(self._folder), "local", "local", "not stated", held)


def present(folder: Path, files: Sequence[File]) -> int:
    """Bytes of the files that lie there from an earlier run, whole or begun."""
    lies = {path.name: path.stat().st_size for path in folder.iterdir()} if folder.is_dir() else {}
    done = 0
    for file in files:
        pieces = [size for name, size in lies.items() if name == file.name or name.startswith(f".{file.name}.")]
        done += min(max(pieces, default=0), file.size)
    return done


def check_disk(place: Place, origin: Origin) -> None:
    """Raises ModelError where the rest of it has no room."""
    size = sum(file.size for file in origin.files)
    need = size - present(place.partial(origin.version), origin.files) + RESERVE
    there = place.root
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < need:
        raise ModelError(
            f"{gib(need)} are needed on the disk of {place.root}, {gib(free)} are free: make room, or set MODELS_DIR"
        )


def complete(folder: Path) -> list[Check]:
    """The doctor's checks of a model's files. Raises ModelError for the first that fails."""
    found = model.files(folder)
    if bad := next((check for check in found if check.status == "fail"), None):
        raise ModelError(f"{bad.found} (expected: {bad.expected})")
    return found


def install(place: Place, origin: Origin) -> list[Check]:
    """The origin's version, whole in its place; returns what the checks said. Raises what its parts raise.

    After a refusal nothing is left; after an interruption what came, where the next run can go on from it.
    """
    part = place.partial(origin.version)
    check_disk(place, origin)
    if not origin.resumes:
        shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True, exist_ok=True)
    try:
        held = origin.bring(part)
        for path in part.iterdir():
            if path.name not in held:
                path.unlink()
        found = complete(part)
        place.put(origin.version, origin.source(held))
    except BaseException as error:
        if not origin.resumes or isinstance(error, (RefusedError, ModelError)):
            shutil.rmtree(part, ignore_errors=True)
        raise
    return found
