"""Usage of each tenant out of the gateway's ledger (setting ledger.path), as CSV or JSON. Reads only.

    python -m scripts.usage --since 2030-01-01 --until 2030-01-31 --tenant app1 > usage.csv

Rows are per UTC day, tenant and model; both days are included. The gateway may be running: its last second is missing.

Exit codes: 0 done; 1 the ledger can't be read (one line on stderr says why); 2 wrong usage.
"""

import argparse
import csv
import datetime
import json
import os
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from gateway.ledger import COUNTS
from gateway.settings import ENV_PREFIX
from scripts._command import Parser

PATH_VARIABLE = f"{ENV_PREFIX}LEDGER__PATH"
DEFAULT_PATH = Path("data/usage.sqlite")
COLUMNS = ("day", "tenant", "model", *COUNTS)
BUSY_S = 5.0

Row = tuple[str | int, ...]


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
    default = Path(os.environ.get(PATH_VARIABLE) or DEFAULT_PATH)
    parser.add_argument("--ledger", type=Path, default=default, help=f"default: {PATH_VARIABLE}, else {DEFAULT_PATH}")
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
        found = rows(chosen.ledger, chosen.since, chosen.until, chosen.tenant)
    except FileNotFoundError:
        print(
            f"usage: {chosen.ledger}: no such file; expected the ledger of a gateway with ledger.path", file=sys.stderr
        )
        return 1
    except sqlite3.Error as error:
        print(f"usage: {chosen.ledger}: {error}; expected the ledger of a gateway with ledger.path", file=sys.stderr)
        return 1
    if chosen.json:
        print(json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in found], indent=2))
    else:
        write_csv(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
