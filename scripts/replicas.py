"""`make replicas`: the engines as the running gateway sees them; one of them drained by hand, or brought back.

    python -m scripts.replicas [--drain URL | --back URL] [--dry-run] [--json]

Asked from inside the gateway's container: its admin port is not published, and the token for it stays there. A drained
engine gets nothing new and ends what it has; a gateway that restarts has forgotten it. Sources are the files and names
that engines are taken from (docs/replicas.md). --json prints the gateway's whole /status.
Exit codes: 0 every engine is ready and every source can be used, 1 one is not, 2 wrong usage, 3 the gateway can't be
asked or refuses the order.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.wording import several
from scripts import _running
from scripts._command import Parser, web_address
from scripts._compose import Compose

Ask = Callable[[str, str, Any], tuple[int, str]]  # method, path, body -> HTTP status (0: nobody answered) and text


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("replicas", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--drain", type=web_address, metavar="URL", help="nothing new for this one")
    order.add_argument("--back", type=web_address, metavar="URL", help="requests for this one again")
    parser.add_argument("--dry-run", action="store_true", help="say what would be ordered, and order nothing")
    parser.add_argument("--json", action="store_true", help="print the gateway's whole /status")
    return parser.parse_args(argv)


def wrong(status: Mapping[str, Any]) -> bool:
    """Whether an engine takes no requests, none is listed, or a source can't be used."""
    ready = [one["state"] == "ready" for one in status["replicas"]]
    return not ready or not all(ready) or any(one["problem"] for one in status["discovery"])


def lines(status: Mapping[str, Any]) -> list[str]:
    """One an engine, one a source, for people."""
    said = [
        f"{one['url']}  {one['state']}  {several(one['calls'], 'call')}, circuit {one['circuit']['state']}"
        f"{': ' + one['reason'] if one['reason'] else ''}"
        for one in status["replicas"]
    ]
    said += [
        f"{one['source']}  {several(len(one['engines']), 'engine')}  {one['problem'] or 'good'}"
        for one in status["discovery"]
    ]
    return said or ["no engine is listed: GATEWAY__ENGINES, or discovery in configs/gateway.yaml"]


def main(argv: Sequence[str] | None = None, ask: Ask | None = None) -> int:
    args = parse_args(argv)
    compose = Compose()
    ask = ask or (lambda method, path, body: _running.ask(compose, "admin", method, path, body))
    order = {"replica": args.drain or args.back, "on": bool(args.drain)} if args.drain or args.back else None
    if order and args.dry_run:
        print(f"would order: {json.dumps(order)}")
        return 0
    code, text = ask("POST", "/drain", order) if order else ask("GET", "/status", None)
    if code != 200:
        print(f"replicas: {_why(code, text)}", file=sys.stderr)
        return 3
    status = json.loads(text)
    print(json.dumps(status, indent=2) if args.json else "\n".join(lines(status)))
    return 0 if order or not wrong(status) else 1


def _why(code: int, text: str) -> str:
    if not code:
        return text[:200]
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        text = text[:200]
    return f"the gateway's admin port answered {code}: {text}"


if __name__ == "__main__":
    sys.exit(main())
