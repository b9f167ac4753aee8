"""Usage of each tenant out of the gateway's ledger (setting ledger.path), as CSV or JSON. Reads only.

    python -m scripts.usage --since 2030-01-01 --until 2030-01-31 --tenant app1 > usage.csv

Rows are per UTC day, tenant and model; both days are included. The gateway may be running: its last second is missing.
Without --ledger: the file that GATEWAY__LEDGER__PATH names, else data/usage.sqlite, else that of the container stack.

Exit codes: 0 done; 1 the ledger can't be read (one line on stderr says why); 2 wrong usage.
"""

import argparse
import contextlib
import csv
import datetime
import json
import os
import shutil
import sqlite3
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from gateway.ledger import COUNTS
from gateway.settings import ENV_PREFIX
from scripts import _volumes
from scripts._command import Parser
from scripts._compose import ROOT, Compose, ComposeError

PATH_VARIABLE = f"{ENV_PREFIX}LEDGER__PATH"
DEFAULT_PATH = Path("data/usage.sqlite")
COLUMNS = ("day", "tenant", "model", *COUNTS)
BUSY_S = 5.0

VOLUME, FILE = "gateway-data", "usage.sqlite"  # of compose.yaml

Row = tuple[str | int, ...]


class MissingError(Exception):
    """There is no ledger; the message says where one was looked for, and how to get one."""


def rows(path: Path, since: datetime.date | None, until: datetime.date | None, tenant: str | None) -> list[Row]:
    """In the order of day, tenant, model. Raises sqlite3.Error, FileNotFoundError."""
    if not path.is_file():
        raise FileNotFoundError(path)
    conditions, values = ["1"], []
    for condition, value in (("day >= ?", since), ("day <= ?", until), ("tenant = ?", tenant)):
        if value is not None:
            conditions.append(condition)
            values.append(str(value))
    query = f"SELECT {', '.join(COLUMNS)} FROM usage WHERE {' AND '.join(conditions)} ORDER BY day, tenant, model"  # noqa: S608
    connection = sqlite3.connect(path, timeout=BUSY_S)  # not mode=ro: a reader of a WAL file needs its index beside it
    try:
        connection.execute("PRAGMA query_only = 1")
        return connection.execute(query, values).fetchall()
    finally:
        connection.close()


@contextlib.contextmanager
def ledger(named: Path | None, environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Where to read. Raises MissingError where there is none, ComposeError, OSError."""
    path = named or Path(environ.get(PATH_VARIABLE) or DEFAULT_PATH)
    if path.is_file() or named or environ.get(PATH_VARIABLE) or not (ROOT / ".env").exists():
        if not path.is_file():
            raise MissingError(f"{path}: no such file: a gateway writes one where ledger.path is set (--ledger FILE)")
        yield path
        return
    (volume,) = _volumes.find(Compose(), [VOLUME])
    if not volume.there:
        raise MissingError(f"neither {path} nor a ledger of the stack: make up makes one")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / FILE
        with volume.reading("ledger") as stream, contextlib.suppress(tarfile.ReadError):  # Docker's own words say more
            _unpack(stream, copy)
        if not copy.is_file():
            raise MissingError(f"volume {volume.name} holds no ledger yet: it begins with the first request")
        print(f"usage: of the stack in containers (volume {volume.name})", file=sys.stderr)
        yield copy


def _unpack(stream: IO[bytes], copy: Path) -> None:
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            if member.name == FILE and (source := archive.extractfile(member)) is not None:
                with copy.open("wb") as target:
                    shutil.copyfileobj(source, target)


def write_csv(found: Sequence[Row], out: IO[str]) -> None:
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(found)


def _day(text: str) -> datetime.date:
    try:
        return datetime.datetime.strptime(text, "%Y-%m-%d").date()  # noqa: DTZ007 - a day of the ledger, in UTC as those are
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a day such as 2030-01-31") from None


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("usage", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ledger", type=Path, help="the gateway's file (its setting ledger.path)")
    parser.add_argument("--since", type=_day, metavar="DAY", help="first day, as 2030-01-31")
    parser.add_argument("--until", type=_day, metavar="DAY", help="last day, as 2030-01-31")
    parser.add_argument("--tenant", help="the name of a key")
    parser.add_argument("--json", action="store_true", help="a list of objects instead of CSV")
    chosen = parser.parse_args(arguments)
    if chosen.since and chosen.until and chosen.since > chosen.until:
        parser.error(f"--since {chosen.since} lies after --until {chosen.until}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments)
    try:
        with ledger(chosen.ledger) as path:
            found = rows(path, chosen.since, chosen.until, chosen.tenant)
    except sqlite3.Error as error:
        print(f"usage: {path}: {error}; expected the ledger of a gateway with ledger.path", file=sys.stderr)
        return 1
    except (MissingError, ComposeError) as error:
        print(f"usage: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"usage: {error.filename or chosen.ledger}: {error.strerror or error}", file=sys.stderr)
        return 1
    if chosen.json:
        print(json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in found], indent=2))
    else:
        write_csv(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
