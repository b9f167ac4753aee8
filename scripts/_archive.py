"""One backup as a file: a plain tar whose last member, manifest.json, names every other one with its size and SHA-256.

    files/.env, files/secrets/..., files/configs/...      as they lie in the project's directory
    volumes/gateway-data/..., volumes/prometheus-data/... as they lie in the stack's volumes

Written in one pass, so the disk needs room for it once. A copy that was cut off has no manifest, and is refused.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, Any, Self

FORMAT = "vllm-stack backup 1"
MANIFEST = "manifest.json"
VOLUMES = ("gateway-data", "prometheus-data")
_BLOCK = 1 << 20
_MAX_MANIFEST = 256 << 20


class ArchiveError(Exception):
    """Not a whole backup of this stack; the message is one line."""


class _Hashing(io.RawIOBase):
    """What passes through, counted and hashed."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source, self.hash, self.size = source, hashlib.sha256(), 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        block = self._source.read(size)
        self.hash.update(block)
        self.size += len(block)
        return block


@dataclass
class Writer:
    """`with Writer(file, facts) as archive:` adds members; the manifest is written when it ends well."""

    file: IO[bytes]
    facts: Mapping[str, Any]
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self._tar = tarfile.open(fileobj=self.file, mode="w", format=tarfile.PAX_FORMAT)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            text = json.dumps({"format": FORMAT, **self.facts, "entries": self.entries}, indent=1).encode()
            self._member(MANIFEST, len(text), 0o600, io.BytesIO(text))
            self._tar.close()

    def add(self, name: str, size: int, mode: int, source: IO[bytes]) -> None:
        """Raises OSError where the disk is full, tarfile's errors where the source is shorter than it said."""
        hashing = _Hashing(source)
        self._member(name, size, mode, hashing)
        self.entries[name] = {"bytes": size, "sha256": hashing.hash.hexdigest(), "mode": mode}

    def _member(self, name: str, size: int, mode: int, source: Any) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode = size, mode
        self._tar.addfile(info, source)


def verify(path: Path) -> Mapping[str, Any]:
    """The manifest of a whole backup. Reads all of it. Raises ArchiveError, OSError."""
    seen: dict[str, dict[str, Any]] = {}
    manifest: Mapping[str, Any] | None = None
    try:
        with tarfile.open(path, mode="r|") as archive:
            for member in archive:
                file = archive.extractfile(member)
                if file is None or not _allowed(member.name):
                    raise ArchiveError(f"{path} is no backup of this stack: it holds {member.name!r}")
                if member.name == MANIFEST:
                    manifest = json.loads(file.read(_MAX_MANIFEST))
                    continue
                hashing = _Hashing(file)
                while hashing.read(_BLOCK):
                    pass
                seen[member.name] = {"bytes": hashing.size, "sha256": hashing.hash.hexdigest(), "mode": member.mode}
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise ArchiveError(f"{path} is damaged, or no backup: {error}") from error
    if manifest is None:
        raise ArchiveError(f"{path} is damaged: its end, with the manifest, is missing")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ArchiveError(f"{path} is no backup of this stack: expected the format {FORMAT!r}")
    entries = manifest.get("entries") or {}
    for name in sorted(set(entries) | set(seen)):
        if entries.get(name) != seen.get(name):
            raise ArchiveError(f"{path} is damaged: {name} is not what its manifest says")
    return manifest


def _allowed(name: str) -> bool:
    parts = PurePosixPath(name).parts
    if name == MANIFEST:
        return True
    if ".." in parts or name.startswith("/") or len(parts) < 2:
        return False
    if parts[0] == "volumes":
        return len(parts) > 2 and parts[1] in VOLUMES
    return parts[0] == "files" and (parts[1] == ".env" or (len(parts) > 2 and parts[1] in ("secrets", "configs")))


def members(path: Path, prefix: str) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """The members below a prefix, named without it. Of an archive that was verified."""
    with tarfile.open(path, mode="r|") as archive:
        for member in archive:
            file = archive.extractfile(member)
            if member.name.startswith(prefix) and file is not None:
                member.name = member.name.removeprefix(prefix)
                yield member, file
