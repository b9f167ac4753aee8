"""A run's folder: what was measured there, what failed, and under which conditions. A file is whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway.wording import several
from scripts.bench import conditions
from scripts.bench.plan import Boot, Plan, PlanError, Row

PARTS = ("rows", "failed", "logs", "work", "boots")
ENGINE_START = "engine.started"  # of a running engine whose flags can't be read: a new start may mean others


@dataclass(frozen=True)
class Folder:
    path: Path
    plan: Plan

    def row(self, boot: Boot, row: Row, repeat: int) -> Path:
        return self.path / "rows" / f"{boot.name}.{row.name}.{repeat}.json"

    def failure(self, boot: Boot) -> Path:
        return self.path / "failed" / f"{boot.name}.json"

    def pending(self, *, retry: bool = False) -> list[tuple[Boot, Row, int]]:
        """What is still to measure; what failed is left out, or in with `retry`."""
        return [
            (boot, row, repeat)
            for boot, row, repeat in self.plan.measurements()
            if (retry and self._wrong(boot, row, repeat))
            or not (self.row(boot, row, repeat).exists() or self.failure(boot).exists())
        ]

    def _wrong(self, boot: Boot, row: Row, repeat: int) -> bool:
        """Whether it failed and was not meant to, or the other way round."""
        path, failure = self.row(boot, row, repeat), self.failure(boot)
        if path.exists():
            return ("failed" in json.loads(path.read_text())) == (row.expect == "success")
        return failure.exists() and (boot.expect == "success" or json.loads(failure.read_text())["came_up"])

    def results(self) -> dict[str, list[dict[str, Any]]]:
        """boot/row to its repeats' figures, failed ones left out."""
        found: dict[str, list[dict[str, Any]]] = {}
        for boot, row, repeat in self.plan.measurements():
            path = self.row(boot, row, repeat)
            if path.exists():
                figures = json.loads(path.read_text())
                if "requests_per_s" in figures:
                    found.setdefault(f"{boot.name}/{row.name}", []).append(figures)
        return found

    def outcomes(self) -> Outcomes:
        """What has no figures, and what should have none and has."""
        found = Outcomes()
        for boot in self.plan.boots:
            path = self.failure(boot)
            if path.exists():
                failed = json.loads(path.read_text())
                meant = boot.expect == "failure" and not failed["came_up"]
                (found.expected if meant else found.failures)[boot.name] = failed["reason"]
        for boot, row, repeat in self.plan.measurements():
            path = self.row(boot, row, repeat)
            if not path.exists():
                continue
            figures, name = json.loads(path.read_text()), f"{boot.name}/{row.name} {repeat + 1}"
            if "failed" in figures:
                (found.expected if row.expect == "failure" else found.failures)[name] = figures["failed"]
            elif row.expect == "failure":
                verb = "was" if figures["completed"] == 1 else "were"
                found.failures[name] = f"meant to fail, and {several(figures['completed'], 'request')} {verb} answered"
        return found

    def days(self) -> list[str]:
        """The days on which its figures were made, first and last."""
        days = sorted(figures["at"][:10] for repeats in self.results().values() for figures in repeats)
        return sorted({days[0], days[-1]}) if days else []

    def take_up(self, now: Mapping[str, Any], *, retry: bool, fresh: bool, same_flags: bool) -> str:
        """Makes the folder, or takes up the earlier run in it; one line that says which. Raises PlanError where its
        figures were made under other conditions, and OSError."""
        moved = self._move_aside() if fresh else None
        self.check(now, same_flags=same_flags)
        for part in PARTS:
            (self.path / part).mkdir(parents=True, exist_ok=True)
        # Conditions first: a plan alone is what runs left that did not keep them, whose figures can't be gone on with.
        write(self.path / "conditions.json", json.dumps(now, indent=2))
        write(self.path / "plan.json", self.plan.model_dump_json(indent=2))
        if retry:
            self._forget_failures()
        return self._said(moved)

    def check(self, now: Mapping[str, Any], *, same_flags: bool) -> None:
        """Raises PlanError where figures of other conditions are in it, naming what differs."""
        kept = self.path / "conditions.json"
        if not kept.exists():
            if any(self.path.glob("rows/*.json")) or (self.path / "plan.json").exists():
                raise PlanError(f"{self.path} holds figures that do not say what they were made with: {_WAYS}")
            return
        differs = conditions.changed(json.loads(kept.read_text()), json.loads(json.dumps(now)))
        if same_flags:
            differs = [line for line in differs if not line.startswith(f"{ENGINE_START}:")]
        if differs and any(self.path.glob("[rf]*/*.json")):
            more = f" and {len(differs) - 4} more" if len(differs) > 4 else ""
            again = any(line.startswith(f"{ENGINE_START}:") for line in differs)
            hint = "; --same-flags, if it was started again with the same flags" if again and len(differs) == 1 else ""
            raise PlanError(
                f"{self.path} holds figures of something else ({'; '.join(differs[:4])}{more}): {_WAYS}{hint}"
            )

    def _move_aside(self) -> Path | None:
        if not self.path.exists():
            return None
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        return self.path.rename(aside)

    def _forget_failures(self) -> None:
        wrong = [each for each in self.plan.measurements() if self._wrong(*each)]
        for boot, row, repeat in wrong:
            self.row(boot, row, repeat).unlink(missing_ok=True)
            self.failure(boot).unlink(missing_ok=True)

    def _said(self, moved: Path | None) -> str:
        left, total = len(self.pending()), len(list(self.plan.measurements()))
        kept = [path for path in (self.row(*each) for each in self.plan.measurements()) if path.exists()]
        lines = [f"{self.path}: {left} of {total} measurements to make"]
        if moved:
            lines.append(f"what was there is in {moved}")
        if kept:
            last = datetime.fromtimestamp(max(path.stat().st_mtime for path in kept), UTC)
            lines.append(
                f"{len(kept)} are kept from an earlier run that ended {last:%Y-%m-%d %H:%M} UTC (--fresh: anew)"
            )
        if failed := list(self.outcomes().failures):
            lines.append(f"failed then and passed over: {', '.join(failed)} (--retry: once more)")
        return "; ".join(lines)


_WAYS = "--fresh moves them aside and measures anew, --out DIR measures elsewhere"


@dataclass
class Outcomes:
    """boot, or boot/row repeat, to the reason it has no figures: `failures` were not meant, `expected` were."""

    failures: dict[str, str] = field(default_factory=dict)
    expected: dict[str, str] = field(default_factory=dict)


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.write_text(text if text.endswith("\n") else f"{text}\n")
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
