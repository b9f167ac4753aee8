"""What advice looks like: a finding of one of a bounded set of kinds. Values only."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["critical", "warning", "info"]

# Each kind has one severity, and a section of its name in docs/advise.md.
KINDS: Mapping[str, Severity] = {
    "engine_absent": "critical",
    "engine_hung": "critical",
    "stats_off": "warning",
    "kv_pressure": "warning",
    "engine_slots": "warning",
    "prefix_off": "warning",
    "prefix_misses": "warning",
    "api_server_bound": "warning",
    "gateway_queue": "warning",
    "deadline_sheds": "warning",
    "tenant_hog": "warning",
    "idle_window": "warning",
    "kv_full_healthy": "info",
    "idle": "info",
    "no_limit": "info",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """`limit`: what limits, `by_how_much`, the `change` worth trying: whole sentences. `numbers` are those in them."""

    kind: str
    limit: str
    by_how_much: str
    change: str
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind

    @property
    def severity(self) -> Severity:
        return KINDS[self.kind]

    @property
    def doc(self) -> str:
        return f"docs/advise.md#{self.kind}"

    def as_json(self) -> dict[str, Any]:
        return {"severity": self.severity, **asdict(self), "doc": self.doc}


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 or share == 0 else "under 1%"


def count(number: float) -> str:
    """A number as people read it: 12,345 or 0.4."""
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"


def listed(parts: list[str]) -> str:
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)
