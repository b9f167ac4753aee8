"""Puts a backup back: keys and secrets, settings, the usage ledger, Prometheus's data.

    make restore FILE=backups/NAME.tar        python -m scripts.restore FILE [--replace] [--dry-run]

All of the file is read first, and refused if one byte of it is not what its manifest says. A running stack is refused;
so is one that has secrets or data of its own, unless --replace says that they may go. What files it replaces are kept
in .stack/replaced-<time>/. Run again after an interruption, it begins anew and ends the same.

Exit codes: 0 done, 1 not (one line says why), 2 wrong usage, 130 or 143 interrupted (run it again).
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.wording import several
from scripts import _archive, _journal, _secrets, _volumes
from scripts._archive import ArchiveError
from scripts._children import Terminated, raise_on_termination
from scripts._command import Parser
from scripts._compose import ROOT, Compose, ComposeError
from scripts.backup import environment

# The service whose first start makes the volume, with the owner that its image gives it.
MAKERS = {"gateway-data": "gateway", "prometheus-data": "prometheus"}


class RestoreError(Exception):
    """It can't be put back here; the message is one line."""


@dataclass(frozen=True)
class Plan:
    """`files`: name below files/ -> where it goes. `volumes`: their keys in compose.yaml."""

    files: Mapping[str, Path]
    volumes: Sequence[str]


def plan(manifest: Mapping[str, Any], environ: Mapping[str, str], root: Path = ROOT) -> Plan:
    secrets = root / Path(environ.get("SECRETS_DIR") or "secrets").expanduser()
    files = {}
    for name in manifest["entries"]:
        if name.startswith("files/"):
            short = name.removeprefix("files/")
            top, _, rest = short.partition("/")
            files[short] = secrets / rest if top == "secrets" else root / short
    held = {name.split("/")[1] for name in manifest["entries"] if name.startswith("volumes/")}
    return Plan(files, [key for key in _archive.VOLUMES if key in held])


def in_the_way(chosen: Plan, volumes: Sequence[_volumes.Volume]) -> list[str]:
    """What of its own this stack would lose: secrets, .env, data. Shipped settings are the project's, and are kept."""
    own = [name for name, path in chosen.files.items() if path.exists() and not name.startswith("configs/")]
    return own + [f"volume {volume.name}" for volume in volumes if volume.there and volume.ask("empty") == "no"]


def put_files(path: Path, chosen: Plan, aside: Path) -> None:
    """Each whole or not at all; what was there is kept in `aside`. Raises OSError."""
    for member, source in _archive.members(path, "files/"):
        target = chosen.files[member.name]
        _make_folder(target.parent, member.name)
        if target.exists():
            kept = aside / member.name
            kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            kept.write_bytes(target.read_bytes())
            kept.chmod(0o600)
        part = target.with_name(f".{target.name}.part")
        part.write_bytes(source.read())
        part.chmod(member.mode & 0o777)
        part.replace(target)


def _make_folder(path: Path, member: str) -> None:
    """Those of secrets as scripts/_secrets.py makes them."""
    if member.startswith("secrets/"):
        private = path.name == "private"
        _secrets.make_folder(path.parent if private else path)
        if private and not path.is_dir():
            path.mkdir(mode=_secrets.PRIVATE_MODE)
    path.mkdir(parents=True, exist_ok=True)


def put_volume(path: Path, volume: _volumes.Volume) -> None:
    """Raises ComposeError, OSError."""
    with volume.writing() as stdin, tarfile.open(fileobj=stdin, mode="w|") as inner:
        for member, source in _archive.members(path, f"volumes/{volume.key}/"):
            inner.addfile(member, source)


def make_volumes(compose: Compose, keys: Sequence[str]) -> list[_volumes.Volume]:
    """There, and owned by whom they serve: compose makes them with their services, which are not started."""
    services = [MAKERS[key] for key in keys]
    if services:
        compose.run("up", "--no-start", "--no-deps", *services)
        compose.run("rm", "--force", *services)
    return _volumes.find(compose, keys)


def run(arguments: argparse.Namespace) -> None:
    """Raises RestoreError, ArchiveError, ComposeError, JournalError, OSError."""
    path = Path(arguments.file)
    manifest = _archive.verify(path)
    print(
        f"{path}: whole, made {manifest.get('made', 'at an unknown time')}, {several(len(manifest['entries']), 'file')}"
    )
    chosen = plan(manifest, environment())
    compose = Compose(env={"ENGINE_PROFILE": os.environ.get("ENGINE_PROFILE") or "any"} if not _env_there() else {})
    with _journal.alone():
        running = sorted(found.service for found in compose.containers() if found.running)
        if running:
            raise RestoreError(f"the stack is running ({', '.join(running)}): make down first")
        if chosen.volumes:
            _volumes.ensure_image(compose)
        lost = in_the_way(chosen, _volumes.find(compose, chosen.volumes))
        if lost and not arguments.replace:
            raise RestoreError(f"this would replace {_few(lost)}: say ARGS=--replace if it may")
        if arguments.dry_run:
            print(f"would put back {_few(list(chosen.files))}, and the volumes {', '.join(chosen.volumes) or '(none)'}")
            return
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        aside = _journal.FOLDER / f"replaced-{stamp}"
        put_files(path, chosen, aside)
        for volume in make_volumes(compose, chosen.volumes):
            put_volume(path, volume)
            print(f"volume {volume.name}: put back")
    print(f"put back {several(len(chosen.files), 'file')}; make up (or make up-cpu) starts with them")
    if aside.exists():
        print(f"what they replaced is in {aside}")


def _env_there() -> bool:
    return (ROOT / ".env").exists()


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def main(argv: Sequence[str] | None = None) -> int:
    example = "make restore FILE=backups/today.tar"
    parser = Parser("restore", "name a backup", example, description="Put a backup back.")
    parser.add_argument("file", help="what `make backup` made")
    parser.add_argument("--replace", action="store_true", help="secrets and data of this stack may go")
    parser.add_argument("--dry-run", action="store_true", help="read and check the file, change nothing")
    arguments = parser.parse_args(argv)
    try:
        run(arguments)
    except (RestoreError, ArchiveError, ComposeError, _journal.JournalError) as error:
        print(f"restore: {error}", file=sys.stderr)
    except OSError as error:
        print(f"restore: {error.filename or arguments.file}: {error.strerror}", file=sys.stderr)
    except (KeyboardInterrupt, Terminated) as error:
        print("\nrestore: interrupted; run it again before the stack is started", file=sys.stderr)
        return 143 if isinstance(error, Terminated) else 130
    else:
        return 0
    return 1


if __name__ == "__main__":
    raise_on_termination()
    sys.exit(main())
