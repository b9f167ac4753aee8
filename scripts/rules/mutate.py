"""`make mutate-rules`: do the promtool tests notice when a rule is wrong?

    python -m scripts.rules.mutate [--component NAME ...] [--jobs N] [--json]

Each wrong rule is tried against what tests/promtool says of it, then against what is said of the rules that read it. A
wrong that no test notices is a survivor. Exit codes: 0 all were noticed, 1 survivors, or the tests fail on the rules
as they are, 2 wrong usage, 3 no promtool here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gateway.wording import several
from scripts._command import Parser
from scripts.rules import Component, promises
from scripts.rules.components import ALL
from scripts.rules.mutants import Mutant, mutants
from scripts.rules.promtool import about, dependents, load_tests, passes
from scripts.rules.render import Renderer


@dataclass(frozen=True)
class Bench:
    """A component with its tests."""

    component: Component
    tests: list[dict[str, Any]]
    renderer: Renderer

    def untold(self) -> list[str]:
        """Rules that no test speaks of, and rules whose tests fail as they are."""
        names = dict.fromkeys(rule.name for rule in self.component.rules)
        return [name for name in names if not self._right(name)]

    def _right(self, name: str) -> bool:
        tests = about(self.tests, {name})
        return bool(tests) and passes(self.component, tests, self.renderer)

    def mutants(self) -> list[Mutant]:
        return list(mutants(self.component, self.renderer))

    def notices(self, mutant: Mutant) -> bool:
        for names in ({mutant.rule}, dependents(self.component, mutant.rule)):
            tests = about(self.tests, names)
            if tests and not passes(mutant.component, tests, self.renderer):
                return True
        return False


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        "mutate-rules",
        prog="python -m scripts.rules.mutate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [component.name for component in ALL]
    parser.add_argument("--component", action="append", choices=names, help="only this file (repeat for several)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="promtools at once (default: the cores)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if shutil.which("promtool") is None:
        print("mutate: there is no promtool on PATH (apt-get install prometheus)", file=sys.stderr)
        return 3
    renderer = Renderer(promises.load())
    wanted = [component for component in ALL if not args.component or component.name in args.component]
    count, survivors = 0, []
    with ThreadPoolExecutor(args.jobs) as pool:
        for bench in (Bench(component, load_tests(component.name), renderer) for component in wanted):
            if untold := bench.untold():
                print(f"mutate: no test that passes for {', '.join(untold)}", file=sys.stderr)
                return 1
            every = bench.mutants()
            count += len(every)
            noticed = pool.map(bench.notices, every)
            survivors += [mutant for mutant, seen in zip(every, noticed, strict=True) if not seen]
    if args.json:
        alive = [{"file": m.component.name, "rule": m.rule, "wrong": m.says} for m in survivors]
        print(json.dumps({"mutants": count, "survivors": alive}, indent=2))
    else:
        for mutant in survivors:
            print(f"survived: {mutant.component.name}.yml {mutant.rule}: {mutant.says}")
        print(f"{several(count, 'wrong')}, {count - len(survivors)} noticed, {len(survivors)} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
