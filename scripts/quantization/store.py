"""The versions of a model under MODELS_DIR, and the two links that say which one is served.

    MODELS_DIR/<name>/<version>/     from the quantization job (manifest.json) or fetched as it is (source.json)
    MODELS_DIR/<name>/current        what profiles name; a relative link, so that it holds inside a container too
    MODELS_DIR/<name>/previous       what was served before, for `make revert`
    MODELS_DIR/<name>/.promote.lock  held (flock) by the promotion or revert at work

Only promotion writes the links, besides the fetch of a first version. A reader sees the old target or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.checks.envfile import read_env
from scripts.model_fetch_store import SOURCE, read_source
from scripts.quantization import QuantizeError
from scripts.quantization.manifest import MANIFEST, Manifest, read, sync_dir

ROOT = Path(__file__).parents[2]
CURRENT, PREVIOUS = "current", "previous"
LOCK = ".promote.lock"
GATE_LOCK = ".gate.lock"  # in MODELS_DIR itself: the gates of two models want the same card


@dataclass(frozen=True)
class Version:
    """One version directory. manifest: None for a fetched one; problem: why it can't be read, empty where it can."""

    name: str
    version: str
    path: Path
    current: bool
    previous: bool
    manifest: Manifest | None = None
    problem: str = ""


def models_dir(environ: Mapping[str, str]) -> Path:
    """MODELS_DIR as compose sees it: the environment, then .env, then ./models."""
    env_file = read_env(ROOT)
    said = environ.get("MODELS_DIR") or (env_file.values.get("MODELS_DIR", "") if env_file else "")
    return ROOT / Path(said or "models").expanduser()


def target(home: Path, link: str) -> str | None:
    """The version that a link names, whether or not it is there; None without the link. Raises QuantizeError."""
    path = home / link
    if not path.is_symlink():
        if path.exists():
            raise QuantizeError(f"{path} is a directory and no link: move it away, then again")
        return None
    named = path.readlink()
    if named.is_absolute() or len(named.parts) != 1:
        raise QuantizeError(f"{path} leads to {named}, out of {home}: a container sees nothing there; remove the link")
    return named.name


def point(home: Path, link: str, version: str | None) -> None:
    """Lets a link name a version, or removes it, in one step. Raises OSError; then it is as it was."""
    path = home / link
    if version is None:
        path.unlink(missing_ok=True)
    else:
        part = home / f".{link}.part"
        part.unlink(missing_ok=True)
        try:
            part.symlink_to(version)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
    sync_dir(home)


def is_version(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and ((path / MANIFEST).is_file() or (path / SOURCE).is_file())


def versions(models: Path, name: str) -> list[Version]:
    """All of one model, the newest last. Raises QuantizeError where there is no such model."""
    home = models / name
    if not name or Path(name).name != name or not home.is_dir():
        known = ", ".join(names(models)) or "none"
        raise QuantizeError(f"{models} holds no model {name!r}; there are: {known}" if name else f"NAME=... of {known}")
    current, previous = target(home, CURRENT), target(home, PREVIOUS)
    found = []
    for path in sorted(filter(is_version, home.iterdir()), key=_made):
        manifest, problem = None, ""
        if (path / MANIFEST).is_file():
            try:
                manifest = read(path)
            except QuantizeError as error:
                problem = str(error)
        elif read_source(path) is None:
            problem = f"{path / SOURCE} can't be read"
        found.append(Version(name, path.name, path, path.name == current, path.name == previous, manifest, problem))
    return found


def names(models: Path) -> list[str]:
    """Models with versions; a directory that is itself a model has none to choose from."""
    if not models.is_dir():
        return []
    return sorted(
        home.name
        for home in models.iterdir()
        if home.is_dir() and not home.name.startswith(".") and any(map(is_version, home.iterdir()))
    )


def _made(path: Path) -> tuple[int, str]:
    """By when its directory appeared: the manifest is rewritten by the gate, the weights' names stay."""
    written = [file.stat().st_mtime_ns for file in path.glob("*.safetensors")]
    return (max(written, default=0), path.name)


@contextlib.contextmanager
def alone(home: Path, lock: str = LOCK, doing: str = "promoting or reverting") -> Iterator[None]:
    """One at a time, here the promotion or revert of a model; a second one is told so at once, and may try again.

    Raises QuantizeError, OSError. The kernel lets go of the lock however its holder ends.
    """
    with (home / lock).open("a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or "another process"
            raise QuantizeError(f"{who} is {doing} {home.name}: wait for its end") from None
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield
