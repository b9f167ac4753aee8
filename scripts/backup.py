"""Copies what is worth keeping into one file: keys and secrets, settings, the usage ledger, Prometheus's data.

    make backup [FILE=backups/NAME.tar]        python -m scripts.backup [FILE] [--no-prometheus] [--dry-run] [--json]

Works on a running stack and on a stopped one. Requests don't notice; Prometheus is away for a few seconds, so that its
data is of one piece. Models are not in it (they can be fetched or quantized again), nor Grafana's volume (dashboards
are files of the project). The file holds secrets: it is readable by its owner alone, and belongs where secrets belong.

Exit codes: 0 done, 1 not (one line says why, and nothing is left behind), 2 wrong usage, 130 or 143 interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gateway.wording import several
from scripts import _archive, _secrets, _volumes
from scripts._children import Terminated, raise_on_termination
from scripts._command import Parser
from scripts._compose import ROOT, Compose, ComposeError
from scripts._journal import JournalError, alone
from scripts.checks.envfile import read_env

FOLDER = "backups"
# What an operator edits; the rest of configs/ comes with the project's version.
SETTINGS = ("configs/gateway.yaml", "configs/slo.yaml", "configs/alertmanager", "configs/caddy")
READS = {"gateway-data": "ledger", "prometheus-data": "read"}


@dataclass(frozen=True)
class Plan:
    """`files`: name in the archive (below files/) -> where it lies."""

    target: Path
    files: Mapping[str, Path]
    volumes: Sequence[_volumes.Volume]
    absent: Sequence[str]


def environment() -> dict[str, str]:
    found = read_env(ROOT)
    return {**(found.values if found else {}), **os.environ}


def settings_files(environ: Mapping[str, str], root: Path = ROOT) -> dict[str, Path]:
    """.env, all secrets, the settings an operator edits and the engine profile in use."""
    secrets = root / Path(environ.get("SECRETS_DIR") or "secrets").expanduser()
    tops = {name: root / name for name in (".env", *SETTINGS)}
    if profile := environ.get("ENGINE_PROFILE"):
        tops[f"configs/engine/{profile}.yaml"] = root / f"configs/engine/{profile}.yaml"
    tops["secrets"] = secrets
    found: dict[str, Path] = {}
    for name, top in tops.items():
        if top.is_file():
            found[name] = top
        for path in sorted(top.rglob("*")) if top.is_dir() else ():
            if path.is_file() and not path.name.startswith("."):  # locks, and halves of files being written
                found[f"{name}/{path.relative_to(top).as_posix()}"] = path
    return found


def plan(compose: Compose, target: Path, prometheus: bool) -> Plan:
    """Raises ComposeError."""
    keys = [key for key in _archive.VOLUMES if prometheus or key != "prometheus-data"]
    volumes = _volumes.find(compose, keys)
    return Plan(
        target,
        settings_files(environment()),
        [volume for volume in volumes if volume.there],
        [volume.key for volume in volumes if not volume.there],
    )


@contextmanager
def still(compose: Compose, volume: _volumes.Volume) -> Iterator[None]:
    """Prometheus is stopped for the moment in which its files get second names; they are read after it runs again."""
    if volume.key != "prometheus-data":
        yield
        return
    running = any(found.service == "prometheus" and found.running for found in compose.containers())
    try:
        if running:
            compose.run("stop", "prometheus")
        volume.ask("link")
    finally:
        if running:
            compose.run("start", "prometheus")
    yield


def write(chosen: Plan, compose: Compose) -> None:
    """Whole, under its name, readable by its owner alone; or nothing. Raises OSError, ComposeError, TarError."""
    part = chosen.target.with_name(f".{chosen.target.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    for left in part.parent.glob(".vllm-stack-*.tar.part"):  # of one that was killed: we are alone here
        left.unlink()
    facts = {"made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "absent": list(chosen.absent)}
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            with _archive.Writer(file, facts) as archive:
                for name, path in chosen.files.items():
                    stat = path.stat()
                    with path.open("rb") as source:
                        archive.add(f"files/{name}", stat.st_size, stat.st_mode & 0o777, source)
                for volume in chosen.volumes:
                    with still(compose, volume), volume.reading(READS[volume.key]) as stream:
                        _copy(stream, f"volumes/{volume.key}/", archive)
            file.flush()
            os.fsync(file.fileno())
        part.replace(chosen.target)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()


def _copy(stream: IO[bytes], prefix: str, archive: _archive.Writer) -> None:
    with tarfile.open(fileobj=stream, mode="r|") as inner:
        for member in inner:
            source = inner.extractfile(member)
            if source is not None:
                archive.add(prefix + member.name, member.size, member.mode & 0o777, source)
    while stream.read(1 << 16):  # the padding behind the end, or the other side would see a broken pipe
        pass


def run(arguments: argparse.Namespace) -> int:
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    target = Path(arguments.file) if arguments.file else ROOT / FOLDER / f"vllm-stack-{stamp}.tar"
    if target.exists():
        print(f"backup: {target} is there already: name another file", file=sys.stderr)
        return 1
    compose = Compose()
    chosen = plan(compose, target, not arguments.no_prometheus)
    if arguments.dry_run:
        for name, path in chosen.files.items():
            print(f"{name}  {path}")
        print(f"volumes: {', '.join(volume.name for volume in chosen.volumes) or 'none'}; to {target}")
        return 0
    with alone():
        if chosen.volumes:
            _volumes.ensure_image(compose)
        write(chosen, compose)
    manifest = _archive.verify(target)  # what was written is read again: a backup that can't be restored is none
    entries = manifest["entries"]
    told = {"file": str(target), "bytes": target.stat().st_size, "members": len(entries), "absent": list(chosen.absent)}
    if arguments.json:
        print(json.dumps(told))
        return 0
    size = f"{target.stat().st_size / 1e6:.1f} MB"
    print(f"{target}: {several(int(str(told['members'])), 'file')}, {size}, read again and found whole")
    for key in chosen.absent:
        print(f"not in it: {key}, which this stack does not have yet")
    print("it holds your secrets; models and Grafana's volume are not in it. Back again: make restore FILE=...")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("backup", description="One file of what is worth keeping.")
    parser.add_argument("file", nargs="?", help=f"the file to make (default: {FOLDER}/vllm-stack-<time>.tar)")
    parser.add_argument(
        "--no-prometheus", action="store_true", help="without Prometheus's data, which is the most of it"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be copied")
    parser.add_argument("--json", action="store_true", help="what was made, as JSON")
    arguments = parser.parse_args(argv)
    try:
        return run(arguments)
    except (ComposeError, JournalError, _archive.ArchiveError, _secrets.SecretsError) as error:
        print(f"backup: {error}", file=sys.stderr)
    except tarfile.TarError as error:
        print(f"backup: a volume could not be read to its end ({error})", file=sys.stderr)
    except OSError as error:
        print(
            f"backup: {error.filename or arguments.file or FOLDER}: {error.strerror}; nothing was made", file=sys.stderr
        )
    except (KeyboardInterrupt, Terminated) as error:
        print("\nbackup: interrupted; nothing was made", file=sys.stderr)
        return 143 if isinstance(error, Terminated) else 130
    return 1


if __name__ == "__main__":
    raise_on_termination()
    sys.exit(main())
