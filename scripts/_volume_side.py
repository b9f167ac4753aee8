"""Runs in a container beside a volume: reads it for a backup, or writes what a backup holds. Standard library alone.

    python -c SOURCE link PATH      names for all files of PATH in PATH/.backup, so that the owner may go on meanwhile
    python -c SOURCE read PATH      PATH/.backup as a tar stream on stdout; removes it
    python -c SOURCE ledger PATH    PATH/usage.sqlite as a tar stream, consistent while the gateway writes
    python -c SOURCE write PATH     a tar stream on stdin takes the place of what is in PATH
    python -c SOURCE empty PATH     prints whether PATH holds anything: "yes" or "no"

Exit codes: 0 done, 1 not (one line on stderr says why).
"""

import os
import shutil
import sqlite3
import sys
import tarfile
from pathlib import Path

# Names of our own in a volume, and what only a running Prometheus has a use for.
LINKS, PART = ".backup", ".restore"
PASSED_OVER = {LINKS, PART, "lock", "queries.active", "lost+found"}
LEDGER = "usage.sqlite"


def link(top: Path) -> None:
    """Hard links: in a moment, and without room. Prometheus never changes a file that it has once closed."""
    shutil.rmtree(top / LINKS, ignore_errors=True)
    (top / LINKS).mkdir()
    for path in contents(top):
        if path.is_dir():
            shutil.copytree(path, top / LINKS / path.name, copy_function=os.link)
        else:
            os.link(path, top / LINKS / path.name)


def read(top: Path) -> None:
    try:
        _stream(top / LINKS)
    finally:
        shutil.rmtree(top / LINKS, ignore_errors=True)


def ledger(top: Path) -> None:
    (top / LINKS).mkdir(exist_ok=True)
    try:
        if (top / LEDGER).exists():
            source, target = sqlite3.connect(top / LEDGER), sqlite3.connect(top / LINKS / LEDGER)
            source.backup(target)
            target.close()
            source.close()
        _stream(top / LINKS)
    finally:
        shutil.rmtree(top / LINKS, ignore_errors=True)


def _stream(top: Path) -> None:
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        for path in sorted(top.rglob("*")):
            if path.is_file():
                archive.add(path, str(path.relative_to(top)), recursive=False)


def write(top: Path) -> None:
    """All of it beside first; only then does it take the place of what was there."""
    part = top / PART
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
            for member in archive:
                _extract(archive, member, part)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    for path in contents(top):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in part.iterdir():
        path.rename(top / path.name)
    part.rmdir()


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, part: Path) -> None:
    """Plain files below `part`, and nothing else: an older Python here has no filter that would see to it."""
    source, target = archive.extractfile(member), part / member.name
    if source is None or not member.isfile() or ".." in target.parts or not target.is_relative_to(part):
        raise tarfile.ExtractError(f"unexpected member {member.name!r}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        shutil.copyfileobj(source, file)
    target.chmod(member.mode & 0o777)


def contents(top: Path) -> list[Path]:
    return [path for path in sorted(top.iterdir()) if path.name not in PASSED_OVER]


def main(argv: list[str]) -> int:
    what, top = argv[0], Path(argv[1])
    try:
        if what == "empty":
            print("no" if contents(top) else "yes")
        else:
            {"link": link, "read": read, "ledger": ledger, "write": write}[what](top)
    except (OSError, sqlite3.Error, tarfile.TarError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
