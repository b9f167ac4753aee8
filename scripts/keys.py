"""API keys of the gateway: add, list, revoke, rotate, expire. The gateway takes changes over by itself within a second.

    python -m scripts.keys add app1 --requests-per-minute 600
    python -m scripts.keys rotate app1 --grace 1d

The file holds digests only; a key is printed once, to stdout and alone, when it is made. Two writers wait for each
other, and whoever reads sees the old file or the new one, whole.

Exit codes: 0 done; 1 refused, nothing was changed (one line on stderr says why); 2 wrong usage.
"""

import argparse
import contextlib
import datetime
import fcntl
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.keys import Key, KeysFile, KeysFileError, new_key, parse_keys
from gateway.settings import ENV_PREFIX
from gateway.wording import expectation, several
from scripts import _secrets
from scripts._command import Parser

EXAMPLE = "make keys NAME=app1 (adds one), or ARGS=list, ARGS='rotate app1', ARGS='revoke app1'"
DEFAULT_FILE = Path("secrets/keys.json")
FILE_VARIABLE = f"{ENV_PREFIX}AUTH__KEYS_FILE"
# The gateway's user is seldom ours, and digests of 256 random bits are no secret.
FILE_MODE = 0o644
ID_DIGITS = 12
_LIMITS = ("group", "priority", "weight", "requests_per_minute", "tokens_per_minute", "concurrent")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class RefusedError(Exception):
    """What was asked can't be done; the message is for people."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a command comes to: the keys as they shall be, what to tell, and the new key if one was made."""

    keys: tuple[Key, ...]
    told: str
    touched: tuple[Key, ...]
    secret: str | None = None


def plan(arguments: argparse.Namespace, keys: Sequence[Key], now: datetime.datetime) -> Plan:
    """Decide; nothing is read or written here. Raises RefusedError."""
    named = [key for key in keys if key.name == arguments.name]
    if arguments.command == "add":
        if any(_valid(key, now) for key in named):
            raise RefusedError(f"{arguments.name} exists; `rotate` makes a new key for it, `revoke` ends it")
        others = tuple(key for key in keys if key.name != arguments.name)
        secret, entry = _made(arguments.name, now, _fields(arguments))
        return Plan((*others, entry), f"added {arguments.name}", (entry,), secret)
    if not named:
        raise RefusedError(f"there is no key of that name: {arguments.name}; `list` shows all")
    if arguments.command == "rotate":
        return _rotated(arguments, keys, named, now)
    chosen = [key for key in named if arguments.id is None or _id(key) == arguments.id]
    if not chosen:
        raise RefusedError(f"{arguments.name} has no key with the id {arguments.id}; `list` shows all")
    if arguments.command == "revoke":
        left = tuple(key for key in keys if key not in chosen)
        return Plan(left, f"revoked {arguments.name} ({len(chosen)} of {several(len(named), 'key')})", tuple(chosen))
    changed = {key: key.model_copy(update={"expires": arguments.when}) for key in chosen}
    told = (
        f"{arguments.name} expires {arguments.when.isoformat()}" if arguments.when else f"{arguments.name} stays valid"
    )
    return Plan(tuple(changed.get(key, key) for key in keys), told, tuple(changed.values()))


def _rotated(arguments: argparse.Namespace, keys: Sequence[Key], named: Sequence[Key], now: datetime.datetime) -> Plan:
    """A new key with the old one's rights; the old one stays valid for the grace period, and no longer than it was."""
    newest = max(named, key=lambda key: key.created or now)
    rights = newest.model_dump(exclude={"name", "sha256", "created", "expires"})
    secret, entry = _made(arguments.name, now, {**rights, "expires": arguments.expires})
    end = now + arguments.grace
    kept = []
    for key in keys:
        if key.name != arguments.name:
            kept.append(key)
        elif _valid(key, now):
            kept.append(key.model_copy(update={"expires": min(end, key.expires or end)}))
    told = f"rotated {arguments.name}; the old key is valid until {end.isoformat(timespec='seconds')}"
    return Plan((*kept, entry), told, (entry,), secret)


def _made(name: str, now: datetime.datetime, fields: dict[str, Any]) -> tuple[str, Key]:
    secret, digest = new_key()
    return secret, Key(name=name, sha256=digest, created=now, **fields)


def _fields(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in _LIMITS if getattr(arguments, name) is not None}
    return {**given, "expires": arguments.expires, "prompt_tokens_details": arguments.prompt_tokens_details}


def _valid(key: Key, now: datetime.datetime) -> bool:
    return key.expires is None or key.expires > now


def _id(key: Key) -> str:
    return key.sha256[:ID_DIGITS]


# -- the file ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One writer at a time, over a file beside the keys file: that one itself is replaced by each write."""
    with (path.parent / f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read(path: Path) -> tuple[Key, ...]:
    """The keys of the file, none where it does not exist yet. Raises KeysFileError, OSError."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return ()
    return parse_keys(content, str(path)).keys


def write(path: Path, keys: tuple[Key, ...]) -> None:
    """Replace the file whole, keeping its mode and owner where it has one."""
    document = KeysFile(keys=keys).model_dump(mode="json", exclude_defaults=True)
    content = json.dumps(document, indent=2) + "\n"
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with open(descriptor, "w", encoding="ascii") as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(content)
            _take_after(path, descriptor)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _take_after(path: Path, descriptor: int) -> None:
    try:
        old = path.stat()
    except FileNotFoundError:
        os.fchmod(descriptor, FILE_MODE)
        return
    os.fchmod(descriptor, old.st_mode & 0o777)
    if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
        os.fchown(descriptor, old.st_uid, old.st_gid)


# -- people ------------------------------------------------------------------------------------------------------------


def _shown(key: Key, now: datetime.datetime) -> dict[str, Any]:
    shown = key.model_dump(mode="json", exclude={"sha256"}, exclude_defaults=True)
    return {"id": _id(key), "state": "valid" if _valid(key, now) else "expired", **shown}


def _table(keys: Sequence[Key], now: datetime.datetime) -> str:
    rows = [("NAME", "ID", "STATE", "CREATED", "EXPIRES", "LIMITS")]
    for key in sorted(keys, key=lambda key: (key.name, key.created or now)):
        limits = key.model_dump(mode="json", exclude_defaults=True, exclude={"name", "sha256", "created", "expires"})
        state = "valid" if _valid(key, now) else "expired"
        text = " ".join(f"{name}={value}" for name, value in limits.items())
        rows.append((key.name, _id(key), state, _date(key.created), _date(key.expires), text))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in padded)


def _date(moment: datetime.datetime | None) -> str:
    return "-" if moment is None else moment.isoformat(timespec="seconds")


def _duration(text: str) -> datetime.timedelta:
    found = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a duration such as 90d, 12h, 30m or 0s")
    return datetime.timedelta(seconds=int(found[1]) * _UNITS[found[2]])


def _moment(text: str) -> datetime.datetime | None:
    """A duration from now, a date and time, or `never`."""
    if text == "never":
        return None
    with contextlib.suppress(argparse.ArgumentTypeError):
        return datetime.datetime.now(datetime.UTC) + _duration(text)
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected 90d, 12h, 30m, 0s, never, or a date and time such as 2030-01-31T12:00"
        ) from None
    return moment if moment.tzinfo else moment.astimezone()


class _Parser(Parser):
    """Of the whole command line, and of each command's own part of it."""

    def __init__(self, **options: Any) -> None:
        super().__init__("keys", "say what to do, and to whom", EXAMPLE, **options)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common = _Parser(add_help=False)
    default = Path(os.environ.get(FILE_VARIABLE) or DEFAULT_FILE)
    common.add_argument("--file", type=Path, default=default, help=f"default: {FILE_VARIABLE}, else {DEFAULT_FILE}")
    common.add_argument("--json", action="store_true", help="report as JSON on stdout")
    common.add_argument("--dry-run", action="store_true", help="say what would be done, and make no key")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    commands.add_parser("list", parents=[common], help="names, ids, limits; never keys")
    add = commands.add_parser("add", parents=[common], help="make a key for a new name and print it once")
    add.add_argument("--expires", type=_moment, help="90d, or a date and time")
    add.add_argument("--group", help="keys of one group share the engine's prefix cache, and nobody else theirs")
    add.add_argument("--priority", type=int, help="handed to the engine where policy.engine_priority is on")
    add.add_argument("--weight", type=float, help="share of the queue relative to other keys")
    add.add_argument("--requests-per-minute", type=int)
    add.add_argument("--tokens-per-minute", type=int)
    add.add_argument("--concurrent", type=int, help="requests at once")
    add.add_argument("--prompt-tokens-details", action="store_true", help="report cached tokens; never merged then")
    rotate = commands.add_parser("rotate", parents=[common], help="a new key of the same rights")
    rotate.add_argument("--grace", type=_duration, default="1d", help="how long the old key stays valid (1d)")
    rotate.add_argument("--expires", type=_moment, help="of the new key: 90d, or a date and time")
    revoke = commands.add_parser("revoke", parents=[common], help="end a name's keys at once")
    expire = commands.add_parser("expire", parents=[common], help="set when a name's keys end")
    expire.add_argument("--when", type=_moment, required=True, help="30d, a date and time, or never")
    for command in (revoke, expire):
        command.add_argument("--id", help="only this one of the name's keys (`list` shows ids)")
    for command in (add, rotate, revoke, expire):
        command.add_argument("name", metavar="NAME")
    return parser.parse_args(arguments)


def _report(arguments: argparse.Namespace, chosen: Plan, now: datetime.datetime) -> None:
    would = "would have " if arguments.dry_run else ""
    secret = None if arguments.dry_run else chosen.secret
    print(f"{would}{chosen.told} in {arguments.file}", file=sys.stderr)
    if arguments.json:
        report: dict[str, Any] = {"keys": [_shown(key, now) for key in chosen.touched]}
        print(json.dumps({**report, "key": secret} if secret else report, indent=2))
    elif secret:
        print(secret)


def run(arguments: argparse.Namespace) -> None:
    """Raises RefusedError, KeysFileError, OSError; then nothing was changed."""
    now = datetime.datetime.now(datetime.UTC)
    if arguments.command == "list":
        keys = read(arguments.file)
        print(json.dumps({"keys": [_shown(k, now) for k in keys]}, indent=2) if arguments.json else _table(keys, now))
        return
    if arguments.dry_run:
        _report(arguments, plan(arguments, read(arguments.file), now), now)
        return
    path = arguments.file.resolve()  # a link stays one: what it points to is replaced
    _secrets.make_folder(path.parent)
    with locked(path):
        chosen = plan(arguments, read(path), now)
        write(path, chosen.keys)
    _report(arguments, chosen, now)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments)
    try:
        run(chosen)
    except (RefusedError, KeysFileError) as error:
        print(f"keys: {error}", file=sys.stderr)
    except OSError as error:
        print(f"keys: {error.filename or chosen.file}: {error.strerror}; nothing was changed", file=sys.stderr)
    except ValueError as error:  # pydantic's: a name or limit outside what the file may hold
        print(f"keys: {_first_line(error)}", file=sys.stderr)
    else:
        return 0
    return 1


def _first_line(error: ValueError) -> str:
    details = getattr(error, "errors", None)
    if details is None:
        return str(error)
    first = details()[0]
    where = ".".join(str(part) for part in first["loc"]).replace("_", "-")
    return f"{where} = {first['input']!r}: {expectation(first)}"


if __name__ == "__main__":
    sys.exit(main())
