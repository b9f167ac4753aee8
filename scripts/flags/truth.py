"""The reviewed table: what is known about a flag, metric, variable, program, log line or claim beyond its existence.

Whether a flag exists is never written here: that comes from the captured releases (scripts.engine_args). An entry
says what the name alone doesn't: what it costs, what to write instead, why a claim is wrong.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, model_validator

from scripts.engine_args import Flag, release

FOLDER = Path(__file__).parent / "truth"

Verdict = Literal[
    "real",  # exists and does what it says
    "harmless",  # exists and changes nothing
    "harmful",  # exists and costs more than it gives
    "renamed",  # another spelling, flag or program does it now
    "removed",  # some releases had it
    "never existed",  # reviewed: no release had it
    "unknown",  # in no captured release, and nobody reviewed it
    "not yet",  # only releases after this one have it
    "wrong value",  # the flag exists, this value doesn't
    "wrong",  # a claim that is false
    "unverifiable",  # a claim or figure that nobody can check
]
# What a paste with such a verdict asks of its author.
CHANGE: frozenset[str] = frozenset(
    ("harmful", "renamed", "removed", "never existed", "unknown", "not yet", "wrong value", "wrong")
)


class Say(BaseModel):
    """One text in English and in Chinese."""

    model_config = ConfigDict(frozen=True)
    en: str
    zh: str

    def to(self, lang: str) -> str:
        """The text in `lang` ("en" or "zh")."""
        return self.zh if lang == "zh" else self.en

    def __add__(self, other: "Say") -> "Say":
        return Say(en=f"{self.en} {other.en}", zh=f"{self.zh}{other.zh}")


class Entry(BaseModel):
    """One reviewed claim. Exactly one of flags, docker, env, metrics, programs, says, together names what it is about.

    `when` is a regular expression for the whole value (`example` one that matches, where the expression reads badly),
    `above` and `below` are exclusive bounds for a number; `since` and `until` are the first and last release the
    verdict holds for. `becomes` are profile keys (dots nest) in which {value} is the given value ({VALUE}: in
    capitals), `environment` lines for the env file; `keep` overrides what the verdict implies for the profile.
    `evidence`: run (tried on the pinned release), source (read in it), measured (with `on`, the hardware), estimate,
    or reasoned.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    flags: tuple[str, ...] = ()
    docker: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    together: dict[str, str] = {}
    claim: str = ""
    claim_zh: str = ""
    when: str | None = None
    example: str = ""
    above: float | None = None
    below: float | None = None
    since: str | None = None
    until: str | None = None
    form: Literal["switch", "value"] | None = None
    verdict: Verdict
    why: str
    why_zh: str
    write: str = ""
    write_zh: str = ""
    effect: str = ""
    effect_zh: str = ""
    evidence: Literal["run", "source", "measured", "estimate", "reasoned"]
    on: str = ""
    on_zh: str = ""
    becomes: dict[str, Any] = {}
    environment: dict[str, str] = {}
    keep: bool | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        about = [self.flags, self.docker, self.env, self.metrics, self.programs, self.says, self.together]
        if sum(map(bool, about)) != 1:
            raise ValueError("is about none or several of flags, docker, env, metrics, programs, says, together")
        for english, chinese in ("claim", "claim_zh"), ("write", "write_zh"), ("effect", "effect_zh"), ("on", "on_zh"):
            if bool(getattr(self, english)) != bool(getattr(self, chinese)):
                raise ValueError(f"has only one of {english} and {chinese}")
        if (self.says or self.together) and not self.claim:
            raise ValueError("needs a claim, the words to show for it")
        if self.evidence == "measured" and not self.on:
            raise ValueError("is measured but names no hardware")
        if self.example and not self.matches(self.example):
            raise ValueError("has an example that it does not match")
        for pattern in (*self.says, *self.together.values(), *([self.when] if self.when else [])):
            re.compile(pattern)
        return self

    def holds(self, version: str) -> bool:
        """Whether the entry speaks about release `version`."""
        at = release(version)
        return (not self.since or release(self.since) <= at) and (not self.until or at <= release(self.until))

    def matches(self, value: str | None) -> bool:
        """Whether the entry speaks about this value (None: the flag was named without one)."""
        if self.when is not None and not re.fullmatch(self.when, value or "", re.IGNORECASE):
            return False
        if self.above is None and self.below is None:
            return True
        try:
            number = float(value or "")
        except ValueError:
            return False
        return (self.above is None or number > self.above) and (self.below is None or number < self.below)


class Truth:
    """The table, indexed; the first entry that matches wins, so entries with conditions stand before general ones."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        doubles = {entry.id for entry in entries if sum(other.id == entry.id for other in entries) > 1}
        if doubles:
            raise ValueError(f"entries of the same id: {', '.join(sorted(doubles))}")

    def about(self, kind: str, name: str, value: str | None, version: str) -> Iterator[Entry]:
        """Entries of a kind ("flags", "metrics", ...) for a name and value, as of a release, in file order."""
        return (entry for entry in self.about_any(kind, name, version) if entry.matches(value))

    def about_any(self, kind: str, name: str, version: str) -> Iterator[Entry]:
        """The same for whatever value."""
        return (entry for entry in self.entries if name in getattr(entry, kind) and entry.holds(version))

    def names(self, kind: str) -> set[str]:
        """Every name the table has an entry of this kind for."""
        return {name for entry in self.entries for name in getattr(entry, kind)}

    def form(self, name: str) -> str | None:
        """What may follow a flag that no release had, where the table says."""
        return next((entry.form for entry in self.entries if name in entry.flags and entry.form), None)

    @classmethod
    @cache
    def load(cls) -> Self:
        """The table in the folder truth/."""
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        entries = []
        for path in sorted(FOLDER.glob("*.yaml")):
            for raw in yaml.load(path.read_text(), Loader=loader):  # noqa: S506 - a safe loader, the fast one
                try:
                    entries.append(Entry(**raw))
                except ValueError as error:
                    raise ValueError(f"{path.name}, entry {raw.get('id')}: {error}") from error
        return cls(entries)


def canonical(flag: Flag | None, name: str) -> str:
    """The name under which the table speaks about a flag: its long one, the negative form as such."""
    name = name.replace("_", "-") if name.startswith("--") else name
    if flag is None:
        return name
    return flag.negative if flag.negative and name == flag.negative else flag.name
