"""`make rules`: writes configs/prometheus/rules/*.yml and the tables of docs/metrics.md.

    python -m scripts.rules [--check] [--out DIR [--window-scale 0.05] [--scrape-interval 1s]]

--window-scale is for runs that can't wait half an hour for an alert: every range and every `for` is multiplied
by it. A range still spans four scrapes, and a `for` lasts one; the
scrape interval is prometheus.yml's unless --scrape-interval says another. The recorded names stay as they are.
--out writes the rule files there and nothing else. Exit codes: 0 done, 1 --check found something stale or
slo.yaml can't be used, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from scripts._command import Parser
from scripts.rules import document, promises
from scripts.rules.components import ALL
from scripts.rules.render import Renderer
from scripts.rules.windows import Windows, milliseconds

RULES = Path("configs/prometheus/rules")
PROMETHEUS = Path("configs/prometheus/prometheus.yml")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("rules", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, say what is stale")
    parser.add_argument("--out", type=Path, help=f"write the rule files there, not to {RULES}")
    parser.add_argument("--window-scale", type=_scale, default=1.0, help="times every duration; needs --out")
    parser.add_argument("--scrape-interval", type=_interval, help="of the Prometheus that will read them; needs --out")
    args = parser.parse_args(argv)
    if args.out is None and (args.window_scale != 1 or args.scrape_interval):
        parser.error("--window-scale and --scrape-interval need --out: the committed rules have their full windows")
    if args.out is not None and args.check:
        parser.error("--check looks at the committed files: it takes no --out")
    return args


def _scale(said: str) -> float:
    value = float(said)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{said}: expected more than 0, at most 1")
    return value


def _interval(said: str) -> int:
    if not re.fullmatch(r"[1-9]\d*[dhms]", said):
        raise argparse.ArgumentTypeError(f"{said}: expected a duration such as 5s")
    return milliseconds(said)


def scrape_ms() -> int:
    """prometheus.yml's own."""
    return milliseconds(yaml.safe_load(PROMETHEUS.read_text(encoding="utf-8"))["global"]["scrape_interval"])


def plan(promised: promises.Promises, folder: Path, windows: Windows) -> dict[Path, str]:
    """Path -> text of every rule file."""
    renderer = Renderer(promised, windows)
    return {folder / f"{component.name}.yml": renderer.file(component) for component in ALL}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        promised = promises.load()
    except promises.PromisesError as error:
        print(f"rules: {error}", file=sys.stderr)
        return 1
    windows = Windows(args.window_scale, args.scrape_interval or scrape_ms())
    files = plan(promised, args.out or RULES, windows)
    if args.out is None:
        old, boards = document.PATH.read_text(encoding="utf-8"), document.asked()
        files[document.PATH] = document.text(old, Renderer(promised), ALL, boards)
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if args.check:
        for path in stale:
            print(f"rules: {path} is stale: run `make rules`", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path], encoding="utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
