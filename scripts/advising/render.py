"""Findings as text for people, and as JSON for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from gateway.findings import Finding

_SHOWN = {"critical": "CRITICAL", "warning": "advice", "info": "fine"}
_WIDTH = 118
_INDENT = "            "


def text(findings: Sequence[Finding], source: str, seconds: float) -> str:
    out = [f"advise: {source}, {seconds:.0f} s"]
    for finding in findings:
        out += ["", f"  {_SHOWN[finding.severity]:<10}{finding.limit}"]
        change = [] if finding.change == "Nothing." else [f"Try: {finding.change}"]
        for part in (finding.by_how_much, *change):
            out += textwrap.wrap(part, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
        if finding.severity != "info":
            out.append(f"{_INDENT}{finding.doc}")
    return "\n".join(out)


def as_json(findings: Sequence[Finding], source: str, seconds: float) -> str:
    found = {"source": source, "seconds": round(seconds, 1), "findings": [finding.as_json() for finding in findings]}
    return json.dumps(found, indent=2)
