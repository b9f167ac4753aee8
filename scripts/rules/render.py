"""Components as Prometheus's rule files: plain YAML, each rule under a line that says what it is for. Pure."""

from __future__ import annotations

import re
import textwrap

from scripts.rules import Alert, Component, Record
from scripts.rules.promises import Promises
from scripts.rules.windows import Windows

_NAME = re.compile(r"@([a-z_]+)@")
_WIDTH = 120


class Renderer:
    """Fills in the promises and the windows."""

    def __init__(self, promises: Promises, windows: Windows | None = None) -> None:
        self._values = promises.values()
        self._runbooks = promises.runbooks.rstrip("/")
        self._windows = windows or Windows()

    def expr(self, rule: Record | Alert) -> str:
        return self._filled(self._windows.expr(rule.expr.strip("\n")))

    def words(self, text: str) -> str:
        return self._filled(text)

    def file(self, component: Component) -> str:
        """The text of <component>.yml."""
        head = f"{component.says} Written by `make rules` from scripts/rules and configs/slo.yaml."
        lines = [*_comment(head, 0), "groups:", f"  - name: {component.name}", "    rules:"]
        for rule in component.rules:
            lines += self._record(rule) if isinstance(rule, Record) else self._alert(rule)
        return "\n".join(lines) + "\n"

    def _record(self, rule: Record) -> list[str]:
        lines = [*_comment(self.words(rule.says), 6), f"      - record: {rule.name}", *self._expr(rule)]
        return lines + _labels(rule.labels)

    def _alert(self, rule: Alert) -> list[str]:
        lines = [*(_comment(self.words(rule.why), 6) if rule.why else [])]
        lines += [f"      - alert: {rule.name}", *self._expr(rule)]
        if rule.hold:
            lines.append(f"        for: {self._windows.hold(rule.hold)}")
        lines += _labels({"severity": rule.severity})
        lines.append("        annotations:")
        for key, text in (("summary", rule.summary), ("description", rule.description)):
            folded = textwrap.wrap(self.words(text), _WIDTH - 12, break_long_words=False, break_on_hyphens=False)
            lines += [f"          {key}: >-", *(f"            {line}" for line in folded)]
        return [*lines, f"          runbook_url: {self._runbooks}/{rule.name}.md"]

    def _expr(self, rule: Record | Alert) -> list[str]:
        body = self.expr(rule).split("\n")
        return ["        expr: |-", *(f"          {line}" for line in body)]

    def _filled(self, text: str) -> str:
        return _NAME.sub(lambda found: self._values[found[1]], text)


def _comment(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=" " * indent + "# ",
        subsequent_indent=" " * indent + "# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _labels(labels: dict[str, str]) -> list[str]:
    return ["        labels:", *(f"          {key}: {value}" for key, value in labels.items())] if labels else []
