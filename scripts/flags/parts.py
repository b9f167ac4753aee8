"""What a paste is taken apart into."""

from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.engine_args import Flag
from scripts.flags.shell import Given

# Tells a flag of any release by its name, so that values are not mistaken; None for what never was one.
Lookup = Callable[[str], Flag | None]


@dataclass
class Start:
    """One engine start: how, with what, and for which model (None: not named)."""

    launcher: str
    line: int
    given: list[Given]
    model: str | None = None
    strays: list[str] = field(default_factory=list)
    env: list[tuple[str, str]] = field(default_factory=list)
    docker: list[Given] = field(default_factory=list)
    image: str | None = None


@dataclass
class Paste:
    """A paste taken apart. `mentions` are flags named in prose; names of metrics and variables come with their line."""

    text: str
    starts: list[Start] = field(default_factory=list)
    mentions: list[Given] = field(default_factory=list)
    metrics: dict[str, int] = field(default_factory=dict)
    variables: dict[str, tuple[str | None, int]] = field(default_factory=dict)
    traps: set[str] = field(default_factory=set)
