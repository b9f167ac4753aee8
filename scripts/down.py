"""Stops the stack: the gateway first, which ends its streams, then the rest. Volumes stay.

    python -m scripts.down [--grace-s N] [--dry-run]

Exit codes: 0 nothing of it runs any more, 1 something failed (one line says what), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from scripts import _journal
from scripts._command import Parser
from scripts._compose import Compose, ComposeError, Container


def plan(containers: Sequence[Container], grace_s: int | None) -> list[tuple[str, ...]]:
    """The compose commands, in their order."""
    timeout = () if grace_s is None else ("--timeout", str(grace_s))
    streaming = any(found.service == "gateway" and found.running for found in containers)
    return [*([("stop", *timeout, "gateway")] if streaming else []), ("down", *timeout)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("down", description="Stop the stack; volumes stay.")
    parser.add_argument("--grace-s", type=int, help="longest wait for each service (default: its stop_grace_period)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    arguments = parser.parse_args(argv)
    compose = Compose()
    try:
        return _alone(compose, arguments)
    except (ComposeError, _journal.JournalError) as error:
        print(f"\ndown: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndown: interrupted; run it again to go on", file=sys.stderr)
        return 130


def _alone(compose: Compose, arguments: argparse.Namespace) -> int:
    """Not in the middle of an upgrade, which would start the engine again."""
    with _journal.alone():
        containers = compose.containers()
        if not containers:
            print("nothing of the stack is there")
            return 0
        for command in plan(containers, arguments.grace_s):
            if arguments.dry_run:
                print(" ".join(compose.command(*command)))
                continue
            since = time.monotonic()
            what = "the gateway ends its streams" if command[0] == "stop" else "the rest stops"
            print(f"{what} ...", end="", flush=True)
            compose.run(*command)
            print(f" {time.monotonic() - since:.1f} s", flush=True)
    if not arguments.dry_run:
        print("down; volumes are kept (docker volume ls)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
