"""Write grafana/dashboards/*.json.

    python -m scripts.dashboards [--check] [--out FOLDER]

--check writes nothing and exits with 1 when a file is not what the code says. Exit code 2: wrong usage.
"""

from __future__ import annotations

import sys
from pathlib import Path

from scripts._command import Parser
from scripts.dashboards import _runbooks, _slo, capacity, engine, gateway, overview, usage

FOLDER = Path("grafana/dashboards")


def plan() -> dict[str, str]:
    """File name -> text, of every dashboard."""
    slo = _slo.read()
    boards = (
        overview.board(slo),
        engine.board(slo),
        gateway.board(slo),
        capacity.board(),
        usage.board(),
        _runbooks.board(),
    )
    return {f"{board.uid}.json": board.to_json() for board in boards}


def stale(files: dict[str, str], folder: Path) -> list[str]:
    """What is missing, different, or there without being written by us; one line each."""
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    return [
        *(f"{folder / name} is not what the code says" for name, text in files.items() if found.get(name) != text),
        *(f"{folder / name} is no dashboard of ours" for name in sorted(found.keys() - files.keys())),
    ]


def main(argv: list[str] | None = None) -> int:
    parser = Parser("dashboards", description="Write the dashboards' JSON.")
    parser.add_argument("--check", action="store_true", help="write nothing; say what is stale")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder (default %(default)s)")
    args = parser.parse_args(argv)
    files = plan()
    if args.check:
        wrong = stale(files, args.out)
        for line in wrong:
            print(f"dashboards: {line}: make dashboards", file=sys.stderr)
        return 1 if wrong else 0
    args.out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (args.out / name).write_text(text, encoding="utf-8")
    for path in args.out.glob("*.json"):
        if path.name not in files:
            path.unlink()
    print(f"wrote {len(files)} dashboards to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
