"""Two runs side by side: what changed beyond the spread of their repeats, and what else was not the same.

    python -m scripts.bench.compare A B [--json]          A, B: folders of scripts.bench, or their summary.json

Exit codes: 0 compared; 1 no measurement is in both; 2 wrong usage or no summary there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from gateway.wording import expectation
from scripts._command import Parser


class NoResultError(Exception):
    """There is no summary of a run there; the message is one line."""


LATENCIES = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "e2e_ms_p50")


class _Rates(BaseModel):
    median: float = Field(gt=0)
    least: float = Field(gt=0)
    most: float = Field(gt=0)


class _Measured(BaseModel):
    requests_per_s: _Rates
    asked: dict[str, Any] = {}


class _Summary(BaseModel):
    """What is read of a summary, so that a file that has something else is refused by what it lacks."""

    rows: dict[str, _Measured]
    boots: dict[str, dict[str, Any]]
    hardware: dict[str, Any]


def read(given: Path) -> dict[str, Any]:
    """A run's summary, from its folder or from the file. Raises NoResultError."""
    path = given / "summary.json" if given.is_dir() else given
    try:
        found = json.loads(path.read_text())
        _Summary.model_validate(found)
    except OSError as error:
        if given.is_dir() and any(given.glob("rows/*.json")):
            raise NoResultError(f"{given} has no summary yet: its own make bench command writes one") from None
        raise NoResultError(f"{path}: {error.strerror}; A and B are folders of make bench") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise NoResultError(f"{path} is not the summary of a make bench run: {place}: {expectation(first)}") from None
    except ValueError:
        raise NoResultError(f"{path} is no JSON; A and B are folders of make bench") from None
    return dict(found)


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Rows that both have, as ratios new ÷ old; what differs in machine, version and flags."""
    rows = {}
    for key in old["rows"]:
        if key not in new["rows"]:
            continue
        before, after = old["rows"][key], new["rows"][key]
        was, now = before["requests_per_s"], after["requests_per_s"]
        rows[key] = {
            "requests_per_s": now["median"] / was["median"],
            "was": was,
            "now": now,
            "shown": now["least"] > was["most"] or now["most"] < was["least"],
            **{name: after[name] / before[name] for name in LATENCIES if before.get(name) and after.get(name)},
        }
    return {"rows": rows, "differs": _differences(old, new)}


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found = [
        f"{name}: {old['hardware'][name]} → {new['hardware'][name]}"
        for name in old["hardware"]
        if old["hardware"][name] != new["hardware"].get(name)
    ]
    for boot in sorted(old["boots"].keys() & new["boots"].keys()):
        found += _changed(boot, old["boots"][boot], new["boots"][boot])
    for key in [key for key in old["rows"] if key in new["rows"]]:
        before, after = old["rows"][key].get("asked"), new["rows"][key].get("asked")
        found += _changed(key, before, after) if before and after else []  # summaries of before it was told lack it
    return found


def _changed(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [
        f"{what} {name}: {before.get(name)} → {after.get(name)}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]


def render(result: Mapping[str, Any]) -> str:
    lines = ["| measurement | req/s, A | B | B ÷ A | more than the spread | TTFT p50, B ÷ A | ITL p50, B ÷ A |"]
    lines.append("|---|---|---|---|---|---|---|")
    for key, row in result["rows"].items():
        cells = [key, f"{row['was']['median']:.2f}", f"{row['now']['median']:.2f}", f"{row['requests_per_s']:.3f}"]
        cells.append("yes" if row["shown"] else "no")
        cells += [f"{row[name]:.2f}" if name in row else "–" for name in ("ttft_ms_p50", "itl_ms_p50")]
        lines.append(f"| {' | '.join(cells)} |")
    if result["differs"]:
        lines += ["", "Not the same in both runs:", "", *(f"- {line}" for line in result["differs"])]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "bench-compare",
        "name two runs, A and B",
        "make bench-compare A=results/bench/one B=results/bench/other",
        prog="python -m scripts.bench.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", metavar="A")
    parser.add_argument("new", metavar="B")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        if not arguments.old or not arguments.new:
            raise NoResultError("name two runs' folders: make bench-compare A=results/bench/one B=results/bench/other")
        summaries = [read(Path(given)) for given in (arguments.old, arguments.new)]
    except NoResultError as error:
        print(f"bench-compare: {error}", file=sys.stderr)
        return 2
    result = compare(*summaries)
    if not result["rows"]:
        print("bench-compare: the two runs have no measurement in common", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=2) if arguments.json else render(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
